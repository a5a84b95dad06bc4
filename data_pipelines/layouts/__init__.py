"""Layouts in circulation: how their rows are read and become records of our schema."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from data_pipelines.layouts import conversations, documents
from data_pipelines.layouts.images import EncodedImage, ImageFolder, suffix_of
from data_pipelines.layouts.rows import Row, table_rows, tar_rows
from data_pipelines.records import Conversation, json_bytes, read_record


@dataclasses.dataclass(frozen=True)
class Layout:
    """One layout.

    Fields:
        what: one line for help texts.
        rows: the rows of a path; raises `UserError`.
        convert: a row's content to a record and its images; raises `RecordError` or `ImageError`.
    """

    what: str
    rows: Callable[[Path], Iterator[Row]]
    convert: Callable[[Any, ImageFolder], conversations.Found]


@dataclasses.dataclass(frozen=True)
class Checked:
    """A record that training can use.

    Fields:
        images: as suffix (`png`) and encoded file, in order, each decoded once.
        pixels: the decoded images by the names of their members, `img0.png`.
    """

    record: dict[str, Any]
    conversation: Conversation
    images: list[tuple[str, bytes]]
    pixels: dict[str, Any]


def check_row(layout: Layout, row: Row, folder: ImageFolder, source: str) -> Checked:
    """Converts a row and reads it as training will: by `read_record` and `decode_image`.

    Args:
        source: the data set's name where the record says none.

    Raises:
        RecordError, ImageError: training could not use it.
    """
    record, images = layout.convert(row.load(), folder)
    record.setdefault("source", source)
    suffixes = [suffix_of(image.data) or "png" for image in images]
    members = [f"img{number}.{suffix}" for number, suffix in enumerate(suffixes)]
    conversation = read_record(json_bytes(record), members, source)
    pixels = {member: image.decode() for member, image in zip(members, images, strict=True)}
    files = [
        (suffix, _member_data(image, pixels[member]))
        for suffix, member, image in zip(suffixes, members, images, strict=True)
    ]
    return Checked(record, conversation, files, pixels)


def _member_data(image: EncodedImage, pixels: Any) -> bytes:
    """The file as it is; kinds that shards do not hold (PPM, ICO and such) as PNG."""
    if suffix_of(image.data) is not None:
        return image.data
    buffer = io.BytesIO()
    pixels.save(buffer, "PNG")
    return buffer.getvalue()


LAYOUTS: dict[str, Layout] = {
    "messages": Layout(
        "`messages`, images in a folder",
        lambda path: table_rows(
            path, ("messages",), ("images", "image", "source", "independent_turns")
        ),
        conversations.from_messages,
    ),
    "llava": Layout(
        "LLaVA's `conversations` with `<image>` marks, images in a folder",
        lambda path: table_rows(path, ("conversations",), ("image", "images")),
        conversations.from_llava,
    ),
    "cauldron": Layout(
        "the_cauldron or FineVision: parquet with embedded `images`, and `texts`",
        lambda path: table_rows(path, ("images", "texts")),
        conversations.from_cauldron,
    ),
    "img2dataset": Layout(
        "tars of img2dataset: a picture, txt and json a sample",
        tar_rows,
        documents.from_img2dataset,
    ),
    "text": Layout(
        "plain text: a field `text`, or .txt with blank lines between documents",
        lambda path: table_rows(path, ("text",), text=True),
        documents.from_text,
    ),
    "obelics": Layout(
        "OBELICS: lists `images` and `texts`, images in a folder",
        lambda path: table_rows(path, ("images", "texts")),
        documents.from_obelics,
    ),
    "mmc4": Layout(
        "MMC4: `text_list` and `image_info`, images in a folder",
        lambda path: table_rows(path, ("text_list", "image_info")),
        documents.from_mmc4,
    ),
}
