"""python -m eval --model DIR --tasks easy_vqa: asks, scores and writes everything down."""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import conceptmoe_vl_runtime

# torch is imported within the functions, after conceptmoe_vl_runtime.setup().


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m eval", description=__doc__)
    parser.add_argument("--model", required=True, metavar="DIR", help="model folder (RUN/model)")
    parser.add_argument(
        "--tasks", required=True, metavar="NAMES", help="tasks, with commas: easy_vqa"
    )
    parser.add_argument(
        "--data", metavar="DIR", help="folder of the shards (default: the task's own)"
    )
    parser.add_argument(
        "--batch-size",
        type=int,
        default=64,
        metavar="N",
        help="questions at once (default: %(default)s)",
    )
    parser.add_argument(
        "--compression",
        type=float,
        metavar="R",
        help="tokens per concept; 1 compresses nothing (default: what the model was trained for)",
    )
    parser.add_argument("--limit", type=int, metavar="N", help="ask the first N questions only")
    parser.add_argument(
        "--output",
        metavar="DIR",
        help="folder of the results, one folder a task in it (default: RUN/eval beside RUN/model, "
        "otherwise eval_results/NAME)",
    )
    parser.add_argument("--device", help="torch device (default: cuda if there is one, else cpu)")
    return parser


def default_output(model: Path) -> Path:
    """`RUN/eval` for a run's own model; other people's folders are left alone."""
    model = model.resolve()
    if (model.parent / "metrics.jsonl").is_file():
        return model.parent / "eval"
    return Path("eval_results") / model.name


def evaluate_tasks(arguments: argparse.Namespace) -> None:
    from conceptmoe_vl.asking import check_model_folder, check_reachable, load_pretrained
    from conceptmoe_vl.errors import UserError
    from eval.tasks import get_tasks

    for name in ("batch_size", "limit"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} is {value}; give 1 or more")
    # What can be refused without the seconds that a model takes to load is refused first.
    tasks = get_tasks(arguments.tasks)
    check_model_folder(arguments.model)
    questions = {task.name: task.load(Path(arguments.data or task.default_data)) for task in tasks}
    model, processor = load_pretrained(arguments.model, arguments.device)
    check_reachable(model, arguments.compression)
    output = Path(arguments.output) if arguments.output else default_output(Path(arguments.model))
    for task in tasks:
        _evaluate_task(task, questions[task.name], model, processor, arguments, output / task.name)


def _evaluate_task(
    task: Any,
    questions: Sequence,
    model: Any,
    processor: Any,
    arguments: argparse.Namespace,
    folder: Path,
) -> None:
    from rich.console import Console
    from rich.progress import Progress

    from eval.report import print_report, summarise, write_results, write_row, written_whole
    from eval.runner import evaluate

    questions = questions[: arguments.limit]
    errors = Console(stderr=True)
    with (
        written_whole(folder / "samples.jsonl") as file,
        Progress(console=errors, disable=not errors.is_terminal) as progress,
    ):
        bar = progress.add_task(task.name, total=len(questions))

        def on_batch(samples: list) -> None:
            for sample in samples:
                write_row(file, sample.to_row())
            progress.advance(bar, len(samples))

        evaluation = evaluate(
            model,
            processor,
            task,
            questions,
            arguments.batch_size,
            on_batch,
            arguments.compression,
        )
    results = summarise(evaluation) | _settings(model, arguments, task)
    path = write_results(folder, results)
    print_report(results, Console())
    print(f"results: {path}\nevery prompt and answer: {folder / 'samples.jsonl'}")


def _settings(model: Any, arguments: argparse.Namespace, task: Any) -> dict[str, Any]:
    import torch

    return {
        "model": str(arguments.model),
        "data": str(arguments.data or task.default_data),
        "limit": arguments.limit,
        "batch_size": arguments.batch_size,
        "max_new_tokens": task.max_new_tokens,
        "compression": arguments.compression,
        "device": str(model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "versions": {
            name: importlib.metadata.version(name) for name in ("torch", "transformers", "timm")
        },
    }


def main(argv: list[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    conceptmoe_vl_runtime.setup()
    from conceptmoe_vl.cli import run_program

    return run_program(lambda: evaluate_tasks(arguments))


if __name__ == "__main__":
    sys.exit(main())
