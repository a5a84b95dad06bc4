"""AI2D (Kembhavi et al. 2016), test: the original folders, or a parquet export with pictures.

In the original, the options of some questions are letters that stand for texts of the diagram;
there the texts are covered by their letters, as the annotations say. Exports have this done.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import ImageDraw, ImageFont

from conceptmoe_vl.asking import question_messages
from conceptmoe_vl.errors import UserError
from conceptmoe_vl.images import decode_image
from eval.metrics import LETTERS
from eval.tasks import Question, Task
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
from eval.tasks._scoring import choice_figures, chosen_letter, is_reference
from eval.tasks._tables import TableRow, parquet_rows

_PARQUET = ("data/test-*.parquet", "test-*.parquet", "test.parquet")
_ROOTS = (".", "ai2d")


def load(folder: Path) -> list[Question]:
    if parquet := find_files(folder, _PARQUET):
        rows = parquet_rows(parquet, ("question", "options", "answer", "image"), ("image",))
        exported = (_exported(number, row) for number, row in enumerate(rows))
        return complete("ai2d", exported, parquet)
    ids = find_file(
        folder,
        [f"{root}/ai2d_test_ids.csv" for root in _ROOTS],
        f"'{_PARQUET[0]}' and no list of AI2D's test images",
    )
    names = ids.read_text(encoding="utf-8").split()
    questions: list[Question] = []
    for name in sorted(names):
        questions += _of_image(folder, name)
    return complete("ai2d", questions, [ids])


def _exported(number: int, row: TableRow) -> Question:
    options = take_texts(row.fields, "options", row.where)
    try:
        answer = int(row.fields["answer"])
    except (TypeError, ValueError) as error:
        raise UserError(f"'answer' of {row.where} is {row.fields['answer']!r}") from error
    text = take(row.fields, "question", str, row.where)
    return _question(str(number), text, options, answer, row.image(), "", row.where)


def _of_image(folder: Path, name: str) -> list[Question]:
    places = [f"{root}/questions/{name}.png.json" for root in _ROOTS]
    file = find_file(folder, places, f"questions about image {name} of AI2D")
    record = read_json(file)
    images = Images(file.parent.parent, ("images",))
    plain = images.lazy(take(record, "imageName", str, f"'{file}'"), f"'{file}'")
    questions = []
    for text, question in take(record, "questions", dict, f"'{file}'").items():
        where = f"the question {text[:60]!r} of '{file}'"
        has_letters = take(question, "abcLabel", bool, where)
        picture = plain
        if has_letters:
            notes = find_file(
                file.parent.parent, [f"annotations/{file.name}"], f"annotations of image {name}"
            )
            picture = _lettered_picture(plain, notes)
        options = take_texts(question, "answerTexts", where)
        answer = take(question, "correctAnswer", int, where)
        key = take(question, "questionId", str, where)
        kind = "letters" if has_letters else "texts"
        questions.append(_question(key, text, options, answer, picture, kind, where))
    return questions


def _question(
    key: str,
    text: str,
    options: list[str],
    answer: int,
    picture: Callable[[], bytes],
    kind: str,
    where: str,
) -> Question:
    if not 0 <= answer < len(options) <= len(LETTERS):
        raise UserError(f"the answer of {where} is {answer}, none of its {len(options)} options")
    return Question(
        key=key,
        messages=question_messages([picture], f"{text}\n{lettered(options)}\n{LETTER_ANSWER}"),
        references=(LETTERS[answer],),
        kind=kind,
        choices=tuple(LETTERS[: len(options)]),
        details={"options": options},
    )


def _lettered_picture(plain: Callable[[], bytes], notes: Path) -> Callable[[], bytes]:
    """The picture with its texts covered; the annotations are read at once, the picture late."""
    covers = []
    for name, text in take(read_json(notes), "text", dict, f"'{notes}'").items():
        where = f"text {name} of '{notes}'"
        letter = take(text, "replacementText", str, where)
        covers.append((_corners(take(text, "rectangle", list, where), where), letter))

    def draw() -> bytes:
        picture = decode_image(plain(), name=notes.stem)
        pen = ImageDraw.Draw(picture)
        for box, letter in covers:
            _cover(pen, box, letter)
        buffer = io.BytesIO()
        picture.save(buffer, "PNG")
        return buffer.getvalue()

    return draw


def _corners(rectangle: list[Any], where: str) -> tuple[float, float, float, float]:
    flat = [value for corner in rectangle for value in checked(corner, list, where)]
    if len(flat) != 4 or not all(isinstance(value, (int, float)) for value in flat):
        raise UserError(f"'rectangle' of {where} is {rectangle!r}, not two corners")
    (left, right), (top, bottom) = sorted(flat[0::2]), sorted(flat[1::2])
    return left, top, right, bottom


def _cover(pen: ImageDraw.ImageDraw, box: tuple[float, float, float, float], letter: str) -> None:
    """A white box with the letter in its middle, as high as the box."""
    left, top, right, bottom = box
    pen.rectangle(box, fill="white")
    size = max(6, min(bottom - top, right - left))
    font = ImageFont.load_default(size=size)
    middle = ((left + right) / 2, (top + bottom) / 2)
    pen.text(middle, letter, fill="black", font=font, anchor="mm")


TASK = Task(
    name="ai2d",
    description="AI2D test: accuracy of the chosen letters",
    default_data="data/ai2d",
    load=load,
    parse=chosen_letter,
    score=is_reference,
    max_new_tokens=16,
    metrics=choice_figures,
    official_size=3088,
)
