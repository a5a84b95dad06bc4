"""`python -m eval long` and `perplexity`: oracles through the whole program, and a tiny model."""

from __future__ import annotations

import json

import pytest
import torch

from conceptmoe_vl.asking import Answer
from eval.__main__ import main
from eval.long_context.family import Plan, long_tasks
from tests.model_folder import save_model_folder

LENGTH, GRID = 2048, (0.0, 0.5, 1.0)
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return save_model_folder(tmp_path_factory.mktemp("run") / "model")


def run(model_folder, output, *more, command="long"):
    arguments = [command, "--model", str(model_folder), "--output", str(output)]
    return main([*arguments, "--device", "cpu", *more])


def text_of(messages):
    return "".join(part.get("text", "") for part in messages[-1]["content"])


def oracle(monkeypatch, names, answer_of):
    """Answers questions without the model: a function from prompt and right answer."""
    known = {}

    def answer_all(model, processor, conversations, *more, prefixes, on_prompt):
        if not known:
            for task in long_tasks(processor, names, Plan([LENGTH], GRID, 1)):
                known.update({question.text: question for question in task.load(None)})
        on_answer = more[-1]
        for number, messages in enumerate(conversations):
            prompt = text_of(messages)
            on_prompt(number, [7, 7], torch.ones(2, dtype=torch.bool))
            text = answer_of(prompt, known[prompt])
            on_answer(number, Answer(text, text, "", known[prompt].details["tokens"], 1))

    monkeypatch.setattr("eval.runner.generate_all", answer_all)


def controls_abstain(prompt, question):
    return "none" if question.details["control"] else f"It is {question.references[0]}."


