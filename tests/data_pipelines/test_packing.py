"""What goes into a batch: nothing lost, nothing waits, and no better combination exists."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.packing import MIXTURE, lengths_of, pack_all
from data_pipelines.packing import best_fit, next_pack


def packs(lengths, budget, lookahead):
    """Packs of (age, length), and what was ready when each was chosen."""
    queue = list(enumerate(lengths))
    ready: list[tuple[int, int]] = []

    def refill():
        while queue and len(ready) < lookahead:
            ready.append(queue.pop(0))

    while pack := next_pack(ready, lambda item: item[1], budget, refill):
        yield pack, list(ready)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 50), max_size=60), st.integers(50, 120), st.integers(1, 12))
def test_nothing_is_lost_and_no_item_waits_longer_than_the_lookahead(lengths, budget, lookahead):
    taken, waited = [], {}
    for number, (pack, ready) in enumerate(packs(lengths, budget, lookahead)):
        assert sum(length for _, length in pack) <= budget
        assert pack == sorted(pack)
        assert pack[0] == min([pack[0], *ready])
        for item in pack:
            assert number - waited.pop(item, number) <= lookahead
        for item in ready:
            waited.setdefault(item, number)
        taken += pack
    assert sorted(taken) == list(enumerate(lengths))


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(1, 30), max_size=9), st.integers(0, 100))
def test_no_combination_leaves_less_room(lengths, room):
    places = best_fit(lengths, room)
    assert places == sorted(set(places))
    subsets = itertools.product((0, 1), repeat=len(lengths))
    sums = [sum(itertools.compress(lengths, subset)) for subset in subsets]
    assert sum(lengths[place] for place in places) == max(s for s in sums if s <= room)


def test_of_equal_combinations_the_oldest_are_taken():
    assert best_fit([3, 7, 5, 5, 7, 3], 10) == [0, 1]
    assert best_fit([11, 4, 4, 4], 8) == [1, 2]


def test_a_large_room_is_measured_in_coarser_units_and_never_exceeded():
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 2**24, 40).tolist()
    room = 2**27 - 1
    used = sum(lengths[place] for place in best_fit(lengths, room))
    assert 0.9999 * room < used <= room


@pytest.mark.parametrize("over_length", ["drop", "split"])
@pytest.mark.parametrize("row", [4096, 32768, 131072])
def test_rows_of_a_realistic_mixture_are_filled(row, over_length):
    lengths = lengths_of(MIXTURE, 4000, row, over_length, seed=3)
    rows = pack_all(lengths, row, lookahead=64)
    assert sorted(itertools.chain(*rows)) == sorted(lengths)
    used = [sum(pack) / row for pack in rows[:-2]]  # the end of a data set need not fill a row
    assert sum(used) / len(used) >= 0.98
