"""`python -m data_pipelines build|inspect|stats|show`."""

from __future__ import annotations

import argparse
import difflib
import sys
from inspect import signature
from pathlib import Path
from typing import Any

from rich.console import Console

from conceptmoe_vl.errors import UserError


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0; 1 where `inspect` or `stats` found damage; 2 for a mistake in the call."""
    options = _parser().parse_args(arguments)
    try:
        return options.run(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        sys.stderr.close()  # a reader such as `head` has seen enough
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m data_pipelines", description="Shards of samples"
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    build = commands.add_parser("build", help="write the shards of a built-in source")
    build.add_argument("source", help="easy_vqa | scenes")
    build.add_argument("out", type=Path, help="folder that is made")
    build.add_argument("--samples-per-shard", type=_positive, default=1000, metavar="N")
    build.add_argument("--samples", type=_positive, metavar="N", help="scenes: both splits (10000)")
    build.add_argument("--seed", type=int, metavar="S", help="scenes: of what is drawn (0)")
    build.add_argument("--level", type=int, metavar="1..4", help="scenes: one level (all in turn)")
    build.add_argument("--force", action="store_true", help="replace shards that are already there")
    build.set_defaults(run=_build)

    inspect = commands.add_parser("inspect", help="a table of the first samples")
    inspect.add_argument("shards", nargs="+", help="tar files, folders or patterns")
    inspect.add_argument("--limit", type=_positive, default=20, metavar="N", help="samples (20)")
    inspect.set_defaults(run=_inspect)

    stats = commands.add_parser("stats", help="counts over all samples; decodes every image")
    stats.add_argument("shards", nargs="+", help="tar files, folders or patterns")
    stats.set_defaults(run=_stats)

    show = commands.add_parser("show", help="one sample's tokens and which are supervised")
    show.add_argument("shards", nargs="+", help="tar files, folders or patterns")
    show.add_argument("--key", help="the sample's key (the first sample)")
    show.add_argument("--model", help="folder of a model, for its processor (a small tokenizer)")
    show.set_defaults(run=_show)
    return parser


def _positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is no whole number above 0")
    return number


def _build(options: Any) -> int:
    from data_pipelines.sources import SOURCES

    if options.source not in SOURCES:
        near = difflib.get_close_matches(options.source, SOURCES, n=1, cutoff=0.0)[0]
        raise UserError(
            f"unknown source '{options.source}'; the nearest is '{near}', all: {', '.join(SOURCES)}"
        )
    make = SOURCES[options.source]
    asked = {name: getattr(options, name) for name in ("samples", "seed", "level")}
    asked = {name: value for name, value in asked.items() if value is not None}
    for name in asked:
        if name not in signature(make).parameters:
            raise UserError(f"--{name} has no meaning for the source '{options.source}'")
    manifest = make(options.out, options.samples_per_shard, options.force, **asked)
    for split, counts in manifest["splits"].items():
        print(
            f"{options.out}/{split}-*.tar: {counts['samples']:,} samples, "
            f"{counts['questions']:,} questions, {len(counts['shards'])} shards"
        )
    return 0


def _inspect(options: Any) -> int:
    from data_pipelines.reports import inspect

    return int(inspect(options.shards, options.limit, Console()) > 0)


def _stats(options: Any) -> int:
    from data_pipelines.reports import stats

    return int(stats(options.shards, Console()) > 0)


def _show(options: Any) -> int:
    from data_pipelines.reports import show

    show(options.shards, options.key, _processor(options), Console(soft_wrap=True))
    if options.model is None:
        print("tokenizer: trained on these shards (--model names a model's)", file=sys.stderr)
    return 0


def _processor(options: Any) -> Any:
    from conceptmoe_vl.image_processing import ConceptMoEVLImageProcessor
    from conceptmoe_vl.processing import ConceptMoEVLProcessor, train_tokenizer
    from data_pipelines.shards import iter_texts

    if options.model is None:
        tokenizer = train_tokenizer(iter_texts(options.shards, max_samples=1000), 1024)
        return ConceptMoEVLProcessor(ConceptMoEVLImageProcessor(), tokenizer)
    if not Path(options.model).is_dir():
        raise UserError(f"--model: there is no folder '{options.model}'")
    try:
        return ConceptMoEVLProcessor.from_pretrained(options.model, local_files_only=True)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"--model: '{options.model}' holds no processor ({reason})") from error


if __name__ == "__main__":
    sys.exit(main())
