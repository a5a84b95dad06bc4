"""ScienceQA (Lu et al. 2022), test: `problems.json`, `pid_splits.json` and a folder of
pictures, or a parquet export.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from conceptmoe_vl.asking import question_messages
from conceptmoe_vl.errors import UserError
from eval.metrics import LETTERS
from eval.tasks import Question, RatioOfSums, Scored, Task
from eval.tasks._files import (
    LETTER_ANSWER,
    Images,
    checked,
    complete,
    find_file,
    find_files,
    lettered,
    read_json,
    take,
    take_texts,
)
from eval.tasks._scoring import chosen_letter, is_reference
from eval.tasks._tables import TableRow, parquet_rows, record_row

_ROOTS = (".", "scienceqa", "data/scienceqa", "data")
_SUBJECTS = ("natural science", "social science", "language science")


_PARQUET = ("ScienceQA-FULL/test-*.parquet", "data/test-*.parquet", "test-*.parquet")
_COLUMNS = ("question", "choices", "answer", "hint", "grade", "subject")


def load(folder: Path) -> list[Question]:
    if files := find_files(folder, _PARQUET):
        rows = enumerate(parquet_rows(files, _COLUMNS, ("image",)))
        return complete("scienceqa", (_question(str(key), row) for key, row in rows), files)
    files = [
        find_file(folder, [*(f"{root}/{name}" for root in _ROOTS), *_PARQUET], what)
        for name, what in (
            ("problems.json", "problems of ScienceQA"),
            ("pid_splits.json", "splits of ScienceQA"),
        )
    ]
    named_rows = _official_rows(folder, *files)
    return complete("scienceqa", (_question(key, row) for key, row in named_rows), files)


def _official_rows(folder: Path, problems: Path, splits: Path) -> Iterator[tuple[str, TableRow]]:
    records = checked(read_json(problems), dict, f"'{problems}'")
    places = [f"{root}/{inside}" for root in _ROOTS for inside in ("test", "images/test", "images")]
    images = Images(folder, places)
    for key in take_texts(read_json(splits), "test", f"'{splits}'"):
        if key not in records:
            raise UserError(f"'{splits}' names the problem {key}, which '{problems}' lacks")
        where = f"problem {key} of '{problems}'"
        image = checked(records[key], dict, where).get("image")
        lazy = None
        if image is not None:
            lazy = images.lazy(f"{key}/{checked(image, str, where)}", where)
        yield key, record_row(records[key], where, lazy)


def _question(key: str, row: TableRow) -> Question:
    fields, where, picture = row.fields, row.where, row.picture("image")
    options = take_texts(fields, "choices", where)
    number = take(fields, "answer", int, where)
    if not 0 <= number < len(options) <= len(LETTERS):
        raise UserError(f"'answer' of {where} is {number}, none of its {len(options)} choices")
    hint = fields.get("hint") or ""
    context = f"Context: {hint}\n" if hint else ""
    text = f"{context}{take(fields, 'question', str, where)}\n{lettered(options)}\n{LETTER_ANSWER}"
    subject = take(fields, "subject", str, where)
    grade = take(fields, "grade", str, where).removeprefix("grade")
    if subject not in _SUBJECTS or not grade.isdecimal():
        raise UserError(f"{where} is of subject '{subject}', grade '{grade}'; download it again")
    return Question(
        key=key,
        messages=question_messages([] if picture is None else [picture], text),
        references=(LETTERS[number],),
        kind=subject,
        choices=tuple(LETTERS[: len(options)]),
        details={
            "options": options,
            "grade": int(grade),
            "has_text": bool(hint),
            "has_image": picture is not None,
        },
    )


def _figures(sample: Scored) -> dict[str, tuple[float, float]]:
    """The published table: all, by subject, by what stands beside the question, and by grade."""
    kind, details = sample.question.kind, sample.question.details
    belongs = {
        "accuracy": True,
        **{subject.replace(" ", "_"): kind == subject for subject in _SUBJECTS},
        "with_text": details["has_text"],
        "with_image": details["has_image"],
        "without_context": not (details["has_text"] or details["has_image"]),
        "grades_1_to_6": details["grade"] <= 6,
        "grades_7_to_12": details["grade"] > 6,
    }
    figures = {name: (sample.score * inside, float(inside)) for name, inside in belongs.items()}
    return figures | {"abstained": (float(sample.parsed == ""), 1.0)}


TASK = Task(
    name="scienceqa",
    description="ScienceQA test: accuracy by subject, context and grade",
    default_data="data/scienceqa",
    load=load,
    parse=chosen_letter,
    score=is_reference,
    max_new_tokens=16,
    metrics=RatioOfSums(_figures),
    official_size=4241,
    shares_prefixes=False,  # an image has one question
)
