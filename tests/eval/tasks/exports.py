"""Made-up exports of public data sets to parquet, with the pictures in their rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.eval.tasks.files import BOX, picture, put_parquet


def _cell(color: str = "red") -> dict[str, Any]:
    return {"bytes": picture(color, kind="PNG"), "path": None}


def make_ai2d_parquet(folder: Path) -> None:
    rows = [
        {
            "question": f"Question {number}?",
            "options": ["leaf", "root", "stem", "soil"],
            "answer": str(number),
            "image": {"bytes": picture(color, kind="PNG"), "path": None},
        }
        for number, color in enumerate(("red", "green", "blue"))
    ]
    put_parquet(folder / "data/test-00000-of-00001.parquet", rows)


def make_vqav2_parquet(folder: Path) -> None:
    rows = [
        {
            "question_id": 42000 + number,
            "image_id": 42,
            "question": "Is it red?",
            "question_type": "is it",
            "answer_type": "yes/no",
            "answers": [{"answer": "yes", "answer_confidence": "yes", "answer_id": 1}] * 10,
            "image": _cell(),
        }
        for number in range(3)
    ]
    put_parquet(folder / "data/validation-00000-of-00002.parquet", rows[:2])
    put_parquet(folder / "data/validation-00001-of-00002.parquet", rows[2:])


def make_textvqa_parquet(folder: Path) -> None:
    row = {"question_id": 1, "image_id": "a", "question": "what?", "answers": ["dakota"] * 10}
    put_parquet(folder / "data/validation-00000-of-00001.parquet", [{**row, "image": _cell()}])


def make_docvqa_parquet(folder: Path) -> None:
    row = {
        "questionId": "49153",
        "question": "How much?",
        "question_types": ["layout"],
        "docId": 14465,
        "answers": ["0.28"],
        "image": _cell(),
    }
    put_parquet(folder / "DocVQA/validation-00000-of-00001.parquet", [row])


def make_chartqa_parquet(folder: Path) -> None:
    rows = [
        {"type": f"{part}_test", "question": "How many?", "answer": "14", "image": _cell()}
        for part in ("human", "augmented")
    ]
    put_parquet(folder / "data/test-00000-of-00001.parquet", rows)


def make_pope_parquet(folder: Path) -> None:
    rows = [
        {
            "id": str(number),
            "question_id": "1",
            "question": "Is there a dog in the image?",
            "answer": "no",
            "image_source": "COCO_val2014_000000310196",
            "category": kind,
            "image": _cell(),
        }
        for number, kind in enumerate(("random", "popular", "adversarial"))
    ]
    put_parquet(folder / "data/test-00000-of-00001.parquet", rows)


def make_mme_parquet(folder: Path) -> None:
    from eval.tasks.mme import COGNITION, PERCEPTION

    rows = [
        {
            "question_id": f"{subtask}/0020.png",
            "question": f"Is it {color}? Please answer yes or no.",
            "answer": answer,
            "category": subtask,
            "image": _cell(),
        }
        for subtask in (*PERCEPTION, *COGNITION)
        for color, answer in (("red", "Yes"), ("blue", "No"))
    ]
    put_parquet(folder / "data/test-00000-of-00001.parquet", rows)


def make_scienceqa_parquet(folder: Path) -> None:
    row = {
        "question": "Which?",
        "choices": ["here", "there"],
        "answer": 1,
        "hint": "",
        "grade": "grade2",
        "subject": "social science",
    }
    rows = [{**row, "image": None}, {**row, "image": _cell()}]
    put_parquet(folder / "ScienceQA-FULL/test-00000-of-00001.parquet", rows)


def make_refcoco_parquet(folder: Path) -> None:
    rows = [
        {
            "question_id": str(number),
            "answer": [f"thing {number}", "the red one"],
            "bbox": BOX,
            "image": {"bytes": picture(), "path": None},
        }
        for number in range(3)
    ]
    put_parquet(folder / "refcoco/data/testA-00000-of-00001.parquet", rows)


EXPORTS = [
    ("vqav2", make_vqav2_parquet),
    ("textvqa", make_textvqa_parquet),
    ("docvqa", make_docvqa_parquet),
    ("chartqa", make_chartqa_parquet),
    ("pope", make_pope_parquet),
    ("mme", make_mme_parquet),
    ("scienceqa", make_scienceqa_parquet),
    ("ai2d", make_ai2d_parquet),
    ("refcoco_testA", make_refcoco_parquet),
]
"""Task name, and what writes its files into a folder."""
