"""Haystacks: what they are made of, and where a needle may stand."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conceptmoe_vl.errors import UserError
from eval.long_context.haystack import Haystack, Window, cut_pieces, load_haystack
from eval.long_context.prompt import fit


def test_pieces_are_the_text():
    text = 'One two. "Three!" four\n\nfive ' + "x" * 60 + " \u4e00\u4e8c\u3002\u4e09"
    assert "".join(cut_pieces(text)) == text
    assert max(len(piece.strip()) for piece in cut_pieces(text)) <= 24


def test_sentences_end_at_marks_and_lines():
    haystack = Haystack("t", cut_pieces('He said "no." Then he\nleft again! Now'))
    starts = [haystack.pieces[end].strip() for end in haystack.ends]
    assert starts == ["He", "Then", "left", "Now"]


@given(
    size=st.integers(1, 40),
    start=st.integers(0, 39),
    first=st.integers(0, 90),
    more=st.integers(0, 90),
)
def test_a_window_begins_again_behind_the_end(size, start, first, more):
    words = [f"w{number}" for number in range(size)]
    window = Window(Haystack("t", cut_pieces(" ".join(words))), start % size)
    expected = [words[(start % size + place) % size] for place in range(first, first + more)]
    assert window.text(first, first + more).split() == expected


@given(seed=st.integers(0, 1000), count=st.integers(0, 3000), share=st.floats(0, 1))
def test_needles_stand_between_sentences_near_their_place(seed, count, share):
    haystack = load_haystack("noise")
    window = Window(haystack, haystack.start(random.Random(seed)))
    place = window.nearest_end(share * count, count)
    assert 0 <= place <= count
    assert abs(place - share * count) <= 9  # no sentence is longer
    before = window.text(0, place)
    assert not before or before.endswith(". ")


def test_a_text_without_sentences_is_cut_in_the_middle():
    window = Window(Haystack("t", cut_pieces("word " * 1000)), 0)
    assert window.nearest_end(500.0, 1000) == 500


def test_texts_of_the_user(tmp_path):
    (tmp_path / "b.txt").write_text("Second text.")
    (tmp_path / "a.txt").write_text("First text. It goes on.\n")
    folder = load_haystack(str(tmp_path))
    assert folder.text == "First text. It goes on.\n\n\nSecond text."
    assert load_haystack(str(tmp_path / "b.txt")).text == "Second text."


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("nowhere.txt", None, "there is no text"),
        ("latin.txt", "caf\u00e9".encode("latin-1"), "cannot be read as UTF-8"),
        ("empty.txt", b" \n", "holds no text"),
    ],
)
def test_texts_that_cannot_be_used(tmp_path, name, content, part):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=part):
        load_haystack(str(tmp_path / name))


def test_a_folder_without_texts(tmp_path):
    with pytest.raises(UserError, match=r"holds no \*.txt"):
        load_haystack(str(tmp_path))


@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=50),
    bare=st.integers(0, 60),
    limit=st.integers(60, 3000),
)
def test_one_piece_more_would_not_fit(sizes, bare, limit):
    def tokens(amount):
        rounds, rest = divmod(amount, len(sizes))
        return bare + rounds * sum(sizes) + sum(sizes[:rest])

    amount = fit(tokens, limit, "t")
    assert tokens(amount) <= limit < tokens(amount + 1)


def test_a_question_longer_than_the_limit():
    with pytest.raises(UserError, match=r"t: 50 tokens are too few.* take 51"):
        fit(lambda amount: 51 + amount, 50, "t")
