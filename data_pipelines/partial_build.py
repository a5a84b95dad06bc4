"""The folder of a build that is under way: `.NAME.partial` beside the data set `NAME`.

Notable:
- a shard counts once its line stands in the journal, on the disk; whatever else lies there when a
  build goes on is thrown away;
- the folder takes the place of the data set in one step, when all is written;
- one build at a time: the lock is the kernel's, so a killed build leaves none.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any, BinaryIO

from conceptmoe_vl.errors import UserError
from data_pipelines.shard_index import INDEX_SUFFIX, index_path
from data_pipelines.writing import MANIFEST, REJECTS

_OWN = _LOCK, _JOURNAL, _MARKS = ".lock", ".journal", ".marks"
MARK_BYTES = 16


class PartialBuild:
    """Holds the folder; a context manager.

    Args:
        out: the data set.
        force: replace the data set that is there.

    Attributes:
        folder: where shards are written.

    Raises:
        UserError: `out` is a file, or a folder that holds something and `force` is not given, or
            holds something else than shards; another build has the folder.
    """

    def __init__(self, out: Path, force: bool = False) -> None:
        _check_target(out, force)
        self.out, self._force = out, force
        self.folder = out.with_name(f".{out.name}.partial")
        self.num_shards = 0
        self._num_marks = 0
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock: BinaryIO = open(self.folder / _LOCK, "wb")  # noqa: SIM115 (`close`)
        except OSError as error:
            raise UserError(f"'{self.folder}' cannot be written ({error})") from error
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise UserError(f"another build of '{out}' is under way; wait for its end") from error

    def __enter__(self) -> PartialBuild:
        return self

    def __exit__(self, *_: object) -> None:
        """Keeps finished shards, for the next build of this kind."""
        if self.num_shards == 0:
            shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.close()

    def resume(self, fingerprint: str) -> tuple[list[dict[str, Any]], list[bytes], bool]:
        """What an interrupted build of the same kind left.

        Returns:
            A journal's entry of each finished shard; the marks that were saved; and whether
            something was thrown away because it was of another kind.
        """
        lines = self._read_journal()
        same = bool(lines) and lines[0].get("fingerprint") == fingerprint
        entries = lines[1:] if same else []
        marks = self._read_marks(entries[-1]["marks"] if entries else 0)
        if marks is None or not all(self._is_whole(entry["shard"]) for entry in entries):
            entries, marks, same = [], [], False
        kept = {_LOCK}
        for entry in entries:
            kept |= {entry["shard"]["name"], index_path(entry["shard"]["name"]).name}
        self.num_shards, self._num_marks = len(entries), len(marks)
        for path in self.folder.iterdir():  # first of all: the disk may still be full
            if path.name not in (*kept, _MARKS, _JOURNAL):
                path.unlink()
        self._replace(_MARKS, b"".join(marks))
        self._replace(_JOURNAL, b"".join(map(_line, [{"fingerprint": fingerprint}, *entries])))
        return entries, marks, len(lines) > 1 and not same

    def _read_journal(self) -> list[dict[str, Any]]:
        """Its whole lines, up to one that is torn or was changed."""
        try:
            text = (self.folder / _JOURNAL).read_bytes()
        except FileNotFoundError:
            return []
        lines: list[dict[str, Any]] = []
        for line in text.split(b"\n")[:-1]:
            check, _, entry = line.partition(b" ")
            if check != _check(entry):
                break
            lines.append(json.loads(entry))
        return lines

    def _is_whole(self, shard: dict[str, Any]) -> bool:
        path = self.folder / shard["name"]
        return (
            path.is_file() and path.stat().st_size == shard["bytes"] and index_path(path).is_file()
        )

    def _read_marks(self, count: int) -> list[bytes] | None:
        path = self.folder / _MARKS
        data = path.read_bytes()[: count * MARK_BYTES] if path.is_file() else b""
        if len(data) < count * MARK_BYTES:
            return None
        return [data[start : start + MARK_BYTES] for start in range(0, len(data), MARK_BYTES)]

    def save(self, entry: dict[str, Any], new_marks: list[bytes]) -> None:
        """Makes a finished shard count.

        Args:
            entry: of the journal; `shard` is its entry in the manifest.
            new_marks: since the last shard.
        """
        self._num_marks += len(new_marks)
        if new_marks:
            self._append(_MARKS, b"".join(new_marks))
        self._append(_JOURNAL, _line({**entry, "marks": self._num_marks}))
        self.num_shards += 1

    def _append(self, name: str, data: bytes) -> None:
        _write(self.folder / name, "ab", data)

    def _replace(self, name: str, data: bytes) -> None:
        _write(self.folder / f"{name}.new", "wb", data)
        (self.folder / f"{name}.new").replace(self.folder / name)

    def complete(self) -> None:
        """Puts the folder in the place of the data set.

        Raises:
            UserError: `out` has come to hold what must not be replaced.
        """
        _check_target(self.out, self._force)
        if self.out.exists():
            shutil.rmtree(self.out)
        self.folder.rename(self.out)
        self.num_shards = 0
        for name in _OWN:
            (self.out / name).unlink(missing_ok=True)


def _write(path: Path, mode: str, data: bytes) -> None:
    with open(path, mode) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _line(entry: dict[str, Any]) -> bytes:
    content = json.dumps(entry).encode()
    return _check(content) + b" " + content + b"\n"


def _check(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest()[:16].encode()


def _check_target(path: Path, force: bool) -> None:
    if path.exists() and not path.is_dir():
        raise UserError(f"'{path}' is a file; name a folder for the shards")
    content = sorted(entry.name for entry in path.iterdir()) if path.exists() else []
    if content and not force:
        raise UserError(f"'{path}' is not empty; name another folder, or replace it with --force")
    foreign = [
        name
        for name in content
        if not name.endswith((".tar", INDEX_SUFFIX))
        and name not in (MANIFEST, REJECTS, ".complete", *_OWN)
    ]
    if foreign:
        raise UserError(
            f"'{path}' holds '{foreign[0]}', which is no shard; --force replaces data sets alone"
        )
