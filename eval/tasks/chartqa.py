"""ChartQA (Masry et al. 2022), test: questions by people and generated ones; the published
folder, or a parquet export (which does not say which questions are about one chart)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

from conceptmoe_vl.asking import question_messages
from conceptmoe_vl.errors import UserError
from eval.metrics import relaxed_accuracy
from eval.tasks import Question, Task
from eval.tasks._files import (
    Images,
    checked,
    complete,
    find_file,
    find_files,
    read_json,
    take,
)
from eval.tasks._scoring import against_references, as_written, mean_as
from eval.tasks._tables import TableRow, parquet_rows, record_row

_INSTRUCTION = "Answer the question with a single word."
_PARTS = ("human", "augmented")
_ROOTS = ("test", "ChartQA Dataset/test", ".")


_PARQUET = ("data/test-*.parquet", "test-*.parquet")
_COLUMNS = ("type", "question", "answer")


def load(folder: Path) -> list[Question]:
    files = find_files(folder, _PARQUET)
    if files:
        rows = parquet_rows(files, _COLUMNS, ("image",))
    else:
        for part in _PARTS:
            places = [f"{root}/test_{part}.json" for root in _ROOTS]
            files.append(find_file(folder, [*places, *_PARQUET], f"{part} questions of ChartQA"))
        rows = _official_rows(files)
    return complete("chartqa", map(_question, itertools.count(), rows), files)


def _official_rows(files: list[Path]) -> Iterator[TableRow]:
    """With the names of the export."""
    for part, file in zip(_PARTS, files, strict=True):
        images = Images(file.parent, ("png",))
        for number, record in enumerate(checked(read_json(file), list, f"'{file}'")):
            where = f"question {number} of '{file}'"
            fields = {
                "type": part,
                "question": take(record, "query", str, where),
                "answer": take(record, "label", str, where),
                "image_name": take(record, "imgname", str, where),
            }
            yield record_row(fields, where, images.lazy(fields["image_name"], where))


def _question(number: int, row: TableRow) -> Question:
    kind = take(row.fields, "type", str, row.where).removesuffix("_test")
    if kind not in _PARTS:
        raise UserError(f"'type' of {row.where} is '{kind}', not human or augmented")
    text = f"{take(row.fields, 'question', str, row.where)}\n{_INSTRUCTION}"
    details = {"cluster": row.fields["image_name"]} if "image_name" in row.fields else {}
    return Question(
        key=str(number),
        messages=question_messages([row.image()], text),
        references=(take(row.fields, "answer", str, row.where),),
        kind=kind,
        details=details,
    )


TASK = Task(
    name="chartqa",
    description="ChartQA test, relaxed accuracy (5 % of the gold value)",
    default_data="data/chartqa",
    load=load,
    parse=as_written,
    score=against_references(relaxed_accuracy),
    max_new_tokens=16,
    metrics=mean_as("relaxed_accuracy"),
    official_size=2500,
)
