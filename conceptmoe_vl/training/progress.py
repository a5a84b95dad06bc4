"""What a person sees of a run: a table of parts, a live bar in a terminal, sparse lines
elsewhere.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from .config import TrainingConfig
from .parameters import PartSummary
from .preparing import describe_choice

_QUIET_INTERVAL = 30.0  # seconds between two lines when the output is no terminal


def _short(metrics: dict[str, Any]) -> str:
    parts = [f"loss {metrics['loss']:.4f}", f"lm {metrics['lm_loss']:.4f}"]
    if metrics.get("ratio") is not None:
        parts.append(f"R {metrics['ratio']:.2f}")
    parts.append(f"norm {metrics['grad_norm']:.2f}")
    if metrics.get("tokens_per_second"):
        parts.append(f"{metrics['tokens_per_second']:,.0f} tok/s")
    return "  ".join(parts)


class Reporter:
    """Reports of rank 0 on stderr; silent on other ranks.

    Args:
        active: whether this process reports.
    """

    def __init__(self, active: bool) -> None:
        self._console = Console(file=sys.stderr, quiet=not active, highlight=False)
        self._live = active and self._console.is_terminal
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._last_line = -_QUIET_INTERVAL

    def say(self, text: str) -> None:
        """One line, above the bar if there is one."""
        self._console.print(text, markup=False, soft_wrap=True)

    def show_parts(self, parts: Iterable[PartSummary], config: TrainingConfig) -> None:
        """The table at a run's start: part, parameters, trained ones, peak rate."""
        table = Table(title=f"trained by {config.engine}", title_justify="left")
        for name in ("part", "parameters", "trained", "peak rate"):
            table.add_column(name, justify="left" if name == "part" else "right")
        total = trained = 0
        for part in parts:
            table.add_row(
                part.part, f"{part.parameters:,}", f"{part.trainable:,}", f"{part.learning_rate:g}"
            )
            total, trained = total + part.parameters, trained + part.trainable
        table.add_row("all", f"{total:,}", f"{trained:,}", "", style="bold")
        self._console.print(table)
        for line in describe_choice(config):
            self.say(line)

    def update(self, metrics: dict[str, Any], progress: float) -> None:
        """After every step: moves the bar, or prints a line now and then."""
        if not self._live:
            now = time.monotonic()
            if now - self._last_line >= _QUIET_INTERVAL or progress >= 1:
                self._last_line = now
                self.say(f"step {metrics['step']}  {progress:4.0%}  {_short(metrics)}")
            return
        if self._progress is None or self._task is None:
            columns = (
                TextColumn("step {task.fields[step]}"),
                BarColumn(),
                TextColumn("{task.percentage:3.0f}%"),
            )
            times = (TimeElapsedColumn(), TimeRemainingColumn())
            self._progress = Progress(
                *columns, *times, TextColumn("{task.description}"), console=self._console
            )
            self._task = self._progress.add_task("", total=1.0, step=metrics["step"])
            self._progress.start()
        self._progress.update(
            self._task, completed=progress, step=metrics["step"], description=_short(metrics)
        )

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = self._task = None
