from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eval.metrics import LETTERS, parse_choice

_FRUIT = ("apple", "pear", "plum", "cherry")


@pytest.mark.parametrize(
    ("answer", "letter"),
    [
        # the whole answer
        ("B", "B"),
        (" b. ", "B"),
        ("(C)", "C"),
        ("**D**", "D"),
        ("pear", "B"),
        ("Plum.", "C"),
        # declared
        ("The answer is B", "B"),
        ("The correct option is (C).", "C"),
        ("Answer: D", "D"),
        ("The answer is B, not A.", "B"),
        ("answer is B or C", ""),  # B and C stand there, one declared alone is not clear
        # marked
        ("B. pear", "B"),
        ("(B) because A is sour", "B"),
        ("C) plum, since A is too small", "C"),
        ("A. or B.", ""),
        ("(A) and (B)", ""),
        # alone
        ("I think B", "B"),
        ("It must be C here", "C"),
        ("Between A and C.", ""),
        ("A is right", "A"),
        ("A pear is on the table", "B"),  # an article, and an option's text
        ("A fruit is on the table", ""),
        # option texts
        ("this is a cherry", "D"),
        ("an apple or a pear", ""),
        ("pineapple", ""),
        # nothing
        ("", ""),
        ("...", ""),
        ("E", ""),  # no such option
        ("I do not know", ""),
    ],
)
def test_letters_of_four_options(answer, letter):
    assert parse_choice(answer, _FRUIT) == letter


def test_an_options_text_comes_before_the_letters_in_it():
    assert parse_choice("Vitamin C", ("Vitamin C", "Vitamin D", "Zinc")) == "A"


def test_the_longest_option_text_decides():
    options = ("blue", "light blue", "red")
    assert parse_choice("it is light blue", options) == "B"
    assert parse_choice("it is blue", options) == "A"


def test_equal_options_are_ambiguous():
    assert parse_choice("red", ("red", "red", "blue")) == ""


def test_options_in_other_scripts_and_with_signs():
    assert parse_choice("答案是 猫", ("狗", "猫")) == "B"
    assert parse_choice("it costs $5 (five)", ("$5", "$10")) == "A"


def test_more_options_than_four():
    options = [f"number {n}" for n in range(10)]
    assert parse_choice("The answer is J", options) == "J"
    assert parse_choice("I see nine", options) == ""


@settings(deadline=None, max_examples=100)
@given(st.text(max_size=30), st.integers(0, 6))
def test_only_letters_of_options_or_nothing(text, count):
    assert parse_choice(text, [f"option number {n}" for n in range(count)]) in {
        "",
        *LETTERS[:count],
    }


def test_an_empty_answer_is_no_option():
    for answer in ("", " ", "."):
        assert parse_choice(answer, ["cat", "+"]) == ""
        assert parse_choice(answer, ["cat", ""]) == ""
    assert parse_choice(" + ", ["-", "+"]) == "B"
