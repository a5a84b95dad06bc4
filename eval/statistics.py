"""How sure a figure is: 95 % intervals by the bootstrap, and whether two models really differ.

Questions are resampled, or whole clusters of them (`details["cluster"]`): ten questions about one
image are no ten independent ones. All random numbers come from one seed, so that the same samples
give the same interval to the digit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from eval.metrics import wilson_interval
from eval.tasks import RatioOfSums, Scored

SEED = 20260121
RESAMPLES = 1000
"""Of ratios of sums; an interval's ends then vary by about 3 % of its width with the seed."""

PERMUTATIONS = 10_000
"""Of ratios of sums: the smallest p-value is 1e-4, which still counts beside 500 other tests."""

_VISITS, _FEWEST = 4_000_000, 200  # of arbitrary functions: samples seen in all, resamples at least
_CELLS = 1 << 22  # entries of a block of random numbers

Metrics = Callable[[Sequence[Scored]], dict[str, float]]


@dataclass(frozen=True)
class Figure:
    """A figure and its 95 % interval; None where the samples do not define it."""

    value: float | None
    interval: tuple[float, float] | None

    def to_json(self) -> dict[str, Any]:
        interval = None if self.interval is None else list(self.interval)
        return {"value": self.value, "interval_95": interval}


@dataclass(frozen=True)
class Difference:
    """Second model minus first.

    Fields:
        value, interval: the difference and its 95 % interval from the paired bootstrap.
        p: of the paired permutation test, two-sided: how often a difference as large comes about
            when the models' names are exchanged at random, cluster by cluster.
    """

    value: float | None
    interval: tuple[float, float] | None
    p: float | None


def group_clusters(samples: Sequence[Scored]) -> list[list[int]]:
    """Positions of the samples of each cluster, by first appearance; others are one each."""
    groups: dict[Any, list[int]] = {}
    for position, sample in enumerate(samples):
        cluster = sample.question.details.get("cluster")
        name = (0, position) if cluster is None else (1, str(cluster))
        groups.setdefault(name, []).append(position)
    return list(groups.values())


def estimate(samples: Sequence[Any], metrics: Metrics) -> dict[str, Figure]:
    """The figures of the samples, with their intervals.

    Samples are `Scored`, or whatever else has a `question` and is what the metrics take.

    Plain means of scores 0 and 1 over independent questions have Wilson's interval, which keeps a
    width when every answer is right; all others the percentiles of the bootstrap.
    """
    values = metrics(samples)
    groups = group_clusters(samples)
    drawn = _bootstrap([samples], groups, metrics)[0]
    figures = {}
    for name, value in values.items():
        interval = _percentiles([row.get(name) for row in drawn], groups)
        counted = _counted_clusters(samples, groups, metrics, name)
        if counted:
            flat = interval is None or interval[0] == interval[1]
            if len(groups) == len(samples) or flat:
                interval = wilson_interval(value * counted, counted)
        figures[name] = Figure(_finite(value), interval)
    return figures


def paired(
    first: Sequence[Scored], second: Sequence[Scored], metrics: Metrics
) -> dict[str, Difference]:
    """Differences of two models on the same questions, in the same order."""
    groups = group_clusters(first)
    values = [metrics(samples) for samples in (first, second)]
    draws_first, draws_second = _bootstrap([first, second], groups, metrics)
    exchanged = _permute(first, second, groups, metrics)
    differences = {}
    for name in values[0]:
        value = _minus(values[1].get(name), values[0].get(name))
        drawn = [
            _minus(b.get(name), a.get(name)) for a, b in zip(draws_first, draws_second, strict=True)
        ]
        by_chance = [d for row in exchanged if (d := row.get(name)) is not None]
        p = None
        if value is not None and by_chance:
            # Sums in another order differ in their last bits: as large is as large but for those.
            least = abs(value) * (1 - 1e-9)
            p = (1 + sum(abs(d) >= least for d in by_chance)) / (1 + len(by_chance))
        differences[name] = Difference(value, _percentiles(drawn, groups), p)
    return differences


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values adjusted for their number by Holm's step-down method, in the given order."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)


def _minus(a: float | None, b: float | None) -> float | None:
    a, b = _finite(a), _finite(b)
    return None if a is None or b is None else a - b


def _percentiles(
    drawn: Sequence[float | None], groups: Sequence[list[int]]
) -> tuple[float, float] | None:
    """The interval; None for a single cluster, of which all resamples are equal."""
    if len(groups) < 2:
        return None
    kept = [value for value in map(_finite, drawn) if value is not None]
    if not kept:
        return None
    low, high = np.percentile(kept, [2.5, 97.5])
    return float(low), float(high)


