"""Files of public data sets: found under one path, read with checks, images on demand.

What a user gives is one folder. Each data set names the places where its files are usually found in
it; whatever is missing is named with the places that were tried.
"""

from __future__ import annotations

import ast
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from conceptmoe_vl.errors import UserError
from conceptmoe_vl.images import ImageError
from data_pipelines.layouts.images import ImageFolder
from data_pipelines.records import RecordError
from eval.tasks import Question

SHORT_ANSWER = "Answer the question using a single word or phrase."
LETTER_ANSWER = "Answer with the option's letter from the given choices directly."
COCO_VAL2014 = ("val2014", "images/val2014", "coco/val2014", "coco/images/val2014", "images", ".")

Kind = TypeVar("Kind")


def find_file(folder: Path, places: Sequence[str], what: str) -> Path:
    """The first of the places, as paths or patterns relative to the folder, that is a file.

    Raises:
        UserError: there is none; names the places.
    """
    found = find_files(folder, places)
    if found:
        return found[0]
    tried = ", ".join(f"'{place}'" for place in places)
    raise UserError(
        f"{_missing(folder)} {what}: put it at one of {tried} in it, or name its folder"
    )


def find_files(folder: Path, places: Sequence[str]) -> list[Path]:
    """All files of the first place that has any, by name."""
    for place in places:
        if found := sorted(path for path in folder.glob(place) if path.is_file()):
            return found
    return []


def _missing(folder: Path) -> str:
    return f"'{folder}' holds no" if folder.is_dir() else f"there is no folder '{folder}' with"


def complete(
    task: str, questions: Iterable[Question], files: Iterable[str | Path]
) -> list[Question]:
    """The questions, after saying on the error stream how many were found, and where.

    Raises:
        UserError: there are none, or two have one key.
    """
    found = list(questions)
    where = ", ".join(f"'{file}'" for file in files)
    if not found:
        raise UserError(f"{task}: there is no question in {where}; download it again")
    keys: set[str] = set()
    for question in found:
        if question.key in keys:
            raise UserError(f"{task}: question {question.key} stands twice in {where}")
        keys.add(question.key)
    print(f"{task}: {len(found)} questions from {where}", file=sys.stderr)
    return found


def read_json(path: Path) -> Any:
    """A JSON file's content.

    Raises:
        UserError: it cannot be read or is damaged.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"'{path}' cannot be read as JSON ({error}); download it again") from error


def read_json_lines(path: Path) -> list[Any]:
    """The records of a file with one JSON value a line, or of one JSON array.

    Raises:
        UserError: it cannot be read, is empty, or a line is damaged; names it.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise UserError(f"'{path}' cannot be read ({error}); download it again") from error
    if text.lstrip().startswith("["):
        return list(checked(read_json(path), list, f"'{path}'"))
    records = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            records.append(json.loads(line))
        except (ValueError, RecursionError) as error:
            raise UserError(
                f"line {number} of '{path}' is no JSON ({error}); download it again"
            ) from error
    if not records:
        raise UserError(f"'{path}' holds no record; download it again")
    return records


def checked(value: Any, kind: type[Kind], where: str) -> Kind:
    """The value, if it is of this kind.

    Raises:
        UserError: it is not; says where it stands.
    """
    # A boolean is an int to Python, and never one in these files.
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        shown = repr(value)[:80]
        raise UserError(f"{where} is {shown}, not {kind.__name__}; download the file again")
    return value


def take(record: Any, name: str, kind: type[Kind], where: str) -> Kind:
    """A record's field.

    Raises:
        UserError: the record is no mapping, or the field is missing or of another kind.
    """
    fields: Mapping = checked(record, dict, where)
    if name not in fields:
        raise UserError(f"{where} has no '{name}'; download the file again")
    return checked(fields[name], kind, f"'{name}' of {where}")


def take_texts(record: Any, name: str, where: str) -> list[str]:
    """A record's field that is a list of texts."""
    return [checked(text, str, f"'{name}' of {where}") for text in take(record, name, list, where)]


def take_id(record: Any, name: str, where: str) -> str:
    """A number or a text that identifies, as a text."""
    value = checked(record, dict, where).get(name)
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise UserError(f"'{name}' of {where} is {value!r}; download the file again")
    return str(value)


def listed(text: str, where: str) -> list[str]:
    """A list of texts that is written as a Python literal, as in parquet files of MMMU."""
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
        raise UserError(f"{where} is no list: {text[:80]!r}; download the file again") from error
    return [str(item) for item in checked(value, list, where)]


@dataclass(frozen=True)
class ImageReader:
    """Reads an image. Readers of one file are equal, whichever record names it.

    Fields:
        root: folder, resolved. name: of the file in it. where: the record.
    """

    root: Path
    name: str
    where: str = field(compare=False)

    def __call__(self) -> bytes:
        try:
            return ImageFolder(self.root).read(self.name, "image").data
        except (RecordError, ImageError) as error:
            raise UserError(f"{self.where}: {error}") from error


class Images:
    """Images of one data set by their names.

    Args:
        folder: what the user gave.
        places: folders in it that are looked through, in this order.
    """

    def __init__(self, folder: Path, places: Sequence[str]) -> None:
        self.folder = folder
        self.places = places
        self._folders = [ImageFolder(folder / place) for place in places]
        self._names: dict[Path, frozenset[str]] = {}

    def lazy(self, names: str | Sequence[str], where: str) -> Callable[[], bytes]:
        """A function that reads the image.

        Args:
            names: its usual names, the first that exists is taken; may have folders in them.

        Raises:
            UserError: there is no such file, or a name leads out of its folder.
        """
        names = [names] if isinstance(names, str) else names
        for name in names:
            for folder in self._folders:
                if self._holds(folder.folder, name):
                    return self._reader(folder, name, where)
        tried = ", ".join(f"'{place}'" for place in self.places)
        raise UserError(
            f"{where} needs the image '{names[0]}': it is in none of {tried} of '{self.folder}'"
        )

    def _holds(self, folder: Path, name: str) -> bool:
        # One listing of a folder instead of a question for each of 200,000 names.
        parent, _, file = name.rpartition("/")
        directory = folder / parent
        if directory not in self._names:
            try:
                self._names[directory] = frozenset(os.listdir(directory))
            except (OSError, ValueError):
                self._names[directory] = frozenset()
        return file in self._names[directory]

    @staticmethod
    def _reader(folder: ImageFolder, name: str, where: str) -> Callable[[], bytes]:
        root = folder.folder.resolve()
        # Also a name that leads out by a link is refused when it is read.
        if not (root / name).resolve().is_relative_to(root):
            raise UserError(f"{where} names an image outside '{folder.folder}': '{name}'")
        return ImageReader(root, name, where)


def lettered(options: Sequence[str]) -> str:
    """Options one a line: `A. text`."""
    return "\n".join(f"{chr(ord('A') + number)}. {text}" for number, text in enumerate(options))
