"""One evaluation from arguments to files: what `python -m eval` does behind its parser."""

from __future__ import annotations

import argparse
import importlib.metadata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

import conceptmoe_vl
from conceptmoe_vl.asking import check_model_folder, check_reachable, load_pretrained
from conceptmoe_vl.errors import UserError
from conceptmoe_vl.prefixes import PrefixCache
from eval.efficiency import mean_cost
from eval.processes import World, joined
from eval.replies import ReplyStore, checksum, folder_checksum
from eval.report import Speed, print_report, summarise, write_results, write_samples
from eval.runner import Asked, Asker, Sample, to_sample
from eval.tasks import Question, Task, get_tasks

Loaded = tuple[Task, Sequence[Question]]
_LIBRARIES = ("torch", "transformers", "timm", "numpy", "tokenizers")


@dataclass(frozen=True)
class _Run:
    """What all tasks of an evaluation share.

    Fields:
        identity: what an answer depends on beside its question; JSON.
    """

    arguments: argparse.Namespace
    world: World
    asker: Asker
    output: Path
    identity: dict[str, Any]


def default_output(model: Path) -> Path:
    """`RUN/eval` for a run's own model; other people's folders are left alone."""
    model = model.resolve()
    if (model.parent / "metrics.jsonl").is_file():
        return model.parent / "eval"
    return Path("eval_results") / model.name


def check_counts(arguments: argparse.Namespace, *names: str, least: int = 1) -> None:
    """Raises `UserError` where one of these arguments is given and too small."""
    for name in names:
        value = getattr(arguments, name)
        if value is not None and value < least:
            raise UserError(f"--{name.replace('_', '-')} is {value}; give {least} or more")


def evaluate_tasks(
    arguments: argparse.Namespace,
    make_tasks: Callable[[Any], Sequence[Task]] | None = None,
    finish: Callable[[Path], None] = lambda folder: None,
) -> None:
    """Evaluates every task that the arguments name, in all processes of the launcher.

    Args:
        make_tasks: gives the tasks that depend on the model's processor, instead of
            `arguments.tasks`. Their questions are loaded task by task.
        finish: called at the end with the folder of the results, in the process that writes them.

    Raises:
        UserError: an argument, the data or the model cannot be used, or a question not be asked.
    """
    check_counts(arguments, "batch_size", "limit")
    check_counts(arguments, "prefix_cache", least=0)
    with joined() as world:
        # What can be refused without the seconds that a model takes to load is refused first.
        tasks = [] if make_tasks else get_tasks(arguments.tasks)
        check_model_folder(arguments.model)
        loaded: Iterable[Loaded] = load_questions(tasks, arguments)
        model, processor = load_pretrained(arguments.model, world.device(arguments.device))
        if make_tasks:
            made = make_tasks(processor)
            loaded = ((task, _questions(task, arguments)) for task in made)
        output = Path(arguments.output or default_output(Path(arguments.model)))
        evaluate_loaded(model, processor, loaded, arguments, output, world)
        if world.is_main:
            finish(output)


def evaluate_loaded(
    model: Any,
    processor: Any,
    loaded: Iterable[Loaded],
    arguments: argparse.Namespace,
    output: Path,
    world: World,
) -> None:
    """Asks questions that are there, and writes the results into `output`.

    Raises:
        UserError: the model cannot reach `arguments.compression`, or a question not be asked.
    """
    check_reachable(model, arguments.compression)
    prefixes = PrefixCache(arguments.prefix_cache << 20)
    asker = Asker(model, processor, arguments.batch_size, arguments.compression, prefixes)
    run = _Run(arguments, world, asker, output, _identity(model, arguments, world))
    for task, questions in loaded:
        _evaluate_task(task, questions, run)


def load_questions(tasks: Sequence[Task], arguments: argparse.Namespace) -> list[Loaded]:
    """Tasks with their questions, `arguments.limit` at most.

    Raises:
        UserError: the data cannot be used.
    """
    return [(task, _questions(task, arguments)) for task in tasks]


