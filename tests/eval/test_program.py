"""`python -m eval` on a tiny model with random weights."""

from __future__ import annotations

import json

import pytest

from eval.__main__ import main
from eval.program import default_output
from eval.replies import ReplyStore
from tests.eval.shards import conversation, describe_tasks, png, small_set, write_shard
from tests.model_folder import save_model_folder


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return save_model_folder(tmp_path_factory.mktemp("run") / "model")


@pytest.fixture
def data(tmp_path):
    return small_set(tmp_path / "data", pictures=3)


def run(model_folder, data, output, *more):
    arguments = ["--model", str(model_folder), "--tasks", "easy_vqa", "--data", str(data)]
    return main([*arguments, "--output", str(output), "--device", "cpu", *more])


def read(output):
    results = json.loads((output / "easy_vqa" / "results.json").read_text())
    lines = (output / "easy_vqa" / "samples.jsonl").read_text().splitlines()
    return results, [json.loads(line) for line in lines]


def without_speed(results):
    """What must be the same to the digit however the questions were asked."""
    return {name: part for name, part in results.items() if name not in ("speed", "run")}


def test_every_question_is_counted_and_written(model_folder, data, tmp_path, capsys):
    assert run(model_folder, data, tmp_path / "out") == 0
    results, rows = read(tmp_path / "out")
    assert results["count"] == len(rows) == 9
    assert len({row["key"] for row in rows}) == 9
    accuracy = results["figures"]["accuracy"]
    assert accuracy["value"] == sum(row["score"] for row in rows) / 9
    low, high = accuracy["interval_95"]
    assert 0 <= low <= accuracy["value"] <= high <= 1
    assert results["prompt_tokens"] == sum(row["prompt_tokens"] for row in rows)
    assert {kind: part["count"] for kind, part in results["by_kind"].items()} == {
        "colour": 3,
        "shape": 3,
        "yes/no": 3,
    }
    assert "no official score" in capsys.readouterr().out
    assert not list((tmp_path / "out").rglob("*.tmp"))


def test_no_earlier_question_or_answer_is_in_a_prompt(model_folder, data, tmp_path):
    run(model_folder, data, tmp_path / "out")
    _, rows = read(tmp_path / "out")
    for row in rows:
        others = {other["question"] for other in rows} - {row["question"]}
        assert row["question"] in row["prompt"]
        assert "<|image_pad|>*" in row["prompt"]
        assert not any(other in row["prompt"] for other in others)


def test_the_ratio_is_that_of_the_model_run_alone(model_folder, data, tmp_path):
    import torch

    from conceptmoe_vl.asking import load_pretrained, question_messages

    run(model_folder, data, tmp_path / "out", "--batch-size", "4")
    results, rows = read(tmp_path / "out")
    model, processor = load_pretrained(model_folder, "cpu")
    tokens = concepts = image_tokens = image_concepts = 0
    colours = {"test0000": "red", "test0001": "blue", "test0002": "green"}
    for row in rows:
        picture = png(colours[row["key"].partition("#")[0]])
        inputs = processor.apply_chat_template(
            question_messages([picture], row["question"]),
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
        )
        with torch.no_grad():
            boundary = model(**inputs).chunks.boundary_mask
        is_image = inputs["input_ids"][0] == model.config.image_token_id
        tokens, concepts = tokens + boundary.numel(), concepts + int(boundary.sum())
        image_tokens += int(is_image.sum())
        image_concepts += int(boundary[is_image].sum())
    assert results["ratio"] == pytest.approx(tokens / concepts)
    expected = image_tokens / image_concepts if image_concepts else None
    assert results["ratio_by_modality"]["image"] == (expected and pytest.approx(expected))


def test_the_batch_size_changes_nothing(model_folder, data, tmp_path):
    outcomes = []
    for size in ("1", "4", "16"):
        assert run(model_folder, data, tmp_path / size, "--batch-size", size) == 0
        results, rows = read(tmp_path / size)
        outcomes.append((without_speed(results), rows))
    assert outcomes[0] == outcomes[1] == outcomes[2]


def test_the_batch_size_changes_no_likelihood(model_folder, tmp_path):
    tasks = describe_tasks(tmp_path / "data")
    outcomes = []
    for size in ("1", "4", "16"):
        words = ["--model", str(model_folder), "--tasks", tasks, "--device", "cpu"]
        assert main([*words, "--output", str(tmp_path / size), "--batch-size", size]) == 0
        folder = tmp_path / size / "choose"
        results = json.loads((folder / "results.json").read_text())
        outcomes.append((without_speed(results), (folder / "samples.jsonl").read_text()))
    assert outcomes[0] == outcomes[1] == outcomes[2]
    rows = [json.loads(line) for line in outcomes[0][1].splitlines()]
    assert all(len(row["log_likelihoods"]) == len(row["choices"]) == 5 for row in rows)
    assert results["ties"] == 0
    assert list(results["figures"]) == ["accuracy", "accuracy_normalised"]


