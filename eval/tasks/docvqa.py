"""DocVQA (Mathew et al. 2021), validation of the single-page task: JSON file and page images."""

from __future__ import annotations

from pathlib import Path

from conceptmoe_vl.asking import question_messages
from eval.metrics import anls
from eval.tasks import Question, RatioOfSums, Scored, Task
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

_FILES = ("val_v1.0_withQT.json", "val_v1.0.json")


def load(folder: Path) -> list[Question]:
    places = [place for name in _FILES for place in (name, f"*/{name}")]
    file = find_file(folder, places, "questions of DocVQA")
    images = Images(folder, (".", "val", "spdocvqa_images", "documents", "val/documents", "images"))
    questions = []
    for number, record in enumerate(take(read_json(file), "data", list, f"'{file}'")):
        where = f"question {number} of '{file}'"
        image = take(record, "image", str, where)
        lazy = images.lazy([image, image.rpartition("/")[2]], where)
        text = f"{take(record, 'question', str, where)}\n{SHORT_ANSWER}"
        types = take_texts(record, "question_types", where) if "question_types" in record else []
        questions.append(
            Question(
                key=take_id(record, "questionId", where),
                messages=question_messages([lazy], text),
                references=tuple(take_texts(record, "answers", where)),
                kind=types[0] if types else "",
                details={"cluster": image, "question_types": types},
            )
        )
    return complete("docvqa", questions, [file])


def _score(parsed: str, question: Question) -> float:
    return anls(parsed, question.references)


def _parts(sample: Scored) -> dict[str, tuple[float, float]]:
    return {"anls": (sample.score, 1.0)}


TASK = Task(
    name="docvqa",
    description="DocVQA validation, ANLS",
    default_data="data/docvqa",
    load=load,
    parse=as_written,
    score=_score,
    max_new_tokens=32,
    metrics=RatioOfSums(_parts),
    official_size=5349,
)
