from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eval.metrics import wilson_interval


def test_wilson_interval_equals_a_published_example():
    # Newcombe 1998, table I: 81 of 263 gives 0.2553 to 0.3662, 0 of 20 gives 0 to 0.1611.
    assert wilson_interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson_interval(0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)


@settings(deadline=None)
@given(st.integers(0, 10_000), st.integers(0, 10_000))
def test_wilson_interval_contains_the_share_and_solves_its_equation(successes, more):
    count = successes + more
    low, high = wilson_interval(successes, count)
    if count == 0:
        assert (low, high) == (0.0, 1.0)
        return
    share = successes / count
    assert 0 <= low <= share <= high <= 1
    assert low < high
    for end in (low, high):  # |share - end| = z sqrt(end (1 - end) / n) defines the interval
        distance = 1.959964 * math.sqrt(end * (1 - end) / count)
        assert abs(share - end) == pytest.approx(distance, abs=1e-6)


@pytest.mark.parametrize(("successes", "count"), [(3, 2), (-1, 2)])
def test_wilson_interval_refuses_scores_that_are_no_shares(successes, count):
    with pytest.raises(ValueError, match="scores must be 0 or 1"):
        wilson_interval(successes, count)