def _counted_clusters(
    samples: Sequence[Scored], groups: list[list[int]], metrics: Metrics, name: str
) -> int:
    """Clusters that a plain mean of scores 0 and 1 counts; 0 if the figure is another one."""
    if not isinstance(metrics, RatioOfSums) or metrics.transform is not None:
        return 0
    parts = [metrics.parts(sample)[name] for sample in samples]
    if not all(bottom in (0.0, 1.0) and top in (0.0, bottom) for top, bottom in parts):
        return 0
    return sum(any(parts[i][1] for i in group) for group in groups)


def _cluster_sums(
    samples: Sequence[Scored], groups: list[list[int]], metrics: RatioOfSums
) -> tuple[list[str], np.ndarray]:
    """Names of the figures, and `[clusters, figures, 2]` sums of numerators and denominators."""
    parts = [metrics.parts(sample) for sample in samples]
    names = list(parts[0])
    table = np.array([[part[name] for name in names] for part in parts], dtype=np.float64)
    return names, np.stack([table[group].sum(0) for group in groups])


def _ratios(names: list[str], sums: np.ndarray, metrics: RatioOfSums) -> list[dict[str, float]]:
    """Figures of each row of `[resamples, figures, 2]` sums."""
    with np.errstate(divide="ignore", invalid="ignore"):
        values = sums[..., 0] / sums[..., 1]
    if metrics.transform is not None:
        values = metrics.transform(values)
    return [dict(zip(names, row, strict=True)) for row in values.tolist()]


def _blocks(total: int, width: int) -> Iterator[int]:
    """Numbers of rows that together are `total`, each block of a bounded number of cells."""
    rows = max(1, _CELLS // width)
    while total > 0:
        yield min(rows, total)
        total -= rows


def _resamples(most: int, samples: int) -> int:
    return min(most, max(_FEWEST, _VISITS // samples))


def _bootstrap(
    models: list[Sequence[Scored]], groups: list[list[int]], metrics: Metrics
) -> list[list[dict[str, float]]]:
    """Figures of resamples, for each model; all models see the same questions in each."""
    rng = np.random.default_rng(SEED)
    results: list[list[dict[str, float]]] = [[] for _ in models]
    if isinstance(metrics, RatioOfSums):
        tables = [_cluster_sums(samples, groups, metrics) for samples in models]
        for rows in _blocks(RESAMPLES, len(groups)):
            index = rng.integers(0, len(groups), size=(rows, len(groups)))
            weights = np.stack([np.bincount(row, minlength=len(groups)) for row in index])
            for result, (names, sums) in zip(results, tables, strict=True):
                drawn = np.einsum("rc,cfk->rfk", weights, sums, optimize=True)
                result += _ratios(names, drawn, metrics)
        return results
    for _ in range(_resamples(RESAMPLES, len(models[0]))):
        chosen = [i for group in rng.integers(0, len(groups), len(groups)) for i in groups[group]]
        for result, samples in zip(results, models, strict=True):
            result.append(metrics([samples[i] for i in chosen]))
    return results


def _permute(
    first: Sequence[Scored], second: Sequence[Scored], groups: list[list[int]], metrics: Metrics
) -> list[dict[str, float | None]]:
    """Differences, second minus first, with random clusters exchanged between the models."""
    rng = np.random.default_rng(SEED)
    results: list[dict[str, float | None]] = []
    if isinstance(metrics, RatioOfSums):
        (names, a), (_, b) = (_cluster_sums(s, groups, metrics) for s in (first, second))
        for rows in _blocks(PERMUTATIONS, len(groups)):
            swap = rng.integers(0, 2, size=(rows, len(groups)), dtype=np.int8).astype(np.float64)
            moved = np.einsum("rc,cfk->rfk", swap, b - a, optimize=True)
            pairs = zip(
                _ratios(names, a.sum(0) + moved, metrics),
                _ratios(names, b.sum(0) - moved, metrics),
                strict=True,
            )
            results += [{name: _minus(y[name], x[name]) for name in names} for x, y in pairs]
        return results
    for _ in range(_resamples(RESAMPLES, len(first))):
        x, y = list(first), list(second)
        for group, swap in zip(groups, rng.integers(0, 2, len(groups)), strict=True):
            for i in group if swap else ():
                x[i], y[i] = y[i], x[i]
        left, right = metrics(x), metrics(y)
        results.append({name: _minus(right.get(name), left[name]) for name in left})
    return results
