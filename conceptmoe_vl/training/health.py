"""Guards over the numbers of a step: what is not finite, and losses that spike."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from conceptmoe_vl.errors import UserError

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
