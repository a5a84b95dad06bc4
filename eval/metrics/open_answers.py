"""MMMU's open questions: the places of an answer that may hold the result, and their comparison.

After the published rules of MMMU's evaluation: the answer's sentences are cut behind words that
announce a result, numbers are taken out of what is left, and the reference has to stand in one of
the texts or equal one of the numbers to two decimals.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_ANNOUNCED_BY = (
    *("could be ", "so ", "is ", "thus ", "therefore ", "final ", "answer ", "result "),
)
_NOTHING = frozenset(":,.!?;'")
_SENTENCE_END = re.compile(r"\.\s(?=[A-Z])|\n")
_NUMBERS = (
    re.compile(r"-?\b\d{1,3}(?:,\d{3})+\b"),
    re.compile(r"-?\d+(?:\.\d+)?[eE][+-]?\d+"),
    re.compile(r"-?(?:\d+\.\d+|\.\d+|\d+\b)(?![eE][+-]?\d+)(?![,\d])"),
)


def parse_open_answer(text: str) -> list[str | float]:
    """Texts in lower case and numbers that an answer may mean, each once, in the order found."""
    found = _key_parts(text)
    numbers = [number for part in found for pattern in _NUMBERS for number in pattern.findall(part)]
    return list(dict.fromkeys(form for part in (*found, *numbers) for form in _forms(part)))


def _key_parts(text: str) -> list[str]:
    # In lower case no capital follows a full stop any more, so that lines alone are cut, as in the
    # published script.
    lines = _SENTENCE_END.split(text.strip().strip(".").lower())
    parts = []
    for number, line in enumerate(lines, start=1):
        marks = (*_ANNOUNCED_BY, "=") if number == len(lines) else _ANNOUNCED_BY
        tails = [line.rsplit(mark, 1)[1].strip() for mark in marks if mark in line]
        # An empty tail is passed over by the next one, as in the published script.
        shortest = ""
        for tail in tails:
            if not shortest or len(tail) < len(shortest):
                shortest = tail
        if shortest and shortest not in _NOTHING:
            parts.append(shortest)
    return parts or [text.strip().strip(".").lower()]


def _forms(text: str) -> list[str | float]:
    """A number to two decimals; else the text, a single character with a blank at either side, so
    that it is not found within every word.
    """
    text = text.strip()
    try:
        return [round(float(text.replace(",", "")), 2)]
    except ValueError:
        text = text.lower()
        return [f" {text}", f"{text} "] if len(text) == 1 else [text]


def open_answer_score(parsed: Sequence[str | float], references: Sequence[str]) -> float:
    """1.0 if a reference stands in one of the parsed texts or equals one of the numbers."""
    golds = [form for reference in references for form in _forms(reference)]
    for part in parsed:
        if isinstance(part, str):
            if any(isinstance(gold, str) and gold in part for gold in golds):
                return 1.0
        elif part in golds:
            return 1.0
    return 0.0
