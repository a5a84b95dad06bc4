from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from conceptmoe_vl.asking import Answer
from eval.report import print_report, summarise, write_results, written_whole
from eval.runner import Evaluation, RatioMeter, Sample
from eval.tasks import Question, get_tasks


def make_evaluation() -> Evaluation:
    task = get_tasks("easy_vqa")[0]
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
        answer = Answer(parsed, parsed + "<|im_end|>", "<|image_pad|>*4q?", 10, 2)
        samples.append(Sample(question, answer, parsed, score))
    ratios = RatioMeter({"image": 40, "text": 20}, {"image": 10, "text": 20})
    return Evaluation(task, samples, ratios, seconds=2.0)


def test_summary_counts_every_sample():
    results = summarise(make_evaluation())
    assert (results["count"], results["right"], results["accuracy"]) == (4, 3, 0.75)
    assert sum(part["count"] for part in results["by_kind"].values()) == 4
    assert results["by_kind"]["yes/no"]["accuracy"] == 0.5
    assert results["empty_answers"] == 1
    assert results["ratio"] == 2.0
    assert results["ratio_by_modality"] == {"image": 4.0, "text": 1.0}
    assert results["questions_per_second"] == 2.0
    assert results["prompt_tokens_per_second"] == 20.0


def test_report_says_what_is_no_official_score():
    output = io.StringIO()
    print_report(summarise(make_evaluation()), Console(file=output, width=100))
    printed = output.getvalue()
    assert "75.00 %" in printed
    assert "tokens per concept: all 2.00, image 4.00, text 1.00" in printed
    assert "4 of the 9673 official questions" in printed
    assert "1 answers are empty" in printed


def test_ratio_without_tokens_is_none_not_a_division_by_zero():
    assert RatioMeter().ratio() is None


def test_results_are_json(tmp_path):
    results = summarise(make_evaluation())
    assert json.loads(write_results(tmp_path / "new", results).read_text()) == results


def test_a_file_that_was_not_finished_is_not_there(tmp_path):
    path = tmp_path / "samples.jsonl"

    def fail_half_way():
        with written_whole(path) as file:
            file.write("half")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fail_half_way()
    assert list(tmp_path.iterdir()) == []


def test_an_older_file_survives_a_failed_write(tmp_path):
    path = tmp_path / "samples.jsonl"
    path.write_text("old")

    def fail_half_way():
        with written_whole(path) as file:
            file.write("half")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fail_half_way()
    assert path.read_text() == "old"
