"""Local tar shards, read by offset: any sample can be reached at once, in any order.

A shard is an uncompressed tar. Members of a sample share everything before the first dot of their
file name (webdataset's rule); they need not be neighbours.
"""

from __future__ import annotations

import collections
import dataclasses
import glob
import hashlib
import logging
import os
import re
import tarfile
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from conceptmoe_vl.errors import UserError
from conceptmoe_vl.prompts import Turn
from data_pipelines.records import Conversation, RecordError, read_record
from data_pipelines.remote_opening import is_remote, shown
from data_pipelines.shard_index import (
    BLOCK,
    IndexedSample,
    Member,
    SampleMembers,
    ShardSamples,
    ShardTable,
    StaleIndexError,
    load_index,
)

__all__ = [
    "IndexedSample",
    "Member",
    "ShardIndex",
    "ShardReader",
    "expand_patterns",
    "index_shards",
    "iter_texts",
    "read_sample",
    "scan_shard",
    "texts_of",
]

logger = logging.getLogger(__name__)

_RANGE = re.compile(r"\{([0-9]+)\.\.([0-9]+)\}")
_OPEN_FILES = 64
_PIECE = 1 << 20  # bytes


@dataclasses.dataclass(frozen=True)
class ShardIndex:
    """All samples of some shards, in the order of the shards and of the files in them.

    Fields:
        samples: each is made when it is asked for.
        damaged: shards that end early or hold a broken header, with what is wrong.
    """

    samples: Sequence[IndexedSample]
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
        if is_remote(pattern):
            raise UserError(
                f"'{shown(pattern)}' is remote, which training reads (docs/data.md) and this does "
                "not; copy the shards to a local folder"
            )
        for path in (path for part in expand_ranges(pattern) for path in _matches(part, pattern)):
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


def expand_ranges(pattern: str) -> list[str]:
    match = _RANGE.search(pattern)
    if match is None:
        return [pattern]
    first, last = match.groups()
    numbers = [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return [
        rest
        for number in numbers
        for rest in expand_ranges(pattern[: match.start()] + number + pattern[match.end() :])
    ]


def index_shards(patterns: Sequence[str]) -> ShardIndex:
    """The samples of all shards, by the index beside a shard or else by its headers.

    Raises:
        UserError: see `expand_patterns`; or a shard cannot be opened.
    """
    shards = expand_patterns(patterns)
    tables: list[ShardTable] = []
    damaged: dict[str, str] = {}
    for shard in shards:
        found, fault = _indexed(shard) or scan_shard(shard)
        tables.append(ShardTable(shard, found))
        if fault is not None:
            damaged[shard] = fault
    return ShardIndex(ShardSamples(tables), shards, damaged)


def _indexed(shard: str) -> tuple[list[IndexedSample], None] | None:
    """As `scan_shard`, by the index beside the shard; None where there is none that fits."""
    try:
        loaded = load_index(shard)
    except (StaleIndexError, OSError) as error:
        logger.warning("the index of shard '%s' is not used: %s; its headers are", shard, error)
        return None
    return None if loaded is None else (loaded[0], None)


def scan_shard(shard: str) -> tuple[list[IndexedSample], str | None]:
    """Samples of a shard by its headers, and what is wrong with it (None: nothing).

    Of a damaged shard the last sample before the damage is left out, since members of it may be
    missing.
    """
    members = SampleMembers()
    fault, last_key, end = None, "", 0
    try:
        size = os.path.getsize(shard)
        with tarfile.open(shard, "r:") as tar:
            for info in tar:
                member = Member(info.offset_data, info.size)
                end = member.end
                if info.isfile():
                    last_key = members.add(info.name, member)
        if not _is_end(shard, end):
            fault = f"it ends early or is damaged at byte {end} of {size}"
    except (tarfile.TarError, EOFError) as error:
        fault = f"it ends early or is damaged behind byte {min(end, size)} of {size} ({error})"
    except OSError as error:
        raise UserError(f"shard '{shard}' cannot be read ({error}); check the file") from error
    if fault is not None:
        members.by_key.pop(last_key, None)
    return members.samples(shard), fault


def _is_end(shard: str, offset: int) -> bool:
    """Whether a block of zeros stands there, and nothing else behind it.

    tarfile takes any broken header for the end, and a block of zeros too: a hole that a copy left,
    or the end mark of the first of two tars in one file, behind which samples would be lost.
    """
    with open(shard, "rb") as file:
        file.seek(offset)
        piece = file.read(BLOCK)
        whole = len(piece) == BLOCK
        while piece and not piece.strip(b"\0"):
            piece = file.read(_PIECE)
        return whole and not piece


def _is_header(block: bytes, key: str, name: str, size: int) -> bool:
    """Whether the header of a tar is that of a member, by its size and path.

    Long and foreign paths are cut or replaced there, and sizes from 8 GiB on are not octal: what
    cannot be compared counts as equal.
    """
    try:
        found = int(block[124:136].strip(b" \0") or b"0", 8)
    except ValueError:
        found = size if block[124] & 0x80 else -1
    name_field = block[:100].partition(b"\0")[0]
    path = name_field.decode("utf-8", "surrogateescape").lower().removeprefix("./")
    own = f"{key}.{name}".rstrip(".").lower()
    # The start of a long path stands elsewhere in the header.
    same = len(name_field) == 100 or f"/{own}".endswith(f"/{path}")
    if not same and not own.isascii():  # PAX has `?` there, or marks of letters on their own
        own, path = (unicodedata.normalize("NFC", text) for text in (own, path))
        same = "?" in path or f"/{own}".endswith(f"/{path}")
    return found == size and same


class ShardReader:
    """Reads members by offset; keeps a bounded number of files open. Safe to use after a fork."""

    def __init__(self) -> None:
        self._files: collections.OrderedDict[str, int] = collections.OrderedDict()

    def read(self, sample: IndexedSample, name: str) -> bytes:
        """A member's bytes.

        Raises:
            RecordError: the sample has no such member, or it does not stand where it should: the
                file was cut or replaced, or the index beside it is wrong.
        """
        if name not in sample.members:
            raise RecordError("missing_field", f"the member '{name}' is missing", name)
        offset, size = sample.members[name]
        data = os.pread(self._file(sample.shard), BLOCK + size, offset - BLOCK)
        if len(data) != BLOCK + size:
            raise RecordError("truncated_shard", f"the member '{name}' ends early", name)
        if not _is_header(data[:BLOCK], sample.key, name, size):
            raise RecordError(
                "truncated_shard", f"the member '{name}' does not stand at byte {offset}", name
            )
        return data[BLOCK:]

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


def read_sample(reader: Any, sample: Any) -> Conversation:
    """The conversation of a sample; its source is by default the shard's name up to the first `-`.

    Args:
        reader, sample: a `ShardReader` and an `IndexedSample`, or what stands for them where the
            sample's files are at hand.

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
        yield from texts_of(turns)
    reader.close()


def texts_of(turns: Sequence[Turn]) -> Iterator[str]:
    """The texts of turns, in their order."""
    return (part for turn in turns for part in turn.parts if isinstance(part, str))
