"""What built-in sources share: samples go to `train-*` or `test-*` by a hash of their group."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from PIL import ImageStat

from conceptmoe_vl.errors import UserError
from conceptmoe_vl.images import decode_image
from data_pipelines.building import Made, Recipe
from data_pipelines.records import RecordError

TEST_SHARE = 10  # one group of ten is for testing

_COLORS = (
    *("black", "white", "red", "green", "blue", "yellow", "orange", "purple", "violet", "pink"),
    *("brown", "grey", "gray", "cyan", "magenta", "beige", "gold", "silver", "dark", "light"),
)
_FILLING = {"a", "an", "the", "and", "with", "of", "in", "b", "w", "bw", "color", *_COLORS}
_BLANK = 4.0  # levels of 255: pictures whose values spread less (thin drawings reach 8 and more)

Item = tuple[str, Any]  # key, content


class Entry(NamedTuple):
    """A sample to be.

    Fields:
        name: becomes its key, behind a number.
        group: entries of one group go to the same split.
        content: what `make` gets beside the key.
    """

    name: str
    group: str
    content: Any


def split_of(group: str) -> str:
    """`test` for a tenth of all groups, else `train`; depends on the text alone."""
    number = int.from_bytes(hashlib.sha256(group.encode()).digest()[:8], "big")
    return "test" if number % TEST_SHARE == 0 else "train"


def title_group(title: str) -> str:
    """What titles of near-duplicates have in common: their words without articles, colours and
    numbers, in any order."""
    words = sorted({word.removesuffix("s") for word in re.findall(r"[^\W\d_]+", title.casefold())})
    kept = [word for word in words if word not in _FILLING]
    return " ".join(kept or words) or title.casefold()


def split_recipe(
    header: dict[str, Any],
    entries: Sequence[Entry],
    left_out: Counter[str],
    make: Callable[[Item], Made],
) -> Recipe:
    """The recipe of both splits.

    Args:
        header: source and licence, for the manifest.
        entries: in the order of their keys.
        left_out: by reason, for the manifest.
        make: an item to a sample.

    Raises:
        UserError: there are no entries.
    """
    if not entries:
        raise UserError(f"{header['source']}: nothing usable was found; install its package again")
    items: dict[str, list[Item]] = {"train": [], "test": []}
    for number, entry in enumerate(entries):
        key = f"{number:05d}-{_slug(entry.name)}"
        items[split_of(entry.group)].append((key, entry.content))
    return Recipe(
        manifest={**header, "left_out": dict(left_out)},
        splits={split: partial(iter, found) for split, found in items.items()},
        make=make,
        name=itemgetter(0),
        inputs=hashlib.sha256(repr(items).encode(errors="backslashreplace")).hexdigest(),
    )


def _slug(name: str) -> str:
    """The name as part of a key: no dots, ASCII, and short enough for the header of a tar."""
    return re.sub(r"[^A-Za-z0-9]+", "_", name).strip("_")[-60:]


def make_document(source: str, item: tuple[str, tuple[str, dict[str, Any]]]) -> Made:
    """Text alone, all of it supervised; beside it stand the fields of the item."""
    key, (text, fields) = item
    messages = [{"role": "user", "content": ""}, {"role": "assistant", "content": text}]
    return Made(key, {"messages": messages, "source": source, **fields}, [])


def make_caption(source: str, question: str | None, item: tuple[str, tuple[str, str]]) -> Made:
    """A PNG file with a caption. Its mark are its pixels: files of equal ones often differ in their
    metadata.

    Args:
        question: stands behind the image; None: the image alone asks.

    Raises:
        ImageError: the picture cannot be decoded.
        RecordError: it is blank on a white background, as white drawings on nothing are.
    """
    key, (path, text) = item
    data = Path(path).read_bytes()
    image = decode_image(data, name=path)
    if max(ImageStat.Stat(image).stddev) < _BLANK:
        raise RecordError("blank", f"'{path}' shows nothing on a white background")
    asked: list[dict[str, Any]] = [{"type": "image"}]
    if question:
        asked.append({"type": "text", "text": question})
    messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": text}]
    size = repr(image.size).encode()[:16]
    mark = hashlib.blake2b(image.tobytes(), digest_size=16, salt=size).digest()
    return Made(key, {"messages": messages, "source": source}, [("png", data)], mark=mark)
