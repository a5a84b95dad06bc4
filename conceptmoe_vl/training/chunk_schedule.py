"""The schedules of the method: ratio, noise and the ratio loss's weight along a run.

Everything is a function of the run's progress alone, so a resumed run goes on exactly.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn

from conceptmoe_vl.chunk import THRESHOLD, ChunkModule
from conceptmoe_vl.chunk_values import ChunkValues
from conceptmoe_vl.configuration import ChunkConfig
from conceptmoe_vl.errors import UserError
from conceptmoe_vl.field_checks import refuse_idle

from .checks import require, require_share


@dataclasses.dataclass
class ChunkSchedule:
    """What moves linearly from a start to the value in `model.chunk`, over a share of the run.

    Fields:
        ratio_start: tokens per concept at the run's start, 1 or more; None: no warm-up. Then 1/R
            moves to that of `chunk.target_ratio`, of each of `chunk.target_ratios` and of
            `image_target_ratio` and `text_target_ratio`; ratios below the start stay.
        ratio_fraction: share of the run after which the configured ratio is reached.
        threshold_start: p from which a token is a boundary at the run's start, 0 (every token is)
            to 0.5; it reaches 0.5 with the ratio. None: 0 where `ratio_start` is 1, else 0.5.
            Training and evaluation use it alike.
        tau_start, tau_fraction: of the Bernoulli noise (`chunk.tau`); None: no schedule.
        ratio_loss_weight_start, ratio_loss_weight_fraction: of lambda (`chunk.ratio_loss_weight`);
            None: no schedule.
    """

    ratio_start: float | None = None
    ratio_fraction: float = 0.3
    threshold_start: float | None = None
    tau_start: float | None = None
    tau_fraction: float = 0.3
    ratio_loss_weight_start: float | None = None
    ratio_loss_weight_fraction: float = 0.3

    def __post_init__(self) -> None:
        where = "training.chunk_schedule"
        for name, least in (("ratio_start", 1), ("tau_start", 1), ("ratio_loss_weight_start", 0)):
            value = getattr(self, name)
            require(value is None or value >= least, f"{where}.{name} is {value}; give {least} up")
        require_share(self, where, "ratio_fraction", "tau_fraction", "ratio_loss_weight_fraction")
        for name in ("ratio", "tau", "ratio_loss_weight"):
            start = getattr(self, f"{name}_start")
            if start is None:
                refuse_idle(self, where, (f"{name}_fraction",), f"there is no {name}_start; set it")
            require(
                start is None or getattr(self, f"{name}_fraction") > 0,
                f"{where}.{name}_start is {start}, which has no effect: {name}_fraction is 0; "
                "raise it, or leave the start out",
            )
        threshold = self.threshold_start
        require(
            threshold is None or 0 <= threshold <= THRESHOLD,
            f"{where}.threshold_start is {threshold}; give 0 to {THRESHOLD}",
        )
        if self.ratio_start is None:
            refuse_idle(self, where, ("threshold_start",), "there is no ratio_start; set it")

    @property
    def is_idle(self) -> bool:
        starts = (self.ratio_start, self.tau_start, self.ratio_loss_weight_start)
        return starts == (None, None, None)

    @property
    def ratio_warmup(self) -> float:
        """Share of the run after which the configured ratio holds."""
        return 0.0 if self.ratio_start is None else self.ratio_fraction

    def values(self, chunk: ChunkConfig, progress: float) -> ChunkValues:
        """What holds at this share of the run."""
        share = _share(self.ratio_start, self.ratio_fraction, progress)
        start = self.ratio_start or 1.0
        threshold = self.threshold_start
        if threshold is None:
            threshold = 0.0 if start == 1 else THRESHOLD
        return ChunkValues(
            tau=_moved(self.tau_start, chunk.tau, self.tau_fraction, progress),
            ratio_loss_weight=_moved(
                self.ratio_loss_weight_start,
                chunk.ratio_loss_weight,
                self.ratio_loss_weight_fraction,
                progress,
            ),
            share=share,
            start=start,
            threshold=THRESHOLD if share >= 1 else threshold + share * (THRESHOLD - threshold),
        )


def _share(start: float | None, fraction: float, progress: float) -> float:
    """How far a schedule has come, 0 to 1; 1 where there is none."""
    return 1.0 if start is None or progress >= fraction else progress / fraction


def _moved(start: float | None, end: float, fraction: float, progress: float) -> float:
    share = _share(start, fraction, progress)
    return end if start is None or share >= 1 else start + share * (end - start)


class ChunkScheduler:
    """Moves the values in a model's chunk module.

    Args:
        model: the model; one without a chunk module is left as it is.
        schedule: the section `training.chunk_schedule`.

    Raises:
        UserError: the schedule moves something that this model does not use.
    """

    def __init__(self, model: nn.Module, schedule: ChunkSchedule) -> None:
        modules = model.modules() if isinstance(model, nn.Module) else ()
        self._module = next((m for m in modules if isinstance(m, ChunkModule)), None)
        self._schedule = schedule
        if self._module is not None:
            _require_effect(schedule, self._module.config)

    def unfinished(self) -> list[str]:
        """What the export of a model in mid warm-up should say."""
        values = None if self._module is None else self._module.schedule
        if values is None or values.share >= 1:
            return []
        return [
            f"the ratio's warm-up had come {values.share:.0%} of its way when the run ended; the "
            "exported model has the configured ratio and threshold"
        ]

    def set(self, progress: float) -> dict[str, Any]:
        """Sets the values of this share of the run; returns them for the metrics.

        Returns:
            target_ratio (tokens per concept over all tokens), with scope `modality`
            target_ratio_image and target_ratio_text, then tau, ratio_loss_weight and
            boundary_threshold; nothing for a model without boundaries to learn.
        """
        if self._module is None or self._module.config.router == "none":
            return {}
        chunk = self._module.config
        values = self._schedule.values(chunk, progress)
        if not self._schedule.is_idle:
            self._module.schedule = values
        return {
            **ratio_targets(chunk, values),
            "tau": values.tau,
            "ratio_loss_weight": values.ratio_loss_weight,
            "boundary_threshold": values.threshold,
        }


def _require_effect(schedule: ChunkSchedule, chunk: ChunkConfig) -> None:
    """Raises `UserError` for the first start that moves nothing."""
    learned = chunk.router in ("cosine", "linear")
    own = (chunk.target_ratio, chunk.image_target_ratio, chunk.text_target_ratio)
    highest = max(ratio for ratio in (*own, *(chunk.target_ratios or ())) if ratio is not None)
    start = schedule.ratio_start
    for name, has_effect, because in (
        ("ratio_start", chunk.router != "none", f"chunk.router is {chunk.router}"),
        (
            "ratio_start",
            start is None or start < highest,
            f"no target ratio is above it (the highest is {highest:g})",
        ),
        (
            "tau_start",
            learned and chunk.noise == "bernoulli",
            f"chunk.router is {chunk.router} and chunk.noise {chunk.noise}",
        ),
        ("ratio_loss_weight_start", learned, f"chunk.router is {chunk.router}"),
    ):
        value = getattr(schedule, name)
        if value is not None and not has_effect:
            raise UserError(
                f"training.chunk_schedule.{name} is {value:g}, which has no effect: {because}; "
                "leave it out"
            )


def ratio_targets(chunk: ChunkConfig, values: ChunkValues) -> dict[str, float | None]:
    """What the measured ratios should be now, by name.

    Of several drawn ratios it is the one over all tokens: shares of concepts are averaged. With
    scope `modality` only the modalities' own ratios are asked for.
    """
    if chunk.ratio_scope != "modality":
        return {"target_ratio": _over_drawn(chunk, values, chunk.target_ratio)}
    text, image = chunk.text_target_ratio, chunk.image_target_ratio
    return {
        "target_ratio_image": _over_drawn(chunk, values, image or chunk.target_ratio),
        "target_ratio_text": _over_drawn(chunk, values, text or chunk.target_ratio),
    }


def _over_drawn(chunk: ChunkConfig, values: ChunkValues, ratio: float) -> float:
    drawn = [values.target(each) for each in chunk.target_ratios or [ratio]]
    return len(drawn) / sum(1 / each for each in drawn)
