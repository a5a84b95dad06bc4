"""Rows of the files in circulation: JSON, JSONL, parquet, plain text and tars of samples.

Notable:
- nothing is read whole: an array of a million records costs the memory of one;
- a row that cannot be read raises when it is loaded, so that one bad line never ends a file.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from conceptmoe_vl.errors import UserError
from data_pipelines.records import RecordError, parse_record
from data_pipelines.shards import IndexedSample, ShardReader, index_shards

JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
_CHUNK = 1 << 20  # characters
_PARQUET_ROWS = 16  # at once: rows hold whole images


class FileError(UserError):
    """A file that is damaged as a whole.

    Attributes:
        file: its path.
        reason: bad_json | bad_content | truncated_shard.
    """

    def __init__(self, file: str, reason: str, message: str) -> None:
        super().__init__(message)
        self.file = file
        self.reason = reason

    def __reduce__(self) -> tuple:
        return type(self), (self.file, self.reason, str(self))


class Row(NamedTuple):
    """One row of a file.

    Fields:
        number: from 1; None where rows have keys.
        load: its content, in any process; raises `RecordError`.
    """

    file: str
    number: int | None
    key: str | None
    load: Callable[[], Any]

    @property
    def name(self) -> str:
        return f"{self.file}, " + (f"row {self.number}" if self.key is None else f"key {self.key}")


def table_rows(
    path: Path, needed: Sequence[str], optional: Sequence[str] = (), text: bool = False
) -> Iterator[Row]:
    """Rows as mappings, of a file or of all such files of a folder in the order of their names.

    Args:
        needed: fields without which a parquet file is refused; `optional` ones are read if there.
        text: `.txt` files count too, as documents between blank lines.

    Raises:
        UserError: there is no such file, its kind is unknown, or it is damaged as a whole.
    """
    suffixes = (*JSON_SUFFIXES, ".parquet", *((".txt",) if text else ()))
    for file in _files(path, suffixes):
        try:
            if file.suffix.lower() == ".parquet":
                yield from _parquet_rows(file, needed, optional)
            elif file.suffix.lower() == ".txt":
                yield from _paragraphs(file)
            elif _is_array(file):
                yield from _array_rows(file)
            else:
                yield from _line_rows(file)
        except OSError as error:
            raise UserError(f"'{file}' cannot be read ({error}); check the file") from error


def source_files(path: Path) -> list[Path]:
    """The files that rows of a path come from, of whatever layout; none where it is no path."""
    if path.is_dir():
        kinds = (*JSON_SUFFIXES, ".parquet", ".txt", ".tar")
        return [entry for entry in folder_entries(path) if entry.suffix.lower() in kinds]
    return [path] if path.exists() else []


def _files(path: Path, suffixes: Sequence[str]) -> list[Path]:
    files = [path] if path.is_file() else []
    if path.is_dir():
        files = [entry for entry in folder_entries(path) if entry.suffix.lower() in suffixes]
    if not files:
        raise UserError(f"'{path}' is no file and no folder with {', '.join(suffixes)}")
    if files[0].suffix.lower() not in suffixes:
        raise UserError(f"'{path}' is of no known kind; give one of {', '.join(suffixes)}")
    return files


def folder_entries(folder: Path) -> list[Path]:
    """What a folder holds, by name, without hidden files.

    Raises:
        UserError: it cannot be read.
    """
    try:
        return sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
    except OSError as error:
        raise UserError(f"'{folder}' cannot be read ({error}); check its permissions") from error


def _line_rows(file: Path) -> Iterator[Row]:
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield Row(str(file), number, None, partial(parse_record, line))


def _is_array(file: Path) -> bool:
    with open(file, "rb") as lines:
        start = lines.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
    return start.startswith(b"[")


def _array_rows(file: Path) -> Iterator[Row]:
    """The elements of one JSON array; `parse_record` checks each as it does a line."""
    for number, element in enumerate(_array_elements(file), start=1):
        yield Row(str(file), number, None, partial(parse_record, element))


def _array_elements(file: Path) -> Iterator[bytes]:
    decoder = json.JSONDecoder()
    with open(file, encoding="utf-8-sig") as stream:
        buffer, start, count, due = _more(stream, file).lstrip()[1:], 0, 0, "element"
        while True:
            while buffer[start : start + 1].isspace():
                start += 1
            mark = buffer[start : start + 1]
            if mark == "]" and (due == "comma" or count == 0):
                _check_end(stream, file, buffer[start + 1 :], count)
                return
            if mark == "," and due == "comma":
                start, due = start + 1, "element"
                continue
            end = None
            if mark and due == "element":
                end = _element_end(decoder, buffer, start)
            if end is not None:
                yield buffer[start:end].encode()
                start, count, due = end, count + 1, "comma"
                continue
            more = _more(stream, file) if not mark or due == "element" else ""
            if not more:
                raise FileError(
                    str(file), "bad_json", f"'{file}' is no JSON array behind its record {count}"
                )
            # Doubling what is read keeps a huge element from being scanned again and again.
            more += _more(stream, file, len(buffer) - start - _CHUNK)
            buffer, start = buffer[start:] + more, 0


def _check_end(stream: Any, file: Path, behind: str, count: int) -> None:
    """Whatever stood there would be lost: a second array, or the lines of a JSONL file."""
    while behind and not behind.strip():
        behind = _more(stream, file)
    if behind:
        message = f"'{file}' goes on behind its JSON array of {count} records; give one array"
        raise FileError(str(file), "bad_json", message)


def _element_end(decoder: json.JSONDecoder, buffer: str, start: int) -> int | None:
    try:
        return decoder.raw_decode(buffer, start)[1]
    except (ValueError, RecursionError):
        return None


def _more(stream: Any, file: Path, size: int = _CHUNK) -> str:
    if size <= 0:
        return ""
    try:
        return str(stream.read(size))
    except UnicodeDecodeError as error:
        raise FileError(str(file), "bad_content", f"'{file}' is no UTF-8 ({error})") from error


def _paragraphs(file: Path) -> Iterator[Row]:
    """Documents between blank lines; a row's number is that of its first line."""
    document: list[bytes] = []
    first = 1
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                first = first if document else number
                document.append(line)
            elif document:
                yield _paragraph(file, first, b"".join(document))
                document = []
    if document:
        yield _paragraph(file, first, b"".join(document))


