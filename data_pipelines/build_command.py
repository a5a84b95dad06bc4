"""`python -m data_pipelines build`: options, progress, and what is printed at the end."""

from __future__ import annotations

import argparse
import difflib
import time
from inspect import signature
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from conceptmoe_vl.errors import UserError
from data_pipelines import building
from data_pipelines.importing import layout_recipe
from data_pipelines.layouts import LAYOUTS
from data_pipelines.sources import SOURCES
from data_pipelines.visible import visible
from data_pipelines.workers import default_workers
from data_pipelines.writing import REJECTS, ShardSize

_SOURCE_OPTIONS = ("samples", "seed", "level", "path", "language", "question", "unit")


def add_build(commands: Any) -> None:
    """Adds the command to the subparsers `commands`."""
    what = "write shards of a built-in source or of a layout"
    build = commands.add_parser("build", help=what, description=what)
    _add_common(build)
    sources = build.add_subparsers(required=True, metavar="SOURCE")
    for name in (*SOURCES, *LAYOUTS):
        what = LAYOUTS[name].what if name in LAYOUTS else "built in"
        parser = sources.add_parser(name, help=what, description=what)
        if name in LAYOUTS:
            _add_layout(parser, name)
        else:
            _add_built_in(parser)
        parser.add_argument("out", type=Path, help="folder that is made")
        _add_common(parser, repeated=True)
        parser.set_defaults(run=_build, source=name)


def _add_layout(parser: argparse.ArgumentParser, name: str) -> None:
    parser.add_argument("path", type=Path, help="a file, or a folder of such files")
    parser.add_argument("--images", type=Path, help="folder that paths in records start from")
    parser.add_argument("--name", help=f"the data set's name in metrics ({name})")
    parser.add_argument(
        "--max-rejects",
        type=_share,
        default=0.05,
        metavar="SHARE",
        help="largest share of records that may be left out as unusable, 0 to 1 (0.05)",
    )


def _add_built_in(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--samples", type=positive, metavar="N", help="scenes: in all (10000)")
    parser.add_argument("--seed", type=int, metavar="S", help="scenes: of the drawing (0)")
    parser.add_argument("--level", type=int, metavar="1..4", help="scenes: one level (all)")
    parser.add_argument("--path", type=Path, help="folder of the source's package")
    parser.add_argument("--language", metavar="L", help="tuxpaint, wiki: en, es, ... (en)")
    parser.add_argument("--question", help="openclipart, tuxpaint: about each picture (none)")
    parser.add_argument("--unit", help="shakespeare: a sample is a scene or a work (scene)")


def _add_common(parser: argparse.ArgumentParser, repeated: bool = False) -> None:
    """Options that may stand before the source's name or behind it.

    Args:
        repeated: behind it; what is not given there leaves what was given before.
    """

    def add(flag: str, default: Any, **options: Any) -> None:
        default = argparse.SUPPRESS if repeated else default
        parser.add_argument(flag, default=default, **options)

    add(
        "--shard-size",
        ShardSize(samples=1000),
        type=_shard_size,
        metavar="SIZE",
        help="samples (1000), or bytes at most (256MB)",
    )
    add(
        "--workers",
        default_workers(),
        type=positive,
        metavar="N",
        help="processes (all cores, up to 16)",
    )
    add(
        "--deduplicate",
        None,
        action="store_const",
        const="samples",
        help="leave out samples whose roles, texts and images were there before",
    )
    add(
        "--deduplicate-images",
        None,
        action="store_const",
        const="images",
        dest="deduplicate",
        help="the same for equal images, whatever the texts",
    )
    add("--force", False, action="store_true", help="replace shards that are there")


def check_source(arguments: list[str]) -> None:
    """Names the nearest source for an unknown one; argparse would list them all alone."""
    if arguments[:1] != ["build"]:
        return
    common = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    _add_common(common)
    try:
        _, rest = common.parse_known_args(arguments[1:])
    except argparse.ArgumentError:
        return  # the whole parser says so, with its usage
    known = [*SOURCES, *LAYOUTS]
    if not rest or rest[0] in known or rest[0].startswith("-"):
        return
    near = difflib.get_close_matches(rest[0], known, n=1, cutoff=0.0)[0]
    raise UserError(f"unknown source '{rest[0]}'; the nearest is '{near}', all: {', '.join(known)}")


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"'{text}' is no share from 0 to 1")
    return share


