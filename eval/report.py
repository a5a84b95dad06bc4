"""What an evaluation leaves behind: a table, `results.json` and `samples.jsonl`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table

from eval.metrics import wilson_interval
from eval.runner import MODALITIES, Evaluation, Sample


@contextmanager
def written_whole(path: Path) -> Iterator[TextIO]:
    """A text file that appears under its name only when the block has ended well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".partial")
    try:
        with beside.open("w", encoding="utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def summarise(evaluation: Evaluation) -> dict[str, Any]:
    """The figures of `results.json`: accuracies with 95 % intervals, ratios, throughput."""
    samples = evaluation.samples
    kinds = sorted({sample.question.kind for sample in samples})
    seconds = evaluation.seconds
    prompt_tokens = sum(sample.answer.prompt_tokens for sample in samples)
    ratios = evaluation.ratios
    return {
        "task": evaluation.task.name,
        "description": evaluation.task.description,
        **_accuracy(samples),
        "official_size": evaluation.task.official_size,
        "by_kind": {
            kind: _accuracy(sample for sample in samples if sample.question.kind == kind)
            for kind in kinds
        },
        "empty_answers": sum(not sample.parsed for sample in samples),
        "ratio": ratios.ratio(),
        "ratio_by_modality": {name: ratios.ratio(name) for name in MODALITIES},
        "prompt_tokens": prompt_tokens,
        "answer_tokens": sum(sample.answer.answer_tokens for sample in samples),
        "seconds": seconds,
        "questions_per_second": len(samples) / seconds,
        "prompt_tokens_per_second": prompt_tokens / seconds,
    }


def _accuracy(samples: Iterable[Sample]) -> dict[str, Any]:
    scores = [sample.score for sample in samples]
    right = sum(scores)
    return {
        "count": len(scores),
        "right": right,
        "accuracy": right / len(scores) if scores else None,
        "interval_95": list(wilson_interval(right, len(scores))),
    }


def print_report(results: dict[str, Any], console: Console) -> None:
    """The table of one task."""
    table = Table(title=results["description"], title_justify="left")
    table.add_column("questions")
    for name in ("count", "right", "accuracy", "95 % interval"):
        table.add_column(name, justify="right")
    for kind, part in results["by_kind"].items():
        table.add_row(kind, *_cells(part))
    table.add_section()
    table.add_row("all", *_cells(results), style="bold")
    console.print(table)
    ratios = {"all": results["ratio"], **results["ratio_by_modality"]}
    shown = ", ".join(f"{name} {_number(value)}" for name, value in ratios.items())
    console.print(f"tokens per concept: {shown}")
    console.print(
        f"{results['questions_per_second']:.1f} questions and "
        f"{results['prompt_tokens_per_second']:.0f} prompt tokens a second, "
        f"{results['seconds']:.0f} s"
    )
    official = results["official_size"]
    if official is not None and results["count"] != official:
        console.print(
            f"note: {results['count']} of the {official} official questions: no official score"
        )
    if results["empty_answers"]:
        console.print(f"note: {results['empty_answers']} answers are empty and count as wrong")


def _cells(part: dict[str, Any]) -> tuple[str, str, str, str]:
    low, high = part["interval_95"]
    return (
        f"{part['count']}",
        f"{part['right']:.0f}",
        f"{100 * part['accuracy']:.2f} %",
        f"{100 * low:.2f} to {100 * high:.2f}",
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def write_results(folder: Path, results: dict[str, Any]) -> Path:
    path = folder / "results.json"
    with written_whole(path) as file:
        json.dump(results, file, indent=2, ensure_ascii=False)
        file.write("\n")
    return path


def write_row(file: TextIO, row: dict[str, Any]) -> None:
    file.write(json.dumps(row, ensure_ascii=False) + "\n")
