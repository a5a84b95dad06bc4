"""Guards over the numbers of a step: what is not finite, and losses that spike."""

from __future__ import annotations

import collections
import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from conceptmoe_vl.errors import UserError
from conceptmoe_vl.field_checks import refuse_idle

from .checks import require
from .distributed import World, gather_objects
from .run_files import append_line


class FiniteGuard:
    """Counts and names the steps that were skipped because something was not finite.

    Args:
        limit: such steps in a row after which the run stops.
        path: file that gets a line for each, with the keys of its samples.
        say: prints a line.

    Attributes:
        steps: such steps since the run's start. in_a_row: up to the present step.
    """

    def __init__(self, limit: int, path: Path, world: World, say: Callable[[str], None]) -> None:
        self._limit, self._path, self._world, self._say = limit, path, world, say
        self.steps = self.in_a_row = 0

    def look(self, step: int, metrics: dict[str, Any], keys: Iterable[str]) -> None:
        """Adds `nonfinite_steps` to a step's metrics. Collective where the step is not finite.

        Raises:
            UserError: too many such steps in a row.
        """
        finite = math.isfinite(metrics["loss"]) and math.isfinite(metrics["grad_norm"])
        self.in_a_row = 0 if finite else self.in_a_row + 1
        self.steps += not finite
        metrics["nonfinite_steps"] = self.steps
        if finite:
            return
        what = "loss" if not math.isfinite(metrics["loss"]) else "gradient"
        by_rank = gather_objects(list(keys))
        if self._world.is_main:
            line = {"step": step, "what": what, "loss": metrics["loss"], "keys_by_rank": by_rank}
            append_line(self._path, line)
        self._say(
            f"warning: the {what} of step {step} is not finite; the step is skipped "
            f"({self.steps} so far; keys in {self._path})"
        )
        if self.in_a_row >= self._limit:
            raise UserError(
                f"the {what} was not finite in {self.in_a_row} steps in a row, up to step {step}; "
                f"lower training.learning_rate or look at the samples in {self._path}"
            )


@dataclasses.dataclass
class SpikeConfig:
    """What happens when the language loss spikes.

    Fields:
        rollbacks: how often a run may go back to its newest checkpoint; 0: never, the guard is off.
        deviations: standard deviations above the mean of the last losses from which a step spikes.
        history: steps whose losses that mean is taken over; before there are so many, none spikes.
        steps: spiking steps in a row that make a roll-back: one alone is a hard batch.
    """

    rollbacks: int = 0
    deviations: float = 6.0
    history: int = 100
    steps: int = 3

    def __post_init__(self) -> None:
        for name, least in (("rollbacks", 0), ("deviations", 0), ("history", 2), ("steps", 1)):
            value = getattr(self, name)
            require(value >= least, f"training.spike_guard.{name} is {value}; give {least} up")
        if not self.rollbacks:
            because = "training.spike_guard.rollbacks is 0; set it"
            refuse_idle(self, "training.spike_guard", ("deviations", "history", "steps"), because)


class SpikeGuard:
    """Decides from the language losses of all steps when to go back. The same on every rank.

    Attributes:
        rollbacks: how often the run has gone back. losses: of the spike so far, in order.
    """

    def __init__(self, config: SpikeConfig) -> None:
        self._config = config
        self._before: collections.deque[float] = collections.deque(maxlen=config.history)
        self.rollbacks, self.losses = 0, list[float]()

    @property
    def is_on(self) -> bool:
        return self.rollbacks < self._config.rollbacks

    def look(self, metrics: dict[str, Any]) -> bool:
        """Whether to go back behind this step and the `losses` before it.

        Losses that are not finite count for nothing: their steps changed no weight. Nor do those of
        steps without a supervised token: they are zero.

        Args:
            metrics: lm_loss and supervised_tokens of a step.
        """
        loss = metrics["lm_loss"]
        counts = metrics["supervised_tokens"] and math.isfinite(loss)
        if not self._config.rollbacks or not counts:
            return False
        if self.is_on and self._spikes(loss):
            self.losses.append(loss)
            return len(self.losses) >= self._config.steps
        # A rise that did not last is part of the run; so is all of it when no roll-back is left.
        self._before.extend([*self.losses, loss])
        self.losses.clear()
        return False

    def _spikes(self, loss: float) -> bool:
        if len(self._before) < self._config.history:
            return False
        mean = statistics.fmean(self._before)
        deviation = max(statistics.pstdev(self._before), 1e-3 * abs(mean))
        return loss > mean + self._config.deviations * deviation

    def went_back(self) -> None:
        """Counts a roll-back: the spike is over and forgotten."""
        self.rollbacks += 1
        self.losses.clear()

    def give_in(self) -> None:
        """Takes the spike as the run's losses: there is nowhere to go back to."""
        self._before.extend(self.losses)
        self.losses.clear()

    def state_dict(self) -> dict[str, Any]:
        before, spike = list(self._before), list(self.losses)
        return {"rollbacks": self.rollbacks, "before": before, "losses": spike}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rollbacks, self.losses = state["rollbacks"], list(state["losses"])
        self._before.clear()
        self._before.extend(state["before"])
