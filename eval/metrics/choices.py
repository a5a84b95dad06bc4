"""Letters of multiple choice, read from an answer; what is ambiguous is an abstention.

MMMU's script draws a letter at random where it finds none and takes the last of several; MMBench
asks another model. Neither is repeatable or fair to compare, so here both give "": counted, wrong,
and reported as a share of their own.
"""

from __future__ import annotations

import re
import string
from collections.abc import Sequence

LETTERS = string.ascii_uppercase
_EDGES = string.whitespace + string.punctuation
# "B or C", "A, B": not one letter
_NO_OTHER = r"(?!\.?\s*(?:or\b|and\b|/|,\s*[A-Z]\s*(?:$|[,.]|or\b|and\b)))"
# "The answer is (B)", "correct option: B", "answer B"
_DECLARED = re.compile(
    r"\b(?i:answer|option|choice)(?i:\s+is|\s+should\s+be|\s+would\s+be|\s*[:=])?[\s*:\"'`]*"
    rf"[(\[]?([A-Z])(?![\w']){_NO_OTHER}"
)
# "(B)" anywhere; "B." "B)" "B:" where a line starts
_MARKED = re.compile(rf"[(\[]([A-Z])[)\]]|^[\s*\"'`]*([A-Z])[.):](?!\w){_NO_OTHER}", re.MULTILINE)
_ALONE = re.compile(r"(?<![\w'])([A-Z])(?![\w'])")
# "A dog" and "I see": a word, not a letter. "A is right" names one.
_WORD = re.compile(r"\s+(?!(?:is|and|or|because|since|as)\b)[a-z]")


def parse_choice(text: str, options: Sequence[str]) -> str:
    """The letter of the option that an answer chooses, "" if it chooses none or not clearly one.

    The first of these rules that finds letters decides; if it finds two different ones, the answer
    abstains:

    1. the whole answer, without punctuation around it, is a letter (in either case) or an option's
       text;
    2. letters that are declared: "the answer is B", "option: B";
    3. letters with marks: "(B)" anywhere, "B." or "B)" or "B:" at the start of a line;
    4. capital letters that stand alone, save "A" and "I" before a word in lower case;
    5. options whose text stands in the answer as whole words, save those within a longer one that
       stands there too.

    Args:
        options: the options' texts in order; the first is A. At most 26.
    """
    letters = LETTERS[: len(options)]
    bare = text.strip(_EDGES)
    if len(bare) == 1 and bare.upper() in letters:
        return bare.upper()
    texts = [_comparable(option) for option in options]
    wanted = _comparable(text)
    # An empty answer is none of the options, not even one that is empty or a mere "+".
    equal = {
        letters[number]
        for number, option in enumerate(texts)
        if (wanted and option == wanted) or (text.strip() and text.strip() == options[number])
    }
    if len(equal) == 1:
        return equal.pop()
    for found in (_DECLARED.finditer(text), _MARKED.finditer(text), _ALONE.finditer(text)):
        chosen = {_letter(match) for match in found if not _is_word(match)} & set(letters)
        if chosen:
            return chosen.pop() if len(chosen) == 1 else ""
    return _option_within(_comparable(text), texts)


def _letter(match: re.Match[str]) -> str:
    return next(group for group in match.groups() if group)


def _is_word(match: re.Match[str]) -> bool:
    letter = _letter(match)
    return (
        letter in "AI"
        and match[0].endswith(letter)
        and _WORD.match(match.string, match.end()) is not None
    )


def _comparable(text: str) -> str:
    return " ".join(text.lower().split()).strip(_EDGES)


def _option_within(answer: str, options: Sequence[str]) -> str:
    found = [
        (number, option)
        for number, option in enumerate(options)
        if option and _stands_in(option, answer)
    ]
    longest = [
        number
        for number, option in found
        if not any(option != other and _stands_in(option, other) for _, other in found)
    ]
    return LETTERS[longest[0]] if len(longest) == 1 else ""


def _stands_in(part: str, whole: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(part)}(?!\w)", whole) is not None
