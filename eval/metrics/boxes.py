"""Boxes: read from texts, compared by intersection over union."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

Coordinates = Literal["unit", "thousand", "pixels"]
ACCEPTED_OVERLAP = 0.5

_NUMBER = r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)"
_FIELDS = re.compile(
    r"""["']?\b[xy](?:_?(?:min|max)|[12]|_?(?:left|right|top|bottom))["']?\s*[:=]"""
)
# Four numbers with brackets around all or around each corner: [1, 2, 3, 4], (1,2),(3,4)
_GAP = r"(?=[\s,;()\[\]<>])[\s,;]*[)\]>]*[\s,;]*[(\[<]*[\s,;]*"
_BOX = re.compile(
    rf"[(\[{{<]\s*({_NUMBER}){_GAP}({_NUMBER}){_GAP}({_NUMBER}){_GAP}({_NUMBER})\s*%?[)\]}}>]"
)
_ANY = re.compile(rf"(?<![\w.]){_NUMBER}(?!\w)")


class Box(NamedTuple):
    """Corners as shares of the image's width and height; `left < right` and `top < bottom`, or its
    area is 0.
    """

    left: float
    top: float
    right: float
    bottom: float

    @property
    def area(self) -> float:
        return max(0.0, self.right - self.left) * max(0.0, self.bottom - self.top)


def parse_box(text: str, coordinates: Coordinates, width: int = 0, height: int = 0) -> Box | None:
    """The first box of an answer, None if there is none.

    Read are the first four numbers within brackets, `[x1, y1, x2, y2]` or `(x1, y1), (x2, y2)`;
    without brackets, the numbers of a text that has exactly four. Which units they are in cannot be
    told from the numbers, so the question has to say it.

    Args:
        coordinates: `unit` (0 to 1), `thousand` (0 to 1000) or `pixels`.
        width, height: of the image; needed for `pixels`.
    """
    text = _FIELDS.sub(" ", text)
    match = _BOX.search(text)
    numbers = list(match.groups()) if match else _ANY.findall(text)
    if len(numbers) != 4:
        return None
    return scaled_box([float(number) for number in numbers], coordinates, width, height)


def scaled_box(
    corners: list[float], coordinates: Coordinates, width: int = 0, height: int = 0
) -> Box:
    """`[left, top, right, bottom]` in the given units as shares of the image."""
    if coordinates == "pixels" and (width < 1 or height < 1):
        raise ValueError(f"pixels need the image's size, not {width} x {height}")
    across, down = {"unit": (1, 1), "thousand": (1000, 1000), "pixels": (width, height)}[
        coordinates
    ]
    left, top, right, bottom = corners
    return Box(left / across, top / down, right / across, bottom / down)


def intersection_over_union(first: Box, second: Box) -> float:
    """Overlap of two boxes, 0 to 1; 0 where both are empty."""
    overlap = Box(
        max(first.left, second.left),
        max(first.top, second.top),
        min(first.right, second.right),
        min(first.bottom, second.bottom),
    ).area
    union = first.area + second.area - overlap
    return overlap / union if union > 0 else 0.0
