"""The commands `python -m eval long` and `python -m eval perplexity`."""

from __future__ import annotations

import argparse
import functools
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from conceptmoe_vl.asking import check_model_folder, check_reachable, load_pretrained
from conceptmoe_vl.errors import UserError
from eval.long_context import figures, perplexity, summary
from eval.long_context.family import (
    GENERATORS,
    PREFIX,
    Plan,
    length_name,
    long_tasks,
    read_depths,
    read_length,
    read_lengths,
)
from eval.long_context.haystack import load_haystack
from eval.long_context.image_tasks import load_pictures
from eval.program import check_counts, default_output, evaluate_tasks
from eval.report import write_results

TEXT_TASKS = [name for name, generator in GENERATORS.items() if not generator.pictures]


def ask_long(arguments: argparse.Namespace) -> None:
    """Asks the tasks at all lengths and depths; writes heat maps and a summary beside the results.

    Raises:
        UserError: an argument, the haystack or the model cannot be used.
    """
    check_counts(arguments, "samples", "batch_size")
    if not 0 < arguments.threshold <= 1:
        raise UserError(f"--threshold is {arguments.threshold}; give a score above 0, at most 1")
    if arguments.figures:
        figures.check_matplotlib()
    lengths, names = read_lengths(arguments.lengths), _task_names(arguments.tasks)
    plan = Plan(
        lengths=lengths,
        grid=read_depths(arguments.depths),
        samples=arguments.samples,
        seed=arguments.seed,
        haystack=arguments.haystack,
        pictures=load_pictures(Path(arguments.images)) if arguments.images else None,
    )
    load_haystack(plan.haystack, plan.seed)  # refused before the model is loaded
    # What the common program reads beside these.
    values = {**vars(arguments), "data": None, "limit": None}
    evaluate_tasks(
        argparse.Namespace(**values),
        lambda processor: long_tasks(processor, names, plan),
        lambda output: _summarise(output, names, plan, arguments),
    )


def _task_names(text: str) -> list[str]:
    """Names of tasks, without `long/`; `all`, or `text` for those that need no pictures."""
    groups = {"all": list(GENERATORS), "text": TEXT_TASKS}
    parts = [part.strip() for part in text.split(",") if part.strip()]
    names = [name.removeprefix(PREFIX) for part in parts for name in groups.get(part, [part])]
    if not names:
        raise UserError(f"--tasks names no task; choose among: all, text, {', '.join(GENERATORS)}")
    return list(dict.fromkeys(names))


def _summarise(output: Path, names: list[str], plan: Plan, arguments: argparse.Namespace) -> None:
    tasks: dict[str, dict[int, summary.LengthSummary]] = {}
    folder = output / PREFIX
    for name in names:
        tasks[name] = {}
        for length in plan.lengths:
            path = folder / f"{name}@{length_name(length)}" / "samples.jsonl"
            tasks[name][length] = summary.summarise_length(summary.read_samples(path))
        if arguments.figures:
            figures.draw_heat_map(name, tasks[name], folder / f"{name}.png")
    settings = {
        "model": str(arguments.model),
        "compression": arguments.compression,
        "depths": list(plan.grid),
        "samples": plan.samples,
        "seed": plan.seed,
        "haystack": plan.haystack,
        "images": arguments.images,
    }
    results = summary.to_json(tasks, arguments.threshold) | {"settings": settings}
    path = write_results(folder, results)
    summary.print_summary(tasks, arguments.threshold, Console())
    print(f"summary: {path}")
    if arguments.figures:
        print(f"heat maps: {folder / '*.png'}")


def measure_perplexity(arguments: argparse.Namespace) -> None:
    """The loss over position on long documents, for one or several compressions.

    Raises:
        UserError: an argument, the texts or the model cannot be used.
    """
    check_counts(arguments, "windows", "batch_size")
    length = read_length(arguments.length)
    ratios = _compressions(arguments.compression)
    if arguments.figures:
        figures.check_matplotlib()
    check_model_folder(arguments.model)
    texts = perplexity.load_texts(arguments.texts)
    model, processor = load_pretrained(arguments.model, arguments.device)
    for ratio in ratios.values():
        check_reachable(model, ratio)
    windows, short = perplexity.cut_windows(texts, processor, length, arguments.windows)
    curves = {}
    errors = Console(stderr=True)
    with Progress(console=errors, disable=not errors.is_terminal) as progress:
        for name, ratio in ratios.items():
            bar = progress.add_task(name, total=len(windows))
            curves[name] = perplexity.measure(
                model,
                processor,
                windows,
                arguments.batch_size,
                ratio,
                functools.partial(progress.advance, bar),
            )
    output = Path(arguments.output) if arguments.output else default_output(Path(arguments.model))
    documents = len({window.document for window in windows})
    results = {
        "model": str(arguments.model),
        "texts": arguments.texts,
        "length": length,
        "documents": documents,
        "documents_too_short": short,
        "windows": len(windows),
        "curves": {name: _curve_json(curve) for name, curve in curves.items()},
    }
    path = write_results(output / "perplexity", results)
    perplexity.print_curves(curves, Console())
    print(f"{len(windows)} windows of {documents} documents, {short} documents are shorter")
    print(f"results: {path}")
    if arguments.figures:
        picture = path.with_suffix(".png")
        title = f"{length} tokens, {len(windows)} windows of {documents} documents"
        figures.draw_positions(perplexity.points(curves), title, picture)
        print(f"figure: {picture}")


def _compressions(text: str | None) -> dict[str, float | None]:
    """Compressions by the names of their curves; `default` is what the model was trained for."""
    found: dict[str, float | None] = {}
    for part in (text or "default").split(","):
        word = part.strip()
        if word == "default":
            found[word] = None
            continue
        try:
            found[f"R = {float(word):g}"] = float(word)
        except ValueError as error:
            raise UserError(
                f"--compression: '{word}' is no ratio; give numbers of 1 or more and default, "
                "with commas"
            ) from error
    return found


def _curve_json(curve: perplexity.Curve) -> dict[str, Any]:
    buckets = [bucket.to_json() for bucket in curve.buckets]
    return {"tokens_per_concept": curve.ratio, "buckets": buckets}