def test_a_killed_evaluation_goes_on_where_it_was(model_folder, data, tmp_path, monkeypatch):
    assert run(model_folder, data, tmp_path / "unbroken") == 0
    add = ReplyStore.add

    def killed_at_the_fifth_reply(store, key, reply):
        if len(store._replies) == 4:
            raise KeyboardInterrupt
        add(store, key, reply)

    monkeypatch.setattr(ReplyStore, "add", killed_at_the_fifth_reply)
    assert run(model_folder, data, tmp_path / "broken", "--batch-size", "2") == 130
    assert not (tmp_path / "broken" / "easy_vqa").exists()
    monkeypatch.setattr(ReplyStore, "add", add)
    assert run(model_folder, data, tmp_path / "broken", "--batch-size", "4") == 0
    whole, mended = (read(tmp_path / name) for name in ("unbroken", "broken"))
    assert without_speed(mended[0]) == without_speed(whole[0])
    assert mended[1] == whole[1]
    assert mended[0]["speed"]["reused"] == 4


def test_replies_are_reused_by_the_same_model_alone(model_folder, data, tmp_path):
    def asked(folder, *more):
        assert run(folder, data, tmp_path / "out", *more) == 0
        return read(tmp_path / "out")[0]["speed"]["asked"]

    assert asked(model_folder) == 9
    assert asked(model_folder) == 0
    assert asked(model_folder, "--no-cache") == 9
    assert asked(model_folder, "--compression", "1") == 9
    assert asked(save_model_folder(tmp_path / "other", seed=1)) == 9
    assert asked(model_folder) == 0


def test_what_reproduces_the_figures_is_recorded(model_folder, data, tmp_path):
    run(model_folder, data, tmp_path / "a")
    run(model_folder, small_set(tmp_path / "other", pictures=2), tmp_path / "b")
    first, second = (read(tmp_path / name)[0]["settings"] for name in "ab")
    for name in ("model_checksum", "code_checksum", "versions", "dtype", "compression", "stop"):
        assert first[name] == second[name]
    assert first["data_checksum"] != second["data_checksum"]
    assert set(first["versions"]) >= {"conceptmoe-vl", "torch", "transformers"}


def test_pictures_in_tiles_are_batched_too(data, tmp_path):
    folder = save_model_folder(tmp_path / "tiles", size_policy="tiles", image_size=16)
    outcomes = []
    for size in ("1", "4"):
        assert run(folder, data, tmp_path / size, "--batch-size", size) == 0
        results, rows = read(tmp_path / size)
        outcomes.append((without_speed(results), rows))
    assert outcomes[0] == outcomes[1]
    # Four tiles and a thumbnail of 2 x 2 tokens each.
    assert all("<|image_pad|>*20" in row["prompt"] for row in rows)


def test_the_limit_takes_the_first_questions(model_folder, data, tmp_path):
    assert run(model_folder, data, tmp_path / "out", "--limit", "4") == 0
    results, rows = read(tmp_path / "out")
    assert results["settings"]["limit"] == results["count"] == 4
    assert [row["key"] for row in rows] == [f"test0000#{n}" for n in range(3)] + ["test0001#0"]


@pytest.mark.parametrize(
    ("more", "part"),
    [
        (["--tasks", "easy_vqua"], "the nearest is 'easy_vqa'"),
        (["--tasks", ","], "names no task"),
        (["--batch-size", "0"], "--batch-size is 0"),
        (["--limit", "-3"], "--limit is -3"),
        (["--prefix-cache", "-1"], "--prefix-cache is -1"),
        (["--model", "nowhere"], "there is no model folder 'nowhere'"),
        (["--data", "nowhere"], "there are no shards 'nowhere/test-*.tar'"),
    ],
)
def test_a_mistake_is_one_line(model_folder, data, tmp_path, capsys, more, part):
    assert run(model_folder, data, tmp_path / "out", *more) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert part in captured.err
    assert captured.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("size", ["1", "4"])
def test_a_damaged_image_ends_the_evaluation_with_its_name(model_folder, tmp_path, capsys, size):
    records = {
        "fine": (conversation(("a?", "b")), [png()]),
        "broken": (conversation(("a?", "b")), [png()[:40]]),
    }
    write_shard(tmp_path / "data" / "test-0.tar", records)
    assert run(model_folder, tmp_path / "data", tmp_path / "out", "--batch-size", size) == 2
    assert "question 'broken#0' cannot be asked" in capsys.readouterr().err
    assert not list((tmp_path / "out").glob("easy_vqa/*"))


def test_results_go_beside_the_model_of_a_run(tmp_path):
    (tmp_path / "run" / "model").mkdir(parents=True)
    assert default_output(tmp_path / "run" / "model").as_posix() == "eval_results/model"
    (tmp_path / "run" / "metrics.jsonl").touch()
    assert default_output(tmp_path / "run" / "model") == (tmp_path / "run" / "eval").resolve()
