"""The learning rate over a run.

Progress is the larger of step/max_steps and elapsed/max_minutes, so one formula serves runs that
end after a number of steps, runs that end after a time, and runs that have both limits.
"""

from __future__ import annotations

import math
from typing import Any

from .config import TrainingConfig


def run_progress(config: TrainingConfig, step: int, elapsed_seconds: float) -> float:
    """Share of the run that is done before optimiser step `step` (counted from 0), at most 1."""
    by_steps = step / config.max_steps if config.max_steps is not None else 0.0
    by_clock = (
        elapsed_seconds / (60 * config.max_minutes) if config.max_minutes is not None else 0.0
    )
    return min(1.0, max(by_steps, by_clock))


def learning_rate_factor(config: TrainingConfig, progress: float) -> float:
    """Share of the peak learning rate at `progress` (0 to 1).

    In a run that is limited by steps, the step that begins counts as done while warming up: the
    first step learns, and the last step of the warm-up has the full rate.
    """
    warmup = config.warmup_fraction
    if progress < warmup:
        begun = 1 / config.max_steps if config.max_steps is not None else 0.0
        return min(1.0, (progress + begun) / warmup)
    floor = config.final_learning_rate
    if config.schedule == "wsd":
        start = max(warmup, 1 - config.decay_fraction)
        if progress < start or start >= 1:
            return 1.0
        return 1 - (1 - floor) * (progress - start) / (1 - start)
    done = (progress - warmup) / max(1 - warmup, 1e-8)
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))


def set_learning_rates(optimizer: Any, config: TrainingConfig, progress: float) -> dict[str, Any]:
    """Sets every group's rate; returns that of most parts, and of those with their own."""
    factor = learning_rate_factor(config, progress)
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * factor
    own = {part: peak * factor for part, peak in config.part_learning_rates.items()}
    return {"lr": config.learning_rate * factor, **({"lr_by_part": own} if own else {})}
