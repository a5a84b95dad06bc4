"""Documents: captions, plain text, and text with pictures between.

A document is an answer to an empty question, so all its text is supervised. A caption's picture
stands in the question.
"""

from __future__ import annotations

from typing import Any

from data_pipelines.layouts.conversations import Found
from data_pipelines.layouts.images import EncodedImage, ImageFolder
from data_pipelines.records import RecordError, parse_record

_CAPTIONED = ("jpg", "jpeg", "png", "webp")


def from_img2dataset(members: dict[str, bytes], folder: ImageFolder) -> Found:
    """A picture and its caption: the member `txt`, or `caption` of the member `json`."""
    pictures = [name for name in members if name in _CAPTIONED]
    if len(pictures) != 1:
        shown = ", ".join(members)
        raise RecordError(
            "image_count", f"of the members {shown} {len(pictures)} are pictures; give one", "jpg"
        )
    if "txt" in members:
        try:
            caption: Any = members["txt"].decode("utf-8")
        except UnicodeDecodeError as error:
            raise RecordError("bad_content", f"'txt' is no UTF-8 ({error})", "txt") from error
    elif "json" in members:
        caption = parse_record(members["json"]).get("caption")
    else:
        raise RecordError("missing_field", "there is neither 'txt' nor 'json'", "txt")
    if not isinstance(caption, str) or not caption.strip():
        raise RecordError(
            "no_answer", f"the caption is {repr(caption)[:80]}; nothing can be learnt", "txt"
        )
    image = EncodedImage(pictures[0], members[pictures[0]], pictures[0])
    return _record([{"type": "image"}], caption.strip()), [image]


def from_text(row: dict[str, Any], folder: ImageFolder) -> Found:
    """The field `text`."""
    if "text" not in row:
        raise RecordError("missing_field", "the field 'text' is missing", "text")
    if not isinstance(row["text"], str):
        raise RecordError("bad_content", f"'text' is {repr(row['text'])[:80]}; give text", "text")
    if not row["text"].strip():
        raise RecordError("no_answer", "'text' is empty; nothing can be learnt", "text")
    return _record("", row["text"]), []


def _list(row: dict[str, Any], name: str) -> list[Any]:
    values = row.get(name)
    if not isinstance(values, list):
        raise RecordError("missing_field", f"'{name}' is no list", name)
    return values


def from_obelics(row: dict[str, Any], folder: ImageFolder) -> Found:
    """Lists `images` and `texts` of one length, with None where the other has something."""
    images, texts = _list(row, "images"), _list(row, "texts")
    if len(images) != len(texts):
        raise RecordError(
            "bad_field",
            f"'images' has {len(images)} places and 'texts' {len(texts)}; give one each",
            "images",
        )
    document = _Document(joint="\n\n")
    for number, (image, text) in enumerate(zip(images, texts, strict=True)):
        if image is not None:
            document.picture(folder.read(image, f"images[{number}]"))
        if text is not None:
            document.text(text, f"texts[{number}]")
    return document.found()


def from_mmc4(row: dict[str, Any], folder: ImageFolder) -> Found:
    """Sentences `text_list`, and `image_info`: each picture before the sentence that it matches."""
    sentences, infos = _list(row, "text_list"), _list(row, "image_info")
    before: list[list[tuple[Any, str]]] = [[] for _ in sentences]
    for number, info in enumerate(infos):
        field = f"image_info[{number}]"
        place = info.get("matched_text_index") if isinstance(info, dict) else None
        if isinstance(place, bool) or not isinstance(place, int) or not 0 <= place < len(before):
            raise RecordError(
                "bad_field",
                f"'{field}.matched_text_index' is {repr(place)[:80]}, of {len(before)} sentences",
                f"{field}.matched_text_index",
            )
        before[place].append((info.get("image_name"), f"{field}.image_name"))
    document = _Document(joint=" ")
    for number, (references, sentence) in enumerate(zip(before, sentences, strict=True)):
        for reference, field in references:
            document.picture(folder.read(reference, field))
        document.text(sentence, f"text_list[{number}]")
    return document.found()


class _Document:
    """Texts and pictures in reading order; neighbouring texts become one, with `joint` between."""

    def __init__(self, joint: str) -> None:
        self._joint = joint
        self._parts: list[dict[str, str]] = []
        self._images: list[EncodedImage] = []

    def picture(self, image: EncodedImage) -> None:
        self._images.append(image)
        self._parts.append({"type": "image"})

    def text(self, text: Any, field: str) -> None:
        if not isinstance(text, str):
            raise RecordError("bad_content", f"'{field}' is {repr(text)[:80]}; give text", field)
        if self._parts and self._parts[-1]["type"] == "text":
            self._parts[-1]["text"] += self._joint + text
        elif text.strip():
            self._parts.append({"type": "text", "text": text})

    def found(self) -> Found:
        if all(part["type"] == "image" for part in self._parts):
            raise RecordError("no_answer", "the document has no text; nothing can be learnt")
        return _record("", self._parts), self._images


def _record(question: Any, answer: Any) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    }
