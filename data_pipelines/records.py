"""The schema of a sample in a shard (docs/data.md), checked where it is read."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import re
from typing import Any

from conceptmoe_vl.errors import DataFaultError
from conceptmoe_vl.prompts import MessageError, Picture, Turn, read_messages

IMAGE_MEMBER = re.compile(r"img([0-9]+)\.(?:jpe?g|png|webp|gif|bmp|tiff?|avif|heic|heif)", re.I)


class RecordError(DataFaultError):
    """A record that cannot be used.

    Attributes:
        reason: bad_json | missing_field | bad_field | bad_role | bad_order | bad_content |
            image_count | no_answer; from a shard also repeated_member | truncated_shard, from a
            layout also outside_folder.
        field: the field or member at fault, `messages[2].role`; empty: the record as a whole.
    """


@dataclasses.dataclass(frozen=True)
class Conversation:
    """A record as read.

    Fields:
        turns: pictures hold the names of their members, `img0.png`.
        source: name of the data set, for metrics.
        independent: each question stands alone beside the pictures, so questions may be left out
            and asked in another order.
    """

    turns: list[Turn]
    source: str
    independent: bool

    @property
    def image_members(self) -> list[str]:
        return [
            part.image for turn in self.turns for part in turn.parts if isinstance(part, Picture)
        ]


def image_members(names: Any) -> list[str]:
    """The image members of a record among its member names, in the order of their numbers.

    Raises:
        RecordError: two members have the same number, or a number is missing.
    """
    return list(_image_members(tuple(names)))


@functools.lru_cache(maxsize=1024)  # most samples of a data set have the same member names
def _image_members(names: tuple[str, ...]) -> tuple[str, ...]:
    found = [(int(match[1]), name) for name in names if (match := IMAGE_MEMBER.fullmatch(name))]
    found.sort()
    numbers = [number for number, _ in found]
    if numbers != list(range(len(numbers))):
        raise RecordError(
            "image_count",
            f"the images are numbered {numbers}; name them img0, img1, ... once each",
            "img*",
        )
    return tuple(name for _, name in found)


def read_record(text: bytes, member_names: Any, default_source: str) -> Conversation:
    """The conversation of a record's `json` member.

    Args:
        member_names: names of all members, without the key (`json`, `img0.png`).
        default_source: taken where the record names none.

    Raises:
        RecordError: says which field is wrong; the caller adds shard and key.
    """
    record = parse_record(text)
    if "messages" not in record:
        raise RecordError("missing_field", "the field 'messages' is missing", "messages")
    source = record.get("source", default_source)
    if not isinstance(source, str) or not source:
        raise RecordError("bad_field", f"'source' is {repr(source)[:80]}; give a name", "source")
    independent = record.get("independent_turns", False)
    if not isinstance(independent, bool):
        raise RecordError(
            "bad_field",
            f"'independent_turns' is {repr(independent)[:80]}; give true or false",
            "independent_turns",
        )
    try:
        turns = read_messages(record["messages"])
    except MessageError as error:
        field = f"messages{error.field}"
        raise RecordError(error.reason, f"'messages': {error}", field) from error
    if all(turn.role != "assistant" for turn in turns):
        raise RecordError(
            "no_answer", "'messages' holds no assistant turn; nothing can be learnt", "messages"
        )
    conversation = Conversation(
        _place_images(turns, image_members(member_names)), source, independent
    )
    if independent:
        _check_independent(conversation.turns)
    return conversation


def parse_record(text: bytes) -> dict:
    """The object of a `json` member, or of a line of JSONL.

    Raises:
        RecordError: it is no JSON, no object, or holds half a surrogate pair, which no tokenizer
            takes.
    """
    try:
        # `json` alone would take UTF-16, and a line of it, cut behind a byte, as other characters.
        record = json.loads(text.decode("utf-8-sig"))
    # ValueError: broken JSON, broken UTF-8, integers of more than 4,300 digits
    except (ValueError, RecursionError) as error:
        raise RecordError("bad_json", f"the record is no JSON ({error})", "json") from error
    if not isinstance(record, dict):
        raise RecordError("bad_json", "the record is JSON, but no object", "json")
    if b"\\ud" in text or b"\\uD" in text:
        json_bytes(record)
    return record


def json_bytes(record: dict) -> bytes:
    """A record as the `json` member of a shard.

    Raises:
        RecordError: a text holds half a surrogate pair, or a value has no form in JSON.
    """
    try:
        return json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise RecordError(
            "bad_content", f"a text holds half a surrogate pair ({error.reason})", "messages"
        ) from error
    except (TypeError, ValueError) as error:
        raise RecordError("bad_field", f"a value is no JSON ({error})", "json") from error


def _place_images(turns: list[Turn], members: list[str]) -> list[Turn]:
    """The turns, with the placeholders named by the members, in order."""
    placeholders = sum(isinstance(part, Picture) for turn in turns for part in turn.parts)
    if placeholders != len(members):
        raise RecordError(
            "image_count",
            f"'messages' holds {placeholders} image placeholders, but the sample holds "
            f"{len(members)} images",
            "messages",
        )
    if not members:
        return turns
    names = iter(members)
    return [
        Turn(
            turn.role,
            tuple(
                [Picture(next(names)) if isinstance(part, Picture) else part for part in turn.parts]
            ),
        )
        for turn in turns
    ]


def _check_independent(turns: list[Turn]) -> None:
    start = 1 if turns[0].role == "system" else 0
    misplaced = any(isinstance(part, Picture) for turn in turns[start + 1 :] for part in turn.parts)
    if misplaced or (len(turns) - start) % 2:
        raise RecordError(
            "bad_field",
            "'independent_turns' needs all images in the first question and an answer to each",
            "independent_turns",
        )


def content_hash(turns: list[Turn], encoded: dict[str, bytes]) -> bytes:
    """16 bytes that two samples share if their roles, texts and encoded images are equal."""
    hashed = hashlib.sha256()
    for turn in turns:
        parts = [
            ("image", hashlib.sha256(encoded[part.image]).hexdigest())
            if isinstance(part, Picture)
            else ("text", part)
            for part in turn.parts
            if part != ""
        ]
        hashed.update(repr((turn.role, parts)).encode("utf-8", "backslashreplace"))
    return hashed.digest()[:16]


def pick_questions(conversation: Conversation, order: list[int]) -> list[Turn]:
    """An independent conversation's questions in another order; the pictures stay in front.

    Args:
        order: numbers of the questions (from 0) that are asked.
    """
    turns = conversation.turns
    start = 1 if turns[0].role == "system" else 0
    first = turns[start]
    pictures = tuple(part for part in first.parts if isinstance(part, Picture))
    texts = tuple(part for part in first.parts if not isinstance(part, Picture))
    pairs = [(turns[index], turns[index + 1]) for index in range(start, len(turns), 2)]
    pairs[0] = (Turn("user", texts), pairs[0][1])
    chosen = [turn for number in order for turn in pairs[number]]
    chosen[0] = Turn("user", pictures + chosen[0].parts)
    return turns[:start] + chosen
