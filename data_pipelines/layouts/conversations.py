"""Conversations: `messages`, LLaVA's `conversations`, and the pairs of the_cauldron and FineVision.

Each function turns a row into a record of our schema (docs/data.md) and its images in the order of
their placeholders. What the schema demands is not checked again here: `read_record` does that.
"""

from __future__ import annotations

import re
from typing import Any

from conceptmoe_vl.prompts import MessageError, Picture, Turn, read_messages
from data_pipelines.layouts.images import EncodedImage, ImageFolder
from data_pipelines.records import RecordError

Found = tuple[dict[str, Any], list[EncodedImage]]

# The line break beside a mark only set it apart from the text; our image marks do that.
_MARK = re.compile(r"\n?<image>\n?")
_LLAVA_ROLES = {
    **{"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"},
    "system": "system",
}


def from_messages(row: dict[str, Any], folder: ImageFolder) -> Found:
    """`messages`, with paths in the image parts, or in the row's `images` (or `image`) for bare
    image parts or for `<image>` marks in the texts."""
    if "messages" not in row:
        raise RecordError("missing_field", "the field 'messages' is missing", "messages")
    try:
        turns = read_messages(row["messages"])
    except MessageError as error:
        field = f"messages{error.field}"
        raise RecordError(error.reason, f"'messages': {error}", field) from error
    references = _references(row)
    placed = [
        (part.image, f"messages[{number}].content")
        for number, turn in enumerate(turns)
        for part in turn.parts
        if isinstance(part, Picture)
    ]
    if not placed and references:
        turns = [Turn(turn.role, _split_parts(turn.parts)) for turn in turns]
    elif any(image is not None for image, _ in placed):
        if references:
            raise RecordError(
                "bad_field", "images are named both in 'messages' and beside them", "images"
            )
        references = placed
    messages = [{"role": turn.role, "content": _content(turn.parts)} for turn in turns]
    kept = {name: row[name] for name in ("source", "independent_turns") if _given(row, name)}
    return {"messages": messages, **kept}, _read_all(references, folder)


def from_llava(row: dict[str, Any], folder: ImageFolder) -> Found:
    """`conversations` of `{"from": "human" | "gpt", "value": text}`; `image`: a path or a list.

    `<image>` marks count where the row names images; elsewhere they are text.
    """
    turns = row.get("conversations")
    if not isinstance(turns, list):
        raise RecordError("missing_field", "'conversations' is no list of turns", "conversations")
    references = _references(row)
    messages = []
    for number, turn in enumerate(turns):
        field = f"conversations[{number}]"
        role = turn.get("from") if isinstance(turn, dict) else None
        if not isinstance(role, str) or role not in _LLAVA_ROLES:
            roles = ", ".join(_LLAVA_ROLES)
            raise RecordError(
                "bad_role",
                f"'{field}' is from {repr(role)[:80]}; give one of {roles}",
                f"{field}.from",
            )
        text = _text(turn.get("value"), f"{field}.value")
        parts = _split(text) if references else (text,)
        messages.append({"role": _LLAVA_ROLES[role], "content": _content(parts)})
    return {"messages": messages}, _read_all(references, folder)


def from_cauldron(row: dict[str, Any], folder: ImageFolder) -> Found:
    """`images` of `{"bytes", "path"}` and `texts` of `{"user", "assistant"}`: all images first."""
    references = _references(row)
    pairs = row.get("texts")
    if not isinstance(pairs, list) or not pairs:
        raise RecordError("missing_field", "'texts' is no list of pairs", "texts")
    messages: list[dict[str, Any]] = []
    for number, pair in enumerate(pairs):
        for role in ("user", "assistant"):
            field = f"texts[{number}].{role}"
            text = _text(pair.get(role) if isinstance(pair, dict) else None, field)
            messages.append({"role": role, "content": text})
    pictures = tuple(Picture(None) for _ in references)
    messages[0]["content"] = _content((*pictures, messages[0]["content"]))
    return {"messages": messages}, _read_all(references, folder)


def _references(row: dict[str, Any]) -> list[tuple[Any, str]]:
    """What a row's `images` or `image` names, each with its field."""
    field = "images" if _given(row, "images") else "image"
    value = row.get(field)
    if value is None or value == "":
        return []
    if isinstance(value, list):
        return [(each, f"{field}[{number}]") for number, each in enumerate(value)]
    return [(value, field)]


def _given(row: dict[str, Any], field: str) -> bool:
    return row.get(field) is not None  # parquet writes absent fields as None


def _read_all(references: list[tuple[Any, str]], folder: ImageFolder) -> list[EncodedImage]:
    return [folder.read(reference, field) for reference, field in references]


def _text(value: Any, field: str) -> str:
    if not isinstance(value, str):
        raise RecordError("bad_content", f"'{field}' is {repr(value)[:80]}; give text", field)
    return value


def _split(text: str) -> tuple[Any, ...]:
    """Text at its marks: `a<image>b` is a text, a picture and a text; empty texts are left out."""
    texts = _MARK.split(text)
    parts: list[Any] = [texts[0]]
    for behind in texts[1:]:
        parts += [Picture(None), behind]
    return tuple(part for part in parts if part != "")


def _split_parts(parts: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(piece for part in parts for piece in _split(part))


def _content(parts: tuple[Any, ...]) -> Any:
    """Parts in our schema; text alone where there is no picture."""
    if not any(isinstance(part, Picture) for part in parts):
        return "".join(parts)
    return [
        {"type": "image"} if isinstance(part, Picture) else {"type": "text", "text": part}
        for part in parts
        if part != ""
    ]
