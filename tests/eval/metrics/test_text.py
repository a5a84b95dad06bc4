from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eval.metrics import anls, exact_match, levenshtein, relaxed_accuracy
from tests.reference import metrics as reference


@pytest.mark.parametrize(
    ("answer", "references", "score"),
    [
        ("red", ["red"], 1.0),
        (" Red\n", ["red"], 1.0),
        ("red", ["blue", "RED"], 1.0),
        ("reddish", ["red"], 0.0),
        ("red blue", ["red"], 0.0),
        ("", ["red"], 0.0),
        ("0", ["0"], 1.0),
        ("", [], 0.0),
    ],
)
def test_exact_match(answer, references, score):
    assert exact_match(answer, references) == score


@pytest.mark.parametrize(
    ("answer", "references", "score"),
    [
        ("kitten", ["sitting"], 1 - 3 / 7),
        ("0.28", ["0.28"], 1.0),
        ("T-GESIC", ["t-gesic"], 1.0),
        ("ITC  Limited", ["ITC Limited"], 1.0),  # blanks are single on both sides
        ("itc", ["itc limited", "ITC"], 1.0),  # the best of several
        ("ab", ["abcd"], 0.5),  # at the threshold: counts
        ("ab", ["abcde"], 0.0),  # 0.4: below
        ("", ["yes"], 0.0),
        ("", [""], 1.0),
        ("yes", [""], 0.0),
        ("yes", [], 0.0),
        ("1985", ["1986"], 0.75),
        ("straße", ["strasse"], 1 - 2 / 7),  # ß is SS in upper case: the length is 7
        ("東京", ["東京都"], 1 - 1 / 3),
        ("  yes  ", ["yes"], 1.0),  # the longer length counts, the distance is 0
        ("  yes  ", ["yet"], 1 - 1 / 7),  # blanks make a text longer: as in the script
    ],
)
def test_anls(answer, references, score):
    assert anls(answer, references) == score


@pytest.mark.parametrize(
    ("answer", "gold", "score"),
    [
        ("100", "100", 1.0),
        ("105", "100", 1.0),  # 5 % of the gold value
        ("105.1", "100", 0.0),
        ("95", "100", 1.0),
        ("100", "105.2", 1.0),  # 4.94 % of 105.2, though 5.2 % of 100
        ("100", "95.2", 0.0),  # 5.04 % of 95.2, though 4.8 % of 100
        ("-95", "-100", 1.0),
        ("100", "-100", 0.0),
        ("0", "0", 1.0),
        ("0.01", "0", 0.0),
        ("0.0", "0", 0.0),  # at a gold 0 texts are compared, as in the script
        ("zero", "0", 0.0),
        ("5%", "5%", 1.0),
        ("5.2%", "5%", 1.0),
        ("5", "5%", 0.0),  # 5% is 0.05
        ("0.05", "5%", 1.0),
        ("1950", "2010", 1.0),  # a year is a number like others, as in the script
        ("1,000", "1000", 0.0),  # no number, no equal text
        ("1,000", "1,000", 1.0),
        ("Yes", "yes", 1.0),
        ("", "yes", 0.0),
        ("", "3", 0.0),
        ("", "", 1.0),
        ("3", "", 0.0),
        ("Côte d'Ivoire", "côte d'ivoire", 1.0),
        ("two", "2", 0.0),
        ("nan", "5", 0.0),
    ],
)
def test_relaxed_accuracy(answer, gold, score):
    assert relaxed_accuracy(answer, [gold]) == score


def test_relaxed_accuracy_takes_any_of_several_references():
    assert relaxed_accuracy("7", ["blue", "7.1"]) == 1.0
    assert relaxed_accuracy("7", []) == 0.0


_WORDS = st.text("abcßé", max_size=6)


@settings(deadline=None, max_examples=100)
@given(_WORDS, _WORDS)
def test_levenshtein_is_the_recursive_distance(first, second):
    assert levenshtein(first, second) == reference.edit_distance(first, second)
    assert levenshtein(second, first) == levenshtein(first, second)


@settings(deadline=None, max_examples=100)
@given(st.text("abc", max_size=6), st.lists(st.text("abc", max_size=6), max_size=3))
def test_anls_is_the_slow_one(answer, references):
    assert anls(answer, references) == pytest.approx(
        float(reference.similarity(answer, references)), abs=1e-12
    )
