"""What an answer scores: the keys alone, and nothing for naming everything."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval.long_context.keys import MAKERS, credits, draw_keys, parse, read_keys, score

_CODE = "06388193-58d0-4ec2-9c94-ee9a3a0d289f"


def scored(answer, shape, wanted):
    details = {"shape": shape, "wanted": wanted}
    return score(parse(answer, details), details)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("4821937", 1.0),
        ("The special number is 4821937.", 1.0),
        ("**4,821,937**", 1.0),
        ("4821937, that is 4821937", 1.0),
        ("4.821.937", 1.0),
        ("4 821 937.", 1.0),
        ("4\u202f821\u202f937", 1.0),
        ("4'821'937", 1.0),
        (r"\boxed{4{,}821{,}937}", 1.0),
        ("\uff14\uff18\uff12\uff11\uff19\uff13\uff17", 1.0),
        ("4821937 or 1.234.567", 0.0),
        ("4821937 1234567", 0.0),
        ("", 0.0),
        ("none", 0.0),
        ("0123456789", 0.0),
        ("0 1 2 3 4 5 6 7 8 9", 0.0),
        ("48219370", 0.0),
        ("14821937", 0.0),
        ("482193", 0.0),
        ("4821937 or 1234567", 0.0),
        ("4821937" + " and so on" * 50, 0.0),
    ],
)
def test_one_number_is_right_only_alone(answer, expected):
    assert scored(answer, "number", ["4821937"]) == expected


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("1111111, 2222222, 3333333 and 4444444", 1.0),
        ("1. 4444444\n2. 3333333\n3. 2222222\n4. 1111111", 1.0),
        ("1111111, 2222222", 0.5),
        ("1111111, 2222222, 3333333, 9999999", 0.5),
        ("1111111, 9999999", 0.0),
        ("9999999, 8888888", 0.0),
    ],
)
def test_a_wrong_key_takes_a_right_one_away(answer, expected):
    wanted = ["1111111", "2222222", "3333333", "4444444"]
    assert scored(answer, "number", wanted) == expected


def test_credits_show_which_keys_were_found():
    details = {"shape": "number", "wanted": ["1111111", "2222222", "3333333"]}
    assert credits("3333333, 1111111", details) == [1.0, 0.0, 1.0]
    assert credits("3333333, 1111111, 9999999", details) == [0.5, 0.0, 0.5]
    assert credits("", details) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("2, 4, 1", 1.0),
        ("2 4 1", 1.0),
        ("The numbers are 2, 4, 1.", 1.0),
        ("**1.** 2\n**2.** 4\n**3.** 1", 1.0),
        ("(1) 2\n(2) 4\n(3) 1", 1.0),
        ("1: 2\n2: 4\n3: 1", 1.0),
        ("4, 2, 1", 0.0),
        ("2, 4", 0.0),
        ("2, 4, 1, 3", 0.0),
        ("0 1 2 3 4 5 6 7 8 9", 0.0),
        ("", 0.0),
    ],
)
def test_a_sequence_is_right_only_as_a_whole(answer, expected):
    assert scored(answer, "sequence", ["2", "4", "1"]) == expected


@pytest.mark.parametrize(
    ("answer", "shape", "wanted", "expected"),
    [
        ("zupoka and Nadeku", "coded word", ["ZUPOKA", "NADEKU"], 1.0),
        ("The most common words are amber-anchor.", "name", ["amber-anchor"], 1.0),
        ("amber anchor", "name", ["amber-anchor"], 0.0),
        ("amber\u2011anchor", "name", ["amber-anchor"], 1.0),
        ("amber-anchor, brave\u2011bell", "name", ["amber-anchor"], 0.0),
        (
            "06388193-58D0-4EC2-9C94-EE9A3A0D289F",
            "code",
            ["06388193-58d0-4ec2-9c94-ee9a3a0d289f"],
            1,
        ),
        ("06388193-58d0-4ec2-9c94", "code", ["06388193-58d0-4ec2-9c94-ee9a3a0d289f"], 0.0),
    ],
)
def test_other_shapes(answer, shape, wanted, expected):
    assert scored(answer, shape, wanted) == expected


@given(seed=st.integers(0, 10**6), shape=st.sampled_from(sorted(MAKERS)), count=st.integers(1, 30))
def test_keys_differ_are_absent_and_are_read_back(seed, shape, count):
    rng = random.Random(seed)
    text = " ".join(draw_keys(rng, shape, 20))
    keys = draw_keys(random.Random(seed), shape, count, absent=text)
    assert len(set(keys)) == count
    assert not any(key in text for key in keys)
    assert read_keys(f"They are {', '.join(keys)}.", shape) == [key.lower() for key in keys]


@given(
    shape=st.sampled_from(["number", "code", "coded word", "name", "sequence"]),
    answer=st.text(max_size=300),
)
def test_no_text_breaks_the_reading(shape, answer):
    details = {"shape": shape, "wanted": ["1", "2"]}
    assert 0.0 <= score(parse(answer, details), details) <= 1.0


def test_a_word_of_the_haystack_in_another_case_is_no_key():
    drawn = iter(["DOMINO", "ZUPOKA"])
    assert draw_keys(random.Random(0), lambda rng: next(drawn), 1, "A Domino fell.") == ["ZUPOKA"]
