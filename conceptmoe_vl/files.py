"""Files that are whole or absent, and their checksums."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

_BLOCK = 1 << 22


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A path beside `path` to write to; it takes that name when the block has ended well.

    After an error nothing is left of it, and what stood under `path` stands there still. Two that
    write at once do not meet: the one that ends last stands there, whole.
    """
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        yield beside
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def remove_unfinished(path: Path) -> None:
    """Removes what killed processes have left of `path` in `written_whole`."""
    for left in path.parent.glob(f".{path.name}.????????.tmp"):
        left.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Returns when a file, or a folder's list of names, is on the disk, where that can be known."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems have no such call
            raise
    finally:
        os.close(opened)


def sha256_of(path: str | Path) -> str:
    """Checksum of a file, read in blocks, in hexadecimal digits."""
    digest, buffer = hashlib.sha256(), bytearray(_BLOCK)
    view = memoryview(buffer)
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(view[:count])
    return digest.hexdigest()
