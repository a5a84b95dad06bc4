"""MMMU (Yue et al. 2023), validation: parquet files by subject or together, or a JSON export.

Notable:
- pictures stand where the text mentions them first, `<image 1>`; a second mention stays text;
- multiple choice abstains where no letter is clear, while the published script draws one at random
  (so its scores of a model that rambles are higher by up to a quarter of such answers);
- open questions are read and compared by the published rules.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from conceptmoe_vl.errors import UserError
from eval.metrics import LETTERS, open_answer_score, parse_open_answer
from eval.tasks import Question, RatioOfSums, Scored, Task
from eval.tasks._files import (
    LETTER_ANSWER,
    SHORT_ANSWER,
    Images,
    checked,
    complete,
    find_files,
    lettered,
    listed,
    read_json_lines,
    take,
    take_id,
)
from eval.tasks._scoring import as_written, chosen_letter, is_reference
from eval.tasks._tables import TableRow, parquet_rows

_PICTURES = tuple(f"image_{number}" for number in range(1, 8))
_MENTION = re.compile(r"<image ([1-7])>")
_PARQUET = ("*/validation-*.parquet", "validation-*.parquet", "*/validation.parquet")
_JSON = ("validation.json", "validation.jsonl", "val.json", "*/validation.json")
_ID = re.compile(r"[a-z]+_(.+)_\d+")
DISCIPLINES = {
    "art_and_design": "Art Art_Theory Design Music",
    "business": "Accounting Economics Finance Manage Marketing",
    "science": "Biology Chemistry Geography Math Physics",
    "health_and_medicine": "Basic_Medical_Science Clinical_Medicine "
    "Diagnostics_and_Laboratory_Medicine Pharmacy Public_Health",
    "humanities_and_social_science": "History Literature Psychology Sociology",
    "tech_and_engineering": "Agriculture Architecture_and_Engineering Computer_Science "
    "Electronics Energy_and_Power Materials Mechanical_Engineering",
}
_DISCIPLINE_OF = {
    subject: discipline for discipline, names in DISCIPLINES.items() for subject in names.split()
}


def load(folder: Path) -> list[Question]:
    parquet = find_files(folder, _PARQUET)
    files = parquet or find_files(folder, _JSON)[:1]
    if not files:
        tried = ", ".join(f"'{place}'" for place in (*_PARQUET, *_JSON))
        raise UserError(f"'{folder}' holds no validation split of MMMU: expected one of {tried}")
    needed = ("id", "question", "options", "answer", "question_type")
    rows = parquet_rows(files, needed, _PICTURES) if parquet else _json_rows(folder, files[0])
    return complete("mmmu", (_question(row) for row in rows), files)


def _json_rows(folder: Path, file: Path) -> Iterator[TableRow]:
    """Records whose fields `image_1` and so on are paths."""
    images = Images(folder, (".", "images", "val", "validation"))
    for number, record in enumerate(read_json_lines(file), start=1):
        where = f"record {number} of '{file}'"

        def picture(
            column: str, record: Any = record, where: str = where
        ) -> Callable[[], bytes] | None:
            name = record.get(column)
            return None if not name else images.lazy(checked(name, str, where), where)

        yield TableRow(checked(record, dict, where), where, picture)


def _question(row: TableRow) -> Question:
    fields, where = row.fields, row.where
    key = take_id(fields, "id", where)
    is_choice = take(fields, "question_type", str, where) == "multiple-choice"
    given = fields.get("options", "[]")
    options = [str(option) for option in given] if isinstance(given, list) else listed(given, where)
    text = take(fields, "question", str, where)
    if is_choice:
        text = f"{text}\n{lettered(options)}\n\n{LETTER_ANSWER}"
    else:
        text = f"{text}\n\n{SHORT_ANSWER}"
    gold = fields.get("answer")
    references = _references(gold, where)
    if is_choice and not (len(options) > 1 and references[0] in LETTERS[: len(options)]):
        raise UserError(f"'answer' of {where} is {gold!r}, none of its {len(options)} options")
    subject = found[1] if (found := _ID.fullmatch(key)) else ""
    return Question(
        key=key,
        messages=[{"role": "user", "content": _parts_of(text, row)}],
        references=references,
        kind=subject,
        choices=tuple(LETTERS[: len(options)]) if is_choice else (),
        details={
            "options": options if is_choice else [],
            "is_choice": is_choice,
            "discipline": _DISCIPLINE_OF.get(subject, ""),
        },
    )


def _references(gold: Any, where: str) -> tuple[str, ...]:
    """One answer, or a list of answers that may be written as a text."""
    if isinstance(gold, str) and gold.startswith("["):
        gold = listed(gold, f"'answer' of {where}")
    golds = gold if isinstance(gold, list) else [gold]
    if not golds or not all(isinstance(text, str) and text and text != "?" for text in golds):
        raise UserError(
            f"'answer' of {where} is {gold!r}; the test split has no answers, take the validation"
        )
    return tuple(golds)


def _parts_of(text: str, row: TableRow) -> list[dict[str, Any]]:
    """Text and pictures in the order in which the text mentions them."""
    parts: list[dict[str, Any]] = []
    shown: set[str] = set()
    start = 0
    for mention in _MENTION.finditer(text):
        if mention[1] in shown:
            continue
        picture = row.picture(f"image_{mention[1]}")
        if picture is None:
            raise UserError(f"{row.where} mentions {mention[0]}, but 'image_{mention[1]}' is empty")
        shown.add(mention[1])
        if before := text[start : mention.start()]:
            parts.append({"type": "text", "text": before})
        parts.append({"type": "image", "image": picture})
        start = mention.end()
    return [*parts, {"type": "text", "text": text[start:]}]


def _parse(text: str, question: Question) -> str:
    read = chosen_letter if question.details["is_choice"] else as_written
    return read(text, question)


def _score(parsed: str, question: Question) -> float:
    if question.details["is_choice"]:
        return is_reference(parsed, question)
    return open_answer_score(parse_open_answer(parsed), question.references)


def _figures(sample: Scored) -> dict[str, tuple[float, float]]:
    figures = {"accuracy": (sample.score, 1.0), "abstained": (float(sample.parsed == ""), 1.0)}
    for discipline in DISCIPLINES:
        inside = float(sample.question.details["discipline"] == discipline)
        figures[discipline] = (sample.score * inside, inside)
    return figures


TASK = Task(
    name="mmmu",
    description="MMMU validation: accuracy over multiple-choice and open questions",
    default_data="data/mmmu",
    load=load,
    parse=_parse,
    score=_score,
    max_new_tokens=16,
    metrics=RatioOfSums(_figures),
    official_size=900,
    shares_prefixes=False,  # an image has one question
)
