"""How tasks read answers and put scores together; shared by several data sets."""

from __future__ import annotations

from eval.metrics import parse_choice
from eval.tasks import Question, RatioOfSums, Scored


def as_written(text: str, question: Question) -> str:
    """The answer without white space around it."""
    return text.strip()


def chosen_letter(text: str, question: Question) -> str:
    """The letter of one of the question's options in `details`, "" for an abstention."""
    return parse_choice(text, question.details["options"])


def letter_score(parsed: str, question: Question) -> float:
    return float(parsed in question.references)


def _choice_parts(sample: Scored) -> dict[str, tuple[float, float]]:
    return {"accuracy": (sample.score, 1.0), "abstained": (float(sample.parsed == ""), 1.0)}


choice_figures = RatioOfSums(_choice_parts)
"""Accuracy, and the share of answers in which no letter could be read; those are wrong."""
