"""VQAv2 (Goyal et al. 2017): the official files of the validation split and COCO's val2014, or a
parquet export."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from conceptmoe_vl.asking import question_messages
from conceptmoe_vl.errors import UserError
from eval.metrics import vqa_accuracy, vqa_accuracy_normalized
from eval.tasks import Question, RatioOfSums, Scored, Task
from eval.tasks._files import (
    COCO_VAL2014,
    SHORT_ANSWER,
    Images,
    complete,
    find_file,
    find_files,
    read_json,
    take,
    take_id,
)
from eval.tasks._scoring import against_references, as_written
from eval.tasks._tables import TableRow, parquet_rows, record_row

_QUESTIONS = "v2_OpenEnded_mscoco_val2014_questions.json"
_ANNOTATIONS = "v2_mscoco_val2014_annotations.json"


_PARQUET = ("data/validation-*.parquet", "validation-*.parquet")
_COLUMNS = ("question_id", "question", "image_id", "answers", "answer_type")


def load(folder: Path) -> list[Question]:
    if files := find_files(folder, _PARQUET):
        rows = parquet_rows(files, _COLUMNS, ("image",))
    else:
        files = [
            find_file(folder, [name, f"*/{name}", *_PARQUET], f"{what} of VQAv2")
            for name, what in ((_QUESTIONS, "questions"), (_ANNOTATIONS, "annotations"))
        ]
        rows = _official_rows(folder, *files)
    return complete("vqav2", map(_question, rows), files)


def _official_rows(folder: Path, questions: Path, answers: Path) -> Iterator[TableRow]:
    """A question and its annotation as one record, as in the export."""
    images = Images(folder, (*COCO_VAL2014, "Images/mscoco/val2014"))
    annotations = {
        take_id(record, "question_id", f"annotation {number} of '{answers}'"): record
        for number, record in enumerate(
            take(read_json(answers), "annotations", list, f"'{answers}'")
        )
    }
    for number, record in enumerate(
        take(read_json(questions), "questions", list, f"'{questions}'")
    ):
        where = f"question {number} of '{questions}'"
        key = take_id(record, "question_id", where)
        if key not in annotations:
            raise UserError(f"'{answers}' has no annotation of question {key}")
        image = take(record, "image_id", int, where)
        names = [f"COCO_val2014_{image:012d}.jpg", f"{image:012d}.jpg"]
        yield record_row({**annotations[key], **record}, where, images.lazy(names, where))


def _question(row: TableRow) -> Question:
    fields, where = row.fields, row.where
    answers = take(fields, "answers", list, where)
    return Question(
        key=take_id(fields, "question_id", where),
        messages=question_messages(
            [row.image()], f"{take(fields, 'question', str, where)}\n{SHORT_ANSWER}"
        ),
        references=tuple(take(answer, "answer", str, where) for answer in answers),
        kind=take(fields, "answer_type", str, where),
        details={
            "cluster": take(fields, "image_id", int, where),
            "question_type": fields.get("question_type", ""),
        },
    )


def _parts(sample: Scored) -> dict[str, tuple[float, float]]:
    references: Sequence[str] = sample.question.references
    return {
        "accuracy": (sample.score, 1.0),
        "accuracy_always_normalized": (vqa_accuracy_normalized(sample.parsed, references), 1.0),
    }


TASK = Task(
    name="vqav2",
    description="VQAv2 validation, official accuracy",
    default_data="data/vqav2",
    load=load,
    parse=as_written,
    score=against_references(vqa_accuracy),
    max_new_tokens=16,
    metrics=RatioOfSums(_parts),
    official_size=214354,
)
