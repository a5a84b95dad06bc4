"""Where the samples of shards lie: held compactly, and kept beside a shard as `NAME.index.json`.

Notable:
- an index beside a shard saves reading all headers of the tar; one that does not fit its shard is
  passed over with a line in the log, and the shard is scanned;
- a million samples of two members each take about 40 MB: an `IndexedSample` is made when asked for.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import json
import logging
import os
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, overload

import numpy as np

logger = logging.getLogger(__name__)

INDEX_SUFFIX = ".index.json"
BLOCK = 512  # bytes, of a tar
_FORMAT = 1
_TEXT = ("utf-8", "surrogatepass")  # names in a tar need not be UTF-8


class Member(NamedTuple):
    """Where a file lies in a shard: bytes from its start."""

    offset: int
    size: int

    @property
    def end(self) -> int:
        """Where the next header of the tar stands."""
        return self.offset + -(-self.size // BLOCK) * BLOCK


@dataclasses.dataclass(frozen=True)
class IndexedSample:
    """A sample of a shard: `members` by name without the key (`json`, `img0.png`)."""

    shard: str
    key: str
    members: dict[str, Member]
    repeated: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """`shard/key`, unique in a data set."""
        return f"{self.shard.rpartition('/')[2]}/{self.key}"


class SampleMembers:
    """The members of a shard by sample, gathered in the order of the file."""

    def __init__(self) -> None:
        self.by_key: dict[str, dict[str, Member]] = {}
        self.repeated: dict[str, list[str]] = {}

    def add(self, path: str, member: Member) -> str:
        """Adds a file of the tar by its path in it; returns the key of its sample."""
        key, name = split_name(path)
        members = self.by_key.setdefault(key, {})
        if name in members:
            self.repeated.setdefault(key, []).append(name)
        members[name] = member
        return key

    def samples(self, shard: str) -> list[IndexedSample]:
        return [
            IndexedSample(shard, key, members, tuple(self.repeated.get(key, ())))
            for key, members in self.by_key.items()
        ]

    def as_rows(self) -> list[list[Any]]:
        """As `NAME.index.json` holds them: key, members with offset and size, repeated members."""
        return [[key, members, self.repeated.get(key, [])] for key, members in self.by_key.items()]


def split_name(path: str) -> tuple[str, str]:
    """Key and member name of a file in a tar: webdataset's rule, cut at the first dot."""
    folder, slash, file = path.rpartition("/")
    stem, _, name = file.partition(".")
    return f"{folder}{slash}{stem}", name.lower()


class ShardTable:
    """The samples of one shard in a few arrays of the smallest integers that hold them."""

    def __init__(self, shard: str, samples: Sequence[IndexedSample]) -> None:
        self.shard = shard
        keys = [sample.key.encode(*_TEXT) for sample in samples]
        members = [member for sample in samples for member in sample.members.values()]
        names = [name for sample in samples for name in sample.members]
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        self._names = list(numbers)
        self._keys = b"".join(keys)
        self._key_ends = _smallest(itertools.accumulate(map(len, keys)))
        self._ends = _smallest(itertools.accumulate(len(sample.members) for sample in samples))
        self._name_of = _smallest(numbers[name] for name in names)
        self._offsets = _smallest(member.offset for member in members)
        self._sizes = _smallest(member.size for member in members)
        self._repeated = {
            number: sample.repeated for number, sample in enumerate(samples) if sample.repeated
        }

    def __len__(self) -> int:
        return len(self._ends)

    def sample(self, number: int) -> IndexedSample:
        """The sample with this number, from 0."""
        first, last = _span(self._ends, number)
        names = self._name_of[first:last].tolist()
        places = zip(
            names,
            self._offsets[first:last].tolist(),
            self._sizes[first:last].tolist(),
            strict=True,
        )
        members = {self._names[name]: Member(offset, size) for name, offset, size in places}
        start, end = _span(self._key_ends, number)
        key = self._keys[start:end].decode(*_TEXT)
        return IndexedSample(self.shard, key, members, self._repeated.get(number, ()))

    @property
    def num_bytes(self) -> int:
        """Memory of keys and arrays."""
        arrays = (self._key_ends, self._ends, self._name_of, self._offsets, self._sizes)
        return len(self._keys) + sum(array.nbytes for array in arrays)


def _smallest(values: Iterable[int]) -> np.ndarray:
    """`[number of values]`, unsigned."""
    found = list(values)
    return np.array(found, dtype=np.min_scalar_type(max(found, default=0)))


def _span(ends: np.ndarray, number: int) -> tuple[int, int]:
    return int(ends[number - 1]) if number else 0, int(ends[number])


