"""The arguments of `python -m eval chunks`."""

from __future__ import annotations

import argparse
from pathlib import Path

import conceptmoe_vl_runtime
from eval.arguments import add_asking_options, add_data_options, add_model_options


def chunks_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m eval chunks",
        description="What the chunking does on the prompts of tasks: ratios by modality, kind, "
        "source and place, chunk sizes, confidence, what is merged, scores by compression, and "
        "pictures of prompts, as OUTPUT/chunks/chunks.json and chunks.html",
    )
    add_model_options(parser)
    add_data_options(parser)
    add_asking_options(parser)
    parser.add_argument(
        "--compressions",
        metavar="LIST",
        default="",
        help="ask all questions at these ratios too, with commas: the curve to choose R from; "
        "others than 1 need 'conceptmoe-vl calibrate' once",
    )
    parser.add_argument(
        "--prompts",
        type=int,
        default=500,
        metavar="N",
        help="prompts of each task that are traced, spread over it (default: %(default)s)",
    )
    parser.add_argument(
        "--pictures",
        type=int,
        default=8,
        metavar="N",
        help="of these, prompts of each task that are drawn (default: %(default)s)",
    )
    return parser


def run(arguments: argparse.Namespace) -> None:
    """Asks, traces, draws and writes.

    Raises:
        UserError: an argument, the data or the model cannot be used.
    """
    from conceptmoe_vl.asking import check_reachable, load_pretrained
    from conceptmoe_vl.errors import UserError
    from conceptmoe_vl.training.launch_environment import read_number
    from eval.chunks.program import make_report
    from eval.program import check_counts, default_output

    if read_number("WORLD_SIZE", 1) > 1:
        raise UserError("python -m eval chunks is one process; start it without torchrun")
    check_counts(arguments, "prompts", "batch_size", "limit")
    check_counts(arguments, "pictures", "prefix_cache", least=0)
    ratios = _ratios(arguments.compressions)
    arguments.output = Path(arguments.output or default_output(Path(arguments.model)))
    model, processor = load_pretrained(arguments.model, arguments.device)
    for ratio in (arguments.compression, *ratios):
        check_reachable(model, ratio)
    make_report(model, processor, arguments, ratios)


def _ratios(text: str) -> list[float]:
    from conceptmoe_vl.errors import UserError

    try:
        return [float(part) for part in text.split(",") if part.strip()]
    except ValueError as error:
        raise UserError(
            f"--compressions is '{text}'; give ratios with commas, such as 1,1.5,2"
        ) from error


def main(argv: list[str] | None = None) -> int:
    arguments = chunks_parser().parse_args(argv)
    conceptmoe_vl_runtime.setup()
    from conceptmoe_vl.cli import run_program

    return run_program(lambda: run(arguments))
