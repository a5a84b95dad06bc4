"""`build`: a recipe becomes shards, in parallel, and goes on where it was interrupted.

Notable:
- processes read, check and lay out samples; this one writes them in the order of the items, so
  the number of workers changes no byte;
- after each finished shard a line in the journal holds all that the rest depends on: the same
  command goes on behind it, and the result is that of an unbroken build;
- the data set appears whole, or not at all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Set
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import PIL

from conceptmoe_vl.errors import UserError
from conceptmoe_vl.images import ImageError
from data_pipelines.partial_build import PartialBuild
from data_pipelines.records import RecordError, content_hash, json_bytes, read_record
from data_pipelines.rejects import DUPLICATE, Rejects
from data_pipelines.workers import results_in_order
from data_pipelines.writing import (
    PackedSample,
    ShardSize,
    ShardWriter,
    pack_sample,
    write_manifest,
    write_rejects,
)

_VERSION = 1  # of the bytes that a recipe becomes


class Made(NamedTuple):
    """A sample that a recipe made of an item.

    Fields:
        images: extension (`png`) and encoded file, in order.
        counts: what the manifest sums up, `questions` for instance.
        mark: 16 bytes that no other sample may have: one whose mark was there before is made again
            by `remake`, or else is a duplicate. Empty: `--deduplicate` compares contents.
    """

    key: str
    record: dict[str, Any]
    images: list[tuple[str, bytes]]
    counts: Mapping[str, int] = {}
    mark: bytes = b""


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a data set is made.

    Fields:
        manifest: its first fields: source, license and so on; with `inputs` they decide whether an
            interrupted build is of the same kind.
        splits: the items of each split, in order; picklable.
        make: an item to a sample, in any process; picklable. Raises `RecordError` or `ImageError`.
        name: an item's name in the report of rejects.
        inputs: what else the result depends on; plain JSON.
        remake: makes a sample again whose mark is among those that are taken; None: it is left out.
    """

    manifest: dict[str, Any]
    splits: Mapping[str, Callable[[], Iterable[Any]]]
    make: Callable[[Any], Made]
    name: Callable[[Any], str] = str
    inputs: Any = None
    remake: Callable[[Any, Set[bytes]], Made] | None = None


@dataclasses.dataclass(frozen=True)
class BuildOptions:
    """How it is built.

    Fields:
        size: of a shard.
        workers: processes; 1 builds in this one.
        deduplicate: leave out samples that were there before: `samples` of equal roles, texts and
            images, `images` of equal images whatever the texts; None: keep them.
        max_rejects: largest share of records that may be unusable, 0 to 1.
        force: replace the data set that is there.
    """

    size: ShardSize = dataclasses.field(default_factory=lambda: ShardSize(samples=1000))
    workers: int = 1
    deduplicate: str | None = None
    max_rejects: float = 0.05
    force: bool = False


class Progress(NamedTuple):
    """What a build has done so far.

    Fields:
        resumed: shards that an interrupted build had left.
        renewed: such shards were thrown away, since options or source have changed.
    """

    rejects: Rejects
    samples: int
    shards: int
    resumed: int
    renewed: bool


class _Outcome(NamedTuple):
    """Of one item. Fields: `reject`: field, reason and message where there is no sample."""

    sample: PackedSample | None
    counts: Mapping[str, int]
    mark: bytes
    reject: tuple[str, str, str] | None


