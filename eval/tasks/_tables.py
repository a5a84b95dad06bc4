"""Tables with pictures in their cells: parquet and TSV, read row by row without the pictures.

A picture is fetched from its file when its question is asked, so that a table of any size costs the
memory of its texts.
"""

from __future__ import annotations

import base64
import binascii
import csv
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from conceptmoe_vl.errors import UserError
from eval.tasks._files import checked

_LONGEST_CELL = 1 << 30  # characters: base64 pictures are far beyond csv's default
_SHORTEST_PICTURE = 65  # characters of base64; what is shorter is another row's index


class TableRow(NamedTuple):
    """A row: the fields without pictures, where it stands, and a function picture column -> reader
    (None where the cell is empty).
    """

    fields: dict[str, Any]
    where: str
    picture: Callable[[str], Callable[[], bytes] | None]

    def image(self) -> Callable[[], bytes]:
        """The reader of the column `image`.

        Raises:
            UserError: the cell is empty.
        """
        read = self.picture("image")
        if read is None:
            raise UserError(f"{self.where} has no picture; download the file again")
        return read


def record_row(record: Any, where: str, image: Callable[[], bytes] | None) -> TableRow:
    """A record of a JSON file and its one image as a row, so that both are read alike."""
    return TableRow(checked(record, dict, where), where, lambda column: image)


def parquet_rows(
    files: Sequence[Path], needed: Sequence[str], pictures: Sequence[str]
) -> Iterator[TableRow]:
    """Rows of parquet files whose pictures are mappings with `bytes`, as Hugging Face writes them.

    Args:
        needed: columns without which a file is refused.
        pictures: columns that hold pictures; they need not be there.

    Raises:
        UserError: pyarrow is not installed, a column is missing, or a file is damaged.
    """
    for file in files:
        pyarrow = _pyarrow(file)
        try:
            table = pyarrow.parquet.ParquetFile(file)
            columns = table.schema_arrow.names
            for name in needed:
                if name not in columns:
                    raise UserError(f"'{file}' has no column '{name}', only {', '.join(columns)}")
            texts = [name for name in columns if name not in pictures]
            held = frozenset(columns).intersection(pictures)
            number = 0
            for group in range(table.num_row_groups):
                rows = table.read_row_group(group, columns=texts).to_pylist()
                for position, fields in enumerate(rows):
                    number += 1
                    where = f"row {number} of '{file}'"
                    yield TableRow(fields, where, _ParquetPictures(file, group, position, held))
        except pyarrow.ArrowException as error:
            detail = " ".join(str(error).split())[:200]
            raise UserError(f"'{file}' is damaged ({detail}); download it again") from error


def _pyarrow(file: Path) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(
            f"reading '{file}' needs pyarrow: pip install 'conceptmoe-vl[parquet]'"
        ) from error
    return pyarrow


@dataclass(frozen=True)
class _ParquetPictures:
    file: Path
    group: int
    position: int
    columns: frozenset[str]

    def __call__(self, column: str) -> Callable[[], bytes] | None:
        is_there = column in self.columns and _is_filled(self.file, self.group, column)
        return partial(self._read, column) if is_there and is_there[self.position] else None

    def _read(self, column: str) -> bytes:
        data = _cells(self.file, self.group, column)[self.position]["bytes"].as_py()
        if not isinstance(data, bytes):
            raise UserError(f"a cell of '{column}' of '{self.file}' holds no bytes of a picture")
        return data


@lru_cache(maxsize=2)  # questions are asked in the order of the rows
def _cells(file: Path, group: int, column: str) -> Any:
    table = _pyarrow(file).parquet.ParquetFile(file)
    return table.read_row_group(group, columns=[column]).column(0)


@lru_cache(maxsize=64)
def _is_filled(file: Path, group: int, column: str) -> list[bool]:
    return [bool(value) for value in _cells(file, group, column).is_valid().to_pylist()]


def tsv_rows(file: Path, needed: Sequence[str], picture: str = "image") -> list[TableRow]:
    """Rows of a table with tabs whose column `picture` holds base64, or the `index` of another row
    with the same picture.

    Raises:
        UserError: it cannot be read, a column is missing, or a row's picture is not there.
    """
    header: list[str] = []
    rows: list[dict[str, Any]] = []
    starts: list[int] = []
    try:
        with open(file, "rb") as stream:
            reader = _tsv_reader(stream)
            header = next(reader, [])
            for name in ("index", *needed, picture):
                if name not in header:
                    raise UserError(f"'{file}' has no column '{name}', only {', '.join(header)}")
            starts.append(stream.tell())
            for cells in reader:
                # The reader takes no line more than its row has, so that this is the row's end.
                starts.append(stream.tell())
                if len(cells) != len(header):
                    raise UserError(
                        f"row {len(rows) + 1} of '{file}' has {len(cells)} cells, its header "
                        f"{len(header)}; download it again"
                    )
                rows.append(dict(zip(header, cells, strict=True)))
                if len(rows[-1][picture]) >= _SHORTEST_PICTURE:
                    rows[-1][picture] = ""
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"'{file}' cannot be read ({error}); download it again") from error
    return _with_pictures(file, rows, starts, picture, header.index(picture))


def _with_pictures(
    file: Path, rows: list[dict[str, Any]], starts: list[int], picture: str, column: int
) -> list[TableRow]:
    own = {
        row["index"]: start for row, start in zip(rows, starts, strict=False) if not row[picture]
    }
    tables = []
    for number, row in enumerate(rows, start=1):
        where = f"row {number} of '{file}'"
        source = row.pop(picture) or row["index"]
        if source not in own:
            raise UserError(f"{where} has no picture, and there is none of an index '{source}'")
        tables.append(TableRow(row, where, _TsvPicture(file, own[source], column, where)))
    return tables


def _tsv_reader(stream: io.BufferedReader) -> Any:
    csv.field_size_limit(_LONGEST_CELL)
    lines = iter(stream.readline, b"")
    return csv.reader((line.decode("utf-8-sig") for line in lines), delimiter="\t")


@dataclass(frozen=True)
class _TsvPicture:
    file: Path
    start: int
    column: int
    where: str

    def __call__(self, name: str) -> Callable[[], bytes] | None:
        return self._read

    def _read(self) -> bytes:
        try:
            with open(self.file, "rb") as stream:
                stream.seek(self.start)
                cells: list[str] = next(_tsv_reader(stream), [])
            return base64.b64decode(cells[self.column], validate=True)
        except (OSError, IndexError, binascii.Error) as error:
            raise UserError(f"the picture of {self.where} cannot be read ({error})") from error