def _questions(task: Task, arguments: argparse.Namespace) -> Sequence[Question]:
    questions = task.load(Path(arguments.data or task.default_data))[: arguments.limit]
    if not questions:
        raise UserError(f"task '{task.name}' has no questions; name its data with --data")
    keys = {question.key for question in questions}
    if len(keys) != len(questions):
        raise UserError(
            f"task '{task.name}': {len(questions) - len(keys)} questions have the key of another "
            "one; give each its own"
        )
    return questions


def _identity(model: Any, arguments: argparse.Namespace, world: World) -> dict[str, Any]:
    versions = {name: importlib.metadata.version(name) for name in _LIBRARIES}
    values = {
        "model_checksum": folder_checksum(Path(arguments.model)) if world.is_main else None,
        "code_checksum": folder_checksum(Path(conceptmoe_vl.__file__).parent, "**/*.py"),
        "compression": arguments.compression,
        "shared_prefixes": arguments.prefix_cache > 0,
        "device": model.device.type,
        "dtype": str(model.dtype).removeprefix("torch."),
        "versions": {"conceptmoe-vl": conceptmoe_vl.__version__, **versions},
    }
    return world.share(values)


def _evaluate_task(task: Task, questions: Sequence[Question], run: _Run) -> None:
    world, arguments = run.world, run.arguments
    folder = run.output / "replies" / checksum(run.identity)[:16]
    mine = questions[world.rank :: world.size]
    store = ReplyStore(folder, world.rank, reuse=not arguments.no_cache)
    errors = Console(stderr=True)
    shown = world.is_main and errors.is_terminal
    with Progress(console=errors, disable=not shown) as progress:
        bar = progress.add_task(task.name, total=len(mine))
        asked = run.asker.ask(task, mine, store, lambda count: progress.advance(bar, count))
    store.close()
    parts = world.gather(asked)
    if world.is_main:
        _write(task, questions, parts, run)


def _write(task: Task, questions: Sequence[Question], parts: list[Asked], run: _Run) -> None:
    """Samples and results of all processes: rank r asked the questions r, r + size, …"""
    size = len(parts)
    samples = [
        to_sample(task, question, parts[number % size].replies[number // size])
        for number, question in enumerate(questions)
    ]
    keys = [parts[number % size].keys[number // size] for number in range(len(questions))]
    speed = Speed(sum(part.new for part in parts), max(part.seconds for part in parts))
    costs = mean_cost(run.asker.model.config, [sample.reply for sample in samples])
    results = (
        summarise(task, samples, speed)
        | costs
        | {
            "settings": _settings(task, samples, keys, run),
            "run": _run_settings(run),
        }
    )
    folder = run.output / task.name
    lines = write_samples(folder, samples)
    path = write_results(folder, results)
    print_report(results, Console())
    print(f"results: {path}\nevery prompt and answer: {lines}")


def _settings(
    task: Task, samples: Sequence[Sample], keys: Sequence[str], run: _Run
) -> dict[str, Any]:
    """All that the figures depend on."""
    asked = [
        [key, sample.question.key, list(sample.question.references), dict(sample.question.details)]
        for key, sample in zip(keys, samples, strict=True)
    ]
    return {
        "model": str(run.arguments.model),
        "data": str(run.arguments.data or task.default_data),
        "data_checksum": checksum(asked),
        "limit": run.arguments.limit,
        "max_new_tokens": task.max_new_tokens,
        "stop": list(task.stop),
        "scoring": {
            "code_checksum": folder_checksum(Path(__file__).parent, "**/*.py"),
            **task.scoring,
        },
        **run.identity,
        "shared_prefixes": run.identity["shared_prefixes"] and task.shares_prefixes,
    }


def _run_settings(run: _Run) -> dict[str, Any]:
    """What changes the speed alone."""
    return {
        "batch_size": run.arguments.batch_size,
        "processes": run.world.size,
        "threads": torch.get_num_threads(),
        "device": str(run.asker.model.device),
    }
