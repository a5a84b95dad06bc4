"""POPE (Li et al. 2023) on COCO's val2014: is there such an object? Three kinds of absent ones;
the published files, or a parquet export."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from conceptmoe_vl.asking import question_messages
from conceptmoe_vl.errors import UserError
from eval.metrics import binary_parts, parse_yes_no
from eval.tasks import Question, RatioOfSums, Scored, Task
from eval.tasks._files import (
    COCO_VAL2014,
    SHORT_ANSWER,
    Images,
    complete,
    find_file,
    find_files,
    read_json_lines,
    take,
    take_id,
)
from eval.tasks._scoring import is_reference
from eval.tasks._tables import TableRow, parquet_rows, record_row

_KINDS = ("random", "popular", "adversarial")
_ROOTS = (".", "coco", "output/coco", "POPE/output/coco", "pope/coco")


_PARQUET = ("data/test-*.parquet", "test-*.parquet", "Full/*.parquet")
_COLUMNS = ("question_id", "question", "answer", "image_source", "category")


def load(folder: Path) -> list[Question]:
    files = find_files(folder, _PARQUET)
    if files:
        rows = parquet_rows(files, _COLUMNS, ("image",))
    else:
        for kind in _KINDS:
            places = [f"{root}/coco_pope_{kind}.json" for root in _ROOTS]
            files.append(find_file(folder, [*places, *_PARQUET], f"{kind} part of POPE"))
        rows = _official_rows(folder, files)
    return complete("pope", map(_question, rows), files)


def _official_rows(folder: Path, files: list[Path]) -> Iterator[TableRow]:
    """With the names of the export."""
    images = Images(folder, COCO_VAL2014)
    for kind, file in zip(_KINDS, files, strict=True):
        for number, record in enumerate(read_json_lines(file), start=1):
            where = f"question {number} of '{file}'"
            fields = {
                "question_id": take_id(record, "question_id", where),
                "question": take(record, "text", str, where),
                "answer": take(record, "label", str, where),
                "image_source": take(record, "image", str, where),
                "category": kind,
            }
            yield record_row(fields, where, images.lazy(fields["image_source"], where))


def _question(row: TableRow) -> Question:
    gold = take(row.fields, "answer", str, row.where).strip().lower()
    if gold not in ("yes", "no"):
        raise UserError(f"the answer of {row.where} is '{gold}', not yes or no")
    kind = take(row.fields, "category", str, row.where)
    text = f"{take(row.fields, 'question', str, row.where).strip()}\n{SHORT_ANSWER}"
    return Question(
        key=f"{kind}-{take_id(row.fields, 'question_id', row.where)}",
        messages=question_messages([row.image()], text),
        references=(gold,),
        kind=kind,
        details={"cluster": take(row.fields, "image_source", str, row.where)},
    )


def _parse(text: str, question: Question) -> str:
    return parse_yes_no(text)


def _parts(sample: Scored) -> dict[str, tuple[float, float]]:
    return binary_parts(sample.parsed, sample.question.references[0])


TASK = Task(
    name="pope",
    description="POPE on COCO: accuracy, precision, recall, F1 and share of yes",
    default_data="data/pope",
    load=load,
    parse=_parse,
    score=is_reference,
    max_new_tokens=16,
    metrics=RatioOfSums(_parts),
    official_size=9000,
)
