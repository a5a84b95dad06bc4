"""Scenes of our own: coloured shapes, small text and charts, with exact questions and answers.

Everything is drawn by Pillow from a seed: nothing is fetched, and a seed gives the same bytes
(with the same version of Pillow). One sample is one picture with up to ten independent questions;
its record holds under `scene` what was drawn.

| level | holds | asks for |
| --- | --- | --- |
| 1 | 1 to 3 shapes | colours, shapes, counts, existence |
| 2 | 3 to 6 shapes | counts, existence, left of, above, extremes, boxes |
| 3 | 2 to 5 shapes, 1 or 2 words | what is written; a part of level 2 |
| 4 | a bar or line chart of 3 to 5 values | values, largest and smallest, differences, sums |
"""

from __future__ import annotations

import hashlib
import io
import random
import string
from collections.abc import Iterator, Set
from functools import partial
from typing import Any

from conceptmoe_vl.errors import UserError
from data_pipelines.building import Made, Recipe
from data_pipelines.sources import scene_drawing as drawing
from data_pipelines.sources.scene_questions import questions

NAME = "scenes"
LEVELS = (1, 2, 3, 4)
TEST_SHARE = 10  # one sample of ten is for testing

_WORDS = (
    *("APPLE", "BREAD", "CLOUD", "DANCE", "EARTH", "FIELD", "GRAPE", "HOUSE", "ISLAND", "JUICE"),
    *("KNIFE", "LEMON", "MUSIC", "NIGHT", "OCEAN", "PAPER", "QUEEN", "RIVER", "STONE", "TRAIN"),
)
_ATTEMPTS = 1000  # for a picture that no other sample has

_Item = tuple[str, int, str]  # name of the drawing, level, key