def build(
    recipe: Recipe,
    out: Path,
    options: BuildOptions | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> tuple[dict[str, Any], Rejects]:
    """Writes the shards of all splits, their indexes, the manifest and the report of rejects.

    Args:
        on_progress: called at the start, after each record and at the end.

    Returns:
        The manifest and the rejects.

    Raises:
        UserError: `out` cannot be used, nothing to read, no usable record, too many rejects. Shards
            that were finished are kept, and said.
    """
    options = options or BuildOptions()
    with PartialBuild(out, options.force) as folder:
        try:
            run = _Run(recipe, options, folder, on_progress)
            for split in recipe.splits:
                run.build_split(split)
            manifest = run.manifest()
            write_manifest(folder.folder, manifest)
            write_rejects(folder.folder, run.rejects.as_report())
            folder.complete()
        except (UserError, OSError) as error:
            kept = f"{folder.num_shards} finished shards are kept in '{folder.folder}'"
            kept = f"{kept}: the same command goes on there" if folder.num_shards else ""
            if isinstance(error, OSError):
                error = UserError(f"'{out}' cannot be written ({error})")
            raise UserError("; ".join(filter(None, (str(error), kept)))) from error
    return manifest, run.rejects


class _Run:
    """The state of a build, and of the interrupted one that it continues."""

    def __init__(
        self,
        recipe: Recipe,
        options: BuildOptions,
        folder: PartialBuild,
        on_progress: Callable[[Progress], None] | None,
    ) -> None:
        self.rejects = Rejects()
        self._recipe, self._options, self._folder = recipe, options, folder
        self._on_progress = on_progress
        self._shards: dict[str, list[dict[str, Any]]] = {name: [] for name in recipe.splits}
        self._counts: dict[str, Counter[str]] = {name: Counter() for name in recipe.splits}
        self._records: Counter[str] = Counter()
        self._named = 0  # rejects that the journal names
        entries, marks, self._renewed = folder.resume(_fingerprint(recipe, options))
        self._resumed = len(entries)
        self._seen, self._new_marks = set(marks), list[bytes]()
        self._samples = sum(entry["shard"]["samples"] for entry in entries)
        for entry in entries:
            self._shards[entry["split"]].append(entry["shard"])
            self._counts[entry["split"]] = Counter(entry["counts"])
            self._records[entry["split"]] = entry["records"]
            self.rejects.records = entry["rejects"]["records"]
            self.rejects.by_reason = Counter(entry["rejects"]["by_reason"])
            self.rejects.named += entry["rejects"]["named"]
        self._named = len(self.rejects.named)
        self._report()

    def build_split(self, split: str) -> None:
        """Goes on with a split behind what the journal holds."""
        recipe, options = self._recipe, self._options
        work = partial(_outcome, recipe.make, options.deduplicate)
        items = itertools.islice(recipe.splits[split](), self._records[split], None)
        shards = self._shards[split]
        writer = ShardWriter(self._folder.folder, split, options.size, finished=len(shards))
        with contextlib.ExitStack() as stack:
            stack.callback(writer.close)
            results = results_in_order(work, items, options.workers)
            stack.callback(results.close)  # type: ignore[attr-defined]
            for item, outcome in results:
                self._take(split, writer, item, self._unique(item, outcome))
            self.rejects.check(options.max_rejects)
            self._finish_shard(split, writer)

    def _unique(self, item: Any, outcome: _Outcome) -> _Outcome:
        """The outcome, or what stands for a sample that was there before."""
        if outcome.sample is None or outcome.mark not in self._seen:
            return outcome
        if self._recipe.remake is None:
            message = "a record before it has the same content"
            return outcome._replace(sample=None, reject=("", DUPLICATE, message))
        return _packed(self._recipe.remake(item, self._seen), self._options.deduplicate)

    def _take(self, split: str, writer: ShardWriter, item: Any, outcome: _Outcome) -> None:
        if outcome.sample is not None and not writer.fits(outcome.sample):
            self._finish_shard(split, writer)
        self.rejects.records += 1
        self._records[split] += 1
        if outcome.sample is not None:
            writer.add(outcome.sample)
            self._samples += 1
            self._counts[split].update(outcome.counts)
            if outcome.mark:
                self._seen.add(outcome.mark)
                self._new_marks.append(outcome.mark)
        if outcome.reject is not None:
            self.rejects.add(self._recipe.name(item), *outcome.reject)
            self.rejects.check(self._options.max_rejects, early=True)
        self._report()

    def _finish_shard(self, split: str, writer: ShardWriter) -> None:
        entry = writer.finish()
        if entry is None:
            return
        self._shards[split].append(entry)
        rejects = {
            "records": self.rejects.records,
            "by_reason": dict(self.rejects.by_reason),
            "named": self.rejects.named[self._named :],
        }
        self._folder.save(
            {
                **{"split": split, "shard": entry, "records": self._records[split]},
                **{"counts": dict(self._counts[split]), "rejects": rejects},
            },
            self._new_marks,
        )
        self._named, self._new_marks = len(self.rejects.named), []

    def _report(self) -> None:
        if self._on_progress is not None:
            shards = sum(map(len, self._shards.values()))
            self._on_progress(
                Progress(self.rejects, self._samples, shards, self._resumed, self._renewed)
            )

    def manifest(self) -> dict[str, Any]:
        """What `manifest.json` holds.

        Raises:
            UserError: there is no sample.
        """
        if self._samples == 0:
            raise UserError(
                f"'{self._recipe.manifest['source']}' gives no sample ({self.rejects.describe()}); "
                "check path and layout"
            )
        splits = {
            split: {
                **{name: sum(shard[name] for shard in shards) for name in ("samples", "images")},
                **self._counts[split],
                "shards": shards,
            }
            for split, shards in self._shards.items()
        }
        return {**self._recipe.manifest, "rejected": self.rejects.count, "splits": splits}


def _fingerprint(recipe: Recipe, options: BuildOptions) -> str:
    """Two builds that share it may be continued by each other."""
    content = [
        *(_VERSION, PIL.__version__, recipe.manifest, list(recipe.splits), recipe.inputs),
        *(options.size, options.deduplicate),
    ]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _outcome(make: Callable[[Any], Made], deduplicate: str | None, item: Any) -> _Outcome:
    try:
        return _packed(make(item), deduplicate)
    except (RecordError, ImageError) as error:
        return _Outcome(None, {}, b"", (getattr(error, "field", ""), error.reason, str(error)))


def _packed(made: Made, deduplicate: str | None) -> _Outcome:
    sample = pack_sample(made.key, made.record, made.images)
    mark = made.mark
    if not mark and deduplicate is not None:
        mark = _content_mark(made, images_alone=deduplicate == "images")
    return _Outcome(sample, made.counts, mark, None)


def _content_mark(made: Made, images_alone: bool) -> bytes:
    """Equal for samples that are duplicates; 16 bytes."""
    members = [f"img{number}.{suffix}" for number, (suffix, _) in enumerate(made.images)]
    if images_alone and members:
        digests = [hashlib.sha256(data).digest() for _, data in made.images]
        return hashlib.sha256(b"".join(digests)).digest()[:16]
    turns = read_record(json_bytes(made.record), members, made.key).turns
    return content_hash(turns, dict(zip(members, (data for _, data in made.images), strict=True)))
