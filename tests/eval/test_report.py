from __future__ import annotations

import dataclasses
import io
import json

import pytest
from rich.console import Console

from conceptmoe_vl.errors import UserError
from eval.replies import Reply
from eval.report import Speed, print_report, summarise, write_results, write_samples
from eval.runner import Sample
from eval.tasks import Question, get_tasks

TASK = get_tasks("easy_vqa")[0]
SPEED = Speed(asked=4, seconds=2.0)


def make_samples() -> list[Sample]:
    samples = []
    for number, (kind, parsed, score) in enumerate(
        [
            ("yes/no", "yes", 1.0),
            ("yes/no", "", 0.0),
            ("colour", "red", 1.0),
            ("shape", "circle", 1.0),
        ]
    ):
        question = Question(f"r#{number}", [], ["a"], kind)
        tokens, concepts = {"image": 10, "text": 5}, {"image": 5, "text": 5}
        raw = parsed + "<|im_end|>"
        reply = Reply(parsed, raw, "<|image_pad|>*4q?", 10, 2, tokens, concepts)
        samples.append(Sample(question, reply, parsed, score))
    return samples


def printed(results) -> str:
    output = io.StringIO()
    print_report(results, Console(file=output, width=100))
    return output.getvalue()


def test_summary_counts_every_sample():
    results = summarise(TASK, make_samples(), SPEED)
    assert (results["count"], results["figures"]["accuracy"]["value"]) == (4, 0.75)
    assert sum(part["count"] for part in results["by_kind"].values()) == 4
    assert results["by_kind"]["yes/no"]["figures"]["accuracy"]["value"] == 0.5
    assert results["empty_answers"] == 1
    assert results["ratio"] == 1.5
    assert results["ratio_by_modality"] == {"image": 2.0, "text": 1.0}
    assert results["speed"]["questions_per_second"] == 2.0
    assert results["speed"]["prompt_tokens_per_second"] == 20.0


def test_every_number_has_its_interval():
    results = summarise(TASK, make_samples(), SPEED)
    for part in (results, *results["by_kind"].values()):
        for figure in part["figures"].values():
            low, high = figure["interval_95"]
            assert low <= figure["value"] <= high
            assert low < high


def test_report_says_what_is_no_official_score():
    text = printed(summarise(TASK, make_samples(), SPEED))
    assert "75.00 %" in text
    ratios = "all 1.50 (1.50 to 1.50), image 2.00 (2.00 to 2.00), text 1.00 (1.00 to 1.00)"
    assert f"tokens per concept: {ratios}" in text
    assert "4 of the 9673 official questions" in text
    assert "1 answers are empty" in text
    assert "earlier start" not in text


def test_report_says_what_was_not_asked_anew():
    text = printed(summarise(TASK, make_samples(), Speed(asked=0, seconds=0.1)))
    assert "4 of 4 replies were there" in text
    assert "a second" not in text


def test_figures_that_are_no_shares_and_no_figures_at_all_are_printed():
    def metrics(samples):
        return {"total": 100.0 * len(samples), "precision": float("nan")}

    task = dataclasses.replace(TASK, metrics=metrics)
    results = summarise(task, make_samples(), SPEED)
    assert results["figures"]["precision"] == {"value": None, "interval_95": None}
    assert "400.00" in printed(results)


def test_the_ratio_has_an_interval():
    samples = make_samples()
    for i, concepts in enumerate((2, 5, 10, 10)):
        reply = dataclasses.replace(samples[i].reply, concepts={"image": concepts, "text": 5})
        samples[i] = dataclasses.replace(samples[i], reply=reply)
    results = summarise(TASK, samples, SPEED)
    for name, value in (("all", results["ratio"]), ("image", 40 / 27)):
        low, high = results["ratio_intervals_95"][name]
        assert low < value < high
    assert results["ratio_by_modality"]["image"] == 40 / 27


def test_ratio_without_tokens_is_none_not_a_division_by_zero():
    samples = [
        dataclasses.replace(sample, reply=Reply("", "", "", 0, 0)) for sample in make_samples()
    ]
    assert summarise(TASK, samples, SPEED)["ratio"] is None


def test_results_are_json(tmp_path):
    results = summarise(TASK, make_samples(), SPEED)
    assert json.loads(write_results(tmp_path / "new", results).read_text()) == results


def test_a_file_that_cannot_be_written_leaves_the_older_one(tmp_path):
    samples = make_samples()
    path = write_samples(tmp_path, samples)
    before = path.read_text()
    broken = dataclasses.replace(samples[0].question, details={"no": object()})
    with pytest.raises(TypeError):
        write_samples(tmp_path, [dataclasses.replace(samples[0], question=broken)])
    assert path.read_text() == before
    assert len(list(tmp_path.iterdir())) == 1


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "task").write_text("no folder")
    with pytest.raises(UserError, match=r"task/results.json' cannot be written .* --output"):
        write_results(tmp_path / "task", {})


def test_names_of_the_data_are_neither_markup_nor_control_characters():
    results = summarise(TASK, make_samples(), SPEED)
    results["description"] = "[/b]signs[red]"
    results["by_kind"] = dict(
        zip(["[/i]a[bold]", "b\x1b[2J"], results["by_kind"].values(), strict=False)
    )
    text = printed(results)
    for shown in ("[/b]signs[red]", "[/i]a[bold]", "b<U+001B>[2J"):
        assert shown in text
    assert "\x1b" not in text
