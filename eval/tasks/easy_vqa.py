"""easy-VQA (Zhou 2019): 9,673 test questions about 1,000 pictures of one coloured shape.

The official score is the share of right answers. Published: 87.6 % (CNN and LSTM) and 99.5 % (the
author's larger model, with twice the data).
"""

from __future__ import annotations

from pathlib import Path

from eval.metrics import exact_match
from eval.records import load_questions
from eval.tasks import Question, Task

_SHAPES = frozenset({"circle", "rectangle", "triangle"})


def kind_of(references: list[str]) -> str:
    """Question type by its right answer: yes/no, shape or colour."""
    answer = references[0].strip().lower()
    if answer in ("yes", "no"):
        return "yes/no"
    return "shape" if answer in _SHAPES else "colour"


def load(folder: Path) -> list[Question]:
    return load_questions(folder, split="test", kind_of=kind_of, build="easy_vqa")


def parse(text: str, question: Question) -> str:
    """The answer in lower case; it is a single word, so none is searched for in longer texts."""
    return text.strip().lower()


def score(parsed: str, question: Question) -> float:
    return exact_match(parsed, question.references)


TASK = Task(
    name="easy_vqa",
    description="easy-VQA, official test questions, each asked alone, exact match",
    default_data="data/easy_vqa",
    load=load,
    parse=parse,
    score=score,
    max_new_tokens=8,
    official_size=9673,
)
