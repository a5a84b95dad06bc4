"""Needles in long documents of text and pictures, in the manner of MM-NIAH: retrieve, count, order.

The haystack is text with pictures spread evenly through it: drawn figures with a number below, or
the user's own pictures. Needles are sentences, or pictures of figures that no other picture shows.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from conceptmoe_vl.errors import UserError
from conceptmoe_vl.images import ImageError, decode_image
from data_pipelines.sources.scene_drawing import (
    BACKGROUNDS,
    COLORS,
    KINDS,
    SIDE,
    Scene,
    Shape,
    Word,
    draw,
    text_size,
)
from eval.long_context.keys import draw_keys, listed
from eval.long_context.prompt import Draft, Drawing, Placed, closing, lay_out
from eval.long_context.text_tasks import NONE, Place, Setting, needle

FIGURES = tuple(f"{color} {kind}" for color in COLORS for kind in KINDS)
PICTURE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp")
_SHARE = 0.5  # of the prompt's tokens that pictures of the haystack may take
_MOST_PICTURES = 256
_COUNTED, _MOST_COUNTED = 3, 4
_NO_COUNTS = ("7", "0", "9")  # beyond the most, for the prompt's example
_ORDERED = 5


def figure_picture(figure: str, number: str, background: int = 0) -> Drawing:
    """128 by 128 pixels: a figure, `purple diamond`, and below it a number.

    Args:
        background: number of one of the pale colours.
    """
    color, kind = figure.split()
    scale = 3
    left = (SIDE - text_size(number, scale)[0]) // 2
    scene = Scene(
        level=2,
        background=BACKGROUNDS[background % len(BACKGROUNDS)],
        shapes=(Shape(kind, color, (32, 8, 97, 73)),),
        words=(Word(number, "bottom", left, 86, scale),),
    )
    return Drawing((SIDE, SIDE), functools.partial(_encoded, scene), f"{figure} {number}")


def _encoded(scene: Scene) -> bytes:
    buffer = io.BytesIO()
    draw(scene).save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


def load_pictures(folder: Path) -> list[Drawing]:
    """The pictures of a folder, by name; they are read again when they are asked for.

    Raises:
        UserError: there are none, or one cannot be decoded.
    """
    files = sorted(file for file in folder.glob("*") if file.suffix.lower() in PICTURE_SUFFIXES)
    if not files:
        raise UserError(
            f"--images: '{folder}' holds no pictures ({', '.join(PICTURE_SUFFIXES)}); name another"
        )
    found = []
    for file in files:
        try:
            size = decode_image(file).size
        except ImageError as error:
            raise UserError(f"--images: {error}; remove it from the folder") from error
        found.append(Drawing(size, file.read_bytes, file.name))
    return found


@dataclasses.dataclass(frozen=True)
class _Album:
    """The pictures of one haystack.

    Fields:
        placed: spread evenly through the document.
        names: of figures for needles, which no picture of the haystack shows.
        numbers: for needles, likewise.
        example: another number, for the prompt's example.
    """

    placed: list[Placed]
    names: list[str]
    numbers: list[str]
    example: str


def _album(rng: random.Random, setting: Setting, needles: int, wanted: int) -> _Album:
    """Pictures for a haystack that will hold `needles` pictures more.

    Args:
        wanted: figures that are kept for needles.

    Raises:
        UserError: the model takes no pictures.
    """
    meter = setting.meter
    if not meter.takes_images:
        raise UserError(
            "long/mm_*: this model takes no images (its configuration has vision: null); leave "
            "these tasks out"
        )
    figures = rng.sample(FIGURES, len(FIGURES))
    names, others = figures[:wanted], figures[wanted:]
    room = _SHARE * setting.length - needles * (meter.image_tokens((SIDE, SIDE)) + 2)
    hidden = setting.haystack.text
    number = functools.partial(draw_keys, rng, lambda rng: str(rng.randrange(10_000, 100_000)))
    numbers = number(wanted + 1 + _MOST_PICTURES, absent=hidden)
    pictures: list[Drawing] = []
    for place in range(_MOST_PICTURES):
        if setting.pictures is None:
            own = figure_picture(rng.choice(others), numbers[wanted + 1 + place], rng.randrange(4))
        else:
            own = rng.choice(setting.pictures)
        room -= meter.image_tokens(own.size) + 2
        if room < 0:
            break
        pictures.append(own)
    placed = [
        Placed((place + 0.5) / len(pictures), picture) for place, picture in enumerate(pictures)
    ]
    return _Album(placed, names, numbers[:wanted], numbers[wanted])


def retrieve_text(rng: random.Random, setting: Setting, place: Place) -> Draft:
    """A sentence among text and pictures tells the key."""
    pictures = _album(rng, setting, 0, 1).placed
    return needle(rng, setting, place, pictures=pictures)


def retrieve_image(rng: random.Random, setting: Setting, place: Place) -> Draft:
    """One picture shows the figure that is asked for, and below it the key."""
    album = _album(rng, setting, 1, 1)
    figure, key = album.names[0], album.numbers[0]
    depth = rng.choice(list(setting.grid)) if place.depth is None else place.depth
    placed = list(album.placed)
    if not place.control:
        placed.append(Placed(depth, figure_picture(figure, key, rng.randrange(4))))
    head = (
        "The following document holds text and pictures. In some pictures a number stands below a "
        "figure. Remember them.\n"
        f"Example: where {album.example} stands below the figure that is asked for, the answer is "
        f"{album.example}.\n\n"
    )
    tail = closing(
        [album.example],
        f"Which number stands in the picture with the {figure}? Answer with the number alone. "
        f"{NONE}",
    )
    return _draft(rng, setting, placed, head, tail, "number", [key], [depth])


def _draft(
    rng: random.Random,
    setting: Setting,
    placed: Sequence[Placed],
    head: str,
    tail: str,
    shape: str,
    wanted: list[str],
    depths: Sequence[float] = (),
) -> Draft:
    window = setting.window(rng)

    def body(amount: int) -> list[Any]:
        return lay_out(window, amount, placed)

    return Draft(head, body, tail, shape, wanted, list(depths))


def _needles(
    rng: random.Random, setting: Setting, count: int, figures: int, in_images: bool
) -> tuple[list[Placed], list[str], list[Any]]:
    """The haystack's pictures, names, and for each name what shows it: a picture or a sentence.

    Args:
        count: needles in all, for the room that pictures take.
        figures: names.
    """
    album = _album(rng, setting, count if in_images else 0, figures)
    if in_images:
        pairs = zip(album.names, album.numbers, strict=True)
        shown = [figure_picture(name, number, rng.randrange(4)) for name, number in pairs]
        return album.placed, album.names, shown
    names = draw_keys(rng, "name", figures, absent=setting.haystack.text)
    return album.placed, names, [f"Just then the {name} was seen." for name in names]


def count(rng: random.Random, setting: Setting, place: Place, *, in_images: bool) -> Draft:
    """Three figures, or three names, appear one to four times each; how often does each?"""
    counts = [rng.randint(1, _MOST_COUNTED) for _ in range(_COUNTED)]
    placed, names, shown = _needles(rng, setting, sum(counts), _COUNTED, in_images)
    if not place.control:
        items = [part for part, times in zip(shown, counts, strict=True) for _ in range(times)]
        placed = placed + [Placed(rng.random(), part) for part in items]
    what = "pictures show" if in_images else "sentences mention"
    head = (
        f"The following document holds text and pictures. Count how many of its {what} the things "
        f"that are asked for below: {listed(names)}.\n"
        f"Example of an answer: {', '.join(_NO_COUNTS)}\n\n"
    )
    tail = closing(
        _NO_COUNTS,
        f"How many {what} the {names[0]}, how many the {names[1]}, how many the {names[2]}? Answer "
        "with three numbers in this order alone.",
    )
    return _draft(rng, setting, placed, head, tail, "sequence", [str(times) for times in counts])


def order(rng: random.Random, setting: Setting, place: Place, *, in_images: bool) -> Draft:
    """Five figures, or five names, appear once each; in which order?"""
    placed, names, shown = _needles(rng, setting, _ORDERED, _ORDERED, in_images)
    listing = list(range(_ORDERED))
    while listing == sorted(listing):  # else repeating the list would be right
        rng.shuffle(listing)
    depths = sorted(rng.random() for _ in listing)
    if not place.control:
        pairs = zip(depths, listing, strict=True)
        placed = placed + [Placed(depth, shown[number]) for depth, number in pairs]
    what = "are shown by one picture each" if in_images else "are mentioned once each"
    numbered = ", ".join(f"({number}) {name}" for number, name in enumerate(names, 1))
    head = (
        f"The following document holds text and pictures. In it {_ORDERED} things {what}. "
        "Remember in which order.\n\n"
    )
    tail = (
        f"\n\nQuestion: In which order do these appear: {numbered}? Answer with their "
        f"{_ORDERED} numbers alone, from the first that appears to the last."
    )
    wanted = [str(number + 1) for number in listing]
    return _draft(rng, setting, placed, head, tail, "sequence", wanted)
