"""The report's figures, drawn by matplotlib into `data:` addresses."""

from __future__ import annotations

import base64
import io
import itertools
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")

from matplotlib.axes import Axes
from matplotlib.figure import Figure

matplotlib.rcParams["text.parse_math"] = False  # dollars in the names of data are no formulas
_COLOURS = {"text": "#3b6fb6", "image": "#d07a22", "all": "#555b63"}


def _to_uri(figure: Figure) -> str:
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=130, bbox_inches="tight")
    return "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode("ascii")


def _axes(title: str, x: str, y: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(5.2, 3.2))
    axes = figure.subplots()
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25)
    return figure, axes


def draw_all(results: dict[str, Any]) -> list[str]:
    """The figures of `chunks.json` that have something to show."""
    method = results["method"]
    figures = [
        draw_sizes(method["chunk_sizes"]),
        draw_probabilities(method["probabilities"]),
        draw_ratios(method["ratio_by"]["position"], "Tokens per concept by place in the prompt"),
        draw_ratios(method["ratio_by"]["kind"], "Tokens per concept by kind of question"),
        draw_merged(method["merged_tokens"]),
    ]
    figures += [draw_dial(name, rows) for name, rows in results["dial"].items() if len(rows) > 1]
    if method["score_by_evidence"]:
        figures.append(draw_evidence(method["score_by_evidence"]))
    return figures


def draw_sizes(sizes: dict[str, list[int]]) -> str:
    """Share of concepts of each size, by modality."""
    figure, axes = _axes("Chunk sizes", "tokens of a concept", "share of concepts")
    starts = sizes["bins_from"]
    names = [
        str(low) if high == low + 1 else f"{low}-{high - 1}"
        for low, high in itertools.pairwise(starts)
    ]
    names.append(f"{starts[-1]}+")
    place = np.arange(len(names))
    shown = [name for name in ("text", "image") if sum(sizes[name])]
    width = 0.8 / max(len(shown), 1)
    for number, modality in enumerate(shown):
        counts = np.array(sizes[modality], float)
        left = place - 0.4 + width * (number + 0.5)
        axes.bar(left, counts / counts.sum(), width, label=modality, color=_COLOURS[modality])
    axes.set_xticks(place, names)
    axes.legend(fontsize=8)
    return _to_uri(figure)


def draw_probabilities(counts: dict[str, list[int]]) -> str:
    """Distribution of p, by modality: at one half the router decides nothing."""
    figure, axes = _axes("Confidence: p of boundaries not forced", "p", "share of tokens")
    for modality, values in counts.items():
        if total := sum(values):
            edges = np.linspace(0, 1, len(values) + 1)
            shares = np.array(values) / total
            axes.stairs(shares, edges, label=modality, color=_COLOURS[modality], lw=1.6)
    axes.axvline(0.5, color="#999", lw=1, ls="--")
    axes.legend(fontsize=8)
    return _to_uri(figure)


def _errors(values: Sequence[float], intervals: Sequence[Sequence[float] | None]) -> np.ndarray:
    """`[2, n]` lengths of error bars below and above."""
    ends = [interval or (value, value) for value, interval in zip(values, intervals, strict=True)]
    low, high = np.array(ends, float).T
    middle = np.array(values, float)
    return np.stack((np.maximum(middle - low, 0), np.maximum(high - middle, 0)))


def _short(name: str, most: int = 28) -> str:
    """A name that leaves room for its figure."""
    name = " ".join(name.split())
    return name if len(name) <= most else f"{name[: most - 1]}…"


def draw_ratios(groups: dict[str, dict[str, Any]], title: str) -> str:
    """Tokens per concept of groups, with intervals."""
    figure, axes = _axes(title, "", "tokens per concept")
    rows = [(name, row) for name, row in groups.items() if row["ratio"] is not None][:24]
    values = [row["ratio"] for _, row in rows]
    axes.bar(range(len(rows)), values, color="#3b6fb6", width=0.7)
    errors = _errors(values, [row["interval_95"] for _, row in rows]) if rows else None
    axes.errorbar(range(len(rows)), values, errors, fmt="none", ecolor="#222", capsize=2, lw=1)
    names = [_short(name) for name, _ in rows]
    axes.set_xticks(range(len(rows)), names, rotation=35, ha="right")
    return _to_uri(figure)


def draw_merged(kinds: dict[str, dict[str, float]]) -> str:
    """Mean chunk size by kind of token."""
    figure, axes = _axes("Which tokens are merged", "mean size of their chunk", "")
    axes.barh(
        range(len(kinds)), [row["mean_chunk_size"] for row in kinds.values()], color="#3b6fb6"
    )
    labels = [f"{kind} ({row['tokens']:,})" for kind, row in kinds.items()]
    axes.set_yticks(range(len(kinds)), labels)
    axes.invert_yaxis()
    return _to_uri(figure)


def draw_dial(task: str, rows: list[dict[str, Any]]) -> str:
    """Score over the measured ratio: the curve that a ratio is chosen from."""
    figure, axes = _axes(f"{task}: score by compression", "tokens per concept, measured", "score")
    rows = sorted(rows, key=lambda row: row["ratio"])
    values = [row["score"] for row in rows]
    errors = _errors(values, [row["interval_95"] for row in rows])
    axes.errorbar([row["ratio"] for row in rows], values, errors, marker="o", capsize=3)
    for row in rows:
        axes.annotate(
            f"R {row['asked'] or 'as trained'}",
            (row["ratio"], row["score"]),
            xytext=(4, 6),
            textcoords="offset points",
            fontsize=7,
        )
    return _to_uri(figure)


def draw_evidence(rows: list[dict[str, Any]]) -> str:
    """Score by the size of the chunks that hold the answer's evidence."""
    title, x = "Score by chunk size of the answer's evidence", "mean chunk size of the evidence"
    figure, axes = _axes(title, x, "score")
    names = [
        f"{row['from']:g} to {row['to']:g}" if row["to"] else f"{row['from']:g}+" for row in rows
    ]
    values = [row["score"] for row in rows]
    errors = _errors(values, [row["interval_95"] for row in rows])
    axes.errorbar(range(len(rows)), values, errors, fmt="o", capsize=3)
    axes.set_xticks(
        range(len(rows)),
        [f"{name}\n({row['questions']})" for name, row in zip(names, rows, strict=True)],
    )
    return _to_uri(figure)
