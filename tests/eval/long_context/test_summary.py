"""Figures by length and depth, and the effective length."""

from __future__ import annotations

import pytest

from eval.long_context.figures import heat_map_cells
from eval.long_context.summary import effective_length, summarise_length, to_json
from eval.tasks import Question, Scored


def sample(number, parsed, wanted, depths, control=False):
    from eval.long_context.keys import score

    details = {
        "control": control,
        "wanted": wanted,
        "depths": depths,
        "shape": "number",
        "tokens": 100 + number,
    }
    question = Question(f"q{number}", [], [", ".join(wanted)], "", details=details)
    return Scored(question, parsed, score(parsed, details))


SAMPLES = [
    sample(0, "1111, 2222", ["1111", "2222"], [0.0, 0.5]),
    sample(1, "1111", ["1111", "2222"], [0.0, 1.0]),
    sample(2, "", ["1111", "2222"], [0.5, 1.0]),
    sample(3, "9999", ["1111", "2222"], [0.0, 1.0], control=True),
    sample(4, "", ["1111", "2222"], [0.5, 1.0], control=True),
]


def test_every_depth_has_what_its_keys_earned():
    summary = summarise_length(SAMPLES)
    assert summary.score.value == pytest.approx((1.0 + 0.5 + 0.0) / 3)
    assert {depth: figure.value for depth, figure in summary.depths.items()} == {
        0.0: 1.0,
        0.5: 0.5,
        1.0: 0.0,
    }
    assert summary.control.value == 0.0
    assert summary.control_named.value == 0.5
    assert (summary.tokens, summary.questions) == ((100, 104), 3)
    low, high = summary.score.interval
    assert 0 <= low < summary.score.value < high <= 1


def test_keys_without_a_place_stand_in_one_row():
    samples = [sample(0, "1111", ["1111"], []), sample(1, "", ["1111"], [])]
    summary = summarise_length(samples)
    assert list(summary.depths) == ["all depths"]
    assert summary.depths["all depths"].value == 0.5
    assert summary.control is None


def test_rows_and_columns_of_a_heat_map():
    lengths = {4096: summarise_length(SAMPLES), 1024: summarise_length(SAMPLES[:2])}
    rows, columns, cells = heat_map_cells(lengths)
    assert rows == ["0 %", "50 %", "100 %", "control"]
    assert columns == ["1k", "4k"]
    values = [[cell and cell.value for cell in row] for row in cells]
    assert values == [[1.0, 1.0], [1.0, 0.5], [0.0, 0.0], [None, 0.0]]


def with_score(right, count=4):
    wanted = [sample(n, "1111" if n < right else "", ["1111"], []) for n in range(count)]
    return summarise_length(wanted)


@pytest.mark.parametrize(
    ("scores", "expected"),
    [((4, 4, 4), 4096), ((4, 4, 2), 2048), ((4, 2, 4), 1024), ((2, 4, 4), None)],
)
def test_an_effective_length_has_no_gap_below_it(scores, expected):
    lengths = dict(zip((1024, 2048, 4096), map(with_score, scores), strict=True))
    assert effective_length(lengths, 0.85) == expected
    assert to_json({"t": lengths}, 0.85)["tasks"]["t"]["effective_length"] == expected
