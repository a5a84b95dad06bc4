"""Files that are whole or absent, and their checksums."""

from __future__ import annotations

import contextlib
import hashlib
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


def sha256_of(path: str | Path) -> str:
    """Checksum of a file, read in blocks, in hexadecimal digits."""
    digest, buffer = hashlib.sha256(), bytearray(_BLOCK)
    view = memoryview(buffer)
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(view[:count])
    return digest.hexdigest()
