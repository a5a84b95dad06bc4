"""Aggregation over a whole list, in the manner of RULER: which words are the most common?

In the controls all words are equally common, so that nothing can be found.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

from conceptmoe_vl.errors import UserError
from eval.long_context.keys import draw_keys
from eval.long_context.prompt import Draft, closing
from eval.long_context.text_tasks import Place, Setting

_COMMON = 10
# Entries of a list, and how often its common and its other words stand in it: as RULER has them
# for 4k and more, and for less.
_FREQUENCIES = ((450, 30, 3), (80, 6, 1))
_CODED = 3
_SILENT = "..."


def common_words(rng: random.Random, setting: Setting, place: Place) -> Draft:
    """A numbered list; asked are the ten words that stand in it most often.

    Raises:
        UserError: the list would be too short to tell them from the others.
    """
    example = draw_keys(rng, "name", _COMMON)
    entries = " ".join(f"{number}. {word}" for number, word in enumerate(example * 2, 1))
    head = (
        "The following numbered list holds some words more often than others. Remember those.\n"
        f"Example: in the list '{entries} {2 * _COMMON + 1}. {example[0]}' "
        f"the most common word is {example[0]}.\n\n"
    )
    tail = closing(
        example,
        f"Which {_COMMON} words stand most often in the numbered list above? Answer with the words "
        "alone.",
    )
    room = setting.length // max(setting.meter.answer_tokens(f" 123. {example[0]}"), 1)
    chosen = next((row for row in _FREQUENCIES if room >= row[0]), None)
    if chosen is None:
        raise UserError(
            f"long/common_words: {setting.length} tokens hold about {room} words, and "
            f"{_FREQUENCIES[-1][0]} are needed; ask for a greater length"
        )
    _, often, seldom = chosen
    others = min(room // seldom + 1, 12_000)  # names are no more than 15,000
    words = draw_keys(rng, "name", _COMMON + others, absent=set(example))
    wanted = words[:_COMMON]
    seed = rng.random()

    def body(amount: int) -> list[str]:
        entries = [word for word in wanted for _ in range(seldom if place.control else often)]
        others = [word for word in words[_COMMON:] for _ in range(seldom)]
        entries += (others * (amount // len(others) + 1))[:amount]
        random.Random(seed).shuffle(entries)
        return [" ".join(f"{number}. {word}" for number, word in enumerate(entries, 1))]

    return Draft(head, body, tail, "name", wanted)


def frequent_words(rng: random.Random, setting: Setting, place: Place) -> Draft:
    """Coded words with frequencies of a zeta distribution (exponent 2), the most frequent of them
    silent; asked are the next three.

    Raises:
        UserError: the text would be too short to tell them from the others.
    """
    room = setting.length // max(setting.meter.answer_tokens(" ZUPOKA"), 1)
    if room < 80:
        raise UserError(
            f"long/frequent_words: {setting.length} tokens hold about {room} words, and 80 are "
            "needed; ask for a greater length"
        )
    size = max(setting.length // 50, 2 * _CODED)
    words = draw_keys(rng, "coded word", size + _CODED)
    example, words = words[:_CODED], words[_CODED:]
    head = (
        "The following text consists of coded words. Remember which are the most frequent; the "
        f"dots '{_SILENT}' are none.\nExample: in '{' '.join([*example, _SILENT, example[0]])}' "
        f"the most frequent coded word is {example[0]}.\n\n"
    )
    tail = closing(
        example,
        f"Which {_CODED} coded words are the most frequent in the text above? Answer with the "
        "words alone.",
    )
    seed = rng.random()
    entries = _coded_text(words, setting.length, place.control)

    def body(amount: int) -> list[str]:
        text = list(itertools.islice(itertools.chain(entries, itertools.repeat(_SILENT)), amount))
        random.Random(seed).shuffle(text)
        return [" ".join(text)]

    return Draft(head, body, tail, "coded word", words[:_CODED])


def _coded_text(words: Sequence[str], amount: int, equal: bool) -> list[str]:
    """`amount` words, to be cut anywhere: in any beginning of n there are int(0.61 n / k^2) of rank
    k, or as many but for the one or two that are due, and the rest is silent, as is rank 1.

    Each is one word longer than the one before, so that a text of them fills a prompt to the word.

    Args:
        equal: all coded words are equally frequent, those first in `words` never more than others.
    """
    share = 0.6079  # of rank 1: one over the sum of all 1 / k^2
    if equal:
        every = len(words) / (1 - share)
        order = [*reversed(range(len(words)))]
        due = [
            ((turn + (place + 1) / len(words)) * every, rank)
            for turn in range(int(amount / every) + 1)
            for place, rank in enumerate(order)
        ]
    else:
        due = [
            (turn * rank**2 / share, rank - 2)
            for rank in range(2, len(words) + 2)
            for turn in range(1, int(amount * share / rank**2) + 1)
        ]
    text: list[str] = []
    for place, rank in sorted((math.ceil(place), rank) for place, rank in due):
        text += [_SILENT] * (place - 1 - len(text))
        text.append(words[rank])
    return text[:amount]
