from __future__ import annotations

import json

import numpy as np
import pytest

from eval.__main__ import main
from eval.compare import Comparison, _cells
from eval.replies import Reply
from eval.report import Speed, summarise, write_results, write_samples
from eval.runner import Sample
from eval.tasks import Question, get_tasks

TASK = get_tasks("easy_vqa")[0]


def save(folder, scores, kinds=None, checksum="same", **changes):
    """The files of an evaluation in which the questions had these scores."""
    samples = []
    for number, score in enumerate(scores):
        kind = kinds[number] if kinds else ""
        content = f"question {number}?"
        question = Question(f"q{number}", [{"role": "user", "content": content}], ["a"], kind)
        text = "a" if score else "b"
        reply = Reply(text, f"{text}<|im_end|>", content, 5, 2)
        samples.append(Sample(question, reply, text, float(score)))
    results = summarise(TASK, samples, Speed(len(samples), 1.0))
    results |= {"settings": {"data_checksum": checksum}, **changes}
    write_samples(folder / results["task"], samples)
    write_results(folder / results["task"], results)
    return str(folder)


def compare(*runs, output=None):
    return main(["compare", *runs, *(["--output", str(output)] if output else [])])


def test_real_differences_are_told_from_chance(tmp_path, capsys):
    rng = np.random.default_rng(0)
    kinds = ["even", "odd"] * 200
    first = rng.random(400) < 0.6
    better = first | (np.arange(400) % 2 == 0)  # all even questions right
    folders = [save(tmp_path / "a", first, kinds), save(tmp_path / "b", better, kinds)]
    assert compare(*folders, output=tmp_path / "out") == 0
    written = json.loads((tmp_path / "out" / "comparison.json").read_text())
    lines = {line["group"]: line for line in written["comparisons"]}
    assert list(lines) == ["all", "even", "odd"]
    assert [lines[group]["real"] for group in lines] == [True, True, False]
    assert lines["odd"]["difference"] == 0
    for line in lines.values():
        low, high = line["interval_95"]
        assert low <= line["difference"] <= high
        assert line["difference"] == pytest.approx(line["second"] - line["first"])
        assert line["p"] <= line["p_holm"] <= 1
    assert lines["even"]["p_holm"] == pytest.approx(3 * lines["even"]["p"])
    different = (tmp_path / "out" / "differences.jsonl").read_text().splitlines()
    assert len(different) == int((first != better).sum())
    row = json.loads(different[0])
    assert row["score"] == {folders[0]: 0.0, folders[1]: 1.0}
    assert row["parsed"] == {folders[0]: "b", folders[1]: "a"}
    assert "2 of 3 differences are real" in capsys.readouterr().out


def test_a_run_does_not_differ_from_itself(tmp_path, capsys):
    scores, kinds = [i % 3 == 0 for i in range(60)], ["all", "other", ""] * 20
    folders = [save(tmp_path / name, scores, kinds) for name in ("a", "b")]
    assert compare(*folders, output=tmp_path / "out") == 0
    lines = json.loads((tmp_path / "out" / "comparison.json").read_text())["comparisons"]
    # A kind may be called "all" too.
    assert [(line["group"], line["count"]) for line in lines] == [
        *(("all", 60), ("", 20), ("all", 20), ("other", 20))
    ]
    assert {(line["difference"], line["p"], line["real"]) for line in lines} == {(0.0, 1.0, False)}
    assert "note:" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"score": 1.0}, "gives accuracy 0.5, results.json says 0.4"),
        ({"score": "1"}, "the score of 'q1' is '1'"),
        ({"score": None}, "the score of 'q1' is None"),
        ({"log_likelihoods": [1]}, "cannot be read as results"),
        ({"key": "q0"}, "counts 10 questions and has 9"),
    ],
)
def test_a_line_that_was_changed_is_found(tmp_path, change, part, capsys):
    folders = [save(tmp_path / name, [i > 5 for i in range(10)]) for name in ("a", "b")]
    path = tmp_path / "b" / TASK.name / "samples.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[1] |= change
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert compare(*folders) == 2
    assert part in capsys.readouterr().err


