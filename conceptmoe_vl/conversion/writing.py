"""Safetensors shards written as a stream, from pieces of other files and computed tensors.

The library's own writer takes a whole shard in memory at once. Here a shard's header is written
from shapes alone, and the tensors follow in pieces of at most 1 MiB. Processor time of copying 1 GB
from and to the page cache: by the kernel (`copy_file_range`) 0.27 s, in pieces of 64 KiB 0.36 s,
of 1 MiB 0.28 s, of 8 MiB 2.5 s, tensor by tensor through the library's memory map 0.54 s.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from conceptmoe_vl.conversion.reading import INDEX, SINGLE, VALUE_BYTES, StoredTensor
from conceptmoe_vl.errors import UserError

_STEP = 1 << 20


@dataclasses.dataclass(frozen=True)
class Copied:
    """Bytes of a stored tensor: `size` of them from `start` (offsets inside the tensor)."""

    tensor: StoredTensor
    start: int
    size: int

    @classmethod
    def whole(cls, tensor: StoredTensor) -> Copied:
        return cls(tensor, 0, tensor.size)

    @classmethod
    def rows(cls, tensor: StoredTensor, start: int, stop: int) -> Copied:
        """Entries start to stop of the first dimension."""
        return cls(tensor, start * tensor.row_bytes, (stop - start) * tensor.row_bytes)


@dataclasses.dataclass(frozen=True)
class Computed:
    """A tensor that is made when it is due. `size`: its bytes."""

    make: Callable[[], torch.Tensor]
    size: int


@dataclasses.dataclass(frozen=True)
class NewTensor:
    """A tensor to be written: its bytes are those of `pieces`, end to end.

    Attributes:
        dtype: safetensors' name.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Copied | Computed, ...]

    def __post_init__(self) -> None:
        given = sum(piece.size for piece in self.pieces)
        assert given == self.size, f"{self.name}: pieces of {given} bytes, {self.size} are needed"

    @property
    def size(self) -> int:
        values = 1
        for size in self.shape:
            values *= size
        return values * VALUE_BYTES[self.dtype]


def plan_shards(tensors: list[NewTensor], largest: int) -> list[list[NewTensor]]:
    """Cuts a list of tensors into shards of at most `largest` bytes (or one tensor)."""
    shards: list[list[NewTensor]] = []
    room = 0
    for tensor in tensors:
        if not shards or tensor.size > room:
            shards.append([])
            room = largest
        shards[-1].append(tensor)
        room -= tensor.size
    # Wide values first: the library reads no tensor at an offset that its values do not divide.
    return [sorted(shard, key=lambda tensor: -VALUE_BYTES[tensor.dtype]) for shard in shards]


def write_weights(
    tensors: list[NewTensor], folder: Path, largest: int, advance: Callable[[int], object]
) -> list[Path]:
    """Writes the shards of a model and, if there is more than one, their index.

    Args:
        largest: bytes of a shard. advance: told how many bytes were written.

    Raises:
        UserError: the disk is full, or cannot be written to.
    """
    total = sum(tensor.size for tensor in tensors)
    free = shutil.disk_usage(folder).free
    if free < total:
        raise UserError(
            f"'{folder.parent}' has {free / 1e9:.1f} GB free, but the weights take "
            f"{total / 1e9:.1f} GB; make room, or write elsewhere"
        )
    shards = plan_shards(tensors, largest)
    names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    paths = [folder / name for name in (names if len(shards) > 1 else [SINGLE])]
    with _Sources() as sources:
        for path, shard in zip(paths, shards, strict=True):
            try:
                _write_shard(path, shard, sources, advance)
            except OSError as error:
                raise UserError(
                    f"'{path}' cannot be written: {error.strerror or error}; make room, or write "
                    "elsewhere"
                ) from error
    if len(shards) > 1:
        where = {
            tensor.name: path.name
            for path, shard in zip(paths, shards, strict=True)
            for tensor in shard
        }
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return paths


def _write_shard(
    path: Path, shard: list[NewTensor], sources: _Sources, advance: Callable[[int], object]
) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in shard:
        offsets = [end, end + tensor.size]
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": offsets,
        }
        end = offsets[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb", buffering=0) as file:
        write_all(file.fileno(), len(text).to_bytes(8, "little") + text)
        for tensor in shard:
            for piece in tensor.pieces:
                if isinstance(piece, Computed):
                    value = piece.make().contiguous()
                    write_all(file.fileno(), value.view(torch.uint8).numpy().data)
                    advance(piece.size)
                else:
                    for copied in sources.copy(piece, file.fileno()):
                        advance(copied)


def write_all(target: int, content: bytes | memoryview) -> None:
    """Writes all bytes to a file descriptor; one call of the kernel may take fewer."""
    left = memoryview(content).cast("B")
    while left:
        left = left[os.write(target, left[:_STEP]) :]


class _Sources:
    """The source file that was last read from, kept open."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._file: int = -1

    def __enter__(self) -> _Sources:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def _close(self) -> None:
        if self._path is not None:
            os.close(self._file)
            self._path = None

    def copy(self, piece: Copied, target: int) -> Iterator[int]:
        """Appends a piece to a file descriptor, in steps whose bytes it yields."""
        if self._path != piece.tensor.path:
            self._close()
            self._file = os.open(piece.tensor.path, os.O_RDONLY)
            self._path = piece.tensor.path
        start, left = piece.tensor.start + piece.start, piece.size
        while left:
            content = os.pread(self._file, min(left, _STEP), start)
            if not content:
                raise UserError(f"'{piece.tensor.path}' became shorter while it was read")
            write_all(target, content)
            start, left = start + len(content), left - len(content)
            yield len(content)
