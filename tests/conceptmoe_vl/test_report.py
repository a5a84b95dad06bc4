"""The report: what it reads, draws and escapes."""

from __future__ import annotations

import json
import math
import re
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conceptmoe_vl.report import write_report
from conceptmoe_vl.report.__main__ import main
from conceptmoe_vl.report.charts import (
    WIDTH,
    Chart,
    Line,
    labels,
    log_ticks,
    number,
    smoothed,
    thinned,
    ticks,
)
from conceptmoe_vl.report.runs import read_runs

EVIL = "<script>alert('x')</script>&\"</figure>"


def write_run(folder, steps: int = 30, source: str = "books", evaluate: bool = True):
    folder.mkdir(parents=True)
    lines = [
        {
            "step": step,
            "samples": 4 * step,
            "tokens": 100 * step,
            "seconds": 2.0 * step,
            "loss": 5 / step,
            "lm_loss": "nan" if step == 3 else 4 / step,
            "lm_loss_by_source": {source: 4 / step},
            "ratio": 2.2,
            "target_ratio": 2.0,
            "ratio_image": None,
            "lr": 1e-3,
            "expert_load": {"concept": {"max": 1.5, "min": 0.5}},
            "nonfinite_steps": int(step >= 3),
            "peak_memory": 3 * 2**30,
            "tokens_per_second": 100.0,
            **({"warnings": [f"too few {source}"]} if step == 7 else {}),
        }
        for step in range(1, steps + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if evaluate:
        text = json.dumps({"step": 20, "lm_loss": 0.25}) + "\n"
        (folder / "evaluation.jsonl").write_text(text)
    rolled = {"step": 12, "to_step": 10, "losses": [9.0]}
    (folder / "rollbacks.jsonl").write_text(json.dumps(rolled) + "\n")
    return folder


def titles(text: str) -> list[str]:
    return re.findall(r"<figcaption>(.*?)</figcaption>", text)


def test_one_run(tmp_path, capsys):
    run = write_run(tmp_path / "run")
    assert main([str(run)]) == 0
    assert capsys.readouterr().out == f"wrote {run / 'report.html'}\n"
    text = (run / "report.html").read_text()
    assert "Language loss" in titles(text)
    assert "Tokens per concept" in titles(text)
    assert "Load of concept experts" in titles(text)
    assert "Tokens per concept by modality" not in titles(text)  # no number in any line
    assert "weight 0.9" in text
    for part in ("all tokens, target", "held-out", "too few books", "rolled back to step 10"):
        assert part in text
    assert "steps skipped so far as not finite: 1" in text
    assert not re.search(r'(src|href)="|url\(http|@import|https?://', text)  # self-contained


def test_memory_is_drawn_in_gib_and_counts_are_written_out(tmp_path):
    run = write_run(tmp_path / "run", steps=2000)
    assert main([str(run), "--smoothing", "0"]) == 0
    text = (run / "report.html").read_text()
    memory = text.split("<figcaption>Peak memory of rank 0, GiB</figcaption>")[1]
    data = json.loads(re.findall(r'<script type="application/json">(.*?)</script>', memory)[0])
    assert data["lines"][0]["points"][0] == [1, 3.0]
    assert "<td>2,000</td><td>8,000</td><td>200,000</td>" in text


@pytest.mark.parametrize("scale", [1e-9, 1.25e-5, 4e-4, 0.03, 1.0, 9e4, 1.9e9, 1.7e12])
def test_the_texts_of_axes_lie_inside_the_drawing(scale):
    points = [(step, scale * (1 + step / 500)) for step in range(1, 1001)]
    drawing = Chart("t", [Line("a", points, 0)], 0.9).html()
    texts = re.findall(r'<text x="([\d.]+)"[^>]*text-anchor="(\w+)">(.*?)</text>', drawing)
    assert texts[-1][2] == "1,000"
    for x, anchor, text in texts:
        width = 7 * len(text)
        right = float(x) + (width / 2 if anchor == "middle" else 0)
        assert right - width >= 0, text
        assert right <= WIDTH, text


def test_numbers_are_short_and_those_of_an_axis_exact():
    assert [number(value) for value in (0, 0.5, 1.25e-5, 1.75e9, 1e6, 999_999, -3e-4)] == [
        *("0", "0.5", "1.25e-5", "1.75e9", "1e6", "999,999", "-3e-4")
    ]
    assert labels([1.0, 1.0001, 1.0002]) == ["1", "1.0001", "1.0002"]
    assert labels([1.0125, 1.015]) == ["1.0125", "1.015"]
    assert labels([0.0, 2e-4]) == ["0", "2e-4"]


def test_a_chart_is_no_wider_than_a_small_page(tmp_path):
    assert main([str(write_run(tmp_path / "run"))]) == 0
    text = (tmp_path / "run" / "report.html").read_text()
    assert "minmax(min(24rem, 100%), 1fr)" in text


def test_several_runs_are_told_apart(tmp_path):
    runs = [write_run(tmp_path / name / "run") for name in ("a", "b")]
    assert main([*map(str, runs), "--out", str(tmp_path / "page.html"), "--smoothing", "0"]) == 0
    text = (tmp_path / "page.html").read_text()
    for name in ("a/run", "b/run"):
        assert f'<th scope="row">{name}</th>' in text
        assert f"{name}: all tokens, target" in text
    assert "Lines are the values themselves" in text
    assert [run.name for run in read_runs([runs[0], runs[0]])] == [
        f"{'/'.join(runs[0].parts)} (1)",
        f"{'/'.join(runs[0].parts)} (2)",
    ]


def test_whatever_a_run_says_is_escaped(tmp_path):
    run = write_run(tmp_path / "run", source=EVIL)
    assert main([str(run)]) == 0
    text = (run / "report.html").read_text()
    assert "alert(" in text
    assert "<script>alert" not in text
    assert text.count("</figure>") == text.count("<figure")
    for block in re.findall(r'<script type="application/json">(.*?)</script>', text):
        json.loads(block)


def test_each_chart_is_well_formed_and_its_data_are_the_values(tmp_path):
    points = [(step, 1 / step) for step in range(1, 2000)]
    html = Chart(EVIL, [Line(EVIL, points, 0), Line("b", [(5, 2.0)], 1, dots=True)], 0.5).html()
    figure = ElementTree.fromstring(html)
    data = json.loads(figure.find("script").text)
    assert [line["label"] for line in data["lines"]] == [EVIL, "b"]
    assert data["x"] == [1, 1999]
    assert data["lines"][0]["points"][0] == [1, 1.0]
    assert data["lines"][1]["points"] == [[5, 2.0]]


def test_axes_of_losses_can_be_logarithmic(tmp_path):
    """Both are drawn, and the page's style shows one; where a value is 0 or less there is one."""
    assert main([str(write_run(tmp_path / "run"))]) == 0
    text = (tmp_path / "run" / "report.html").read_text()
    assert text.count('id="logarithmic"') == 1
    assert "#logarithmic:checked ~ .charts .view.linear { display: none; }" in text
    losses, others = text.split("<h2>Compression</h2>")
    assert losses.count('class="view log"') == losses.count('class="view linear"') == 3
    assert 'class="view log"' not in others
    line = Line("a", [(1, 10.0), (2, 1.0), (3, 0.1)], 0, smooth=False)
    html = Chart("t", [line], 0.9, switched=True).html()
    _, drawn = re.findall(r'<path class="line c0" [^>]*d="M(.*?)"', html)[:2]
    heights = [float(place.split()[1]) for place in drawn.split("L")]
    assert heights[1] - heights[0] == pytest.approx(heights[2] - heights[1], abs=0.2)
    below = Line("b", [(1, 0.0)], 1)
    assert "view log" not in Chart("t", [line, below], 0.9, switched=True).html()


@settings(max_examples=100, deadline=None, derandomize=True)
@given(low=st.floats(1e-9, 1e9), factor=st.floats(1.001, 1e12))
def test_ticks_of_a_logarithmic_axis_lie_inside_and_are_few(low, factor):
    found = log_ticks(low, low * factor)
    assert 1 <= len(found) <= 14
    assert all(low * 0.999 <= value <= low * factor * 1.001 for value in found)


def test_a_spike_stays_visible_in_a_long_run():
    points = [(step, 1.0) for step in range(10_000)]
    points[7777] = (7777, 50.0)
    kept = thinned(points)
    assert len(kept) <= 400
    assert (7777, 50.0) in kept


def test_the_mean_is_unbiased_and_weighs_as_stated():
    assert smoothed([(1, 4.0)], 0.9) == [(1, pytest.approx(4.0))]
    found = smoothed([(1, 0.0), (2, 1.0)], 0.75)
    assert found[1][1] == pytest.approx(0.25 / (0.25 + 0.75 * 0.25))
    assert [value for _, value in smoothed([(i, 2.0) for i in range(9)], 0.9)] == pytest.approx(
        [2.0] * 9
    )


@settings(max_examples=100, deadline=None, derandomize=True)
@given(low=st.floats(-1e9, 1e9), span=st.floats(1e-6, 1e9))
def test_ticks_lie_inside_and_are_few(low, span):
    high = low + span
    if high - low <= abs(low) * 1e-9:
        return
    found = ticks(low, high)
    assert 2 <= len(found) <= 8
    assert all(low - 1e-6 * span <= value <= high + 1e-6 * span for value in found)


def test_values_that_are_not_finite_leave_the_frame_alone():
    html = Chart("t", [Line("a", [(1, math.inf), (2, 1.0), (3, math.nan)], 0)], 0.9).html()
    assert "nan" not in html.lower()
    assert "inf" not in html.lower()
    assert Chart("t", [Line("a", [(1, math.nan)], 0)], 0.9).html() == ""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "is no run: it has no metrics.jsonl"),
        ("", "has no complete line yet"),
        ("{]\n", "is no JSON"),
        ("[1]\n", "line 1 is no object"),
    ],
)
def test_mistakes(tmp_path, capsys, text, message):
    if text is not None:
        (tmp_path / "metrics.jsonl").write_text(text)
    assert main([str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "report.html").exists()


def test_a_wrong_smoothing_is_refused(tmp_path, capsys):
    assert main([str(tmp_path), "--smoothing", "1"]) == 2
    assert "give 0 to below 1" in capsys.readouterr().err


def test_lines_of_other_programs_cost_no_more_than_themselves(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"loss": 1.0, "warnings": null}\n{"step": "2", "loss": 1, "nonfinite_steps": "3"}\n'
        '{"step": 3, "loss": 1e305, "lm_loss": NaN, "warnings": 7}\n'
        f'{{"step": 4, "loss": {"9" * 400}}}\n{{"step": 5, "loss": 2.5, "warnings": ["odd"]}}\n'
    )
    (tmp_path / "rollbacks.jsonl").write_text('{"step": 5}\n{}\n')
    write_report([tmp_path], tmp_path / "page.html")
    (run,) = read_runs([tmp_path])
    assert run.series("loss") == [(5, 2.5)]
    assert list(run.warnings()) == [
        (5, "odd"),
        (5, "the loss spiked; rolled back to step None"),
    ]
