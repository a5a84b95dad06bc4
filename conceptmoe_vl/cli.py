"""The command `conceptmoe-vl`. A command is a function from parsed arguments to an exit status.

`ask` answers a question about images and prints the answer alone on standard output. Other
packages add commands by an entry point of the group `conceptmoe_vl.commands`: a function that takes
the subparsers.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import conceptmoe_vl_runtime
from conceptmoe_vl.errors import UserError

DEFAULT_MODEL = "runs/easy_vqa/model"  # what `make quickstart` trains
COMMANDS = "conceptmoe_vl.commands"
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


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="conceptmoe-vl", description="ConceptMoE-VL")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    command = commands.add_parser("ask", help="answer a question about images", description=ASK)
    add_ask_arguments(command)
    command.set_defaults(run=ask)
    for entry in importlib.metadata.entry_points(group=COMMANDS):
        entry.load()(commands)
    arguments = parser.parse_args(argv)
    return run_program(lambda: arguments.run(arguments))


if __name__ == "__main__":
    sys.exit(main())