def positive(text: str) -> int:
    """A whole number above 0, for argparse."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is no whole number above 0")
    return number


def _shard_size(text: str) -> ShardSize:
    try:
        return ShardSize.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _check_apart(path: Path, out: Path) -> None:
    """A data set that takes the place of its own source (--force) would be the end of that."""
    if path.resolve().is_relative_to(out.resolve()):
        raise UserError(f"'{out}' is, or holds, the source '{path}'; name another folder")


def _recipe(options: Any) -> building.Recipe:
    if options.source in LAYOUTS:
        _check_apart(options.path, options.out)
        return layout_recipe(options.source, options.path, options.images, options.name)
    make = SOURCES[options.source]
    asked = {name: getattr(options, name) for name in _SOURCE_OPTIONS}
    asked = {name: value for name, value in asked.items() if value is not None}
    for name in asked:
        if name not in signature(make).parameters:
            raise UserError(f"--{name} has no meaning for the source '{options.source}'")
    return make(**asked)


def _build(options: Any) -> int:
    how = building.BuildOptions(
        size=options.shard_size,
        workers=options.workers,
        deduplicate=options.deduplicate,
        max_rejects=getattr(options, "max_rejects", 0.05),
        force=options.force,
    )
    console = Console(stderr=True)
    try:
        with _Bar(console) as bar:
            manifest, rejects = building.build(_recipe(options), options.out, how, bar.update)
    except KeyboardInterrupt:
        console.print("interrupted; the same command goes on behind the last finished shard")
        return 130
    for split, counts in manifest["splits"].items():
        found = [f"{number:,} {name}" for name, number in counts.items() if isinstance(number, int)]
        shards = f"{len(counts['shards'])} shards"
        print(f"{options.out}/{split}-*.tar: {', '.join([*found, shards])}")
    if manifest.get("left_out"):
        reasons = (f"{reason} {number:,}" for reason, number in manifest["left_out"].items())
        print(f"left out from the start: {', '.join(reasons)}")
    print(rejects.describe())
    if rejects.count:
        print(visible(f"first: {rejects.named[0]['record']}: {rejects.named[0]['message']}"))
        print(f"all of them by reason, the first by name: {options.out}/{REJECTS}")
    return 0


class _Bar:
    """Records, samples and rejects while a build goes on; on terminals alone.

    Args:
        seconds: between two pictures.
    """

    def __init__(self, console: Console, seconds: float = 0.2) -> None:
        self._console, self._seconds = console, seconds
        # Drawn by `update`: a thread of its own and new processes do not go together.
        self._progress = Progress(
            BarColumn(pulse_style="green"),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
            auto_refresh=False,
            transient=True,
        )
        self._task = self._progress.add_task("reading", total=None)
        self._next = 0.0
        self._started = False

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def update(self, state: building.Progress) -> None:
        if not self._started:
            self._started = True
            self._say_start(state)
        now = time.monotonic()
        if now < self._next or self._progress.disable:
            return
        self._next = now + self._seconds
        what = (
            f"{state.rejects.records:,} records, {state.samples:,} samples, "
            f"{state.rejects.count:,} rejected, {state.shards} shards"
        )
        self._progress.update(self._task, description=what, refresh=True)

    def _say_start(self, state: building.Progress) -> None:
        if state.resumed:
            self._console.print(
                f"going on behind {state.resumed} finished shards, {state.rejects.records:,} "
                "records",
                highlight=False,
            )
        elif state.renewed:
            self._console.print(
                "an interrupted build was of other options or of a source that has changed; "
                "beginning anew",
                highlight=False,
            )
