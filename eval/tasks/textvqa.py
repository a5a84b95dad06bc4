"""TextVQA (Singh et al. 2019), validation: the official JSON file and its OpenImages pictures."""

from __future__ import annotations

from pathlib import Path

from conceptmoe_vl.asking import question_messages
from eval.metrics import textvqa_accuracy
from eval.tasks import Question, Task
from eval.tasks._files import (
    SHORT_ANSWER,
    Images,
    complete,
    find_file,
    read_json,
    take,
    take_id,
    take_texts,
)
from eval.tasks._scoring import as_written

_FILE = "TextVQA_0.5.1_val.json"
# The validation pictures come in the archive of the training split.
_PICTURES = ("train_images", "train_val_images/train_images", "val_images", "images")


def load(folder: Path) -> list[Question]:
    file = find_file(folder, [_FILE, f"*/{_FILE}"], "questions of TextVQA")
    images = Images(
        folder, ("train_images", "train_val_images/train_images", "val_images", "images")
    )
    questions = []
    for number, record in enumerate(take(read_json(file), "data", list, f"'{file}'")):
        where = f"question {number} of '{file}'"
        image = take(record, "image_id", str, where)
        text = f"{take(record, 'question', str, where)}\n{SHORT_ANSWER}"
        questions.append(
            Question(
                key=take_id(record, "question_id", where),
                messages=question_messages([images.lazy(f"{image}.jpg", where)], text),
                references=tuple(take_texts(record, "answers", where)),
                details={"cluster": image},
            )
        )
    return complete("textvqa", questions, [file])


def _score(parsed: str, question: Question) -> float:
    return textvqa_accuracy(parsed, question.references)


TASK = Task(
    name="textvqa",
    description="TextVQA validation, accuracy over ten answers",
    default_data="data/textvqa",
    load=load,
    parse=as_written,
    score=_score,
    max_new_tokens=16,
    official_size=5000,
)