def recipe(*, samples: int = 10_000, seed: int = 0, level: int | None = None) -> Recipe:
    """Both splits.

    Args:
        samples: of both splits together, two or more; a tenth (at least one) is for testing.
        seed: 0 or more. No picture occurs twice under a seed, so none in both splits.
        level: 1 to 4; None takes them in turn.

    Raises:
        UserError: an argument is out of range.
    """
    if samples < 2:
        raise UserError(f"--samples is {samples}; give 2 or more, one of them for testing")
    if seed < 0:
        raise UserError(f"--seed is {seed}; give 0 or more")
    if level is not None and level not in LEVELS:
        raise UserError(f"--level is {level}; give one of {list(LEVELS)}, or none for all")
    test = max(1, samples // TEST_SHARE)
    return Recipe(
        manifest={
            "source": NAME,
            "license": "Apache-2.0, as this project; drawn by it",
            "seed": seed,
            "level": level or "1 to 4 in turn",
        },
        splits={
            split: partial(_items, split, count, seed, level)
            for split, count in (("train", samples - test), ("test", test))
        },
        make=_make,
        name=lambda item: item[2],
        inputs=samples,
        remake=_make,
    )


def _items(split: str, count: int, seed: int, level: int | None) -> Iterator[_Item]:
    for number in range(count):
        chosen = level or LEVELS[number % len(LEVELS)]
        yield f"{seed}/{split}/{number}", chosen, f"{split}{number:07d}"


def _make(item: _Item, drawn: Set[bytes] = frozenset()) -> Made:
    name, level, key = item
    scene, pairs, picture, digest = new_sample(name, level, drawn)
    counts = {"questions": len(pairs)}
    return Made(key, _record(scene, pairs), [("png", picture)], counts, digest)


def new_sample(
    name: str, level: int, drawn: Set[bytes]
) -> tuple[drawing.Scene, list[tuple[str, str]], bytes, bytes]:
    """Scene, questions with answers, PNG and the picture's digest, 16 bytes; a function of the
    arguments.

    Args:
        drawn: digests of pictures that must not come again.

    Raises:
        UserError: no new picture was found.
    """
    for attempt in range(_ATTEMPTS):
        # Python promises equal numbers for an equal text.
        rng = random.Random(f"scenes/{name}/{level}/{attempt}")
        scene = draw_scene(rng, level)
        image = drawing.draw(scene)
        digest = hashlib.sha256(image.tobytes()).digest()[:16]
        if digest not in drawn:
            buffer = io.BytesIO()
            image.save(buffer, "PNG", compress_level=9)
            return scene, questions(scene, rng), buffer.getvalue(), digest
    raise UserError(f"level {level} has no further picture after {len(drawn)}; ask for fewer")


def draw_scene(rng: random.Random, level: int) -> drawing.Scene:
    """A random scene of a level (1 to 4)."""
    background = rng.choice(drawing.BACKGROUNDS)
    if level == 4:
        return drawing.Scene(level, background, chart=_chart(rng))
    least, most = {1: (1, 3), 2: (3, 6), 3: (2, 5)}[level]
    words = _words(rng) if level == 3 else ()
    # Words take the upper and lower quarter.
    area = (26, 102) if level == 3 else (0, drawing.SIDE)
    return drawing.Scene(level, background, _shapes(rng, rng.randint(least, most), *area), words)


def _shapes(rng: random.Random, count: int, top: int, bottom: int) -> tuple[drawing.Shape, ...]:
    """Shapes in cells of their own, at least two pixels apart."""
    rows = (bottom - top) // 38
    width, height = drawing.SIDE // 3, (bottom - top) // rows
    cells = [(column * width, top + row * height) for row in range(rows) for column in range(3)]
    shapes = []
    for left, upper in rng.sample(cells, count):
        side = rng.randrange(15, min(width, height) - 2, 2)
        x = left + rng.randint(1, width - side - 1)
        y = upper + rng.randint(1, height - side - 1)
        kind, color = rng.choice(drawing.KINDS), rng.choice(sorted(drawing.COLORS))
        shapes.append(drawing.Shape(kind, color, (x, y, x + side, y + side)))
    return tuple(shapes)


def _words(rng: random.Random) -> tuple[drawing.Word, ...]:
    places = ["top", "bottom"] if rng.random() < 0.5 else [rng.choice(["top", "bottom"])]
    texts = [_text(rng) for _ in places]
    if len(texts) == 2 and rng.random() < 0.3:
        texts[1] = texts[0]
    words = []
    for place, text in zip(places, texts, strict=True):
        scale = rng.choice((1, 2))
        width, height = drawing.text_size(text, scale)
        left = rng.randint(1, drawing.SIDE - width - 1)
        top = 1 if place == "top" else drawing.SIDE - height - 1
        words.append(drawing.Word(text, place, left, top, scale))
    return tuple(words)


def _text(rng: random.Random) -> str:
    """A word, a number of 2 to 4 digits, or 3 letters that mean nothing."""
    kind = rng.randrange(3)
    if kind == 0:
        return rng.choice(_WORDS)
    if kind == 1:
        return str(rng.randint(10, 9999))
    return "".join(rng.choice(string.ascii_uppercase) for _ in range(3))


def _chart(rng: random.Random) -> drawing.Chart:
    count = rng.randint(3, 5)
    names = tuple(rng.sample(string.ascii_uppercase, count))
    values = tuple(rng.randint(1, drawing.MAX_VALUE) for _ in names)
    return drawing.Chart(rng.choice(("bar", "line")), names, values, rng.choice(_CHART_COLORS))


_CHART_COLORS = ("red", "green", "blue", "purple")


def _record(scene: drawing.Scene, pairs: list[tuple[str, str]]) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    for question, answer in pairs:
        messages += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    messages[0]["content"] = [{"type": "image"}, {"type": "text", "text": pairs[0][0]}]
    return {
        "messages": messages,
        "source": f"{NAME}_{scene.level}",
        "independent_turns": True,
        "scene": scene.truth(),
    }
