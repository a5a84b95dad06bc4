"""Watches over a run: the ratio controller, the router's confidence, boundaries and idle experts.

A watch warns once per episode: when something begins, and again only after it has ended. It sees
means over the last steps, so that one odd batch is no episode. Its state is not saved: a resumed
run looks anew, and says again what has not ended.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from conceptmoe_vl.field_checks import refuse_idle

from .checks import require, require_share

_WHERE = "training.watch"
_NAMED = 8  # idle experts in one warning


@dataclasses.dataclass
class WatchConfig:
    """When a run warns.

    Fields:
        steps: optimiser steps over which the measured values are averaged (exponentially), and
            before which nothing is said.
        ratio_band: how far the measured ratio may be from its target, as a share of it: 0.25 is
            target / 1.25 to 1.25 x target. 0: no watch over the ratio.
        ratio_from: share of the run from which the ratio is watched, not before its warm-up ends.
        least_confidence: least mean |p - 1/2| of tokens whose boundary is not forced.
        boundary_margin: least share of such tokens of a modality that are (and that are not)
            boundaries: below it, as good as none (or all) are.
        least_expert_load: an expert with less than this share of its fair load is idle.
        idle_lines: logged lines in a row after which an idle expert is warned of. 0: no watch.
    """

    steps: int = 50
    ratio_band: float = 0.25
    ratio_from: float = 0.1
    least_confidence: float = 0.02
    boundary_margin: float = 0.002
    least_expert_load: float = 0.02
    idle_lines: int = 10

    def __post_init__(self) -> None:
        require(self.steps >= 1, f"{_WHERE}.steps is {self.steps}; it must be 1 or more")
        for name in ("ratio_band", "idle_lines"):
            value = getattr(self, name)
            require(value >= 0, f"{_WHERE}.{name} is {value}; it must not be negative")
        names = ("ratio_from", "least_confidence", "boundary_margin", "least_expert_load")
        require_share(self, _WHERE, *names)
        for switch, name in (("ratio_band", "ratio_from"), ("idle_lines", "least_expert_load")):
            if not getattr(self, switch):
                refuse_idle(self, _WHERE, (name,), f"{_WHERE}.{switch} is 0; raise it")


class _Mean:
    """Exponential mean over about `steps` values; None before there are so many."""

    def __init__(self, steps: int) -> None:
        self._steps, self._seen = steps, 0
        self._keep, self._sum, self._weight = 1 - 1 / steps, 0.0, 0.0

    def add(self, value: float) -> float | None:
        self._seen += 1
        self._sum = self._keep * self._sum + value
        self._weight = self._keep * self._weight + 1
        return self._sum / self._weight if self._seen >= self._steps else None


class RunWatch:
    """Looks at the metrics of every step.

    Args:
        config: the section `training.watch`.
        warmup: share of the run until the ratio has reached its configured target.
    """

    def __init__(self, config: WatchConfig, warmup: float) -> None:
        self._config, self._ratio_from = config, max(warmup, config.ratio_from)
        self._means: dict[str, _Mean] = {}
        self._present: set[str] = set()
        self._idle: dict[tuple[str, int, int], int] = {}

    def look(
        self,
        metrics: dict[str, Any],
        progress: float,
        loads: dict[str, list[list[float]]] | None = None,
    ) -> list[str]:
        """The warnings that this step's metrics begin.

        Args:
            metrics: of the step. progress: share of the run, 0 to 1.
            loads: of a logged step, by stage `[layers][E]` loads over their fair share.
        """
        found = []
        for suffix in ("", "_image", "_text"):
            found += self._look_at_ratio(metrics, suffix, progress)
        for suffix in ("_image", "_text"):
            found += self._look_at_boundaries(metrics, suffix)
        for stage, layers in (loads or {}).items():
            found += self._look_at_experts(stage, layers)
        return found

    def _mean(self, name: str, value: float) -> float | None:
        return self._means.setdefault(name, _Mean(self._config.steps)).add(value)

    def _episode(self, name: str, holds: bool, text: str) -> list[str]:
        """`[text]` when something begins to hold."""
        begins = holds and name not in self._present
        (self._present.add if holds else self._present.discard)(name)
        return [text] if begins else []

    def _look_at_ratio(self, metrics: dict[str, Any], suffix: str, progress: float) -> list[str]:
        measured, target = metrics.get(f"ratio{suffix}"), metrics.get(f"target_ratio{suffix}")
        band = 1 + self._config.ratio_band
        if not measured or not target or band == 1:
            return []
        if progress < self._ratio_from:  # a mean over the warm-up would lag behind its end
            return []
        share = self._mean(f"ratio{suffix}", 1 / measured)
        if share is None:
            return []
        mean = 1 / share
        outside = not target / band <= mean <= target * band
        what = f"tokens per concept{_of(suffix)}"
        text = (
            f"{what} are {mean:.2f} (mean of about {self._config.steps} steps), outside the band "
            f"{target / band:.2f} to {target * band:.2f} around the target {target:.2f}; raise "
            "model.chunk.ratio_loss_weight, or training.part_learning_rates.chunk"
        )
        return self._episode(f"ratio{suffix}", outside, text)

    def _look_at_boundaries(self, metrics: dict[str, Any], suffix: str) -> list[str]:
        share, sure = (metrics.get(f"boundary_{name}{suffix}") for name in ("share", "confidence"))
        if share is None or sure is None:  # no such tokens in this step, or all are forced
            return []
        share, sure = self._mean(f"share{suffix}", share), self._mean(f"sure{suffix}", sure)
        if share is None or sure is None:
            return []
        margin, of = self._config.boundary_margin, _of(suffix)
        remedy = "model.chunk.ratio_loss_weight may be too small, or the chunk part's rate too high"
        return [
            *self._episode(
                f"none{suffix}",
                share < margin,
                f"as good as no boundary{of} fires but the forced ones ({share:.2%}); {remedy}",
            ),
            *self._episode(
                f"every{suffix}",
                share > 1 - margin and metrics.get("boundary_threshold", 0.5) == 0.5,
                f"as good as every token{of} is a boundary ({share:.2%}); {remedy}",
            ),
            *self._episode(
                f"sure{suffix}",
                sure < self._config.least_confidence,
                f"mean |p - 1/2|{of} has collapsed to {sure:.4f}: the chunk router decides "
                "nothing; lower training.part_learning_rates.chunk, or start from an earlier "
                "checkpoint",
            ),
        ]

    def _look_at_experts(self, stage: str, layers: list[list[float]]) -> list[str]:
        """Names all idle experts of a stage when another one has become so."""
        lines, least = self._config.idle_lines, self._config.least_expert_load
        if not lines:
            return []
        idle, new = [], False
        for layer, loads in enumerate(layers):
            for expert, load in enumerate(loads):
                place = (stage, layer, expert)
                self._idle[place] = self._idle.get(place, 0) + 1 if load < least else 0
                new |= self._idle[place] == lines
                if self._idle[place] >= lines:
                    idle.append(f"layer {layer} expert {expert}")
        if not new:
            return []
        more = f" and {len(idle) - _NAMED} more" if len(idle) > _NAMED else ""
        return [
            f"{len(idle)} of {sum(map(len, layers))} experts of the {stage} stage had less than "
            f"{least:.0%} of their fair load in the last {lines} logged steps: "
            f"{', '.join(idle[:_NAMED])}{more}; raise model.text.balance_loss_weight"
        ]


def _of(suffix: str) -> str:
    return f" of {suffix[1:]}" if suffix else ""
