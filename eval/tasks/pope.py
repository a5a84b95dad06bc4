"""POPE (Li et al. 2023) on COCO's val2014: is there such an object? Three kinds of absent ones."""

from __future__ import annotations

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
    read_json_lines,
    take,
    take_id,
)

_KINDS = ("random", "popular", "adversarial")
_ROOTS = (".", "coco", "output/coco", "POPE/output/coco", "pope/coco")


def load(folder: Path) -> list[Question]:
    files = {
        kind: find_file(
            folder, [f"{root}/coco_pope_{kind}.json" for root in _ROOTS], f"{kind} part of POPE"
        )
        for kind in _KINDS
    }
    images = Images(folder, COCO_VAL2014)
    questions = []
    for kind, file in files.items():
        for number, record in enumerate(read_json_lines(file), start=1):
            where = f"question {number} of '{file}'"
            image = take(record, "image", str, where)
            gold = take(record, "label", str, where).lower()
            if gold not in ("yes", "no"):
                raise UserError(f"'label' of {where} is '{gold}', not yes or no")
            text = f"{take(record, 'text', str, where)}\n{SHORT_ANSWER}"
            questions.append(
                Question(
                    key=f"{kind}-{take_id(record, 'question_id', where)}",
                    messages=question_messages([images.lazy(image, where)], text),
                    references=(gold,),
                    kind=kind,
                    details={"cluster": image},
                )
            )
    return complete("pope", questions, files.values())


def _parse(text: str, question: Question) -> str:
    return parse_yes_no(text)


def _score(parsed: str, question: Question) -> float:
    return float(parsed in question.references)


def _parts(sample: Scored) -> dict[str, tuple[float, float]]:
    return binary_parts(sample.parsed, sample.question.references[0])


TASK = Task(
    name="pope",
    description="POPE on COCO: accuracy, precision, recall, F1 and share of yes",
    default_data="data/pope",
    load=load,
    parse=_parse,
    score=_score,
    max_new_tokens=16,
    metrics=RatioOfSums(_parts),
    official_size=9000,
)
