"""What becomes of a sample that is longer than a row (`data.over_length`).

Notable:
- the sample is cut as it was encoded, never encoded again: all tokens and labels are those of the
  whole;
- a picture stands between its two marks and is kept or left out with them, never cut.
"""

from __future__ import annotations

from collections.abc import Sequence

from conceptmoe_vl.processing import ConceptMoEVLProcessor, EncodedSample
from conceptmoe_vl.prompts import IGNORED, Picture, Turn

Run = tuple[int, int]
"""First token of a picture (its start mark), and the token behind its end mark."""


def picture_runs(sample: EncodedSample, processor: ConceptMoEVLProcessor) -> list[Run]:
    """Where each picture of a sample stands, in reading order."""
    special = processor.special_token_ids
    start, end = special["vision_start_token_id"], special["vision_end_token_id"]
    ids = sample.input_ids
    starts = [place for place, token in enumerate(ids) if token == start]
    return [(place, ids.index(end, place) + 1) for place in starts]


def truncated(
    sample: EncodedSample, limit: int, processor: ConceptMoEVLProcessor
) -> EncodedSample | None:
    """The sample's beginning, at most `limit` tokens, up to the last supervised token in them.

    What is left out are whole tokens of text at the end, and pictures behind the cut: one that
    `limit` falls into stays out, and so does one that no supervised token follows.

    Returns:
        None where no supervised token would be left.
    """
    cut = min(limit, len(sample.labels))
    # Image tokens are never supervised, so this goes back to before a picture that is cut, too.
    while cut > 0 and sample.labels[cut - 1] == IGNORED:
        cut -= 1
    if cut < 2:  # the first token has no predecessor: the model does not count its label
        return None
    return _part(sample, 0, cut, picture_runs(sample, processor))


def is_document(turns: Sequence[Turn]) -> bool:
    """Whether these turns are one text, with or without pictures: an answer to nothing."""
    return [turn.role for turn in turns] == ["user", "assistant"] and not any(
        isinstance(part, Picture) or part for part in turns[0].parts
    )


def split(
    sample: EncodedSample, limit: int, processor: ConceptMoEVLProcessor
) -> list[EncodedSample] | None:
    """An encoded document in pieces of at most `limit` tokens.

    Each piece begins with the marks that the document begins with, none of them supervised; the end
    mark stands behind the last piece alone, since the text goes on behind the others. Pictures
    that would end a piece go to the next, where the text behind them is.

    Args:
        sample: of turns that `is_document` is true of.

    Returns:
        The pieces, whose tokens without the repeated marks are the document's, label by label; None
        where a picture alone does not fit.
    """
    empty = processor.encode_turns([Turn("user", ()), Turn("assistant", ())])
    head = next(place for place, label in enumerate(empty.labels) if label != IGNORED)
    end = len(sample.input_ids)
    last = end - (len(empty.input_ids) - head)  # behind the text; the end mark stays beside it
    runs = picture_runs(sample, processor)
    pieces, start = [], head
    while end - start > limit - head:
        cut = min(start + limit - head, last - 1)
        cut = min([cut, *(first for first, behind in runs if first < cut < behind)])
        cut = _before_pictures(sample, start, cut, runs)
        if cut <= start:
            return None
        pieces.append(_part(sample, start, cut, runs, head))
        start = cut
    return [*pieces, _part(sample, start, end, runs, head)]


def _before_pictures(sample: EncodedSample, start: int, cut: int, runs: list[Run]) -> int:
    """`cut` moved before the pictures that end there, as long as supervised text is left."""
    moved = cut
    for first, behind in reversed(runs):
        if behind == moved:
            moved = first
    kept = any(label != IGNORED for label in sample.labels[start:moved])
    return moved if kept else cut


def _part(
    sample: EncodedSample, start: int, cut: int, runs: list[Run], head: int = 0
) -> EncodedSample:
    """Tokens from `start` to `cut` behind the first `head` ones, with the pictures in them."""
    images = [
        image
        for image, (first, behind) in zip(sample.images, runs, strict=True)
        if start <= first and behind <= cut
    ]
    ids = sample.input_ids[:head] + sample.input_ids[start:cut]
    labels = [IGNORED] * head + sample.labels[start:cut]
    return EncodedSample(ids, labels, images)
