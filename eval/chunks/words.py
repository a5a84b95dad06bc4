"""Kinds of tokens, to see which are merged: digits, operators, punctuation, classes of words.

English function words are closed classes, so lists name them without a tagger; what is on no list
is a content word. A token that continues a word is a kind of its own: its word stands in several.
"""

from __future__ import annotations

import re
import unicodedata

_DETERMINERS = "a an the this that these those each every either neither some any no all both"
_PRONOUNS = (
    "i me my mine myself you your yours yourself he him his himself she her hers herself it its "
    "itself we us our ours ourselves they them their theirs themselves who whom whose which what "
    "someone something anyone anything everyone everything nobody nothing one"
)
_PREPOSITIONS = (
    "of in on at by for with about against between into through during before after above below to "
    "from up down out off over under near behind beside beyond within without toward towards upon "
    "across along around among inside outside onto per than as like"
)
_CONJUNCTIONS = "and or but nor so yet if because while although though unless until when where why"
_AUXILIARIES = (
    "am is are was were be been being do does did done has have had having can could will would "
    "shall should may might must not"
)
_ADVERBS = "there here now then how very too also only just more most less least again ever never"

CLOSED_CLASSES: dict[str, frozenset[str]] = {
    name: frozenset(words.split())
    for name, words in {
        "determiner": _DETERMINERS,
        "pronoun": _PRONOUNS,
        "preposition": _PREPOSITIONS,
        "conjunction": _CONJUNCTIONS,
        "auxiliary": _AUXILIARIES,
        "function adverb": _ADVERBS,
    }.items()
}
"""A word on several lists belongs to the first."""

KINDS = (
    *("image patch", "special", "space", "digits", "operator", "punctuation"),
    *(*CLOSED_CLASSES, "content word", "part of a word", "bytes"),
)

_OPERATORS = frozenset("+-*/=<>^%&|~×÷±≤≥≠√∑∫→←")
_WORD = re.compile(r"[^\W\d_]+(?:['\u2019][^\W\d_]+)?", re.UNICODE)
_DIGITS = re.compile(r"[\d.,]*\d[\d.,]*")


def kind_of_word(text: str, continues: bool = False) -> str:
    """The kind of a token of text.

    Args:
        text: what the token stands for, with its leading space. continues: no space or punctuation
            stands between it and the letters before it.
    """
    word = text.strip()
    if not word:
        return "space"
    if "�" in word:
        return "bytes"
    if _DIGITS.fullmatch(word):
        return "digits"
    if all(character in _OPERATORS for character in word):
        return "operator"
    if _WORD.fullmatch(word):
        if continues and not text[0].isspace():
            return "part of a word"
        lower = word.lower()
        for name, words in CLOSED_CLASSES.items():
            if lower in words:
                return name
        return "content word"
    if all(unicodedata.category(character)[0] in "PSZC" for character in word):
        return "punctuation"
    return "part of a word"


def kinds_of(texts: list[str], is_image: list[bool], is_special: list[bool]) -> list[str]:
    """The kind of every token of a prompt, in order.

    Args:
        texts: each token decoded alone. is_image, is_special: which are placeholders and marks.
    """
    kinds: list[str] = []
    in_word = False
    is_text = [not (image or special) for image, special in zip(is_image, is_special, strict=True)]
    for number, (text, image, special) in enumerate(zip(texts, is_image, is_special, strict=True)):
        if image or special:
            kinds.append("image patch" if image else "special")
            in_word = False
            continue
        kind = kind_of_word(text, in_word)
        starts = text[:1].isspace() or not in_word
        goes_on = (
            number + 1 < len(texts) and is_text[number + 1] and texts[number + 1][:1].isalpha()
        )
        # The first part of a word that stands in several tokens is no word either.
        if starts and goes_on and text[-1:].isalpha():
            kind = "part of a word"
        kinds.append(kind)
        in_word = text[-1:].isalpha()
    return kinds
