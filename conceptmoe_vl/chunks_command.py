"""`conceptmoe-vl chunks`: what the model merges in a picture and a question."""

from __future__ import annotations

import argparse
from pathlib import Path

import conceptmoe_vl_runtime
from conceptmoe_vl.errors import UserError
from conceptmoe_vl.files import written_whole

DESCRIPTION = (
    "Draw the concepts of a prompt: pictures with their regions outlined, in reading order and in "
    "the image plane side by side, and the text with its chunks shaded, as one HTML page."
)


def add_command(commands: argparse._SubParsersAction, default_model: str) -> None:
    command = commands.add_parser(
        "chunks", help="draw what is merged in a picture and a question", description=DESCRIPTION
    )
    command.add_argument("images", nargs="*", metavar="IMAGE", help="image files, in their order")
    command.add_argument("question", help="the question, in quotes")
    command.add_argument(
        "--model", default=default_model, metavar="DIR", help="model folder (default: %(default)s)"
    )
    command.add_argument("--device", help="torch device (default: cuda if there is one, else cpu)")
    command.add_argument(
        "--compression",
        type=float,
        metavar="R",
        help="tokens per concept (default: what the model was trained for)",
    )
    command.add_argument(
        "--out",
        type=Path,
        default=Path("chunks.html"),
        metavar="FILE",
        help="page to write (default: %(default)s)",
    )
    command.add_argument(
        "--png", type=Path, metavar="FILE", help="also the pictures alone, as FILE, FILE-2, …"
    )
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Writes the page, and the pictures where they are wanted; prints the facts.

    Raises:
        UserError: no model folder, an image that cannot be decoded, a file that cannot be written.
    """
    conceptmoe_vl_runtime.setup(quiet=True)
    from conceptmoe_vl.asking import load_pretrained, question_messages
    from conceptmoe_vl.chunk_pictures import page_of, show_prompt, side_by_side
    from conceptmoe_vl.images import decode_image

    if not arguments.question.strip():
        raise UserError("the question is empty; give it in quotes as the last argument")
    for image in arguments.images:
        decode_image(image)
    model, processor = load_pretrained(arguments.model, arguments.device)
    messages = question_messages(arguments.images, arguments.question)
    shown = show_prompt(model, processor, messages, arguments.question, arguments.compression)
    page = page_of(str(arguments.model), [shown])
    try:
        with written_whole(arguments.out) as beside:
            beside.write_text(page, encoding="utf-8", errors="backslashreplace")
        for number, drawings in enumerate(shown.drawings if arguments.png else (), 1):
            name = arguments.png
            if number > 1:
                name = name.with_stem(f"{name.stem}-{number}")
            with written_whole(name) as beside:
                side_by_side(drawings).save(beside, format="PNG")
    except OSError as error:
        raise UserError(f"'{error.filename}' cannot be written ({error.strerror})") from error
    print(", ".join(f"{what} {value}" for what, value in shown.facts))
    print(f"page: {arguments.out}")
    return 0
