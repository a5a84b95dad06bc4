"""The arguments of `python -m eval long` and `python -m eval perplexity`. Imports no torch."""

from __future__ import annotations

import argparse


def long_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m eval long",
        description="Needles in long prompts of text and pictures, by length and depth.",
    )
    _add_common(parser)
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
    parser.add_argument(
        "--compression",
        type=float,
        metavar="R",
        help="tokens per concept; 1 compresses nothing (default: what the model was trained for)",
    )
    parser.add_argument(
        "--batch-size",
        type=int,
        default=16,
        metavar="N",
        help="questions at once, fewer where they are long (default: %(default)s)",
    )
    parser.add_argument(
        "--threshold",
        type=float,
        default=0.85,
        metavar="SCORE",
        help="that a length must reach to count as effective (default: %(default)s)",
    )
    parser.add_argument(
        "--no-cache", action="store_true", help="ask everything anew, also what was asked before"
    )
    return parser


def perplexity_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m eval perplexity",
        description="The loss over position on long documents.",
    )
    _add_common(parser)
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
    return parser


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, metavar="DIR", help="model folder (RUN/model)")
    parser.add_argument(
        "--output",
        metavar="DIR",
        help="folder of the results (default: RUN/eval beside RUN/model, otherwise "
        "eval_results/NAME)",
    )
    parser.add_argument("--device", help="torch device (default: cuda if there is one, else cpu)")
    parser.add_argument(
        "--no-figures", dest="figures", action="store_false", help="write no PNG files"
    )