@pytest.mark.parametrize(
    ("answer_of", "expected"),
    [
        (controls_abstain, 1.0),
        (lambda prompt, question: "9999999, 1234567", 0.0),
        (lambda prompt, question: prompt, 0.0),
        (lambda prompt, question: "", 0.0),
    ],
    ids=["right", "wrong", "echo", "empty"],
)
def test_oracles(model_folder, tmp_path, monkeypatch, answer_of, expected):
    tasks = ["niah_single", "variable_tracking", "mm_order_text"]
    oracle(monkeypatch, tasks, answer_of)
    more = ("--lengths", str(LENGTH), "--depths", "3", "--samples", "1", "--tasks", ",".join(tasks))
    assert run(model_folder, tmp_path, *more) == 0
    results = json.loads((tmp_path / "long" / "results.json").read_text())
    assert list(results["tasks"]) == tasks
    for name in tasks:
        part = results["tasks"][name]["lengths"][str(LENGTH)]
        assert part["score"]["value"] == expected
        assert part["control"]["value"] == 0.0
        assert {figure["value"] for figure in part["depths"].values()} == {expected}
        assert results["tasks"][name]["effective_length"] == (LENGTH if expected else None)
        assert LENGTH - 24 < part["tokens"][0] <= part["tokens"][1] <= LENGTH
        assert (tmp_path / "long" / f"{name}.png").read_bytes()[:8] == PNG
        low, high = part["score"]["interval_95"]
        assert low <= expected <= high
        assert high - low > 0.1  # three questions tell little
        lines = (tmp_path / "long" / f"{name}@2k" / "samples.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        assert len(rows) == 4
        task = json.loads((tmp_path / "long" / f"{name}@2k" / "results.json").read_text())
        assert task["figures"]["accuracy"]["value"] == expected
        assert task["figures"]["control"]["value"] == 0.0


def test_a_model_answers_by_itself(model_folder, tmp_path, capsys):
    more = ("--lengths", "1k,1500", "--depths", "0.2,0.8", "--samples", "1", "--no-figures")
    assert run(model_folder, tmp_path, *more, "--tasks", "niah_multivalue,mm_count_image") == 0
    shown = capsys.readouterr().out
    assert "Scores by length" in shown
    assert not list(tmp_path.rglob("*.png"))
    results = json.loads((tmp_path / "long" / "results.json").read_text())
    assert results["settings"]["depths"] == [0.2, 0.8]
    lengths = results["tasks"]["niah_multivalue"]["lengths"]
    assert list(lengths) == ["1024", "1500"]
    assert list(lengths["1500"]["depths"]) == ["0.2", "0.8"]
    lines = (tmp_path / "long" / "mm_count_image@1500" / "samples.jsonl").read_text().splitlines()
    for row in map(json.loads, lines):
        assert row["prompt_tokens"] == row["details"]["tokens"] <= 1500
        assert row["prompt"].count("<|image_pad|>*9") == row["details"]["images"] > 10


def test_the_batch_changes_nothing(model_folder, tmp_path):
    more = ("--tasks", "niah_multikey", "--lengths", "1k", "--depths", "2", "--samples", "1")
    outcomes = []
    for size in ("1", "4"):
        assert run(model_folder, tmp_path / size, *more, "--batch-size", size) == 0
        outcomes.append(
            (tmp_path / size / "long" / "niah_multikey@1k" / "samples.jsonl").read_text()
        )
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize(
    ("more", "part"),
    [
        (["--tasks", "niah_singel"], "the nearest is 'niah_single'"),
        (["--tasks", ","], "names no task"),
        (["--lengths", "4q"], "'4q' is no length"),
        (["--lengths", "64"], "64 tokens are too few"),
        (["--depths", "2.0"], "--depths is '2.0'"),
        (["--samples", "0"], "--samples is 0"),
        (["--threshold", "2"], "--threshold is 2"),
        (["--haystack", "nowhere.txt"], "there is no text 'nowhere.txt'"),
        (["--images", "nowhere"], "holds no pictures"),
        (["--model", "nowhere"], "there is no model folder 'nowhere'"),
    ],
)
def test_a_mistake_is_one_line(model_folder, tmp_path, capsys, more, part):
    assert run(model_folder, tmp_path / "out", *more) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert part in captured.err
    assert captured.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_tasks_with_pictures_need_a_model_that_takes_them(tmp_path, capsys):
    folder = save_model_folder(tmp_path / "model", vision=False)
    assert run(folder, tmp_path / "out", "--tasks", "all", "--lengths", "4k") == 2
    assert "mm_retrieve_text needs pictures" in capsys.readouterr().err


def perplexity(model_folder, output, *more):
    return run(model_folder, output, *more, command="perplexity")


def test_perplexity_is_written_by_position(model_folder, tmp_path, capsys):
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(f"what is the color of the {name}? " * 12)
    (tmp_path / "short.txt").write_text("red")
    more = ("--texts", str(tmp_path), "--length", "100", "--compression", "1,default")
    assert perplexity(model_folder, tmp_path / "out", *more, "--batch-size", "2") == 0
    results = json.loads((tmp_path / "out" / "perplexity" / "results.json").read_text())
    assert (results["documents"], results["documents_too_short"]) == (2, 1)
    assert list(results["curves"]) == ["R = 1", "default"]
    assert results["curves"]["R = 1"]["tokens_per_concept"] == 1.0
    for curve in results["curves"].values():
        assert [bucket["last"] for bucket in curve["buckets"]] == [16, 32, 64, 100]
        assert all(bucket["nats"]["value"] > 1 for bucket in curve["buckets"])
    assert (tmp_path / "out" / "perplexity" / "results.png").read_bytes()[:8] == PNG
    assert "1 documents are shorter" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "part"),
    [
        (["--length", "16k"], "none of 1 documents has 16384 tokens"),
        (["--length", "1k,2k"], "is no length"),
        (["--compression", "much"], "'much' is no ratio"),
        (["--compression", "7"], "never calibrated"),
        (["--windows", "0"], "--windows is 0"),
        (["--texts", "nowhere.txt"], "there is no text"),
    ],
)
def test_a_mistake_of_perplexity_is_one_line(model_folder, tmp_path, capsys, more, part):
    (tmp_path / "a.txt").write_text("red and blue " * 40)
    arguments = ("--texts", str(tmp_path / "a.txt"), "--length", "100", *more)
    assert perplexity(model_folder, tmp_path / "out", *arguments) == 2
    captured = capsys.readouterr()
    assert part in captured.err
    assert captured.err.count("\n") == 1
    assert not (tmp_path / "out").exists()
