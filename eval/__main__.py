"""python -m eval --model DIR --tasks easy_vqa: asks, scores and writes everything down.

python -m eval compare A B [C ...]: which differences between evaluations are real.
python -m eval chunks --model DIR --tasks NAMES: what the chunking does on their prompts.
python -m eval long: needles in long prompts, by length and depth.
python -m eval perplexity: the loss over position on long documents.
"""

from __future__ import annotations

import argparse
import sys

import conceptmoe_vl_runtime
from eval.arguments import add_asking_options, add_data_options, add_model_options
from eval.long_context.arguments import long_parser, perplexity_parser

# torch is imported within the functions, after conceptmoe_vl_runtime.setup().


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m eval",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model_options(parser)
    add_data_options(parser)
    add_asking_options(parser)
    return parser


def _compare_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m eval compare",
        description="Which differences between evaluations of the same questions are real: paired "
        "differences from the first one, 95 % intervals, p-values adjusted for their number (Holm)",
    )
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="DIR",
        help="two or more folders of results: of one task (with samples.jsonl), or of several",
    )
    parser.add_argument(
        "--output",
        metavar="DIR",
        help="folder for comparison.json and differences.jsonl, the questions scored differently",
    )
    return parser


def _long_context(command: str, words: list[str]) -> int:
    parser = long_parser() if command == "long" else perplexity_parser()
    arguments = parser.parse_args(words)
    conceptmoe_vl_runtime.setup()
    from conceptmoe_vl.cli import run_program
    from eval.long_context.command import ask_long, measure_perplexity

    program = ask_long if command == "long" else measure_perplexity
    return run_program(lambda: program(arguments))


def main(argv: list[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == ["chunks"]:
        from eval.chunks.command import main as chunks

        return chunks(words[1:])
    if words[:1] in (["long"], ["perplexity"]):
        return _long_context(words[0], words[1:])
    compares = words[:1] == ["compare"]
    arguments = _compare_parser().parse_args(words[1:]) if compares else _parser().parse_args(words)
    conceptmoe_vl_runtime.setup()
    from conceptmoe_vl.cli import run_program

    if compares:
        from eval.compare import compare_runs

        return run_program(lambda: compare_runs(arguments.runs, arguments.output))
    from eval.program import evaluate_tasks

    return run_program(lambda: evaluate_tasks(arguments))


if __name__ == "__main__":
    sys.exit(main())
