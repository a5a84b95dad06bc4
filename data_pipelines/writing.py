"""Shards out: whole or not at all, and the same bytes for the same samples."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from conceptmoe_vl.errors import UserError

MANIFEST = "manifest.json"
REJECTS = "rejects.json"


@contextlib.contextmanager
def new_folder(path: str | Path, force: bool = False) -> Iterator[Path]:
    """A folder to write into that becomes `path` when the block ends without an error.

    Args:
        force: replace a data set that is already there.

    Raises:
        UserError: `path` is a file, or a folder that holds something and `force` is not given, or
            holds something else than shards.
    """
    path = Path(path)
    _check_target(path, force)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        yield partial
        if path.exists():
            shutil.rmtree(path)
        partial.rename(path)
    except OSError as error:
        raise UserError(f"'{path}' cannot be written ({error}); nothing was left there") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _check_target(path: Path, force: bool) -> None:
    if path.exists() and not path.is_dir():
        raise UserError(f"'{path}' is a file; name a folder for the shards")
    content = sorted(entry.name for entry in path.iterdir()) if path.exists() else []
    if content and not force:
        raise UserError(f"'{path}' is not empty; name another folder, or replace it with --force")
    foreign = [
        name
        for name in content
        if not name.endswith(".tar") and name not in (MANIFEST, REJECTS, ".complete")
    ]
    if foreign:
        raise UserError(
            f"'{path}' holds '{foreign[0]}', which is no shard; --force replaces data sets alone"
        )


def write_shards(
    folder: Path,
    prefix: str,
    samples: Iterable[tuple[str, dict, list[tuple[str, bytes]]]],
    size: int,
) -> list[dict[str, Any]]:
    """Writes `folder/prefix-000000.tar` and so on.

    Args:
        samples: key, record, and images as extension (`png`) and encoded file, in order.
        size: samples per shard.

    Returns:
        Per shard: name, samples, bytes.
    """
    shards: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        tar: tarfile.TarFile | None = None
        for number, (key, record, images) in enumerate(samples):
            if number % size == 0:
                stack.close()
                shards.append({"name": f"{prefix}-{len(shards):06d}.tar", "samples": 0})
                tar = stack.enter_context(
                    tarfile.open(folder / shards[-1]["name"], "w", format=tarfile.USTAR_FORMAT)
                )
            assert tar is not None
            text = json.dumps(record, ensure_ascii=False).encode()
            _add(tar, f"{key}.json", text)
            for place, (extension, data) in enumerate(images):
                _add(tar, f"{key}.img{place}.{extension}", data)
            shards[-1]["samples"] += 1
    for shard in shards:
        shard["bytes"] = (folder / shard["name"]).stat().st_size
    return shards


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)  # its time, owner and mode are fixed: equal samples, equal bytes
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))


def write_manifest(folder: Path, content: dict[str, Any]) -> None:
    """`manifest.json`: what the data set is, its licence, and its shards."""
    _write_json(folder / MANIFEST, content)


def write_rejects(folder: Path, content: dict[str, Any]) -> None:
    """`rejects.json`: the records that could not be used, by reason."""
    _write_json(folder / REJECTS, content)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    text = json.dumps({"format": 1, **content}, indent=2, ensure_ascii=False) + "\n"
    path.write_text(text, encoding="utf-8", errors="backslashreplace")
