"""Shards against the index beside them and the manifest of their folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from conceptmoe_vl.files import sha256_of
from data_pipelines.indexing import count_images
from data_pipelines.records import RecordError
from data_pipelines.shard_index import IndexedSample, StaleIndexError, index_path, load_index
from data_pipelines.writing import MANIFEST

_OnFault = Callable[[str, RecordError], None]


class _Found:
    """What a shard really is."""

    def __init__(self, shard: str, samples: Sequence[IndexedSample]) -> None:
        self.path = Path(shard)
        self.counts = {
            "samples": len(samples),
            "images": sum(map(count_images, samples)),
            "bytes": self.path.stat().st_size,
        }

    @cached_property
    def sha256(self) -> str:
        return sha256_of(self.path)


class ShardChecks:
    """Checks shards one after another, and then their manifests.

    Args:
        on_fault: gets the file at fault and the fault, `bad_index` or `bad_manifest`.
    """

    def __init__(self, on_fault: _OnFault) -> None:
        self._on_fault = on_fault
        self._folders: dict[Path, dict[str, _Found]] = {}

    def add(self, shard: str, samples: Sequence[IndexedSample]) -> None:
        """A shard and its samples by its headers."""
        found = _Found(shard, samples)
        self._folders.setdefault(found.path.parent, {})[found.path.name] = found
        for message in _index_faults(found, samples):
            fault = RecordError("bad_index", f"it does not fit '{shard}': {message}")
            self._on_fault(str(index_path(shard)), fault)

    def finish(self, whole: bool) -> None:
        """Compares the shards with their manifests.

        Args:
            whole: all shards of each folder were added.
        """
        for folder, found in self._folders.items():
            path = folder / MANIFEST
            for message in _manifest_faults(path, found, whole) if path.is_file() else ():
                self._on_fault(str(path), RecordError("bad_manifest", message))


def _index_faults(found: _Found, samples: Sequence[IndexedSample]) -> Iterator[str]:
    try:
        loaded = load_index(str(found.path))
    except StaleIndexError as error:
        yield str(error)
        return
    if loaded is None:
        return
    stated, sha256 = loaded
    if sha256 != found.sha256:
        yield "the checksum differs"
    pairs = zip(stated, samples, strict=False)
    differing = next((own for own, true in pairs if own != true), None)
    if differing is not None:
        yield f"the sample '{differing.key}' differs"
    elif len(stated) != len(samples):
        yield f"it holds {len(stated)} samples of {len(samples)}"


def _manifest_faults(path: Path, found: dict[str, _Found], whole: bool) -> Iterator[str]:
    try:
        splits = _read_splits(path)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        yield f"it is no manifest ({error!r})"
        return
    entries = {entry["name"]: entry for _, split in splits for entry in split["shards"]}
    for name, entry in entries.items():
        if name in found:
            yield from _entry_faults(entry, found[name])
        elif whole:
            yield f"it lists the shard '{name}', which is not there"
    for name in found.keys() - entries.keys():
        yield f"it does not list the shard '{name}'"
    for split, content in splits:
        for what in ("samples", "images"):
            stated = [entry.get(what) for entry in content["shards"]]
            listed = [number for number in stated if isinstance(number, int)]
            if what in content and len(listed) == len(stated) and sum(listed) != content[what]:
                yield f"of '{split}' it states {content[what]} {what}, its shards {sum(listed)}"


def _read_splits(path: Path) -> list[tuple[str, dict[str, Any]]]:
    splits = list(json.loads(path.read_bytes())["splits"].items())
    for _, split in splits:
        for entry in split["shards"]:
            if not isinstance(entry["name"], str):
                raise TypeError(f"a shard's name is {entry['name']!r}")
    return splits


def _entry_faults(entry: dict[str, Any], found: _Found) -> Iterator[str]:
    name = entry["name"]
    for what, number in found.counts.items():
        if what in entry and entry[what] != number:
            yield f"of the shard '{name}' it states {entry[what]!r} {what}, there are {number}"
    same_size = entry.get("bytes") == found.counts["bytes"]
    if "sha256" in entry and same_size and entry["sha256"] != found.sha256:
        yield f"the checksum of the shard '{name}' differs"
