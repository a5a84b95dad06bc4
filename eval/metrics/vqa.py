"""VQA accuracy: agreement with ten people, after the official normalisation of answers.

Notable:
- the tables say the same as the 120 contractions of the official script, entry by entry (only the
  five that start with a capital are left out: they are looked up in lower case);
- the script's own slips are kept, since published figures contain them: its mark for a full stop
  between digits matches before every character but a digit, at most 32 full stops go, `somebody'd`
  loses its apostrophe, and answers on which all ten people agree are not normalised at all.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache

# Written without its apostrophe, each of them gets it back.
_ONE_APOSTROPHE = """
'twas ain't aren't can't could've couldn't didn't doesn't don't hadn't hasn't haven't he'd he's
how'd how'll how's isn't it'd it'll ma'am might've mightn't must've mustn't needn't not've o'clock
oughtn't shan't should've shouldn't somebody'll somebody's someone'd someone'll someone's
something'd something'll that's there'd there're there's they'd they'll they're they've wasn't
we've weren't what'll what're what's what've when's where'd where's where've who'd who'll who's
who've why'll why're why's won't would've wouldn't y'all you'd you'll you're you've
"""
# Written with one of their apostrophes alone, these get the other one back.
_TWO_APOSTROPHES = """
couldn't've hadn't've he'd've it'd've mightn't've she'd've shouldn't've somebody'd've
someone'd've something'd've there'd've they'd've we'd've who'd've wouldn't've y'all'll you'd've
"""
_ODD = {
    "somebody'd": "somebodyd",
    **dict.fromkeys(("yall'd've", "y'alld've", "y'all'dve"), "y'all'd've"),
    **dict.fromkeys(("ow's'at", "'ows'at", "'ow'sat"), "'ow's'at"),
}
_NUMBERS = "zero one two three four five six seven eight nine ten"
_ARTICLES = frozenset({"a", "an", "the"})
_PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'
_THOUSANDS = re.compile(r"\d,\d")
_FULL_STOP = re.compile(r"\.(?!\d)")
_MOST_FULL_STOPS = 32
_AGREEING = 3  # as many others have to agree for a full score


def _contractions() -> dict[str, str]:
    table = {word.replace("'", ""): word for word in _ONE_APOSTROPHE.split()}
    for word in _TWO_APOSTROPHES.split():
        table |= {
            word[: mark.start()] + word[mark.end() :]: word for mark in re.finditer("'", word)
        }
    return table | _ODD


_CONTRACTIONS = _contractions()
_DIGITS = {word: str(value) for value, word in enumerate(_NUMBERS.split())} | {"none": "0"}


def _without_punctuation(text: str) -> str:
    """A mark goes where it stands at a blank, or anywhere if a number has a comma; elsewhere it
    becomes a blank.
    """
    has_thousands = _THOUSANDS.search(text) is not None
    cleaned = text
    for mark in _PUNCTUATION:
        at_blank = f"{mark} " in text or f" {mark}" in text
        cleaned = cleaned.replace(mark, "" if at_blank or has_thousands else " ")
    return _FULL_STOP.sub("", cleaned, count=_MOST_FULL_STOPS)


def _plain_words(text: str) -> str:
    words = (_DIGITS.get(word, word) for word in text.lower().split())
    return " ".join(_CONTRACTIONS.get(word, word) for word in words if word not in _ARTICLES)


def _one_line(text: str) -> str:
    return text.replace("\n", " ").replace("\t", " ").strip()


@lru_cache(maxsize=1 << 16)  # a data set's answers repeat
def normalize_vqa_answer(text: str) -> str:
    """Of the official VQAv2 script: punctuation, then digits for number words, no articles, and
    apostrophes of contractions.
    """
    return _plain_words(_without_punctuation(_one_line(text)))


@lru_cache(maxsize=1 << 16)
def normalize_textvqa_answer(text: str) -> str:
    """Of the EvalAI script for TextVQA: commas and question marks go first, `'s` is a word of its
    own, and the rest as for VQAv2.
    """
    words = text.lower().replace(",", "").replace("?", "").replace("'s", " 's").strip()
    return _plain_words(_without_punctuation(_one_line(words)))


def _leave_one_out(answer: str, references: Sequence[str]) -> float:
    """Mean over the people of min(1, agreeing others / 3)."""
    if not references:
        return 0.0
    agreeing = sum(reference == answer for reference in references)
    scores = [min(1.0, (agreeing - (reference == answer)) / _AGREEING) for reference in references]
    return sum(scores) / len(scores)


def vqa_accuracy(answer: str, references: Sequence[str]) -> float:
    """VQAv2's accuracy of one answer, 0 to 1.

    Args:
        references: the answers of all people, repeated ones included, as they were given.
    """
    given = [_one_line(reference) for reference in references]
    if len(set(given)) > 1:
        return vqa_accuracy_normalized(answer, given)
    return _leave_one_out(_one_line(answer), given)


def vqa_accuracy_normalized(answer: str, references: Sequence[str]) -> float:
    """The same with normalisation also where all people agree, as lmms-eval and VLMEvalKit do."""
    return _normalized(answer, references, normalize_vqa_answer)


def textvqa_accuracy(answer: str, references: Sequence[str]) -> float:
    """TextVQA's accuracy of one answer, 0 to 1; arguments as for `vqa_accuracy`."""
    return _normalized(answer, references, normalize_textvqa_answer)


def _normalized(answer: str, references: Sequence[str], normalize: Callable[[str], str]) -> float:
    return _leave_one_out(normalize(answer), [normalize(reference) for reference in references])