def test_another_metric_is_told(tmp_path, capsys):
    made = [("a", "exact_match"), ("b", "anls")]
    folders = [
        save(
            tmp_path / name,
            [1, 0, 1],
            settings={"data_checksum": "same", "scoring": {"metric": metric}},
        )
        for name, metric in made
    ]
    assert compare(*folders) == 0
    assert "scored in different ways" in capsys.readouterr().out.replace("\n", " ")


def test_small_differences_of_large_figures_are_no_percentages():
    line = Comparison("t", "r", "all", "perplexity", 9, 12.5, 12.25, -0.25, (-0.5, 0.125), 0.1)
    assert _cells(line)[3:7] == ["12.50", "12.25", "-0.25", "-0.50 to 0.12"]
    share = Comparison("t", "r", "all", "accuracy", 9, 0.5, 0.25, -0.25, (-0.5, 0.125), 0.1)
    assert _cells(share)[5:7] == ["-25.00 %", "-50.00 to 12.50"]


def test_several_runs_are_compared_with_the_first(tmp_path, capsys):
    folders = [save(tmp_path / name, [i % 2 for i in range(40)]) for name in ("a", "b", "c")]
    assert compare(*folders) == 0
    printed = capsys.readouterr().out.replace("\n", "")
    assert "0 of 2 differences are real" in printed


def test_folders_of_a_single_task_can_be_named(tmp_path):
    folders = [save(tmp_path / name, [1, 0]) for name in "ab"]
    assert compare(*(f"{folder}/easy_vqa" for folder in folders)) == 0


def test_images_that_differ_are_noted(tmp_path, capsys):
    folders = [save(tmp_path / name, [1, 0], checksum=name) for name in "ab"]
    assert compare(*folders) == 0
    assert "the questions read the same, but images" in " ".join(capsys.readouterr().out.split())


def test_other_questions_are_refused_and_named(tmp_path, capsys):
    first = save(tmp_path / "a", [1, 0, 1])
    for folder, scores, kinds, part in (
        ("shorter", [1, 0], None, f"1 questions are in '{first}' alone: 'q2'"),
        ("longer", [1] * 10, None, "7 questions are in"),
        ("kinds", [1, 0, 1], ["x", "", ""], "1 questions are asked or scored otherwise: 'q0'"),
    ):
        assert compare(first, save(tmp_path / folder, scores, kinds)) == 2
        error = capsys.readouterr().err
        assert part in error
        assert error.count("\n") == 1


def test_folders_that_cannot_be_compared_are_refused(tmp_path, capsys):
    first = save(tmp_path / "a", [1, 0])
    other = save(tmp_path / "other", [1, 0], task="another")
    (tmp_path / "empty").mkdir()
    broken = save(tmp_path / "broken", [1, 0])
    (tmp_path / "broken" / "easy_vqa" / "results.json").write_text("{")
    short = save(tmp_path / "short", [1, 0], count=3)
    for runs, part in (
        ([first], "two folders or more"),
        ([first, first], "the same folder twice"),
        ([first, str(tmp_path / "nowhere")], "there is no folder"),
        ([first, str(tmp_path / "empty")], "holds no samples.jsonl"),
        ([first, other], "are of different tasks: another, easy_vqa"),
        ([first, broken], "cannot be read as results"),
        ([first, short], "counts 3 questions and has 2"),
    ):
        assert compare(*runs) == 2
        assert part in capsys.readouterr().err


def test_kinds_and_folders_are_no_markup(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    kinds = ["[/b]even", "odd\x1b[2J"] * 4
    runs = [save(tmp_path / name / "x", [1, 0] * 4, kinds) for name in ("[", "other[red]")]
    assert compare(*runs) == 0
    table = capsys.readouterr().out
    assert "[/b]even" in "".join(table.split())
    assert "\x1b" not in table
