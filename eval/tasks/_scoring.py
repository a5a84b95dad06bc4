"""How tasks read answers and put scores together; shared by several data sets."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from eval.metrics import parse_choice
from eval.tasks import Question, RatioOfSums, Scored


def as_written(text: str, question: Question) -> str:
    """The answer without white space around it."""
    return text.strip()


def chosen_letter(text: str, question: Question) -> str:
    """The letter of one of the question's options in `details`, "" for an abstention."""
    return parse_choice(text, question.details["options"])


def is_reference(parsed: str, question: Question) -> float:
    """1 for what is one of the references as it is written, such as a letter, yes or no."""
    return float(parsed in question.references)


def against_references(
    metric: Callable[[str, Sequence[str]], float],
) -> Callable[[str, Question], float]:
    """The score of a task: a metric over the question's references."""
    return lambda parsed, question: metric(parsed, question.references)


def mean_as(name: str) -> RatioOfSums:
    """The mean of the scores under the name that it was published by."""
    return RatioOfSums(lambda sample: {name: (sample.score, 1.0)})


def _choice_parts(sample: Scored) -> dict[str, tuple[float, float]]:
    return {"accuracy": (sample.score, 1.0), "abstained": (float(sample.parsed == ""), 1.0)}


choice_figures = RatioOfSums(_choice_parts)
"""Accuracy, and the share of answers in which no letter could be read; those are wrong."""
