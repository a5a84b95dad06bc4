"""Tokens and texts of samples as people can read them: for `show` and the page of `inspect`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from conceptmoe_vl.images import decode_image
from conceptmoe_vl.processing import IGNORED, EncodedSample
from conceptmoe_vl.tokenizing import special_ids
from data_pipelines.encoding import with_pictures
from data_pipelines.records import Conversation
from data_pipelines.shards import IndexedSample, ShardReader, read_sample

_LONGEST_CHARACTER = 4  # bytes of UTF-8: a character may be spread over as many tokens


@dataclasses.dataclass(frozen=True)
class Piece:
    """Neighbouring tokens that are shown as one.

    Fields:
        text: what they stand for.
        ids: one token; all of a picture; or those that share one character's bytes.
        kind: text | special | image.
        supervised: whether the loss counts them.
    """

    text: str
    ids: tuple[int, ...]
    kind: str
    supervised: bool


def encode_whole(
    reader: ShardReader, indexed: IndexedSample, processor: Any
) -> tuple[Conversation, EncodedSample]:
    """A sample as it stands in its shard, encoded: with all questions, without augmentation.

    Returns:
        The conversation, with decoded pictures in its turns, and its tokens.

    Raises:
        RecordError, ImageError: it is damaged.
    """
    conversation = read_sample(reader, indexed)
    background = processor.image_processor.background

    def decoded(member: str) -> Any:
        return decode_image(reader.read(indexed, member), background, name=member)

    turns = with_pictures(conversation.turns, decoded)
    return dataclasses.replace(conversation, turns=turns), processor.encode_turns(turns)


def token_pieces(processor: Any, ids: list[int], labels: list[int]) -> Iterator[Piece]:
    """The pieces of a sample, in order; together they hold every token once.

    Args:
        processor: a ConceptMoEVLProcessor.
        labels: as long as `ids`; -100 where a token is not supervised.
    """
    tokenizer = processor.tokenizer
    special = special_ids(tokenizer)
    place = 0
    while place < len(ids):
        token, supervised = ids[place], labels[place] != IGNORED
        end = place + 1
        kind = "special" if token in special else "text"
        if token == processor.image_token_id:
            kind = "image"
            while end < len(ids) and ids[end] == token:
                end += 1
        elif kind == "text":
            end = _character_end(tokenizer, ids, labels, place)
        text = tokenizer.decode(ids[place : place + 1] if kind == "image" else ids[place:end])
        yield Piece(text, tuple(ids[place:end]), kind, supervised)
        place = end


def _character_end(tokenizer: Any, ids: list[int], labels: list[int], start: int) -> int:
    """The end of the shortest run of tokens that decodes to whole characters; else one token."""
    for end in range(start + 1, min(start + _LONGEST_CHARACTER, len(ids)) + 1):
        if (labels[end - 1] == IGNORED) != (labels[start] == IGNORED):
            break
        if "\ufffd" not in tokenizer.decode(ids[start:end]):
            return end
    return start + 1
