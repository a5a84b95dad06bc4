"""The prediction: rates from the baseline's cells, break-even lengths."""

from __future__ import annotations

import pytest

from bench.inference_models import BASELINE, SHAPES, make_contestants
from bench.roofline import (
    Rates,
    break_even,
    decoding_work,
    fit_rates,
    peak_rates,
    predicted_break_even,
    prefill_work,
)
from bench.timing import Clock

PEAKS = Rates(1e3, 1e3, "peaks")


def test_fit_finds_the_rates():
    work = [(10.0, 1.0), (20.0, 4.0), (40.0, 16.0)]
    rates = fit_rates(work, [w / 5 + v / 2 for w, v in work], PEAKS)
    assert (rates.first, rates.second) == (pytest.approx(5), pytest.approx(2))
    assert rates.seconds((10.0, 2.0)) == pytest.approx(3)


def test_fit_is_bounded_by_the_peaks():
    """A single cell, and times that fall with more attention: its rate is the peak's."""
    one = fit_rates([(10.0, 50.0)], [2.0 + 50 / 1e3], PEAKS)
    assert (one.first, one.second) == (pytest.approx(5), 1e3)
    odd = fit_rates([(10.0, 1.0), (20.0, 8.0)], [2.0, 3.9], PEAKS)
    assert odd.second == 1e3
    assert odd.first == pytest.approx(5, rel=0.05)
    fast = fit_rates([(10.0, 1.0), (20.0, 4.0)], [0.5, 2.0], PEAKS)
    assert fast.first <= 1e3
    assert fast.second == pytest.approx(2, rel=0.1)


def test_break_even():
    assert break_even([], []) == "not measured"
    assert break_even([8, 16], [1.2, 1.4]) == "at or below 8"
    assert break_even([8, 16], [0.8, 0.9]) == "above 16"
    assert break_even([8, 32], [0.5, 2.0]) == "16"
    # From the last crossing on: a lucky short cell does not count.
    assert break_even([8, 16, 64], [1.1, 0.5, 2.0]) == "32"


@pytest.fixture(scope="module")
def pair():
    found = make_contestants(SHAPES["tiny"], ["1L-top24-R2"])
    return found[BASELINE], found["1L-top24-R2"]


def test_prediction_uses_the_counts(pair):
    """Maps of 14 layers against 12 / R^2 + 2 of them; a cache read as often."""
    baseline, variant = pair
    tokens = 2**16
    saved = prefill_work(baseline, tokens)[1] / prefill_work(variant, tokens)[1]
    assert saved == pytest.approx(14 / (12 / 4 + 2))
    for rows in (1, 4):
        work = [decoding_work(c, tokens, rows, 4)[1] for c in pair]
        assert work[0] / work[1] == pytest.approx(14 / 5, rel=1e-3)


def test_predicted_break_even(pair):
    baseline, variant = pair
    rates = Rates(1e9, 4e9, "given")
    tokens = predicted_break_even(baseline, variant, rates)

    def ratio(n):
        ours, theirs = (rates.seconds(prefill_work(c, n)) for c in (variant, baseline))
        return theirs / ours

    assert tokens > 16
    assert ratio(tokens) >= 1 > ratio(tokens - max(tokens // 50, 2))
    assert predicted_break_even(baseline, baseline, rates) == 16


def test_peaks_are_positive(pair):
    for decoding in (True, False):
        rates = peak_rates(pair[0], decoding, Clock("cpu"))
        assert rates.first > 0
        assert rates.second > 0
