"""What a person sees of a run: a table of parts, a live view in a terminal, else sparse lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table

from .config import TrainingConfig
from .live_view import LiveView
from .parameters import PartSummary
from .preparing import describe_choice

_WARNING = "warning: "
_QUIET_INTERVAL = 30.0  # seconds between two lines where there is no live view


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
        active: whether this process reports. console: of stderr unless given.
    """

    def __init__(self, active: bool, console: Console | None = None) -> None:
        self._console = console or Console(file=sys.stderr, quiet=not active, highlight=False)
        live = active and self._console.is_terminal and not self._console.is_dumb_terminal
        self._view = LiveView(self._console) if live else None
        self._step = ""  # the last one's line
        self._last_line = -_QUIET_INTERVAL

    def say(self, text: str) -> None:
        """One line, above the view if there is one; warnings stay in it."""
        if self._view is not None and text.startswith(_WARNING):
            self._view.warn(text.removeprefix(_WARNING))
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
        """After every step: moves the view, or prints a line now and then."""
        self._step = f"step {metrics['step']}  {progress:4.0%}  {_short(metrics)}"
        if self._view is not None:
            self._view.show(metrics, progress)
            return
        now = time.monotonic()
        if now - self._last_line >= _QUIET_INTERVAL or progress >= 1:
            self._last_line = now
            self.say(self._step)

    def close(self) -> None:
        """Takes the view away, if there is one; the last step's line stays."""
        if self._view is not None and self._step:
            self._view.close()
            self.say(self._step)
