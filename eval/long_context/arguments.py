"""The arguments of `python -m eval long` and `python -m eval perplexity`. Imports no torch."""

from __future__ import annotations

import argparse

from eval.arguments import add_asking_options, add_model_options


def long_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m eval long",
        description="Needles in long prompts of text and pictures, by length and depth.",
    )
    add_model_options(parser)
    _add_prompt_options(parser)
    add_asking_options(parser, batch_size=16)
    parser.add_argument(
        "--threshold",
        type=float,
        default=0.85,
        metavar="SCORE",
        help="that a length must reach to count as effective (default: %(default)s)",
    )
    _add_figures(parser)
    return parser


def _add_prompt_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tasks",
        default="text",
        metavar="NAMES",
        help="tasks, with commas; text: those without pictures; all (default: %(default)s)",
    )
    parser.add_argument(
        "--lengths",
        default="1k,4k,16k",
        metavar="LENGTHS",
        help="tokens of the prompts, 1k to 128k and more (default: %(default)s)",
    )
    parser.add_argument(
        "--depths",
        default="5",
        metavar="N",
        help="how many depths, or the depths, such as 0,0.5,1.0 (default: %(default)s)",
    )
    parser.add_argument(
        "--samples",
        type=int,
        default=2,
        metavar="N",
        help="questions at each length and depth, and controls at each length "
        "(default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the prompts (default: %(default)s)")
    parser.add_argument(
        "--haystack",
        default="noise",
        metavar="TEXT",
        help="noise, wiki, shakespeare, a text file, or a folder of *.txt (default: %(default)s)",
    )
    parser.add_argument(
        "--images", metavar="DIR", help="pictures for the haystack (default: drawn ones)"
    )


def perplexity_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m eval perplexity",
        description="The loss over position on long documents.",
    )
    add_model_options(parser)
    parser.add_argument(
        "--texts",
        required=True,
        metavar="TEXT",
        help="a text file, a folder of *.txt, or shakespeare (its test works)",
    )
    parser.add_argument(
        "--length",
        default="16k",
        metavar="LENGTH",
        help="tokens of a window; shorter documents are left out (default: %(default)s)",
    )
    parser.add_argument(
        "--windows",
        type=int,
        default=4,
        metavar="N",
        help="windows of one document at most (default: %(default)s)",
    )
    parser.add_argument(
        "--batch-size",
        type=int,
        default=1,
        metavar="N",
        help="windows read at once (default: %(default)s)",
    )
    parser.add_argument(
        "--compression",
        metavar="R,R",
        help="tokens per concept, with commas, a curve each; default: what the model was trained "
        "for (default: default)",
    )
    _add_figures(parser)
    return parser


def _add_figures(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--no-figures", dest="figures", action="store_false", help="write no PNG files"
    )
