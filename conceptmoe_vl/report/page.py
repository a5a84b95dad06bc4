"""The page: a table of the runs, charts by subject, warnings; style and script are inside it."""

from __future__ import annotations

from html import escape
from importlib import resources
from pathlib import Path

from conceptmoe_vl.errors import UserError
from conceptmoe_vl.files import written_whole

from .charts import HEIGHT, LEFT, RIGHT, TOP, WIDTH, Chart, Line, number, smoothed
from .runs import Run, read_runs
from .subjects import GIB, LOSSES, Curve, subjects_of

_SWITCH = (
    '<input type="checkbox" id="logarithmic"> '
    '<label class="switch" for="logarithmic">logarithmic axes, where all values are above 0</label>'
)


def _lines(runs: list[Run], curves: list[Curve]) -> list[Line]:
    """One run: a colour for each field. Several: a colour for each run, a dash for each field."""
    lines = []
    for number_of_run, run in enumerate(runs):
        for index, curve in enumerate(curves):
            alone = len(runs) == 1
            label = curve.label if alone else f"{run.name}: {curve.label}"
            colour, dash = (index, 0) if alone else (number_of_run, index)
            points = [(step, value / curve.unit) for step, value in run.series(curve.path)]
            lines.append(
                Line(label, points, colour, dash, curve.smooth, curve.dots, framed=curve.dots)
            )
            if curve.target and points:
                target = run.series(curve.target)
                lines.append(
                    Line(f"{label}, target", target, colour, dash + 1, smooth=False, framed=True)
                )
    return lines


def _table(runs: list[Run], smoothing: float) -> str:
    heads = (
        "run", "steps", "samples", "tokens", "hours", "language loss", "held-out", "tokens per "
        "concept", "target", "tokens/s", "peak memory", "skipped steps", "warnings",
    )  # fmt: skip
    rows = []
    for run in runs:
        loss = smoothed(run.series("lm_loss"), smoothing)
        ratio = smoothed(run.series("ratio"), smoothing)
        seconds = run.last("seconds")
        speeds = sorted(value for _, value in run.series("tokens_per_second"))
        memory = run.last("peak_memory")
        counts = [run.last(name) for name in ("step", "samples", "tokens")]
        cells: list[float | str | None] = [
            *(None if count is None else f"{count:,.0f}" for count in counts),
            None if seconds is None else seconds / 3600,
            loss[-1][1] if loss else None,
            run.last("held_out/lm_loss"),
            ratio[-1][1] if ratio else None,
            run.last("target_ratio"),
            speeds[len(speeds) // 2] if speeds else None,
            None if memory is None else f"{memory / GIB:.2f} GiB",
            run.last("nonfinite_steps"),
            sum(1 for _ in run.warnings()),
        ]
        texts = [
            "–" if cell is None else cell if isinstance(cell, str) else number(cell)
            for cell in cells
        ]
        body = "".join(f"<td>{escape(text)}</td>" for text in texts)
        rows.append(f'<tr><th scope="row">{escape(run.name)}</th>{body}</tr>')
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in heads)
    return (
        f'<div class="wide"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _warnings(runs: list[Run]) -> str:
    rows = [
        f"<tr><td>{escape(run.name)}</td><td>{step}</td><td>{escape(text)}</td></tr>"
        for run in runs
        for step, text in run.warnings()
    ]
    if not rows:
        return "<p>None.</p>"
    head = "<tr><th>run</th><th>step</th><th>warning</th></tr>"
    return (
        f'<div class="wide"><table class="warnings"><thead>{head}</thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def page(runs: list[Run], smoothing: float) -> str:
    """The whole HTML page.

    Args:
        smoothing: weight of what came before in the exponential mean; 0 draws raw values alone.
    """
    files = resources.files(__package__)
    style, script = (files.joinpath(name).read_text("utf-8") for name in ("page.css", "page.js"))
    title = ", ".join(run.name for run in runs)
    how = (
        f"Strong lines are exponential means over logged steps (weight {smoothing:g} on what came "
        "before, unbiased), pale ones the values themselves. "
        if smoothing
        else "Lines are the values themselves. "
    ) + "The x axis counts optimiser steps."
    sections = []
    for name, subjects in subjects_of(runs).items():
        charts = "".join(
            Chart(
                each.title, _lines(runs, each.curves), smoothing, each.note, name == LOSSES
            ).html()
            for each in subjects
        )
        if charts:
            switch = _SWITCH if name == LOSSES else ""
            drawn = f'<div class="charts">{charts}</div>'
            sections.append(f"<section><h2>{escape(name)}</h2>{switch}{drawn}</section>")
    frame = (
        f'<svg width="0" height="0" aria-hidden="true"><clipPath id="frame"><rect x="{LEFT}" '
        f'y="0" width="{WIDTH - LEFT - RIGHT}" height="{HEIGHT - TOP}"/></clipPath></svg>'
    )
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style}</style></head><body>{frame}"
        f"<h1>{escape(title)}</h1>{_table(runs, smoothing)}<p>{escape(how)}</p>"
        f"{''.join(sections)}<h2>Warnings</h2>{_warnings(runs)}"
        f"<script>{script}</script></body></html>\n"
    )


def write_report(folders: list[Path], out: Path, smoothing: float = 0.9) -> None:
    """Writes the page of these runs, whole or not at all.

    Raises:
        UserError: a folder is no run, or the page cannot be written.
    """
    text = page(read_runs(folders), smoothing)
    try:
        with written_whole(out) as beside:
            beside.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {out}: {error}; give another --out") from error
