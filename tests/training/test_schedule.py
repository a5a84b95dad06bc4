"""The learning rate over a run."""

from __future__ import annotations

import pytest

from conceptmoe_vl.training.config import TrainingConfig
from conceptmoe_vl.training.schedule import learning_rate_factor, run_progress


def test_progress_is_the_larger_of_steps_and_clock():
    config = TrainingConfig(max_steps=100, max_minutes=10)
    assert run_progress(config, 50, 60) == 0.5
    assert run_progress(config, 10, 300) == 0.5
    assert run_progress(config, 10, 6000) == 1.0
    assert run_progress(TrainingConfig(max_minutes=1), 10**6, 30) == 0.5


def factors(**settings) -> list[float]:
    config = TrainingConfig(max_steps=100, **settings)
    return [learning_rate_factor(config, run_progress(config, step, 0)) for step in range(101)]


def test_cosine_rises_then_falls_to_the_floor():
    found = factors(warmup_fraction=0.1, final_learning_rate=0.1)
    assert found[0] == pytest.approx(0.1)  # the first step learns
    assert found[9] == pytest.approx(1.0)
    assert max(found) <= 1
    assert found[10:] == sorted(found[10:], reverse=True)
    assert found[55] == pytest.approx(0.55, abs=0.01)
    assert found[100] == pytest.approx(0.1)


def test_wsd_is_stable_then_decays_linearly():
    found = factors(schedule="wsd", warmup_fraction=0.1, decay_fraction=0.2)
    assert found[10:81] == [1.0] * 71
    assert found[90] == pytest.approx(0.5)
    assert found[100] == pytest.approx(0.0)


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
def test_extremes_of_the_shares(schedule):
    for warmup, decay in ((0.0, 0.0), (1.0, 1.0), (0.0, 1.0)):
        shares = {"decay_fraction": decay} if schedule == "wsd" else {}
        found = factors(schedule=schedule, warmup_fraction=warmup, **shares)
        assert all(0 <= value <= 1 for value in found)


def test_a_run_by_the_clock_warms_up_from_zero():
    config = TrainingConfig(max_minutes=10, warmup_fraction=0.1)
    assert learning_rate_factor(config, 0.0) == 0.0
    assert learning_rate_factor(config, 0.05) == pytest.approx(0.5)
