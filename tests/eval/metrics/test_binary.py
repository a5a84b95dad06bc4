from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eval.metrics import binary_parts, parse_yes_no, parse_yes_no_prefix
from eval.tasks import Question, RatioOfSums, Scored
from tests.reference import metrics as reference


def figures_of(answers, golds):
    figures = RatioOfSums(lambda sample: binary_parts(sample.parsed, sample.question.references[0]))
    rows = zip(answers, golds, strict=True)
    return figures([Scored(Question("", [], (gold,)), answer, 0.0) for answer, gold in rows])


@pytest.mark.parametrize(
    ("answer", "read"),
    [
        ("Yes", "yes"),
        ("yes.", "yes"),
        ("No, there is no dog.", "no"),
        ("There is not a dog.", "no"),
        ("Yes, there is no doubt", "no"),  # as POPE's script reads it
        ("I would say yes. No other object is near.", "yes"),  # the first sentence
        ("There is a dog.", ""),  # POPE's script reads a yes
        ("I know", ""),  # no "no" within a word
        ("Nothing", ""),
        ("", ""),
        ("...", ""),
        (". yes", "yes"),
        ("YES!", "yes"),
        ("ja", ""),
    ],
)
def test_yes_or_no(answer, read):
    assert parse_yes_no(answer) == read


@pytest.mark.parametrize(
    ("answer", "read"),
    [
        ("Yes", "yes"),
        ("no.", "no"),
        ("Y", "yes"),
        ("n", "no"),
        ("x", ""),
        ("Yes, it is", "yes"),
        ("I know", ""),
        ("know", "no"),  # MME's script looks for the letters in the first four
        ("It is not", ""),
        ("", ""),
    ],
)
def test_yes_or_no_by_the_first_four_characters(answer, read):
    assert parse_yes_no_prefix(answer) == read


def test_figures_by_hand():
    answers = ["yes", "yes", "no", "no", "", "yes"]
    golds = ["yes", "no", "yes", "no", "yes", "yes"]
    figures = figures_of(answers, golds)
    assert figures == {
        "accuracy": 3 / 6,
        "precision": 2 / 3,
        "recall": 2 / 4,
        "f1": pytest.approx(4 / 7),
        "yes_ratio": 3 / 6,
        "unreadable": 1 / 6,
    }


def test_figures_without_a_denominator_are_not_defined():
    figures = figures_of(["no"], ["no"])
    assert [name for name, value in figures.items() if math.isnan(value)] == [
        "precision",
        "recall",
        "f1",
    ]


@settings(deadline=None, max_examples=100)
@given(
    st.lists(
        st.tuples(st.sampled_from(["yes", "no", ""]), st.sampled_from(["yes", "no"])), min_size=1
    )
)
def test_figures_are_the_slow_ones(pairs):
    answers, golds = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    expected = {
        name: math.nan if value is None else float(value)
        for name, value in reference.contingency(answers, golds).items()
    }
    assert figures_of(answers, golds) == pytest.approx(expected, nan_ok=True)