def _paragraph(file: Path, number: int, data: bytes) -> Row:
    return Row(str(file), number, None, partial(_decode_paragraph, data))


def _decode_paragraph(data: bytes) -> dict[str, str]:
    try:
        return {"text": data.decode("utf-8-sig").strip()}
    except UnicodeDecodeError as error:
        raise RecordError("bad_content", f"the text is no UTF-8 ({error})", "text") from error


def _parquet_rows(file: Path, needed: Sequence[str], optional: Sequence[str]) -> Iterator[Row]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(
            f"reading '{file}' needs pyarrow: pip install pyarrow (or conceptmoe-vl[parquet])"
        ) from error
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            there = table.schema_arrow.names
            missing = [name for name in needed if name not in there]
            if missing:
                raise UserError(
                    f"'{file}' has no column '{missing[0]}', only {', '.join(there)}; "
                    "name the layout that it has"
                )
            columns = [name for name in (*needed, *optional) if name in there]
            for batch in table.iter_batches(batch_size=_PARQUET_ROWS, columns=columns):
                for load in _batch_loads(batch):
                    number += 1
                    yield Row(str(file), number, None, load)
    except pyarrow.ArrowException as error:
        detail = " ".join(str(error).split())[:200]
        message = f"'{file}' is damaged behind row {number} ({detail})"
        raise FileError(str(file), "truncated_shard", message) from error


def _batch_loads(batch: Any) -> list[Callable[[], Any]]:
    """Of each row of a record batch what loads it; one without a value in Python is alone."""
    try:
        return [partial(dict, row) for row in batch.to_pylist()]
    # ValueError: texts that are no UTF-8; OverflowError: times before the year 1 or behind 9999
    except (ValueError, OverflowError) as error:
        if batch.num_rows == 1:
            return [partial(_unreadable, " ".join(str(error).split())[:200])]
        rows = (batch.slice(number, 1) for number in range(batch.num_rows))
        return [load for row in rows for load in _batch_loads(row)]


def _unreadable(detail: str) -> Any:
    raise RecordError("bad_content", f"the row cannot be read ({detail}); correct its file")


def tar_rows(path: Path) -> Iterator[Row]:
    """Samples of tars: a row's content is its members, by name without the key.

    Raises:
        UserError: there is no tar, or one ends early.
    """
    index = index_shards([str(path)])
    for shard, fault in index.damaged.items():
        message = f"'{shard}': {fault}; copy it again or take it away"
        raise FileError(shard, "truncated_shard", message)
    for sample in index.samples:
        yield Row(sample.shard, None, sample.key, partial(_members, sample))


def _members(sample: IndexedSample) -> dict[str, bytes]:
    if sample.repeated:
        name = sample.repeated[0]
        raise RecordError("repeated_member", f"the member '{name}' stands there twice", name)
    # A reader of its own: rows go to other processes, which open the shard themselves.
    with contextlib.closing(ShardReader()) as reader:
        return {name: reader.read(sample, name) for name in sample.members}
