"""From tasks to `chunks.json` and `chunks.html`."""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import Progress

from conceptmoe_vl.calibration import target_of
from conceptmoe_vl.chunk_pictures import ShownPrompt, page_environment, show_prompt
from conceptmoe_vl.compression import MODALITIES
from conceptmoe_vl.errors import UserError
from conceptmoe_vl.files import written_whole
from conceptmoe_vl.training.run_files import read_lines
from eval.chunks.statistics import Traced, summarise
from eval.chunks.tracing import trace_questions
from eval.processes import World
from eval.program import Loaded, evaluate_loaded, load_questions
from eval.tasks import get_tasks

Item = TypeVar("Item")


def make_report(
    model: Any, processor: Any, arguments: argparse.Namespace, ratios: Sequence[float]
) -> None:
    """Evaluates at every ratio, traces prompts at one, and writes the report.

    Raises:
        UserError: the data cannot be used, matplotlib is missing, or a file cannot be written.
    """
    draw_all = _figures()
    loaded = load_questions(get_tasks(arguments.tasks), arguments)
    asked = dict.fromkeys([arguments.compression, *ratios])
    scored = {ratio: _evaluated(model, processor, loaded, arguments, ratio) for ratio in asked}
    traced, shown = _traced(model, processor, loaded, arguments, scored[arguments.compression])
    method = summarise(traced)
    results = {
        "model": str(arguments.model),
        "compression": arguments.compression,
        "method": method,
        "drift": drift(model, method["ratio_by"]["modality"], Path(arguments.model)),
        "dial": {
            name: [dial_row(ratio, scored[ratio][name]["results"]) for ratio in asked]
            for name in scored[arguments.compression]
        },
    }
    _write(arguments.output / "chunks", results, draw_all(results), shown)


def _figures() -> Any:
    try:
        from eval.chunks.figures import draw_all
    except ModuleNotFoundError as error:
        raise UserError(
            "the report's figures need matplotlib: pip install 'conceptmoe-vl[figures]'"
        ) from error
    return draw_all


def _evaluated(
    model: Any,
    processor: Any,
    loaded: Sequence[Loaded],
    arguments: argparse.Namespace,
    ratio: float | None,
) -> dict[str, dict[str, Any]]:
    """By task: `results` as in results.json, and `scores` by key, at one compression."""
    folder = arguments.output if ratio is None else arguments.output / f"R{ratio:g}"
    here = argparse.Namespace(**{**vars(arguments), "compression": ratio})
    evaluate_loaded(model, processor, loaded, here, folder, World())
    found = {}
    for task, _ in loaded:
        results = json.loads((folder / task.name / "results.json").read_text("utf-8"))
        with (folder / task.name / "samples.jsonl").open(encoding="utf-8") as lines:
            rows = [json.loads(line) for line in lines]
        scores = {row["key"]: row["score"] for row in rows}
        found[task.name] = {"results": results, "scores": scores}
    return found


def _traced(
    model: Any,
    processor: Any,
    loaded: Sequence[Loaded],
    arguments: argparse.Namespace,
    scored: dict[str, dict[str, Any]],
) -> tuple[list[Traced], list[ShownPrompt]]:
    """Prompts of all tasks, and drawings of some of them."""
    traced: list[Traced] = []
    shown: list[ShownPrompt] = []
    errors = Console(stderr=True)
    with Progress(console=errors, disable=not errors.is_terminal) as progress:
        for task, questions in loaded:
            chosen = spread(questions, arguments.prompts)
            bar = progress.add_task(f"chunks of {task.name}", total=len(chosen))
            found = trace_questions(
                model,
                processor,
                task.name,
                chosen,
                scored[task.name]["scores"],
                arguments.compression,
                functools.partial(progress.advance, bar),
            )
            traced += found
            shown += [
                show_prompt(
                    model,
                    processor,
                    item.question.messages,
                    f"{task.name}: {item.question.key}",
                    arguments.compression,
                    item.trace,
                )
                for item in spread(found, arguments.pictures)
            ]
    return traced, shown


def spread(items: Sequence[Item], most: int) -> list[Item]:
    """At most so many items, evenly spread from the first to the last."""
    if len(items) <= most:
        return list(items)
    return [items[number * len(items) // most] for number in range(most)]


def dial_row(asked: float | None, results: dict[str, Any]) -> dict[str, Any]:
    """A point of the curve: the headline figure beside what the answers cost."""
    metric, figure = next(iter(results["figures"].items()))
    return {
        "asked": asked,
        "ratio": results["ratio"],
        "ratio_by_modality": results["ratio_by_modality"],
        "metric": metric,
        "score": figure["value"],
        "interval_95": figure["interval_95"],
        "gigaflops": results["flops_per_question"] / 1e9,
        "cache_kilobytes": results["cache_bytes_per_question"] / 1e3,
        "questions_per_second": results["speed"]["questions_per_second"] or None,
    }


def drift(model: Any, measured: dict[str, dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """Ratios measured here against what training asked for and where it ended."""
    ended = _last_metrics(folder.resolve().parent / "metrics.jsonl")
    rows = []
    for name in ("all", *MODALITIES):
        row = measured.get(name)
        if row is None:
            continue
        target = target_of(model.config.chunk, name)
        rows.append(
            {
                "modality": name,
                **row,
                "target": target,
                "training": ended.get("ratio" if name == "all" else f"ratio_{name}"),
                "drift": row["ratio"] / target - 1 if target and row["ratio"] else None,
            }
        )
    return rows


def _last_metrics(path: Path) -> dict[str, Any]:
    """The last line of a run's metrics; nothing for a model that lies in no run."""
    try:
        return (read_lines(path) or [{}])[-1]
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}") from error


def _write(
    folder: Path, results: dict[str, Any], figures: list[str], shown: list[ShownPrompt]
) -> None:
    environment = page_environment(Path(__file__).with_name("templates"))
    environment.globals |= {"number": _number, "interval": _interval}
    page = environment.get_template("report.html").render(
        results=results, figures=figures, prompts=shown
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in (
            ("chunks.json", json.dumps(results, indent=2, ensure_ascii=False) + "\n"),
            ("chunks.html", page),
        ):
            with written_whole(folder / name) as beside:
                beside.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise UserError(f"'{error.filename}' cannot be written ({error.strerror})") from error
    print(f"chunks: {folder / 'chunks.html'}")


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _interval(ends: Sequence[float] | None, digits: int = 2) -> str:
    return "-" if ends is None else f"{ends[0]:.{digits}f} to {ends[1]:.{digits}f}"