class ShardSamples(Sequence[IndexedSample]):
    """The samples of some shards, each made when it is asked for; a slice holds no copies."""

    def __init__(self, tables: Sequence[ShardTable], chosen: range | None = None) -> None:
        self._tables = tables
        self._ends = list(itertools.accumulate(map(len, tables)))
        self._chosen = range(self._ends[-1] if tables else 0) if chosen is None else chosen

    def __len__(self) -> int:
        return len(self._chosen)

    @overload
    def __getitem__(self, place: int) -> IndexedSample: ...

    @overload
    def __getitem__(self, place: slice) -> ShardSamples: ...

    def __getitem__(self, place: int | slice) -> IndexedSample | ShardSamples:
        if isinstance(place, slice):
            return ShardSamples(self._tables, self._chosen[place])
        number = self._chosen[place]
        shard = bisect.bisect_right(self._ends, number)
        before = self._ends[shard - 1] if shard else 0
        return self._tables[shard].sample(number - before)

    def __iter__(self) -> Iterator[IndexedSample]:
        return map(self.__getitem__, range(len(self)))


def index_path(shard: str | Path) -> Path:
    """`NAME.index.json` of `NAME.tar`."""
    return Path(f"{str(shard).removesuffix('.tar')}{INDEX_SUFFIX}")


def write_index(shard: str | Path, rows: list[list[Any]], size: int, sha256: str) -> None:
    """Writes `NAME.index.json` beside its shard, whole or not at all.

    Args:
        rows: of `SampleMembers.as_rows`.
        size: bytes of the shard.
    """
    content = {"format": _FORMAT, "bytes": size, "sha256": sha256, "samples": rows}
    path = index_path(shard)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_text(json.dumps(content, separators=(",", ":")) + "\n", encoding="ascii")
    partial.replace(path)


class StaleIndexError(ValueError):
    """Says why an index does not fit its shard."""


def load_index(shard: str) -> tuple[list[IndexedSample], str] | None:
    """Samples and sha256 as the index beside a shard states them; None: it has no index.

    Every offset lies in the shard, the headers of the first and the last file are where they
    must be, and the end mark stands behind; whether all between is true only a scan can tell.

    Raises:
        StaleIndexError: the index does not fit the shard.
        OSError: a file cannot be read.
    """
    path = index_path(shard)
    if not path.is_file():
        return None
    size = os.path.getsize(shard)
    if path.stat().st_size > size:
        raise StaleIndexError("it is larger than the shard")
    try:
        content = json.loads(path.read_bytes())
    # ValueError: broken JSON, broken UTF-8, integers of more than 4,300 digits
    except (ValueError, RecursionError) as error:
        raise StaleIndexError(f"it is no JSON ({error})") from error
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise StaleIndexError(f"it is not of format {_FORMAT}")
    if content.get("bytes") != size:
        raise StaleIndexError(f"it is of {content.get('bytes')!r} bytes, the shard has {size}")
    rows, sha256 = content.get("samples"), content.get("sha256")
    if not isinstance(rows, list) or not isinstance(sha256, str):
        raise StaleIndexError("it has no list of samples or no sha256")
    samples = [_read_row(shard, row, size) for row in rows]
    if len({sample.key for sample in samples}) != len(samples):
        raise StaleIndexError("it holds a key twice")
    _check_ends(shard, samples)
    return samples, sha256


def _read_row(shard: str, row: Any, size: int) -> IndexedSample:
    if not isinstance(row, list) or len(row) != 3:
        raise StaleIndexError("a sample has no key, members and repeated members")
    key, places, repeated = row
    if not (isinstance(key, str) and isinstance(places, dict) and places):
        raise StaleIndexError("a sample has no key or no members")
    if not isinstance(repeated, list) or not all(
        isinstance(name, str) and name in places for name in repeated
    ):
        raise StaleIndexError(f"the repeated members of '{key}' are none of it")
    members = {}
    for name, place in places.items():
        if not (isinstance(place, list) and [type(each) for each in place] == [int, int]):
            raise StaleIndexError(f"'{name}' of '{key}' has no offset and size")
        members[name] = Member(*place)
        offset, length = members[name]
        if offset < BLOCK or offset % BLOCK or length < 0 or offset + length > size:
            raise StaleIndexError(f"'{name}' of '{key}' cannot lie at {offset} with {length} bytes")
    return IndexedSample(shard, key, members, tuple(repeated))


def _check_ends(shard: str, samples: list[IndexedSample]) -> None:
    members = [member for sample in samples for member in sample.members.values()]
    with open(shard, "rb") as file:
        for member in (min(members), max(members)) if members else ():
            file.seek(member.offset - BLOCK)
            try:
                header = tarfile.TarInfo.frombuf(file.read(BLOCK), "utf-8", "surrogateescape")
            except (tarfile.TarError, ValueError) as error:
                raise StaleIndexError(
                    f"no file stands at byte {member.offset} ({error})"
                ) from error
            if header.size != member.size:
                raise StaleIndexError(f"the file at byte {member.offset} has {header.size} bytes")
        end = max(members).end if members else 0
        file.seek(end)
        if file.read(BLOCK) != bytes(BLOCK):
            raise StaleIndexError(f"the shard goes on behind byte {end}")
