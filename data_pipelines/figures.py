"""`stats --png`: lengths, sources, and sizes and aspects of the images in one picture."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np

from conceptmoe_vl.errors import UserError
from conceptmoe_vl.files import written_whole
from data_pipelines.statistics import Statistics
from data_pipelines.visible import visible

_BLUE, _GREY = "#3567a8", "#68707a"
_SOURCES = 12  # shown by name; the smaller ones as one bar
_BINS = 40


def check_figures(path: Path) -> None:
    """Before the samples are read.

    Raises:
        UserError: matplotlib is missing, or the folder of `path`.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("--png needs matplotlib: pip install conceptmoe-vl[figures]")
    if not path.parent.is_dir() or path.is_dir():
        raise UserError(f"--png: '{path}' cannot be written; name a file in a folder that exists")


def draw_statistics(found: Statistics, path: Path) -> None:
    """Writes the picture, whole or not at all.

    Raises:
        UserError: `path` cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 8), layout="constrained")
    FigureCanvasAgg(figure)  # no display is needed to write a file
    figure.suptitle(
        f"{len(found.lengths):,} samples, {len(found.widths):,} images, "
        f"{sum(found.lengths):,} {found.unit}"
        + (f", {found.faults.total():,} damaged" if found.faults else "")
    )
    (lengths, sources), (aspects, sizes) = figure.subplots(2, 2)
    _lengths(lengths, found)
    _sources(sources, found)
    _aspects(aspects, found)
    _sizes(sizes, found)
    try:
        with written_whole(path) as beside:
            figure.savefig(beside, dpi=120, format="png")
    except OSError as error:
        raise UserError(f"--png: '{path}' cannot be written ({error}); name a file") from error


def _finish(panel: Any, title: str, x: str, y: str) -> None:
    panel.set_title(title, fontsize=11)
    panel.set_xlabel(x, color=_GREY)
    panel.set_ylabel(y, color=_GREY)
    panel.spines[["top", "right"]].set_visible(False)
    panel.tick_params(colors=_GREY)


def _empty(panel: Any, title: str) -> None:
    panel.set_title(title, fontsize=11)
    panel.set_axis_off()
    panel.text(0.5, 0.5, "none", ha="center", color=_GREY, transform=panel.transAxes)


def _plain(value: float, _place: Any = None) -> str:
    return f"{value:,.0f}"


def _lengths(panel: Any, found: Statistics) -> None:
    """A histogram; on a logarithmic axis where the longest are 20 times the shortest."""
    lengths = np.array(found.lengths).clip(min=1)
    title = f"Lengths of samples, {found.unit}"
    if not len(lengths):
        return _empty(panel, title)
    low, high = int(lengths.min()), int(lengths.max())
    logarithmic = high > 20 * low
    if logarithmic:
        # Edges between whole numbers: no bin of short lengths stays empty.
        edges = np.unique(np.round(np.geomspace(low, high + 1, _BINS + 1))) - 0.5
        panel.set_xscale("log")
        panel.xaxis.set_major_formatter(_plain)
    else:
        # Whole numbers of values a bin: else bins that hold one more of them look like peaks.
        width = max(1, -(-(high - low + 1) // _BINS))
        edges = np.arange(low - 0.5, high + width + 0.5, width)
    panel.hist(lengths, bins=edges, color=_BLUE)
    for share, name, style in ((50, "median", ":"), (99, "99 %", "--")):
        value = float(np.percentile(lengths, share))
        label = f"{name} {value:,.0f}"
        panel.axvline(value, color="black", linewidth=1, linestyle=style, label=label)
    panel.plot([], [], " ", label=f"longest {high:,}")
    panel.legend(frameon=False, fontsize=9)
    panel.yaxis.set_major_formatter(_plain)
    return _finish(panel, title, found.unit, "samples")


def _sources(panel: Any, found: Statistics) -> None:
    ranked = found.sources.most_common()
    named, rest = ranked[:_SOURCES], sum(count for _, count in ranked[_SOURCES:])
    bars = [(visible(name)[:32].replace("$", r"\$"), count) for name, count in named]
    if rest:
        bars.append((f"{len(ranked) - _SOURCES} others", rest))
    if not bars:
        return _empty(panel, "Samples by source")
    places = range(len(bars))
    drawn = panel.barh(places, [count for _, count in bars], color=_BLUE, height=0.7)
    panel.bar_label(drawn, [f" {count:,}" for _, count in bars], color=_GREY, fontsize=9)
    panel.set_yticks(places, [name for name, _ in bars])
    panel.set_ylim(max(len(bars), 4) - 0.5, -0.5)
    panel.margins(x=0.15)
    panel.xaxis.set_major_formatter(_plain)
    panel.locator_params(axis="x", nbins=5)
    return _finish(panel, "Samples by source", "samples", "")


def _aspects(panel: Any, found: Statistics) -> None:
    """Doublings of width over height lie equally far apart; square ones are in the middle bin."""
    title = "Aspect ratios of images, width : height"
    if not len(found.widths):
        return _empty(panel, title)
    doublings = np.log2(np.array(found.widths) / np.array(found.heights))
    end = min(max(2.0, float(np.abs(doublings).max())), 6.0)
    panel.hist(doublings.clip(-end, end), bins=np.linspace(-end, end, _BINS + 2), color=_BLUE)
    marks = [mark for mark in range(-6, 7) if abs(mark) <= end]
    panel.set_xticks(
        marks, [f"{2**mark} : 1" if mark >= 0 else f"1 : {2**-mark}" for mark in marks]
    )
    panel.yaxis.set_major_formatter(_plain)
    return _finish(panel, title, "", "images")


def _sizes(panel: Any, found: Statistics) -> None:
    """Counts over width and height, both logarithmic."""
    title = "Sizes of images, pixels"
    if not len(found.widths):
        return _empty(panel, title)
    widths, heights = np.array(found.widths), np.array(found.heights)
    low = min(widths.min(), heights.min()) / 1.25
    high = max(widths.max(), heights.max()) * 1.25
    edges = np.geomspace(low, high, 36)
    *_, drawn = panel.hist2d(
        widths, heights, bins=(edges, edges), cmin=1, norm="log", cmap="viridis"
    )
    panel.set_xscale("log", base=2)
    panel.set_yscale("log", base=2)
    panel.xaxis.set_major_formatter(_plain)
    panel.yaxis.set_major_formatter(_plain)
    panel.set_aspect("equal")
    panel.plot([low, high], [low, high], color=_GREY, linewidth=0.7)
    panel.figure.colorbar(drawn, ax=panel, label="images")
    return _finish(panel, title, "width", "height")
