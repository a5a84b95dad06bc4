"""The tensors of a folder's safetensors files: names, shapes and where their bytes lie."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from conceptmoe_vl.errors import UserError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
VALUE_BYTES = {"F32": 4, "BF16": 2, "F16": 2}
_HEADER_LENGTH = 8  # bytes of the number before the header
_OTHER_WEIGHTS = ("*.bin", "*.gguf", "*.pt", "*.pth", "*.h5", "*.msgpack")


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file.

    Attributes:
        name: its name. path: the file. dtype: safetensors' name (F32, BF16, F16).
        shape: its shape. start: offset of its first byte in the file.
    """

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one entry of the first dimension."""
        values = 1
        for size in self.shape[1:]:
            values *= size
        return values * VALUE_BYTES[self.dtype]

    @property
    def size(self) -> int:
        """Bytes of the tensor."""
        return self.row_bytes * (self.shape[0] if self.shape else 1)

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Entries start to stop of the first dimension; only they are read."""
        with safe_open(self.path, framework="pt") as file:
            return file.get_slice(self.name)[start:stop]


class Checkpoint:
    """The weights of a folder, as transformers writes them: one file, or shards and their index.

    Args:
        folder: a model folder.

    Raises:
        UserError: there are no safetensors files, a shard is missing or damaged, or the index
            names a tensor that its shard does not hold.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._tensors: dict[str, StoredTensor] = {}
        wanted = self._weight_map()
        for path in sorted(set(wanted.values()) or {folder / SINGLE}):
            for tensor in _read_header(path):
                if not wanted or wanted.get(tensor.name) == path:
                    self._tensors[tensor.name] = tensor
        missing = sorted(wanted.keys() - self._tensors.keys())
        if missing:
            raise UserError(
                f"{wanted[missing[0]]} does not hold {missing[0]}, which {INDEX} says it does; "
                "fetch the checkpoint again"
            )

    def _weight_map(self) -> dict[str, Path]:
        """File of every tensor by the index; empty for a single file."""
        index = self.folder / INDEX
        if (self.folder / SINGLE).is_file():  # which transformers reads first, too
            return {}
        if not index.is_file():
            others = sorted(p.name for kind in _OTHER_WEIGHTS for p in self.folder.glob(kind))
            raise UserError(
                f"'{self.folder}' holds no {SINGLE} and no {INDEX}"
                + (
                    f", but {others[0]}; load it with transformers and save_pretrained it"
                    if others
                    else "; name the folder of a whole checkpoint"
                )
            )
        try:
            names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            outside = [f for f in names.values() if Path(f).is_absolute() or ".." in Path(f).parts]
            files = {name: self.folder / file for name, file in names.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"'{index}' is no index of shards ({error}); fetch the checkpoint again"
            ) from error
        if outside:  # by name: in a hub's cache the files are links that lead elsewhere
            raise UserError(
                f"'{index}' names '{outside[0]}', which is not in its folder; fetch the checkpoint "
                "again"
            )
        for path in sorted(set(files.values())):
            if not path.is_file():
                raise UserError(
                    f"shard '{path}' is missing, which {INDEX} names; fetch it and convert again"
                )
        return files

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def tensor(self, name: str, shape: tuple[int, ...] | None = None) -> StoredTensor:
        """The tensor of this name.

        Args:
            shape: what it must have, by the configuration.

        Raises:
            UserError: it is missing, of another shape, or of a dtype that is not copied.
        """
        if name not in self._tensors:
            raise UserError(
                f"'{self.folder}' holds no tensor {name}, which its config.json asks for; "
                "fetch the checkpoint again"
            )
        found = self._tensors[name]
        if found.dtype not in DTYPES:
            raise UserError(
                f"tensor {name} in '{found.path}' is {found.dtype}; only {', '.join(DTYPES)} are "
                "converted: save a dequantised checkpoint first"
            )
        if shape is not None and found.shape != shape:
            raise UserError(
                f"tensor {name} in '{found.path}' has the shape {list(found.shape)}, but "
                f"config.json gives {list(shape)}; they do not belong together"
            )
        return found

    @property
    def largest_file(self) -> int:
        """Bytes of the largest file."""
        return max(path.stat().st_size for path in {t.path for t in self._tensors.values()})


def _read_header(path: Path) -> list[StoredTensor]:
    try:
        with safe_open(path, framework="pt"):
            pass  # the library checks offsets against the file's size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_HEADER_LENGTH), "little")
            header: dict[str, Any] = json.loads(file.read(length))
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(
            f"'{path}' cannot be read ({' '.join(str(error).split())}); fetch it again"
        ) from error
    header.pop("__metadata__", None)
    first = _HEADER_LENGTH + length
    return [
        StoredTensor(
            name, path, info["dtype"], tuple(info["shape"]), first + info["data_offsets"][0]
        )
        for name, info in header.items()
    ]
