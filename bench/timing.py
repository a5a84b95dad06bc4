"""Times of two things in alternation: only ratios within one run mean anything on shared cores."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping

import torch

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Seconds of baseline and variant, medians, and the median of the ratios of pairs.

    Each of the variant's runs is paired with the mean of the baseline's runs before and after it.
    """

    baseline: float
    variant: float
    speedup: float
    count: int


class Clock:
    """Times runs on a device.

    Args:
        device: torch device; CUDA is waited for on both sides of a run.
        kind: wall | cpu (time of the process on its cores, for machines that others use).
    """

    def __init__(self, device: str, kind: str = "wall") -> None:
        self.cuda = device.startswith("cuda")
        self.now = CLOCKS[kind]

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def seconds(self, run: Callable[[], object]) -> float:
        self.synchronize()
        start = self.now()
        run()
        self.synchronize()
        return self.now() - start


def alternate(
    clock: Clock,
    baseline: Callable[[], object],
    variants: Mapping[str, Callable[[], object]],
    repeats: int,
    limit: float = float("inf"),
    before: float | None = None,
) -> tuple[dict[str, Pairs], float]:
    """Baseline, every variant, baseline, every variant, ..., baseline.

    Args:
        repeats: rounds, each of one run of every variant. limit: seconds after which no further
            round begins.
        before: seconds of a run of the baseline just made, taken as the first one.

    Returns:
        What was found of each variant, and the seconds of the baseline's last run (`before` of the
        next call).
    """
    start = time.perf_counter()
    base = [clock.seconds(baseline) if before is None else before]
    runs: dict[str, list[float]] = {name: [] for name in variants}
    while len(base) <= repeats and (len(base) == 1 or time.perf_counter() - start < limit):
        for name, variant in variants.items():
            runs[name].append(clock.seconds(variant))
        base.append(clock.seconds(baseline))
    return {name: _paired(base, seconds) for name, seconds in runs.items()}, base[-1]


def _paired(base: list[float], ours: list[float]) -> Pairs:
    ratios = [(base[i] + base[i + 1]) / 2 / seconds for i, seconds in enumerate(ours)]
    median = statistics.median
    return Pairs(median(base), median(ours), median(ratios), len(ours))
