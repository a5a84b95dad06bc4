"""What a scene holds, and its pixels. Without antialiasing: a shape has one colour, so that every
answer can be checked by counting pixels."""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from typing import Any

from PIL import Image, ImageDraw, ImageFont

SIDE = 128  # pixels, width and height of every scene

COLORS = {
    "red": (214, 39, 40),
    "green": (44, 150, 60),
    "blue": (40, 80, 220),
    "yellow": (240, 200, 30),
    "purple": (140, 60, 180),
    "orange": (250, 130, 20),
    "cyan": (40, 190, 210),
    "brown": (120, 70, 40),
}
BACKGROUNDS = ((255, 255, 255), (246, 244, 232), (232, 240, 248), (236, 236, 236))
INK = (20, 20, 20)
FRAME = (110, 110, 110)
GRID = (205, 205, 205)

KINDS = ("circle", "square", "triangle", "diamond", "cross")

Box = tuple[int, int, int, int]
"""Left, top, right and bottom in pixels; right and bottom lie outside."""

# The chart's frame: value 0 at the bottom, 8 pixels a unit.
CHART_LEFT, CHART_TOP, CHART_RIGHT, CHART_BOTTOM = 20, 20, 122, 110
UNIT, MAX_VALUE = 8, 10


@dataclasses.dataclass(frozen=True)
class Shape:
    """One filled shape; its pixels touch all four sides of `box`, whose sides are odd and equal."""

    kind: str
    color: str
    box: Box

    @property
    def name(self) -> str:
        return f"{self.color} {self.kind}"


@dataclasses.dataclass(frozen=True)
class Word:
    """Text in ink. Fields: place: top | bottom; scale: pixels a dot of the font."""

    text: str
    place: str
    left: int
    top: int
    scale: int


@dataclasses.dataclass(frozen=True)
class Chart:
    """Fields: kind: bar | line; names: letters below; values: 1 to 10, as many; color: by name."""

    kind: str
    names: tuple[str, ...]
    values: tuple[int, ...]
    color: str


@dataclasses.dataclass(frozen=True)
class Scene:
    level: int
    background: tuple[int, int, int]
    shapes: tuple[Shape, ...] = ()
    words: tuple[Word, ...] = ()
    chart: Chart | None = None

    def truth(self) -> dict[str, Any]:
        """What is drawn, in plain values, for the record."""
        values = dataclasses.asdict(self)
        return {name: value for name, value in values.items() if value not in ((), None)}


def draw(scene: Scene) -> Image.Image:
    """The scene as RGB, 128 x 128."""
    image = Image.new("RGB", (SIDE, SIDE), scene.background)
    canvas = ImageDraw.Draw(image)
    for shape in scene.shapes:
        _draw_shape(canvas, shape)
    for word in scene.words:
        _write(image, word.text, word.left, word.top, word.scale)
    if scene.chart is not None:
        _draw_chart(image, canvas, scene.chart)
    return image


def _draw_shape(canvas: ImageDraw.ImageDraw, shape: Shape) -> None:
    left, top, right, bottom = shape.box
    right, bottom = right - 1, bottom - 1  # Pillow counts the last pixel in
    middle_x, middle_y = (left + right) // 2, (top + bottom) // 2
    fill = COLORS[shape.color]
    if shape.kind == "circle":
        canvas.ellipse((left, top, right, bottom), fill=fill)
    elif shape.kind == "square":
        canvas.rectangle((left, top, right, bottom), fill=fill)
    elif shape.kind == "triangle":
        canvas.polygon([(left, bottom), (right, bottom), (middle_x, top)], fill=fill)
    elif shape.kind == "diamond":
        corners = [(left, middle_y), (middle_x, top), (right, middle_y), (middle_x, bottom)]
        canvas.polygon(corners, fill=fill)
    else:
        arm = (right - left) // 6  # half an arm's width
        canvas.rectangle((middle_x - arm, top, middle_x + arm, bottom), fill=fill)
        canvas.rectangle((left, middle_y - arm, right, middle_y + arm), fill=fill)


# Dots. The font's own cells are 6 wide, but letters such as T reach 1 over them to the left.
_CELL, _HEIGHT = 8, 11


@lru_cache(maxsize=1)
def _font() -> Any:
    # Pillow's bitmap font: the same dots on every machine, whatever FreeType is there.
    return ImageFont.load_default_imagefont()


@lru_cache(maxsize=256)
def _dots(letter: str) -> Image.Image:
    """One letter in its cell, 1-bit, 8 x 11."""
    cell = Image.new("1", (_CELL + 5, _HEIGHT), 0)
    # Behind a space, since the first letter of a text loses what reaches over its cell.
    ImageDraw.Draw(cell).text((0, 0), f" {letter}", fill=1, font=_font())
    return cell.crop((5, 0, 5 + _CELL, _HEIGHT))


def text_size(text: str, scale: int = 1) -> tuple[int, int]:
    """Width and height in pixels."""
    return _CELL * len(text) * scale, _HEIGHT * scale


def _write(image: Image.Image, text: str, left: int, top: int, scale: int = 1) -> None:
    for place, letter in enumerate(text):
        size = (_CELL * scale, _HEIGHT * scale)
        dots = _dots(letter).resize(size, Image.Resampling.NEAREST)
        image.paste(INK, (left + place * size[0], top), dots)


def chart_places(count: int) -> list[int]:
    """Middle x of every bar or point."""
    step = (CHART_RIGHT - CHART_LEFT) // count
    return [CHART_LEFT + step // 2 + step * place for place in range(count)]


def _draw_chart(image: Image.Image, canvas: ImageDraw.ImageDraw, chart: Chart) -> None:
    for value in range(0, MAX_VALUE + 1):
        y = CHART_BOTTOM - UNIT * value
        if value:
            canvas.line((CHART_LEFT, y, CHART_RIGHT, y), fill=GRID)
        if value % 2 == 0:
            width, height = text_size(str(value))
            _write(image, str(value), CHART_LEFT - 4 - width, y - height // 2)
    fill = COLORS[chart.color]
    places = chart_places(len(chart.names))
    tops = [CHART_BOTTOM - UNIT * value for value in chart.values]
    if chart.kind == "line":
        canvas.line(list(zip(places, tops, strict=True)), fill=fill, width=1)
    for name, x, y in zip(chart.names, places, tops, strict=True):
        if chart.kind == "bar":
            canvas.rectangle((x - 5, y, x + 5, CHART_BOTTOM - 1), fill=fill)
        else:
            canvas.rectangle((x - 2, y - 2, x + 2, y + 2), fill=fill)
        _write(image, name, x - text_size(name)[0] // 2, CHART_BOTTOM + 3)
    canvas.line((CHART_LEFT, CHART_TOP, CHART_LEFT, CHART_BOTTOM), fill=FRAME)
    canvas.line((CHART_LEFT, CHART_BOTTOM, CHART_RIGHT, CHART_BOTTOM), fill=FRAME)
