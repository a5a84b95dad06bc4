"""DocVQA (Mathew et al. 2021), validation of the single-page task: the official JSON
file and page images, or a parquet export."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from conceptmoe_vl.asking import question_messages
from eval.metrics import anls
from eval.tasks import Question, Task
from eval.tasks._files import (
    SHORT_ANSWER,
    Images,
    complete,
    find_file,
    find_files,
    read_json,
    take,
    take_id,
    take_texts,
)
from eval.tasks._scoring import against_references, as_written, mean_as
from eval.tasks._tables import TableRow, parquet_rows, record_row

_FILES = ("val_v1.0_withQT.json", "val_v1.0.json")


_PARQUET = ("DocVQA/validation-*.parquet", "data/validation-*.parquet", "validation-*.parquet")
_COLUMNS = ("questionId", "question", "docId", "answers")
_PICTURES = (".", "val", "spdocvqa_images", "documents", "val/documents", "images")


def load(folder: Path) -> list[Question]:
    if files := find_files(folder, _PARQUET):
        rows = parquet_rows(files, _COLUMNS, ("image",))
    else:
        places = [place for name in _FILES for place in (name, f"*/{name}")]
        files = [find_file(folder, [*places, *_PARQUET], "questions of DocVQA")]
        rows = _official_rows(folder, files[0])
    return complete("docvqa", map(_question, rows), files)


def _official_rows(folder: Path, file: Path) -> Iterator[TableRow]:
    images = Images(folder, _PICTURES)
    for number, record in enumerate(take(read_json(file), "data", list, f"'{file}'")):
        where = f"question {number} of '{file}'"
        name = take(record, "image", str, where)
        yield record_row(record, where, images.lazy([name, name.rpartition("/")[2]], where))


def _question(row: TableRow) -> Question:
    text = f"{take(row.fields, 'question', str, row.where)}\n{SHORT_ANSWER}"
    types: list[str] = []
    if row.fields.get("question_types"):
        types = take_texts(row.fields, "question_types", row.where)
    return Question(
        key=take_id(row.fields, "questionId", row.where),
        messages=question_messages([row.image()], text),
        references=tuple(take_texts(row.fields, "answers", row.where)),
        kind=types[0] if types else "",
        details={"cluster": take_id(row.fields, "docId", row.where), "question_types": types},
    )


TASK = Task(
    name="docvqa",
    description="DocVQA validation, ANLS",
    default_data="data/docvqa",
    load=load,
    parse=as_written,
    score=against_references(anls),
    max_new_tokens=32,
    metrics=mean_as("anls"),
    official_size=5349,
)
