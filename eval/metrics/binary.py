"""Yes and no: how they are read, and the figures of questions that have no third answer."""

from __future__ import annotations

import re
from collections.abc import Sequence

_WORDS = re.compile(r"[^\W_]+(?:'[^\W_]+)?")
_NEGATIVE = frozenset({"no", "not"})


def answer_words(text: str) -> list[str]:
    """Words in lower case, without punctuation."""
    return _WORDS.findall(text.lower())


def parse_yes_no(text: str) -> str:
    """`yes`, `no`, or "" where the answer says neither.

    As in POPE's script, the first sentence decides, and it says no if the word "no" or "not" stands
    in it. The script takes everything else for a yes; here the word has to stand there.
    """
    sentences = [words for part in text.split(".") if (words := answer_words(part))]
    words = sentences[0] if sentences else []
    if words[:1] == ["yes"]:
        return "yes"
    if _NEGATIVE.intersection(words):
        return "no"
    return "yes" if "yes" in words else ""


def parse_yes_no_prefix(text: str) -> str:
    """`yes`, `no` or "", by the rule of MME's script: the answer is the word (a single y or n will
    do), or its first four characters contain it.
    """
    answer = text.lower().strip().replace(".", "")
    if len(answer) == 1:
        return {"y": "yes", "n": "no"}.get(answer, "")
    start = answer[:4]
    return "yes" if "yes" in start else "no" if "no" in start else ""


def binary_figures(answers: Sequence[str], golds: Sequence[str]) -> dict[str, float]:
    """POPE's figures, with "yes" as the positive class.

    Args:
        answers: `yes`, `no` or "" for what could not be read: wrong, and if the right answer was
            yes, not recalled.
        golds: `yes` or `no`.

    Returns:
        `accuracy`, `precision`, `recall`, `f1`, `yes_ratio` (the share of answers that are yes) and
        `unreadable` (a share); 0 where a figure's denominator is.
    """
    count = len(golds)
    pairs = list(zip(answers, golds, strict=True))
    hits = pairs.count(("yes", "yes"))
    said_yes = sum(answer == "yes" for answer in answers)
    precision = _share(hits, said_yes)
    recall = _share(hits, sum(gold == "yes" for gold in golds))
    return {
        "accuracy": _share(sum(answer == gold for answer, gold in pairs), count),
        "precision": precision,
        "recall": recall,
        "f1": _share(2 * precision * recall, precision + recall),
        "yes_ratio": _share(said_yes, count),
        "unreadable": _share(sum(answer == "" for answer in answers), count),
    }


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
