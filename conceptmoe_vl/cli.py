"""The command `conceptmoe-vl`. A command is a function from parsed arguments to an exit status.

`ask` answers a question about images and prints the answer alone on standard output; `chunks` draws
what is merged in them; `flops` counts parameters, FLOPs and bytes of a configuration; `plan`
matches a ConceptMoE configuration to a plain MoE; `convert`, `export` and `losslessness` bring
other checkpoints in and out. Other packages add
commands by an entry point of the group `conceptmoe_vl.commands`: a function that takes the
subparsers.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import conceptmoe_vl_runtime
from conceptmoe_vl import chunks_command, consolidate_command, plan_command
from conceptmoe_vl.conversion import command as conversion
from conceptmoe_vl.errors import UserError

DEFAULT_MODEL = "runs/easy_vqa/model"  # what `make quickstart` trains
COMMANDS = "conceptmoe_vl.commands"
FLOPS = "Print a model's parameters, FLOPs and bytes by component, without building the model."
ASK = "Answer a question about images; the answer stands alone on standard output."


def run_program(program: Callable[[], int | None]) -> int:
    """Runs a program; a user's mistake becomes one line on standard error and exit status 2."""
    try:
        return program() or 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130


def add_ask_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "images", nargs="*", metavar="IMAGE", help="image files, in the order the model sees them"
    )
    parser.add_argument("question", help="the question, in quotes")
    parser.add_argument(
        "--model", default=DEFAULT_MODEL, metavar="DIR", help="model folder (default: %(default)s)"
    )
    parser.add_argument("--device", help="torch device (default: cuda if there is one, else cpu)")
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        default=64,
        metavar="N",
        help="longest answer, in tokens (default: %(default)s)",
    )
    parser.add_argument(
        "--compression",
        type=float,
        metavar="R",
        help="tokens per concept; 1 compresses nothing, others need 'conceptmoe-vl calibrate' once "
        "(default: what the model was trained for)",
    )


def ask(arguments: argparse.Namespace) -> int:
    """Prints the answer to one question alone on standard output.

    Raises:
        UserError: no model folder, no such image, an image that cannot be decoded, no question.
    """
    conceptmoe_vl_runtime.setup(quiet=True)
    from conceptmoe_vl.asking import answer_conversations, load_pretrained, question_messages
    from conceptmoe_vl.images import decode_image

    if not arguments.question.strip():
        raise UserError("the question is empty; give it in quotes as the last argument")
    if not arguments.images and Path(arguments.question).is_file():
        raise UserError(f"'{arguments.question}' is a file; give the question after it, in quotes")
    if arguments.max_new_tokens < 1:
        raise UserError(f"--max-new-tokens is {arguments.max_new_tokens}; give 1 or more")
    # Undecodable pictures are refused before the seconds that a model takes to load.
    for image in arguments.images:
        decode_image(image)
    model, processor = load_pretrained(arguments.model, arguments.device)
    messages = question_messages(arguments.images, arguments.question)
    (answer,) = answer_conversations(
        model, processor, [messages], arguments.max_new_tokens, arguments.compression
    )
    print(answer.text)
    return 0


def add_flops_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config",
        metavar="CONFIG_OR_MODEL",
        help="a YAML file with the model's sections, a config.json, or a model folder",
    )
    parser.add_argument(
        "--tokens", type=int, default=4096, metavar="N", help="tokens (default: %(default)s)"
    )
    parser.add_argument(
        "--ratio", type=float, metavar="R", help="tokens per concept (default: the target)"
    )
    parser.add_argument(
        "--images", type=int, default=0, metavar="N", help="images among the tokens (default: 0)"
    )
    parser.add_argument(
        "--batch", type=int, default=1, metavar="N", help="rows in decoding (default: 1)"
    )
    parser.add_argument(
        "--dtype",
        choices=["bfloat16", "float32"],
        default="bfloat16",
        help="(default: %(default)s)",
    )
    parser.add_argument("--table1", action="store_true", help="print Table 1 of the paper as well")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")


def flops(arguments: argparse.Namespace) -> int:
    """Prints what a configuration counts.

    Raises:
        UserError: no such configuration, or a figure out of range.
    """
    conceptmoe_vl_runtime.setup(quiet=True)
    from conceptmoe_vl.flops_report import print_figures

    return print_figures(arguments)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="conceptmoe-vl", description="ConceptMoE-VL")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    command = commands.add_parser("ask", help="answer a question about images", description=ASK)
    add_ask_arguments(command)
    command.set_defaults(run=ask)
    command = commands.add_parser("flops", help="count parameters, FLOPs, bytes", description=FLOPS)
    add_flops_arguments(command)
    command.set_defaults(run=flops)
    plan_command.add_command(commands)
    chunks_command.add_command(commands, DEFAULT_MODEL)
    consolidate_command.add_command(commands)
    conversion.add_commands(commands)
    words = sys.argv[1:] if argv is None else list(argv)
    if not words or words[0] not in commands.choices:
        conceptmoe_vl_runtime.setup(quiet=True)  # what they import may import torch
        for entry in importlib.metadata.entry_points(group=COMMANDS):
            entry.load()(commands)
    arguments = parser.parse_args(argv)
    return run_program(lambda: arguments.run(arguments))


if __name__ == "__main__":
    sys.exit(main())
