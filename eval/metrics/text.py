"""Scores of one answer against its references as texts."""

from __future__ import annotations

from collections.abc import Sequence

ANLS_THRESHOLD = 0.5
RELAXED_TOLERANCE = 0.05  # of the gold value


def exact_match(answer: str, references: Sequence[str]) -> float:
    """1.0 if the answer equals one of the references, both trimmed and in lower case, else 0.0."""
    return float(answer.strip().lower() in {reference.strip().lower() for reference in references})


def levenshtein(first: str, second: str) -> int:
    """Fewest insertions, deletions and replacements of a character that make the texts equal."""
    if len(first) < len(second):
        first, second = second, first
    above = list(range(len(second) + 1))
    for row, mine in enumerate(first, start=1):
        current = [row]
        for column, other in enumerate(second, start=1):
            replaced = above[column - 1] + (mine != other)
            current.append(min(replaced, above[column] + 1, current[-1] + 1))
        above = current
    return above[-1]


def anls(answer: str, references: Sequence[str], threshold: float = ANLS_THRESHOLD) -> float:
    """Average normalised Levenshtein similarity of one answer (Biten et al. 2019), the best of its
    references; 0 where that is below the threshold, and where there is no reference.

    As in the DocVQA challenge's script, texts are compared in lower case with single blanks, while
    the distance is divided by the length of the longer text as it was written, in upper case.
    """
    best = max((_similarity(answer, reference) for reference in references), default=0.0)
    return best if best >= threshold else 0.0


def _similarity(answer: str, reference: str) -> float:
    longest = max(len(answer.upper()), len(reference.upper()))
    if longest == 0:
        return 1.0
    distance = levenshtein(_single_blanks(answer), _single_blanks(reference))
    # This order of operations gives the script's value to the last digit.
    return 1 - distance / longest


def _single_blanks(text: str) -> str:
    return " ".join(text.lower().split())


def relaxed_accuracy(
    answer: str, references: Sequence[str], tolerance: float = RELAXED_TOLERANCE
) -> float:
    """ChartQA's relaxed accuracy (Masry et al. 2022): 1.0 if the answer is a number within 5 % of
    the gold value, or equal in lower case where either is no number or the gold value is 0.

    As in the script that published figures come from (pix2struct): `12%` is 0.12, so that `12` is
    no answer to it; years are numbers too; thousands with commas are texts.
    """
    return float(any(_is_close(answer, reference, tolerance) for reference in references))


def _is_close(answer: str, reference: str, tolerance: float) -> bool:
    value, gold = _number(answer), _number(reference)
    if value is None or not gold:
        return answer.lower() == reference.lower()
    return abs(value - gold) / abs(gold) <= tolerance


def _number(text: str) -> float | None:
    try:
        return float(text.rstrip("%")) / 100 if text.endswith("%") else float(text)
    except ValueError:
        return None
