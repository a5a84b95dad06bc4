"""VQAv2 (Goyal et al. 2017): the official files of the validation split and COCO's val2014."""

from __future__ import annotations

from collections.abc import Sequence
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
    read_json,
    take,
    take_id,
)
from eval.tasks._scoring import as_written

_QUESTIONS = "v2_OpenEnded_mscoco_val2014_questions.json"
_ANNOTATIONS = "v2_mscoco_val2014_annotations.json"


def load(folder: Path) -> list[Question]:
    questions_file = find_file(folder, [_QUESTIONS, f"*/{_QUESTIONS}"], "questions of VQAv2")
    answers_file = find_file(folder, [_ANNOTATIONS, f"*/{_ANNOTATIONS}"], "annotations of VQAv2")
    images = Images(folder, (*COCO_VAL2014, "Images/mscoco/val2014"))
    annotations = {
        take_id(record, "question_id", f"annotation {number} of '{answers_file}'"): record
        for number, record in enumerate(
            take(read_json(answers_file), "annotations", list, f"'{answers_file}'")
        )
    }
    questions = []
    records = take(read_json(questions_file), "questions", list, f"'{questions_file}'")
    for number, record in enumerate(records):
        where = f"question {number} of '{questions_file}'"
        key = take_id(record, "question_id", where)
        if key not in annotations:
            raise UserError(f"'{answers_file}' has no annotation of question {key}")
        image = take(record, "image_id", int, where)
        text = take(record, "question", str, where)
        lazy = images.lazy([f"COCO_val2014_{image:012d}.jpg", f"{image:012d}.jpg"], where)
        questions.append(_question(key, image, f"{text}\n{SHORT_ANSWER}", lazy, annotations[key]))
    return complete("vqav2", questions, [questions_file, answers_file])


def _question(key: str, image: int, text: str, lazy: object, annotation: dict) -> Question:
    where = f"the annotation of question {key}"
    answers = take(annotation, "answers", list, where)
    return Question(
        key=key,
        messages=question_messages([lazy], text),
        references=tuple(take(answer, "answer", str, where) for answer in answers),
        kind=take(annotation, "answer_type", str, where),
        details={"cluster": image, "question_type": annotation.get("question_type", "")},
    )


def _score(parsed: str, question: Question) -> float:
    return vqa_accuracy(parsed, question.references)


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
    score=_score,
    max_new_tokens=16,
    metrics=RatioOfSums(_parts),
    official_size=214354,
)
