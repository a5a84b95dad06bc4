from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eval.metrics import (
    normalize_textvqa_answer,
    normalize_vqa_answer,
    textvqa_accuracy,
    vqa_accuracy,
    vqa_accuracy_normalized,
)
from tests.reference import metrics as reference


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("Yes", "yes"),
        ("a dog", "dog"),
        ("The  cat", "cat"),
        ("two dogs", "2 dogs"),
        ("none", "0"),
        ("eleven", "eleven"),
        ("dont know", "don't know"),
        ("couldnt've", "couldn't've"),
        ("couldn'tve", "couldn't've"),
        ("couldntve", "couldntve"),  # not in the table
        ("somebody'd", "somebodyd"),  # the table's own slip
        ("y'allll", "y'all'll"),
        ("ows'at", "ows'at"),
        ("'ows'at", "'ow's'at"),
        ("Im", "im"),  # found in no table in lower case
        ("black/white", "black white"),  # between letters a mark becomes a blank
        ("black / white", "black white"),  # at a blank it goes
        ("black- white", "black white"),
        ("yes, it is", "yes it is"),
        ("1,000", "1000"),
        ("1,000-2,000", "10002000"),  # with thousands every mark goes
        ("st.", "st"),
        ("3.5", "3.5"),
        ("5.", "5"),
        ("U.S.", "us"),
        ("." * 40, "." * 8),  # the script takes 32 away
        ("what?", "what"),
        ("(a)", ""),  # the article between two blanks
        ("it's", "it's"),
        ("line\nbreak\ttab", "line break tab"),
        ("", ""),
        ("é!", "é"),
        ("10%", "10%"),
    ],
)
def test_official_normalisation(text, normal):
    assert normalize_vqa_answer(text) == normal


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("dog's", "dog 's"),
        ("Marlboro, lights?", "marlboro lights"),
        ("1,000", "1000"),
        ("the 7up", "7up"),
        ("One", "1"),
        ("", ""),
    ],
)
def test_textvqa_normalisation(text, normal):
    assert normalize_textvqa_answer(text) == normal


@pytest.mark.parametrize(
    ("yes", "score"), [(0, 0.0), (1, 0.3), (2, 0.6), (3, 0.9), (4, 1.0), (9, 1.0), (10, 1.0)]
)
def test_leave_one_out_over_ten_people(yes, score):
    people = ["yes"] * yes + ["no"] * (10 - yes)
    assert vqa_accuracy("yes", people) == pytest.approx(score)


def test_answers_that_all_agree_on_are_not_normalised_by_the_official_script():
    assert vqa_accuracy("2", ["two"] * 10) == 0.0
    assert vqa_accuracy("two", ["two"] * 10) == 1.0
    assert vqa_accuracy_normalized("2", ["two"] * 10) == 1.0
    # One other answer, and both sides are normalised.
    assert vqa_accuracy("2", ["two"] * 9 + ["3"]) == 1.0


@pytest.mark.parametrize("score", [vqa_accuracy, vqa_accuracy_normalized, textvqa_accuracy])
def test_edge_cases(score):
    assert score("", ["yes"] * 9 + ["no"]) == 0.0
    assert score("yes", []) == 0.0
    assert score("yes", ["yes"]) == 0.0  # leaves no other person
    assert score("0", ["0"] * 5 + ["none"] * 5) == 1.0
    assert score("ja", ["nein", "ja", "ja", "ja"]) == pytest.approx((1 + 3 * 2 / 3) / 4)


@settings(deadline=None, max_examples=100)
@given(st.sampled_from("xyz"), st.lists(st.sampled_from("xyz"), min_size=2, max_size=10))
def test_agreement_is_the_slow_one(answer, people):
    expected = pytest.approx(float(reference.agreement(answer, people)))
    assert vqa_accuracy(answer, people) == expected
    assert textvqa_accuracy(answer, people) == expected


@settings(deadline=None, max_examples=100)
@given(st.text(max_size=20))
def test_textvqa_normal_forms_have_single_blanks_and_no_articles(text):
    words = normalize_textvqa_answer(text)
    assert words == " ".join(words.split())
    assert not {"a", "an", "the"} & set(words.split())
