"""Heat maps of scores over length and depth, and curves of the loss over position, as PNG."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from conceptmoe_vl.errors import UserError
from conceptmoe_vl.files import written_whole
from eval.long_context.family import CONTROL, SPREAD, length_name
from eval.long_context.summary import LengthSummary
from eval.statistics import Figure

_GREY = "#68707a"


def check_matplotlib() -> None:
    """Before anything is asked.

    Raises:
        UserError: matplotlib is missing.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError(
            "the figures need matplotlib: pip install conceptmoe-vl[figures], or give --no-figures"
        )


def new_figure(width: float, height: float) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas

    figure = Canvas(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)  # no display is needed to write a file
    return figure


def save_figure(figure: Any, path: Path) -> None:
    """Writes the PNG, whole or not at all.

    Raises:
        UserError: `path` cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(path) as beside:
            figure.savefig(beside, dpi=120, format="png")
    except OSError as error:
        raise UserError(f"'{path}' cannot be written ({error}); name another --output") from error


def heat_map_cells(
    lengths: Mapping[int, LengthSummary],
) -> tuple[list[str], list[str], list[list[Figure | None]]]:
    """Rows (depths, and the control as the last), columns (lengths) and their figures."""
    depths = sorted(
        {depth for part in lengths.values() for depth in part.depths},
        key=lambda depth: (isinstance(depth, str), depth),
    )
    columns = sorted(lengths)
    cells = [[lengths[length].depths.get(depth) for length in columns] for depth in depths]
    rows = [SPREAD if depth == SPREAD else f"{100 * float(depth):g} %" for depth in depths]
    if any(part.control is not None for part in lengths.values()):
        rows.append(CONTROL)
        cells.append([lengths[length].control for length in columns])
    return rows, [length_name(length) for length in columns], cells


def draw_heat_map(name: str, lengths: Mapping[int, LengthSummary], path: Path) -> None:
    """One task: lengths to the right, depths downwards, below them the control.

    Raises:
        UserError: `path` cannot be written.
    """
    rows, columns, cells = heat_map_cells(lengths)
    values = np.array(
        [
            [np.nan if cell is None or cell.value is None else cell.value for cell in row]
            for row in cells
        ]
    )
    figure = new_figure(2.6 + 0.95 * len(columns), 1.7 + 0.5 * len(rows))
    panel = figure.subplots()
    drawn = panel.imshow(values, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
    for (row, column), value in np.ndenumerate(values):
        text = "-" if np.isnan(value) else f"{100 * value:.0f}"
        color = "white" if value < 0.15 or value > 0.9 else "black"
        panel.text(column, row, text, ha="center", va="center", fontsize=9, color=color)
    panel.set_xticks(range(len(columns)), columns)
    panel.set_yticks(range(len(rows)), rows)
    panel.set_xlabel("prompt, tokens", color=_GREY)
    panel.set_ylabel("depth of the needle", color=_GREY)
    panel.set_title(f"{name}: score, %", fontsize=11)
    panel.tick_params(colors=_GREY, length=0)
    panel.spines[:].set_visible(False)
    if rows[-1] == CONTROL:
        panel.axhline(len(rows) - 1.5, color="black", linewidth=2)
    figure.colorbar(drawn, ax=panel, ticks=[0, 0.5, 1], format=lambda v, _: f"{100 * v:.0f}")
    save_figure(figure, path)


def draw_positions(
    curves: Mapping[str, Sequence[tuple[float, float, float, float]]], title: str, path: Path
) -> None:
    """The loss over position.

    Args:
        curves: by name points of (position, mean in nats, low and high end of its interval).

    Raises:
        UserError: `path` cannot be written.
    """
    figure = new_figure(8, 5)
    panel = figure.subplots()
    for name, points in curves.items():
        places, means, lows, highs = (np.array(column) for column in zip(*points, strict=True))
        (line,) = panel.plot(places, means, marker="o", markersize=4, label=name)
        panel.fill_between(places, lows, highs, color=line.get_color(), alpha=0.2, linewidth=0)
    panel.set_xscale("log", base=2)
    panel.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    panel.set_title(title, fontsize=11)
    panel.set_xlabel("position in the document, tokens", color=_GREY)
    panel.set_ylabel("mean negative log-likelihood, nats a token", color=_GREY)
    panel.spines[["top", "right"]].set_visible(False)
    panel.tick_params(colors=_GREY)
    panel.legend(frameon=False, fontsize=9)
    save_figure(figure, path)
