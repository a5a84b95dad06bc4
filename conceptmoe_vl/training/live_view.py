"""The live view of a run in a terminal: a bar, losses, concepts, speeds and the last warnings.

The loop only hands numbers over; a thread draws them once a second, so that no step waits for a
terminal, however slow.
"""

from __future__ import annotations

import collections
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

_REFRESHES = 1.0  # a second; each takes a few milliseconds of one core
_WARNINGS = 3

# By row: the field of metrics.jsonl, what it is called, how its number is written.
_ROWS: dict[str, tuple[tuple[str, str, str], ...]] = {
    "losses": (
        ("loss", "total", ".4f"),
        ("lm_loss", "language", ".4f"),
        ("lm_loss_text", "text", ".4f"),
        ("lm_loss_image", "image", ".4f"),
        ("grad_norm", "norm", ".3g"),
        ("lr", "rate", ".3g"),
    ),
    "concepts": (
        ("ratio", "tokens each", ".2f"),
        ("target_ratio", "target", ".2f"),
        ("ratio_text", "text", ".2f"),
        ("ratio_image", "image", ".2f"),
        ("boundary_confidence", "confidence", ".3f"),
    ),
    "speed": (
        ("tokens_per_second", "tokens/s", ",.0f"),
        ("concepts_per_second", "concepts/s", ",.0f"),
        ("images_per_second", "images/s", ",.1f"),
        ("model_flops_utilization", "MFU", ".1%"),
        ("data_wait_share", "data wait", ".1%"),
        ("peak_memory", "memory", "GiB"),
    ),
}


def _written(value: float, how: str) -> str:
    return f"{value / 2**30:.2f} GiB" if how == "GiB" else format(value, how)


def figures(metrics: dict[str, Any]) -> dict[str, list[str]]:
    """By row, its figures with their names; those without a number are left out."""
    rows = {}
    for row, fields in _ROWS.items():
        parts = [
            f"{name} {_written(metrics[field], how)}"
            for field, name, how in fields
            if isinstance(metrics.get(field), (int, float))
        ]
        if parts:
            rows[row] = parts
    return rows


class _Figures:
    """Figures beside each other, as many in a line as there is room for.

    Args:
        parts: which are not broken: a name stays with its number.
    """

    def __init__(self, parts: list[str]) -> None:
        self._parts = parts

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        line = ""
        for part in self._parts:
            longer = f"{line}   {part}" if line else part
            if line and len(longer) > options.max_width:
                yield Text(line)
                longer = part
            line = longer
        yield Text(line)


class LiveView:
    """Shown from the first `show` to `close`.

    Args:
        console: of a terminal.
    """

    def __init__(self, console: Console) -> None:
        self._metrics: dict[str, Any] = {}
        self._warnings: collections.deque[str] = collections.deque(maxlen=_WARNINGS)
        whole = Column(no_wrap=True)  # where it is narrow, the bar alone shrinks
        self._progress = Progress(
            TextColumn("step {task.fields[step]}"),
            BarColumn(None),
            TextColumn("{task.percentage:3.0f}%"),
            TimeElapsedColumn(whole),
            TextColumn("left"),
            TimeRemainingColumn(table_column=whole),
            console=console,
            expand=True,
        )
        self._task = self._progress.add_task("", total=1.0, step=0)
        self._live = Live(
            get_renderable=self._drawn,
            console=console,
            refresh_per_second=_REFRESHES,
            transient=True,
        )

    def show(self, metrics: dict[str, Any], progress: float) -> None:
        """Takes a step's numbers; of those that only logged steps have, the last ones stay."""
        self._metrics = {**self._metrics, **metrics}  # the drawing thread has the old one or this
        self._progress.update(self._task, completed=progress, step=metrics["step"])
        if not self._live.is_started:
            self._live.start()

    def warn(self, text: str) -> None:
        """Keeps a warning in sight."""
        self._warnings.append(text)

    def close(self) -> None:
        """Takes the view away."""
        self._live.stop()

    def _drawn(self) -> RenderableType:
        table = Table.grid(padding=(0, 2))
        for row, parts in figures(self._metrics).items():
            table.add_row(Text(row, style="bold"), _Figures(parts))
        for text in tuple(self._warnings):
            table.add_row(Text("warning", style="bold yellow"), Text(text, overflow="ellipsis"))
        return Group(self._progress.get_renderable(), table)
