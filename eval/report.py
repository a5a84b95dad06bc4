"""What an evaluation leaves behind: a table, `results.json` and `samples.jsonl`."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from conceptmoe_vl.errors import UserError
from conceptmoe_vl.files import written_whole
from data_pipelines.visible import visible
from eval.runner import MODALITIES, Sample
from eval.statistics import RESAMPLES, SEED, estimate
from eval.tasks import RatioOfSums, Task


@dataclass(frozen=True)
class Speed:
    """How many questions were asked anew, and in how many seconds (without loading the model)."""

    asked: int
    seconds: float


def summarise(task: Task, samples: Sequence[Sample], speed: Speed) -> dict[str, Any]:
    """The figures of `results.json`. All but `speed` depend on questions and replies alone."""
    kinds = sorted({sample.question.kind for sample in samples})
    ratios = estimate(samples, _RATIOS)
    prompt_tokens = sum(sample.reply.prompt_tokens for sample in samples)
    rate = speed.asked / len(samples) / speed.seconds
    return {
        "task": task.name,
        "description": task.description,
        "mode": task.mode,
        **_figures(task, samples),
        "official_size": task.official_size,
        "by_kind": {
            kind: _figures(task, [sample for sample in samples if sample.question.kind == kind])
            for kind in kinds
        },
        "empty_answers": sum(not sample.parsed for sample in samples),
        "ties": sum(_is_tie(sample) for sample in samples) if task.mode == "choose" else None,
        "ratio": ratios["all"].value,
        "ratio_by_modality": {name: ratios[name].value for name in MODALITIES},
        "ratio_intervals_95": {
            name: figure.interval and list(figure.interval) for name, figure in ratios.items()
        },
        "prompt_tokens": prompt_tokens,
        "answer_tokens": sum(sample.reply.answer_tokens for sample in samples),
        "bootstrap": {"seed": SEED, "resamples": RESAMPLES},
        "speed": {
            "asked": speed.asked,
            "reused": len(samples) - speed.asked,
            "seconds": speed.seconds,
            "questions_per_second": speed.asked / speed.seconds,
            "prompt_tokens_per_second": prompt_tokens * rate,
        },
    }


def _figures(task: Task, samples: Sequence[Sample]) -> dict[str, Any]:
    figures = estimate([sample.scored for sample in samples], task.metrics)
    return {
        "count": len(samples),
        "figures": {name: figure.to_json() for name, figure in figures.items()},
    }


def _is_tie(sample: Sample) -> bool:
    totals = [total for total, _ in sample.reply.log_likelihoods]
    return totals.count(max(totals)) > 1


def _ratio_parts(sample: Any) -> dict[str, tuple[float, float]]:
    """Tokens and concepts of a sample's prompt, together and by modality."""
    tokens, concepts = sample.reply.tokens, sample.reply.concepts
    parts = {name: (tokens.get(name, 0), concepts.get(name, 0)) for name in MODALITIES}
    return {"all": (sum(tokens.values()), sum(concepts.values())), **parts}


# The transform keeps them from being taken for shares where every prompt is one token.
_RATIOS = RatioOfSums(_ratio_parts, np.positive)


def print_report(results: dict[str, Any], console: Console) -> None:
    """The table of one task: a row for each kind, two columns for each figure.

    Names come from data: their brackets are no markup, and no control character steers a terminal.
    """
    title = Text(visible(results["description"]), style="table.title")
    table = Table(title=title, title_justify="left")
    table.add_column("questions")
    table.add_column("count", justify="right")
    for name in results["figures"]:
        table.add_column(name.replace("_", " "), justify="right")
        table.add_column("95 % interval", justify="right")
    names = list(results["figures"])
    kinds = results["by_kind"]
    if len(kinds) > 1:
        for kind, part in kinds.items():
            table.add_row(Text(visible(kind or "-")), *_cells(part, names))
        table.add_section()
    table.add_row("all", *_cells(results, names), style="bold")
    console.print(table)
    console.print(f"tokens per concept: {_shown_ratios(results)}")
    for line in _remarks(results):
        console.print(line)


def _remarks(results: dict[str, Any]) -> list[str]:
    lines = []
    speed, count = results["speed"], results["count"]
    if speed["asked"]:
        lines.append(
            f"{speed['questions_per_second']:.1f} questions and "
            f"{speed['prompt_tokens_per_second']:.0f} prompt tokens a second, "
            f"{speed['seconds']:.0f} s"
        )
    if speed["reused"]:
        lines.append(
            f"note: {speed['reused']} of {count} replies were there: of an equal question, or from "
            "an earlier start with the same model and settings (--no-cache asks anew)"
        )
    official = results["official_size"]
    if official is not None and count != official:
        lines.append(f"note: {count} of the {official} official questions: no official score")
    if results["ties"]:
        lines.append(f"note: {results['ties']} questions have several likeliest choices: the first")
    if results["empty_answers"]:
        lines.append(f"note: {results['empty_answers']} answers are empty and count as wrong")
    return lines


def _cells(part: dict[str, Any], names: Sequence[str]) -> list[str]:
    cells = [f"{part['count']}"]
    for name in names:
        figure = part["figures"].get(name, {"value": None, "interval_95": None})
        cells += format_figure(figure["value"], figure["interval_95"])
    return cells


def format_figure(
    value: float | None, interval: Sequence[float] | None, is_share: bool | None = None
) -> tuple[str, str]:
    """A figure and its interval; shares, and differences of shares, in percent.

    Args:
        is_share: whether it is one; None: if it lies between -1 and 1.
    """
    if value is None:
        return "-", "-"
    if is_share is None:
        is_share = all(-1 <= number <= 1 for number in (value, *(interval or ())))
    factor, unit = (100, " %") if is_share else (1, "")
    shown = f"{factor * value:.2f}{unit}"
    if interval is None:
        return shown, "-"
    return shown, f"{factor * interval[0]:.2f} to {factor * interval[1]:.2f}"


def _shown_ratios(results: dict[str, Any]) -> str:
    ratios = {"all": results["ratio"], **results["ratio_by_modality"]}
    shown = []
    for name, value in ratios.items():
        interval = results["ratio_intervals_95"][name]
        limits = f" ({interval[0]:.2f} to {interval[1]:.2f})" if interval else ""
        shown.append(f"{name} -" if value is None else f"{name} {value:.2f}{limits}")
    return ", ".join(shown)


def write_samples(folder: Path, samples: Sequence[Sample]) -> Path:
    """`samples.jsonl`, a line a question; whole or not there."""
    return write_lines(folder / "samples.jsonl", [sample.to_row() for sample in samples])


def write_results(folder: Path, results: dict[str, Any]) -> Path:
    return write_json(folder / "results.json", results)


def write_json(path: Path, value: Any) -> Path:
    """A JSON file, whole or not there."""
    _write(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")
    return path


def write_lines(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """A JSONL file, whole or not there."""
    _write(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(path) as beside, beside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise UserError(
            f"'{path}' cannot be written ({error}); make room there, or name another folder with "
            "--output (what was asked is kept)"
        ) from error
