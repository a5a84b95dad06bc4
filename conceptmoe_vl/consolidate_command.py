"""The arguments of `conceptmoe-vl consolidate`; what it needs is imported when it runs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import conceptmoe_vl_runtime

_CONSOLIDATE = (
    "Writes the model of a training checkpoint, of any engine and ZeRO stage, as a folder that "
    "from_pretrained loads: on a CPU, in one process, and checked against the checkpoint."
)


def add_command(commands: Any) -> None:
    """Adds `consolidate` to the subparsers of `conceptmoe-vl`."""
    parser = commands.add_parser(
        "consolidate", help="write the model of a training checkpoint", description=_CONSOLIDATE
    )
    parser.add_argument("checkpoint", metavar="RUN/checkpoints/step-N", help="the checkpoint")
    parser.add_argument("out", metavar="OUT", help="folder to write; must not exist")
    parser.add_argument(
        "--max-shard-size",
        default="5GB",
        metavar="SIZE",
        help="largest file of weights, such as 500MB (default: %(default)s)",
    )
    parser.add_argument(
        "--adapter",
        action="store_true",
        help="write the adapters of training.lora alone too, to OUT/adapter, for PeftModel",
    )
    parser.set_defaults(run=consolidate)


def consolidate(arguments: argparse.Namespace) -> int:
    """Runs the command.

    Raises:
        UserError: see `training.consolidate`.
    """
    conceptmoe_vl_runtime.setup(quiet=True)
    from conceptmoe_vl.conversion.command import shard_bytes
    from conceptmoe_vl.training.consolidate import consolidate as write

    size = shard_bytes(arguments.max_shard_size)
    write(Path(arguments.checkpoint), Path(arguments.out), size, arguments.adapter)
    print(f"model written to {arguments.out}")
    return 0
