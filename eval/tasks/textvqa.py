"""TextVQA (Singh et al. 2019), validation: the official JSON file and its OpenImages
pictures, or a parquet export."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from conceptmoe_vl.asking import question_messages
from eval.metrics import textvqa_accuracy
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
from eval.tasks._scoring import against_references, as_written
from eval.tasks._tables import TableRow, parquet_rows, record_row

_FILE = "TextVQA_0.5.1_val.json"
# The validation pictures come in the archive of the training split.
_PICTURES = ("train_images", "train_val_images/train_images", "val_images", "images")


_PARQUET = ("data/validation-*.parquet", "validation-*.parquet")
_COLUMNS = ("question_id", "question", "image_id", "answers")


def load(folder: Path) -> list[Question]:
    if files := find_files(folder, _PARQUET):
        rows = parquet_rows(files, _COLUMNS, ("image",))
    else:
        files = [find_file(folder, [_FILE, f"*/{_FILE}", *_PARQUET], "questions of TextVQA")]
        rows = _official_rows(folder, files[0])
    return complete("textvqa", map(_question, rows), files)


def _official_rows(folder: Path, file: Path) -> Iterator[TableRow]:
    images = Images(folder, _PICTURES)
    for number, record in enumerate(take(read_json(file), "data", list, f"'{file}'")):
        where = f"question {number} of '{file}'"
        name = f"{take(record, 'image_id', str, where)}.jpg"
        yield record_row(record, where, images.lazy(name, where))


def _question(row: TableRow) -> Question:
    text = f"{take(row.fields, 'question', str, row.where)}\n{SHORT_ANSWER}"
    return Question(
        key=take_id(row.fields, "question_id", row.where),
        messages=question_messages([row.image()], text),
        references=tuple(take_texts(row.fields, "answers", row.where)),
        details={"cluster": take(row.fields, "image_id", str, row.where)},
    )


TASK = Task(
    name="textvqa",
    description="TextVQA validation, accuracy over ten answers",
    default_data="data/textvqa",
    load=load,
    parse=as_written,
    score=against_references(textvqa_accuracy),
    max_new_tokens=16,
    official_size=5000,
)
