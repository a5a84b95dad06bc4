"""Slow, obvious references of the metrics, from their published definitions, in exact fractions."""

from __future__ import annotations

from fractions import Fraction
from functools import cache
from itertools import combinations


def agreement(answer: str, people: list[str]) -> Fraction:
    """VQA accuracy of normalised answers: over all sets of all people but one, the mean of
    min(people of the set who gave the answer / 3, 1).
    """
    sets = list(combinations(people, len(people) - 1))
    scores = [min(Fraction(others.count(answer), 3), Fraction(1)) for others in sets]
    return sum(scores, Fraction(0)) / len(sets)


def edit_distance(first: str, second: str) -> int:
    """By the recursive definition."""

    @cache
    def distance(i: int, j: int) -> int:
        if i == 0 or j == 0:
            return i + j
        if first[i - 1] == second[j - 1]:
            return distance(i - 1, j - 1)
        return 1 + min(distance(i - 1, j), distance(i, j - 1), distance(i - 1, j - 1))

    return distance(len(first), len(second))


def similarity(answer: str, references: list[str]) -> Fraction:
    """ANLS of texts in lower case without blanks, threshold one half."""
    best = Fraction(0)
    for reference in references:
        longest = max(len(answer), len(reference))
        share = Fraction(edit_distance(answer, reference), longest) if longest else Fraction(0)
        best = max(best, 1 - share)
    return best if best >= Fraction(1, 2) else Fraction(0)


def overlap(first: tuple[int, int, int, int], second: tuple[int, int, int, int]) -> Fraction:
    """Intersection over union of boxes with whole corners, by counting unit squares."""

    def cells(box: tuple[int, int, int, int]) -> set[tuple[int, int]]:
        left, top, right, bottom = box
        return {(x, y) for x in range(left, right) for y in range(top, bottom)}

    union = cells(first) | cells(second)
    return Fraction(len(cells(first) & cells(second)), len(union)) if union else Fraction(0)


def contingency(answers: list[str], golds: list[str]) -> dict[str, Fraction | None]:
    """POPE's figures from the four counts; an unreadable answer is wrong;
    None: not defined."""
    hits = misses = false_alarms = right_no = 0
    for answer, gold in zip(answers, golds, strict=True):
        if gold == "yes":
            hits += answer == "yes"
            misses += answer != "yes"
        else:
            false_alarms += answer == "yes"
            right_no += answer == "no"

    def share(part: int, whole: int) -> Fraction | None:
        return Fraction(part, whole) if whole else None

    return {
        "accuracy": share(hits + right_no, len(golds)),
        "precision": share(hits, hits + false_alarms),
        "recall": share(hits, hits + misses),
        "f1": share(2 * hits, 2 * hits + false_alarms + misses),
        "yes_ratio": share(hits + false_alarms, len(golds)),
        "unreadable": share(answers.count(""), len(golds)),
    }
