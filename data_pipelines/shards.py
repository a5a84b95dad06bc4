"""Local tar shards, read by offset: any sample can be reached at once, in any order.

A shard is an uncompressed tar. Members of a sample share everything before the first dot of their
file name (webdataset's rule); they need not be neighbours.
"""

from __future__ import annotations

import collections
import dataclasses
import glob
import hashlib
import os
import re
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from conceptmoe_vl.errors import UserError
from data_pipelines.records import Conversation, RecordError, read_record

_BLOCK = 512  # bytes, of a tar
_RANGE = re.compile(r"\{([0-9]+)\.\.([0-9]+)\}")
_OPEN_FILES = 64


class Member(NamedTuple):
    """Where a file lies in a shard: bytes from its start."""

    offset: int
    size: int


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
        return f"{Path(self.shard).name}/{self.key}"


@dataclasses.dataclass(frozen=True)
class ShardIndex:
    """All samples of some shards, in the order of the shards and of the files in them.

    Fields:
        damaged: shards that end early or hold a broken header, with what is wrong.
    """

    samples: list[IndexedSample]
    shards: list[str]
    damaged: dict[str, str]

    def fingerprint(self) -> str:
        """Changes when a sample is added, removed, renamed or resized."""
        digest = hashlib.sha256()
        for sample in self.samples:
            sizes = [(name, member.size) for name, member in sample.members.items()]
            digest.update(repr((Path(sample.shard).name, sample.key, sizes)).encode())
        return digest.hexdigest()[:16]


def expand_patterns(patterns: Sequence[str]) -> list[str]:
    """Shard files of patterns, without repetition: patterns in their order, files sorted.

    Raises:
        UserError: a pattern is remote, compressed or matches nothing.
    """
    shards: dict[str, None] = {}
    for pattern in patterns:
        if pattern.startswith("pipe:") or "://" in pattern:
            raise UserError(
                f"data.shards: '{pattern}' is remote; copy the shards to a local folder"
            )
        for path in (path for part in _expand_ranges(pattern) for path in _matches(part, pattern)):
            if not path.endswith(".tar"):
                raise UserError(f"data.shards: '{path}' is no .tar file; unpack compressed shards")
            shards[path] = None
    return list(shards)


def _matches(part: str, pattern: str) -> list[str]:
    if os.path.isdir(part):
        part = os.path.join(glob.escape(part), "*.tar")
    found = sorted(glob.glob(part)) or ([part] if os.path.isfile(part) else [])
    if not found:
        raise UserError(
            f"data.shards: no file matches '{part}'"
            + (f" (of '{pattern}')" if part != pattern else "")
            + "; build the shards first, or correct the path"
        )
    return found


def _expand_ranges(pattern: str) -> list[str]:
    match = _RANGE.search(pattern)
    if match is None:
        return [pattern]
    first, last = match.groups()
    numbers = [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return [
        rest
        for number in numbers
        for rest in _expand_ranges(pattern[: match.start()] + number + pattern[match.end() :])
    ]


def index_shards(patterns: Sequence[str]) -> ShardIndex:
    """Scans the headers of all shards.

    Raises:
        UserError: see `expand_patterns`; or a shard cannot be opened.
    """
    shards = expand_patterns(patterns)
    samples: list[IndexedSample] = []
    damaged: dict[str, str] = {}
    for shard in shards:
        found, fault = scan_shard(shard)
        samples += found
        if fault is not None:
            damaged[shard] = fault
    return ShardIndex(samples, shards, damaged)


def scan_shard(shard: str) -> tuple[list[IndexedSample], str | None]:
    """Samples of a shard, and what is wrong with it (None: nothing).

    Of a damaged shard the last sample before the damage is left out, since members of it may be
    missing.
    """
    members: dict[str, dict[str, Member]] = {}
    repeated: dict[str, list[str]] = collections.defaultdict(list)
    fault, last_key, end = None, "", 0
    try:
        size = os.path.getsize(shard)
        with tarfile.open(shard, "r:") as tar:
            for info in tar:
                end = info.offset_data + -(-info.size // _BLOCK) * _BLOCK
                if not info.isfile():
                    continue
                last_key, name = _split_name(info.name)
                if name in members.setdefault(last_key, {}):
                    repeated[last_key].append(name)
                members[last_key][name] = Member(info.offset_data, info.size)
        if not _is_end_mark(shard, end):
            fault = f"it ends early or is damaged at byte {end} of {size}"
    except (tarfile.TarError, EOFError) as error:
        fault = f"it ends early or is damaged behind byte {min(end, size)} of {size} ({error})"
    except OSError as error:
        raise UserError(f"shard '{shard}' cannot be read ({error}); check the file") from error
    if fault is not None:
        members.pop(last_key, None)
    samples = [
        IndexedSample(shard, key, found, tuple(repeated.get(key, ())))
        for key, found in members.items()
    ]
    return samples, fault


def _is_end_mark(shard: str, offset: int) -> bool:
    """Whether a block of zeros stands there; tarfile takes any broken header for the end."""
    with open(shard, "rb") as file:
        file.seek(offset)
        return file.read(_BLOCK) == bytes(_BLOCK)


def _split_name(path: str) -> tuple[str, str]:
    folder, slash, file = path.rpartition("/")
    stem, _, name = file.partition(".")
    return f"{folder}{slash}{stem}", name.lower()


class ShardReader:
    """Reads members by offset; keeps a bounded number of files open. Safe to use after a fork."""

    def __init__(self) -> None:
        self._files: collections.OrderedDict[str, int] = collections.OrderedDict()

    def read(self, sample: IndexedSample, name: str) -> bytes:
        """A member's bytes.

        Raises:
            RecordError: the sample has no such member, or the file has become shorter.
        """
        if name not in sample.members:
            raise RecordError("missing_field", f"the member '{name}' is missing", name)
        member = sample.members[name]
        data = os.pread(self._file(sample.shard), member.size, member.offset)
        if len(data) != member.size:
            raise RecordError("truncated_shard", f"the member '{name}' ends early", name)
        return data

    def _file(self, shard: str) -> int:
        if shard in self._files:
            self._files.move_to_end(shard)
            return self._files[shard]
        if len(self._files) >= _OPEN_FILES:
            os.close(self._files.popitem(last=False)[1])
        try:
            self._files[shard] = os.open(shard, os.O_RDONLY)
        except OSError as error:
            raise UserError(f"shard '{shard}' cannot be read ({error}); check the file") from error
        return self._files[shard]

    def close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])


def read_sample(reader: ShardReader, sample: IndexedSample) -> Conversation:
    """The conversation of a sample; its source is by default the shard's name up to the first `-`.

    Raises:
        RecordError: the record cannot be used, or a member stands twice in the shard.
    """
    if sample.repeated:
        name = sample.repeated[0]
        raise RecordError("repeated_member", f"the member '{name}' stands there twice", name)
    default_source = sample.shard.rpartition("/")[2].partition("-")[0]
    return read_record(reader.read(sample, "json"), sample.members, default_source)


def iter_texts(patterns: Sequence[str] | str, max_samples: int | None = None) -> Iterator[str]:
    """The texts of all turns of shards, in their order, for training a tokenizer.

    Args:
        max_samples: samples read at most. Records that cannot be read are passed over: the stream
            reports them.
    """
    index = index_shards([patterns] if isinstance(patterns, str) else list(patterns))
    reader = ShardReader()
    for sample in index.samples[:max_samples]:
        try:
            turns = read_sample(reader, sample).turns
        except RecordError:
            continue
        yield from (part for turn in turns for part in turn.parts if isinstance(part, str))
    reader.close()
