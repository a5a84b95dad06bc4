"""Shards out: whole or not at all, and the same bytes for the same samples."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from conceptmoe_vl.errors import UserError
from data_pipelines.records import json_bytes
from data_pipelines.shard_index import (
    BLOCK,
    Member,
    SampleMembers,
    split_name,
    write_index,
)

MANIFEST = "manifest.json"
REJECTS = "rejects.json"

_SIZE = re.compile(r"([0-9]{1,12})(?:([KMG])(i?)B)?", re.I | re.A)


class PackedSample(NamedTuple):
    """A sample as it stands in a tar.

    Fields:
        blocks: headers and files, whole blocks.
        places: path in the tar, offset in `blocks` and size of each file.
        images: number of pictures.
    """

    key: str
    blocks: bytes
    places: tuple[tuple[str, int, int], ...]
    images: int


def pack_sample(key: str, record: dict, images: list[tuple[str, bytes]]) -> PackedSample:
    """The bytes of a sample; equal samples give equal bytes.

    Args:
        images: extension (`png`) and encoded file, in order.

    Raises:
        RecordError: the record has no form in JSON.
        UserError: the key holds a dot or is too long for a tar.
    """
    files = [(f"{key}.json", json_bytes(record))]
    files += [(f"{key}.img{n}.{extension}", data) for n, (extension, data) in enumerate(images)]
    blocks, places = bytearray(), []
    for path, data in files:
        if split_name(path)[0] != key:
            raise UserError(f"the key '{key}' holds a dot, where a sample's name ends; replace it")
        info = tarfile.TarInfo(path)  # its time, owner and mode are fixed
        info.size = len(data)
        try:
            blocks += info.tobuf(tarfile.USTAR_FORMAT)
        except ValueError as error:
            raise UserError(f"the key '{key[:120]}' has no place in a tar ({error})") from error
        places.append((path, len(blocks), len(data)))
        blocks += data + bytes(-len(data) % BLOCK)
    return PackedSample(key, bytes(blocks), tuple(places), len(images))


class ShardSize(NamedTuple):
    """When a shard is full: by samples, or by bytes of its file."""

    samples: int | None = None
    bytes: int | None = None

    @classmethod
    def parse(cls, text: str) -> ShardSize:
        """Of `1000`, samples, or `256MB`, bytes: KB, MB, GB of 1,000, KiB, MiB, GiB of 1,024.

        Raises:
            ValueError: it is neither.
        """
        match = _SIZE.fullmatch(text.strip())
        if match is None or int(match[1]) == 0:
            raise ValueError(f"'{text}' is no size of a shard; give samples, 1000, or bytes, 256MB")
        number, prefix, binary = int(match[1]), match[2], match[3]
        if prefix is None:
            return cls(samples=number)
        return cls(bytes=number * (1024 if binary else 1000) ** ("KMG".index(prefix.upper()) + 1))


class ShardWriter:
    """Writes `folder/prefix-000000.tar` and so on, and an index beside each.

    Args:
        finished: shards that are there already.
    """

    def __init__(self, folder: Path, prefix: str, size: ShardSize, finished: int = 0) -> None:
        self._folder, self._prefix, self._size = folder, prefix, size
        self._finished = finished
        self._file: BinaryIO | None = None
        self._start()

    def _start(self) -> None:
        self._digest = hashlib.sha256()
        self._members = SampleMembers()
        self._bytes = self._samples = self._images = 0

    def fits(self, sample: PackedSample) -> bool:
        """Whether the open shard takes this sample; an empty one takes any."""
        if self._samples == 0:
            return True
        if self._size.bytes is None:
            return self._samples < (self._size.samples or 1)
        return _file_size(self._bytes + len(sample.blocks)) <= self._size.bytes

    def add(self, sample: PackedSample) -> None:
        """Writes a sample that fits."""
        if self._file is None:
            self._file = open(self._path(), "wb")  # noqa: SIM115 (closed by `finish` or `close`)
        for path, offset, size in sample.places:
            self._members.add(path, Member(self._bytes + offset, size))
        self._write(sample.blocks)
        self._samples += 1
        self._images += sample.images

    def finish(self) -> dict[str, Any] | None:
        """Ends the open shard, on the disk too, and writes its index.

        Returns:
            Its entry in the manifest: name, samples, images, bytes, sha256. None: none is open.
        """
        if self._file is None:
            return None
        self._write(bytes(_file_size(self._bytes) - self._bytes))
        self._file.flush()
        os.fsync(self._file.fileno())
        self.close()
        path, sha256 = self._path(), self._digest.hexdigest()
        write_index(path, self._members.as_rows(), self._bytes, sha256)
        entry = {
            **{"name": path.name, "samples": self._samples, "images": self._images},
            **{"bytes": self._bytes, "sha256": sha256},
        }
        self._finished += 1
        self._start()
        return entry

    def close(self) -> None:
        """Leaves the open shard as it is."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _path(self) -> Path:
        return self._folder / f"{self._prefix}-{self._finished:06d}.tar"

    def _write(self, data: bytes) -> None:
        assert self._file is not None
        self._file.write(data)
        self._digest.update(data)
        self._bytes += len(data)


def _file_size(content: int) -> int:
    """Bytes of a tar with its end mark of two blocks, in whole records."""
    return -(-(content + 2 * BLOCK) // tarfile.RECORDSIZE) * tarfile.RECORDSIZE


def write_shards(
    folder: Path,
    prefix: str,
    samples: Iterable[tuple[str, dict, list[tuple[str, bytes]]]],
    size: int | ShardSize,
) -> list[dict[str, Any]]:
    """Writes `folder/prefix-000000.tar` and so on, and an index beside each.

    Args:
        samples: key, record, and images as extension (`png`) and encoded file, in order.
        size: samples per shard, or a `ShardSize`.

    Returns:
        Per shard: name, samples, images, bytes, sha256.
    """
    writer = ShardWriter(folder, prefix, ShardSize(size) if isinstance(size, int) else size)
    shards: list[dict[str, Any] | None] = []
    with contextlib.closing(writer):
        for key, record, images in samples:
            packed = pack_sample(key, record, images)
            if not writer.fits(packed):
                shards.append(writer.finish())
            writer.add(packed)
        shards.append(writer.finish())
    return [shard for shard in shards if shard is not None]


def write_manifest(folder: Path, content: dict[str, Any]) -> None:
    """`manifest.json`: what the data set is, its licence, and its shards."""
    _write_json(folder / MANIFEST, content)


def write_rejects(folder: Path, content: dict[str, Any]) -> None:
    """`rejects.json`: the records that could not be used, by reason."""
    _write_json(folder / REJECTS, content)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    text = json.dumps({"format": 1, **content}, indent=2, ensure_ascii=False) + "\n"
    path.write_text(text, encoding="utf-8", errors="backslashreplace")
