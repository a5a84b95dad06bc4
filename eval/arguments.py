"""Arguments that several of the programs of `python -m eval` take. Imports no torch."""

from __future__ import annotations

import argparse


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """--model, --output, --device."""
    parser.add_argument("--model", required=True, metavar="DIR", help="model folder (RUN/model)")
    parser.add_argument(
        "--output",
        metavar="DIR",
        help="folder of the results (default: RUN/eval beside RUN/model, otherwise "
        "eval_results/NAME)",
    )
    parser.add_argument("--device", help="torch device (default: cuda if there is one, else cpu)")


def add_data_options(parser: argparse.ArgumentParser) -> None:
    """--tasks, --data, --limit."""
    parser.add_argument(
        "--tasks",
        required=True,
        metavar="NAMES",
        help="tasks, with commas: easy_vqa, or YAML files that describe one",
    )
    parser.add_argument(
        "--data", metavar="PATH", help="folder or file of the data (default: the task's own)"
    )
    parser.add_argument("--limit", type=int, metavar="N", help="ask the first N questions only")


def add_asking_options(parser: argparse.ArgumentParser, batch_size: int = 64) -> None:
    """--batch-size, --compression, --prefix-cache, --no-cache."""
    parser.add_argument(
        "--batch-size",
        type=int,
        default=batch_size,
        metavar="N",
        help="questions at once, fewer where they are long (default: %(default)s)",
    )
    parser.add_argument(
        "--compression",
        type=float,
        metavar="R",
        help="tokens per concept; 1 compresses nothing (default: what the model was trained for)",
    )
    add_prefix_cache(parser)
    parser.add_argument(
        "--no-cache",
        action="store_true",
        help="ask everything anew, also what OUTPUT/replies holds of this model and these settings",
    )


def add_prefix_cache(parser: argparse.ArgumentParser) -> None:
    """--prefix-cache."""
    parser.add_argument(
        "--prefix-cache",
        type=int,
        default=1024,
        metavar="MIB",
        help="memory for what questions share: examples, instructions, an image; 0 computes every "
        "prompt anew and in one pass (default: %(default)s)",
    )
