"""Yes and no: how they are read, and the figures of questions that have no third answer."""

from __future__ import annotations

import re

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


def binary_parts(answer: str, gold: str) -> dict[str, tuple[float, float]]:
    """What one answer adds to the numerator and the denominator of each of POPE's figures, with
    "yes" as the positive class: `accuracy`, `precision`, `recall`, `f1` (as 2 hits over 2 hits +
    false alarms + misses, the same), `yes_ratio` (the share of answers that are yes) and
    `unreadable` (a share).

    Args:
        answer: `yes`, `no` or "" for what could not be read: wrong, and if the right answer is yes,
            not recalled.
        gold: `yes` or `no`.
    """
    hit = float(answer == gold == "yes")
    said_yes, is_yes = float(answer == "yes"), float(gold == "yes")
    return {
        "accuracy": (float(answer == gold), 1.0),
        "precision": (hit, said_yes),
        "recall": (hit, is_yes),
        "f1": (2 * hit, said_yes + is_yes),
        "yes_ratio": (said_yes, 1.0),
        "unreadable": (float(answer == ""), 1.0),
    }
