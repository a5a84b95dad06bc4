"""What is hidden in the haystack, how it is found in an answer, and what the answer scores.

Only the key counts, never the wording around it, and everything key-shaped counts: what an answer
names beside the wanted keys is wrong and takes a right one away. Every prompt has at its beginning
and at its end an example with as many keys, all of them wrong. So an answer that repeats the
prompt up to any place, or from any place on, or that lists all candidates, scores 0 (`score`); and
so does a piece of the document (`recites`).
"""

from __future__ import annotations

import random
import re
import uuid
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

from eval.long_context.words import ADJECTIVES, NOUNS

_CONSONANTS, _VOWELS = "BDGKMNPRSTVZ", "AEIOU"

_NO_WORD_BEFORE, _NO_WORD_BEHIND = r"(?<![^\W_])", r"(?![^\W_])"  # `_amber-anchor_` is set apart


def _whole(pattern: str) -> re.Pattern[str]:
    return re.compile(f"{_NO_WORD_BEFORE}{pattern}{_NO_WORD_BEHIND}", re.I)


# How keys of each shape are found. A number of four digits or more is key-shaped whatever its
# length, so that a key within a longer run of digits is no key; shorter ones number a list.
_FOUND = {
    "number": re.compile(r"\d{4,}"),
    "code": re.compile(r"[0-9a-f]{4,}(?:-[0-9a-f]{2,})+", re.I),
    "coded word": _whole(rf"(?:[{_CONSONANTS}][{_VOWELS}]){{3}}"),
    "name": _whole(rf"(?:{'|'.join(ADJECTIVES)})-(?:{'|'.join(NOUNS)})"),
    "sequence": re.compile(r"\d+"),
}
# 1,234,567 as English, other languages, code and LaTeX group it.
_THOUSANDS = re.compile(
    r"(?<!\d)\d{1,3}([,.'\u2019_ \u00a0\u2009\u202f]|\{,\}|\\,)\d{3}(?:\1\d{3})*(?!\d)"
)
_HYPHENS = re.compile("[\u2010-\u2013\u2212]")  # what chat models write for "-"
_NUMBERING = re.compile(r"^\s*[*(]*(\d+)[.):]\**:? +(?=[^\d\n]*\d)", re.M)
_SEPARATOR = ", "
# Characters an answer may have beside its keys: in all, and for each of them.
_ROOM, _ROOM_OF_KEY = 200, 60
_RECITED = 8  # words of the document in a row that no answer has by itself


def random_number(rng: random.Random, digits: int = 7) -> str:
    return str(rng.randrange(10 ** (digits - 1), 10**digits))


def random_code(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def random_coded_word(rng: random.Random) -> str:
    """Six capitals that can be spoken, `ZUPOKA`; there are 216,000."""
    return "".join(rng.choice(_CONSONANTS) + rng.choice(_VOWELS) for _ in range(3))


def random_name(rng: random.Random) -> str:
    """`amber-anchor`; there are more than 15,000."""
    return f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"


MAKERS: dict[str, Callable[[random.Random], str]] = {
    "number": random_number,
    "code": random_code,
    "coded word": random_coded_word,
    "name": random_name,
}


def draw_keys(
    rng: random.Random,
    shape: str | Callable[[random.Random], str],
    count: int,
    absent: Container[str] = "",
) -> list[str]:
    """Keys that differ from each other.

    Args:
        shape: a name of `MAKERS`, or a function that makes one.
        absent: a text, or any container, in which none of them may be; in a text neither in
            another case, since answers are read without regard to it (`POTATO` and "potato").
    """
    if isinstance(absent, str):
        absent = absent.lower()
    make = MAKERS[shape] if isinstance(shape, str) else shape
    found: dict[str, None] = {}
    while len(found) < count:
        key = make(rng)
        if (key.lower() if isinstance(absent, str) else key) not in absent:
            found[key] = None
    return list(found)


def read_keys(text: str, shape: str) -> list[str]:
    """The keys that an answer names: each once, in the order of their first places. Of a sequence
    all numbers in their order."""
    text = _HYPHENS.sub("-", text)
    text = re.sub(r"\d", lambda digit: str(int(digit[0])), text)  # of any script
    if shape == "number":
        text = _THOUSANDS.sub(lambda number: re.sub(r"\D", "", number[0]), text)
    elif shape == "sequence":
        text = _without_numbering(text)
    found = [match.lower() for match in _FOUND[shape].findall(text)]
    return found if shape == "sequence" else list(dict.fromkeys(found))


def _without_numbering(text: str) -> str:
    """The lines of a numbered list, `1. amber-anchor: 4`, without their own numbers."""
    numbers = _NUMBERING.findall(text)
    counted = len(numbers) > 1 and numbers == [str(n) for n in range(1, len(numbers) + 1)]
    return _NUMBERING.sub("", text) if counted else text


def parse(text: str, details: Any, document: str = "") -> str:
    """The named keys, joined by commas; "" where there are none, and where the answer is no answer
    but a recital: more than 200 characters, and 60 for each key, beside its keys, or a piece of the
    document."""
    wanted = _SEPARATOR.join(details["wanted"])
    if len(text) > len(wanted) + _ROOM + _ROOM_OF_KEY * len(details["wanted"]):
        return ""
    if recites(text, document, details):
        return ""
    return _SEPARATOR.join(read_keys(text, details["shape"]))


def recites(text: str, document: str, details: Any) -> bool:
    """Whether an answer repeats eight words of the document in a row, keys not counted. A needle's
    own sentence has six: where keys have places in the document, they end a run of words."""
    key = _FOUND[details["shape"]]
    pieces = key.split(text) if details.get("depths") else [text]
    whole = " ".join(document.split())
    return any(run in whole for piece in pieces for run in _runs(piece.split(), key))


def _runs(words: Sequence[str], key: re.Pattern[str]) -> Iterator[str]:
    """Every shortest run that has as many words beside its keys as a recital."""
    others = [number for number, word in enumerate(words) if not key.search(word)]
    for first, last in zip(others, others[_RECITED - 1 :], strict=False):
        yield " ".join(words[first : last + 1])


def score(parsed: str, details: Any) -> float:
    """Right keys less wrong ones as a share of the wanted, at least 0; of a sequence 1 if it is the
    wanted one, else 0."""
    return sum(credits(parsed, details)) / len(details["wanted"])


def credits(parsed: str, details: Any) -> list[float]:
    """What each wanted key earns; their mean is the score.

    Every wrong key takes one right key away, in equal parts from all that are right.
    """
    wanted = [key.lower() for key in details["wanted"]]
    named = parsed.split(_SEPARATOR) if parsed else []
    if details["shape"] == "sequence":
        return [float(named == wanted)] * len(wanted)
    right = set(wanted) & set(named)
    wrong = set(named) - right
    share = max(0, len(right) - len(wrong)) / len(right) if right else 0.0
    return [share if key in right else 0.0 for key in wanted]


def listed(items: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    if len(items) < 2:
        return "".join(items)
    return f"{', '.join(items[:-1])} and {items[-1]}"
