"""What a run writes down: lines of its JSON files, warnings, and other loggers, on rank 0."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from conceptmoe_vl.errors import UserError

from .config import TrainingConfig
from .distributed import World, raise_together, share_from_main
from .loggers import Loggers, require_loggers
from .run_files import append_line, keep_first_lines, read_lines


class RunLog:
    """The lines and warnings of a run. Collective to make.

    Args:
        run_dir: folder of the run. say: prints a line.

    Raises:
        UserError: a logger's package is missing.
    """

    def __init__(
        self, run_dir: Path, config: TrainingConfig, world: World, say: Callable[[str], None]
    ) -> None:
        self._run_dir, self._world, self._say = run_dir, world, say
        self._warnings: list[str] = []
        self._unlogged: tuple[dict[str, Any], Callable[[], dict[str, Any]]] | None = None
        error = None
        try:
            require_loggers(config.loggers if world.is_main else [])
        except UserError as found:
            error = found
        raise_together(error)
        self._loggers = Loggers(
            config.loggers if world.is_main else [], config.logger_options, run_dir, say
        )

    def warn(self, step: int, texts: list[str]) -> None:
        """Says them now; the next line of metrics.jsonl holds them."""
        for text in texts:
            self._say(f"warning: step {step}: {text}")
        self._warnings += texts

    @contextlib.contextmanager
    def step(
        self, metrics: dict[str, Any], details: Callable[[], dict[str, Any]], logged: bool
    ) -> Iterator[None]:
        """A step: inside, `metrics` have their details, and warnings of it may be said. Collective.

        Args:
            details: what a line has besides; called once, now or by `last_step`.
            logged: whether this step is to have a line.
        """
        self._unlogged = None if logged else (metrics, details)
        if logged:
            metrics |= details()
        yield
        if logged:
            self.metrics(metrics)

    def last_step(self) -> None:
        """Writes the line of a step that only afterwards proved to be the last. Collective."""
        if self._unlogged is not None:
            metrics, details = self._unlogged
            self.metrics({**metrics, **details()})
            self._unlogged = None

    def forget_step(self) -> None:
        """The step before is not of this run any more."""
        self._unlogged = None

    def metrics(self, metrics: dict[str, Any]) -> None:
        """A line of metrics.jsonl, with the warnings since the one before."""
        if self._warnings:
            metrics["warnings"], self._warnings = self._warnings, []
        if self._world.is_main:
            append_line(self._run_dir / "metrics.jsonl", metrics)
        self._loggers.log(metrics["step"], metrics)

    def evaluation(self, result: dict[str, Any]) -> None:
        """A line of evaluation.jsonl."""
        if self._world.is_main:
            append_line(self._run_dir / "evaluation.jsonl", result)
        held_out = {key: value for key, value in result.items() if key != "step"}
        self._loggers.log(result["step"], {"step": result["step"], "held_out": held_out})

    def has_evaluation(self, step: int) -> bool:
        """Whether there is a line of this step in evaluation.jsonl. Collective."""
        path = self._run_dir / "evaluation.jsonl"
        return share_from_main(any(line["step"] == step for line in read_lines(path)))

    def rollback(self, step: int, to_step: int, losses: list[float], samples: int) -> None:
        """A line of rollbacks.jsonl: where the spike was, where the run went, what it skipped."""
        event = {"step": step, "to_step": to_step, "losses": losses, "samples_skipped": samples}
        if self._world.is_main:
            append_line(self._run_dir / "rollbacks.jsonl", event)

    def keep_rollbacks(self, number: int) -> None:
        """Drops lines of rollbacks.jsonl behind those that the resumed checkpoint counts."""
        if self._world.is_main:
            keep_first_lines(self._run_dir / "rollbacks.jsonl", number)

    def close(self) -> None:
        """Lets the loggers write what waits."""
        self._loggers.close()
