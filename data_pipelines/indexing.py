"""`index`: indexes and a manifest for shards that others built."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from conceptmoe_vl.errors import UserError
from conceptmoe_vl.files import sha256_of
from data_pipelines.records import IMAGE_MEMBER
from data_pipelines.shard_index import IndexedSample, write_index
from data_pipelines.shards import expand_patterns, scan_shard
from data_pipelines.writing import MANIFEST, write_manifest


def write_indexes(
    patterns: Sequence[str], on_damage: Callable[[str, str], None], manifest: bool = False
) -> list[dict[str, Any]]:
    """Writes an index beside each shard.

    Args:
        on_damage: gets a shard that is damaged, and how; it gets no index.
        manifest: also write `manifest.json` into each folder, for reading from elsewhere.

    Returns:
        Per shard with an index: folder, name, samples, images, bytes, sha256.

    Raises:
        UserError: no shards; one cannot be read, or its folder not be written; a folder has a
            manifest already, or damaged shards and should get one.
    """
    shards = expand_patterns(patterns)
    folders = sorted({Path(shard).parent for shard in shards})
    for folder in folders if manifest else ():
        if (folder / MANIFEST).exists():
            raise UserError(f"'{folder / MANIFEST}' is there already; delete it to have a new one")
    entries: list[dict[str, Any]] = []
    damaged: set[Path] = set()
    for shard in shards:
        samples, fault = scan_shard(shard)
        if fault is not None:
            damaged.add(Path(shard).parent)
            on_damage(shard, fault)
            continue
        entries.append(_write_index(shard, samples))
    for folder in folders if manifest else ():
        if folder in damaged:
            raise UserError(f"'{folder}' holds damaged shards and gets no manifest; repair them")
        _write_manifest(folder, [entry for entry in entries if entry["folder"] == folder])
    return entries


def _write_index(shard: str, samples: list[IndexedSample]) -> dict[str, Any]:
    rows = [[sample.key, sample.members, list(sample.repeated)] for sample in samples]
    try:
        size, sha256 = os.path.getsize(shard), sha256_of(shard)
        write_index(shard, rows, size, sha256)
    except OSError as error:
        raise UserError(f"the index of shard '{shard}' cannot be written ({error})") from error
    return {
        **{"folder": Path(shard).parent, "name": Path(shard).name, "samples": len(samples)},
        **{"images": sum(count_images(sample) for sample in samples)},
        **{"bytes": size, "sha256": sha256},
    }


def count_images(sample: IndexedSample) -> int:
    """Its image members."""
    return sum(IMAGE_MEMBER.fullmatch(name) is not None for name in sample.members)


def _write_manifest(folder: Path, entries: list[dict[str, Any]]) -> None:
    """Splits are the shards' names up to the first `-`, or `train` where there is none."""
    splits: dict[str, dict[str, Any]] = {}
    for entry in entries:
        start, dash, _ = entry["name"].partition("-")
        split = splits.setdefault(
            start if dash else "train", {"samples": 0, "images": 0, "shards": []}
        )
        split["samples"] += entry["samples"]
        split["images"] += entry["images"]
        split["shards"].append({name: entry[name] for name in entry if name != "folder"})
    write_manifest(folder, {"source": folder.resolve().name, "splits": splits})
