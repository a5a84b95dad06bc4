"""Shards of a layout in circulation: what training could not use is left out, counted and named."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from conceptmoe_vl.errors import UserError
from conceptmoe_vl.images import ImageError
from data_pipelines.layouts import LAYOUTS, ImageFolder, Layout, check_row
from data_pipelines.records import RecordError
from data_pipelines.writing import new_folder, write_manifest, write_rejects, write_shards

_EARLY = 1000  # records after which a share that is too high stops the build at once
_NAMED = 1000  # rejects that the report names; all are counted


@dataclasses.dataclass
class Rejects:
    """Records that could not be used.

    Fields:
        records: all records so far, the rejected ones too.
        by_reason: counts.
        named: the first ones: record, field, reason, message.
    """

    records: int = 0
    by_reason: Counter[str] = dataclasses.field(default_factory=Counter)
    named: list[dict[str, str]] = dataclasses.field(default_factory=list)

    @property
    def count(self) -> int:
        return self.by_reason.total()

    def add(self, name: str, error: RecordError | ImageError) -> None:
        self.by_reason[error.reason] += 1
        if len(self.named) < _NAMED:
            field = getattr(error, "field", "")
            self.named.append(
                {"record": name, "field": field, "reason": error.reason, "message": str(error)}
            )

    def check(self, most: float) -> None:
        """Stops the build where the rejects are more than this share of the records.

        Raises:
            UserError: names the counts and the first reject.
        """
        if self.count > most * self.records:
            raise UserError(
                f"{self.describe()}; more than --max-rejects {most:g} of the records cannot be "
                f"used, first {self.named[0]['record']}: {self.named[0]['message']}"
            )

    def describe(self) -> str:
        reasons = ", ".join(f"{reason} {number:,}" for reason, number in self.by_reason.items())
        return f"rejected {self.count:,} of {self.records:,} records" + (
            f": {reasons}" if reasons else ""
        )

    def as_report(self) -> dict[str, Any]:
        return {
            "records": self.records,
            "rejected": self.count,
            "by_reason": dict(self.by_reason.most_common()),
            "first": self.named,
        }


def build_layout(
    source: str,
    path: Path,
    out: Path,
    *,
    images: Path | None = None,
    name: str | None = None,
    max_rejects: float = 0.05,
    samples_per_shard: int = 1000,
    force: bool = False,
) -> tuple[dict[str, Any], Rejects]:
    """Writes shards `train-*`, the manifest and the report of rejects; whole or not at all.

    Args:
        source: a name in `LAYOUTS`.
        images: the folder that paths in records are relative to; None: the folder of `path`.
        name: the data set's name in losses by source; None: `source`.
        max_rejects: largest share of records that may be left out, 0 to 1.

    Returns:
        The manifest and the rejects.

    Raises:
        UserError: nothing to read, too many rejects, no usable record, or `out` cannot be used.
    """
    folder = ImageFolder(image_folder(path, images))
    rejects = Rejects()
    counts: Counter[str] = Counter()
    samples = _samples(LAYOUTS[source], path, folder, name or source, max_rejects, rejects, counts)
    with new_folder(out, force) as partial:
        shards = write_shards(partial, "train", samples, samples_per_shard)
        rejects.check(max_rejects)
        if not shards:
            raise UserError(f"'{path}' gives no sample ({rejects.describe()}); check the layout")
        train = {"samples": sum(shard["samples"] for shard in shards), **counts, "shards": shards}
        manifest = {
            "source": name or source,
            "layout": source,
            "rejected": rejects.count,
            "splits": {"train": train},
        }
        write_manifest(partial, manifest)
        write_rejects(partial, rejects.as_report())
    return manifest, rejects


def image_folder(path: Path, images: Path | None) -> Path:
    """The folder that image paths are relative to.

    Raises:
        UserError: `images` is no folder.
    """
    if images is not None and not images.is_dir():
        raise UserError(f"--images: there is no folder '{images}'")
    return images or (path if path.is_dir() else path.parent)


def _samples(
    layout: Layout,
    path: Path,
    folder: ImageFolder,
    source: str,
    max_rejects: float,
    rejects: Rejects,
    counts: Counter[str],
) -> Iterator[tuple[str, dict, list[tuple[str, bytes]]]]:
    """Samples for `write_shards`; a sample's key is the number of its record."""
    counts["images"] = 0
    for number, row in enumerate(layout.rows(path)):
        rejects.records += 1
        try:
            checked = check_row(layout, row, folder, source)
        except (RecordError, ImageError) as error:
            rejects.add(row.name, error)
            if rejects.records >= _EARLY:
                rejects.check(max_rejects)
            continue
        counts["images"] += len(checked.images)
        yield f"{number:09d}", checked.record, checked.images
