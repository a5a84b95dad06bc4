from __future__ import annotations

import pytest

from eval.metrics import open_answer_score, parse_open_answer


@pytest.mark.parametrize(
    ("answer", "parsed"),
    [
        ("42", [42.0]),
        ("The answer is 3.14159", [3.14]),
        (
            "It weighs 1,200 kg",
            ["it weighs 1,200 kg", 1200.0, 200.0],
        ),  # the tail of a number too: as published
        ("so x = 5", [5.0]),
        ("x", [" x", "x "]),
        ("", [""]),
        ("The result is blue.\nTherefore it is Paris.", ["blue.", "paris"]),
        ("1e3 N", ["1e3 n", 1000.0, 3.0]),
    ],
)
def test_parsed_parts(answer, parsed):
    assert parse_open_answer(answer) == parsed


@pytest.mark.parametrize(
    ("answer", "references", "score"),
    [
        ("The answer is 8.00", ["8"], 1.0),
        ("8.004", ["8"], 1.0),  # two decimals
        ("8.01", ["8"], 0.0),
        ("0", ["0"], 1.0),
        ("", ["0"], 0.0),
        ("-0.5", ["-.5"], 1.0),
        ("it is the Renaissance", ["renaissance"], 1.0),
        ("gothic", ["Renaissance", "Gothic"], 1.0),
        ("Paris", ["London"], 0.0),
        ("1,200", ["1200"], 1.0),
        ("xylem", ["x"], 0.0),  # a single letter is not found within a word
        ("the variable x", ["x"], 1.0),
        ("α = 0.3", ["0.3"], 1.0),
    ],
)
def test_scores(answer, references, score):
    assert open_answer_score(parse_open_answer(answer), references) == score
