"""Line charts as inline SVG, readable without scripts; the script adds a reading at the mouse."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from html import escape

from .runs import Points

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 460, 240, 56, 10, 10, 26
MOST_POINTS = 400  # of one drawn line
_CHARACTER = 7  # width of a digit, in the drawing's units
_CLIPPED = 0.005  # share of values at either end that may lie beyond the frame
_DASHES = ("", "6 3", "2 3", "9 3 2 3", "1 2", "12 4")


@dataclasses.dataclass(frozen=True)
class Line:
    """One line of a chart.

    Attributes:
        label: in the legend. points: (step, value). colour, dash: their numbers.
        smooth: draw a smoothed line over the pale raw one. dots: mark each point.
        framed: the line's values widen the frame even where they are rare.
    """

    label: str
    points: Points
    colour: int
    dash: int = 0
    smooth: bool = True
    dots: bool = False
    framed: bool = False


def smoothed(points: Points, weight: float) -> Points:
    """Exponential mean, unbiased from the first value on."""
    total = mass = 0.0
    result = []
    for step, value in points:
        total, mass = weight * total + (1 - weight) * value, weight * mass + (1 - weight)
        result.append((step, total / mass))
    return result


def thinned(points: Points, most: int = MOST_POINTS) -> Points:
    """At most `most` points; of each stretch the smallest and the largest value are kept."""
    if len(points) <= most:
        return points
    kept: Points = []
    size = math.ceil(len(points) / (most // 2))
    for start in range(0, len(points), size):
        part = points[start : start + size]
        ends = {min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])}
        kept += sorted(ends)
    return kept


def ticks(low: float, high: float, number: int = 5) -> list[float]:
    """Round values from low to high."""
    span = high - low
    if span <= 0:
        return [low]
    raw = span / number
    base = 10.0 ** math.floor(math.log10(raw))
    step = next(base * factor for factor in (1, 2, 2.5, 5, 10) if base * factor >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    count = math.floor(high / step + 1e-9) - first + 1
    return [round((first + index) * step, 12) for index in range(count)]


def log_ticks(low: float, high: float) -> list[float]:
    """Round values from low to high, both above 0, for a logarithmic axis."""
    decades = math.log10(high / low)
    if decades < 1:
        return ticks(low, high)
    factors = (1, 2, 5) if decades < 3 else (1,)
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    marks = [factor * 10.0**exponent for exponent in exponents for factor in factors]
    return [mark for mark in marks if low <= mark <= high]


@dataclasses.dataclass(frozen=True)
class Scale:
    """The y axis: its range, and whether it is logarithmic (then both ends are above 0)."""

    low: float
    high: float
    is_log: bool = False

    @classmethod
    def around(cls, lines: list[Line], is_log: bool = False) -> Scale:
        """Holds most values of every line, all of framed ones, and a margin around."""
        as_drawn = math.log10 if is_log else float
        values = sorted(as_drawn(value) for line in lines for _, value in line.points)
        cut = int(len(values) * _CLIPPED)
        kept = values[cut : len(values) - cut]
        kept += [as_drawn(value) for line in lines if line.framed for _, value in line.points]
        low, high = min(kept), max(kept)
        margin = 0.05 * (high - low) or 0.05 * abs(high) or 0.5
        low, high = low - margin, high + margin
        return cls(10**low, 10**high, True) if is_log else cls(low, high)

    def ticks(self) -> list[float]:
        return log_ticks(self.low, self.high) if self.is_log else ticks(self.low, self.high)

    def share(self, value: float) -> float:
        """Place from the top, 0, to the bottom, 1."""
        if self.is_log:
            return math.log(self.high / value) / math.log(self.high / self.low)
        return (self.high - value) / (self.high - self.low)


def number(value: float, digits: int = 4) -> str:
    """Short text of a number: of 4 digits at most 7 characters, which is what fits beside an axis
    (8 with a sign).
    """
    if value and not 1e-3 <= abs(value) < 1e6:
        mantissa, exponent = f"{value:.{digits - 2}e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:,.{digits}g}" if abs(value) < 1000 else f"{value:,.0f}"


def labels(values: list[float]) -> list[str]:
    """Short texts of an axis' values, which are round: with as many digits as they have."""
    texts: list[str] = []
    for digits in range(4, 10):
        texts = [number(value, digits) for value in values]
        shown = (float(text.replace(",", "")) for text in texts)
        if all(map(math.isclose, shown, values)):
            break
    return texts


class Chart:
    """One chart.

    Args:
        title: above it. lines: those without points are left out. smoothing: weight of `smoothed`.
        note: below the title.
        switched: drawn with a logarithmic axis too, where every value is above 0; the page's style
            shows one of both.
    """

    def __init__(
        self,
        title: str,
        lines: list[Line],
        smoothing: float,
        note: str = "",
        switched: bool = False,
    ) -> None:
        self.title, self.note, self._smoothing = title, note, smoothing
        self.lines = [
            dataclasses.replace(
                line, points=[point for point in line.points if math.isfinite(point[1])]
            )
            for line in lines
        ]
        self.lines = [line for line in self.lines if line.points]
        values = [value for line in self.lines for _, value in line.points]
        self._scales = [(False, "linear"), (True, "log")]
        if not switched or not values or min(values) <= 0:
            self._scales = [(False, "")]

    def html(self) -> str:
        """A figure; empty where there is nothing to draw."""
        if not self.lines:
            return ""
        steps = [step for line in self.lines for step, _ in line.points]
        self._x = min(steps), max(max(steps), min(steps) + 1)
        drawn = [self._svg(is_log, name) for is_log, name in self._scales]
        return (
            f'<figure class="chart"><figcaption>{escape(self.title)}</figcaption>'
            f"{''.join(svg for svg, _ in drawn)}"
            f'<ul class="legend">{"".join(map(_legend, self.lines))}</ul>'
            f'<script type="application/json">{self._data(drawn[0][1])}</script></figure>'
        )

    def _svg(self, is_log: bool, name: str) -> tuple[str, list[Points]]:
        """One drawing with its note, and the drawn points of every line."""
        self._y = Scale.around(self.lines, is_log)
        drawn = [self._drawn(line) for line in self.lines]
        beyond = sum(
            not self._y.low <= value <= self._y.high
            for line in self.lines
            for _, value in line.points
        )
        notes = [self.note] if self.note else []
        notes += [f"values beyond the frame: {beyond}"] if beyond else []
        svg = (
            f'<div class="view {name}"><small>{escape("; ".join(notes))}</small>'
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(self.title)}">'
            f"{self._axes()}{''.join(svg for svg, _ in drawn)}"
            '<line class="cursor" visibility="hidden"/></svg></div>'
        )
        return svg, [points for _, points in drawn]

    def _place(self, step: float, value: float) -> tuple[float, float]:
        left, right = self._x
        x = LEFT + (step - left) / (right - left) * (WIDTH - LEFT - RIGHT)
        y = TOP + self._y.share(value) * (HEIGHT - TOP - BOTTOM)
        return round(x, 1), round(min(max(y, -HEIGHT), 2 * HEIGHT), 1)

    def _axes(self) -> str:
        parts = []
        values, steps = self._y.ticks(), ticks(*self._x)
        for value, text in zip(values, labels(values), strict=True):
            _, y = self._place(self._x[0], value)
            parts.append(
                f'<path class="grid" d="M{LEFT} {y}H{WIDTH - RIGHT}"/>'
                f'<text x="{LEFT - 6}" y="{y + 3.5}" text-anchor="end">{text}</text>'
            )
        for step, text in zip(steps, labels(steps), strict=True):
            x, _ = self._place(step, self._y.low)
            room = WIDTH - _CHARACTER * len(text) / 2  # the last one stands at the frame's end
            parts.append(
                f'<text x="{min(x, room)}" y="{HEIGHT - 8}" text-anchor="middle">{text}</text>'
            )
        return "".join(parts)

    def _drawn(self, line: Line) -> tuple[str, Points]:
        """SVG of a line, and the points that the reading at the mouse names."""
        style = f'class="line c{line.colour % 8}" stroke-dasharray="{_dash(line)}"'
        raw = thinned(line.points)
        if not line.smooth or not self._smoothing or len(line.points) < 3:
            return f"{self._path(raw, style)}{self._dots(line, raw)}", raw
        mean = thinned(smoothed(line.points, self._smoothing))
        pale = self._path(raw, f'class="line pale c{line.colour % 8}"')
        return f"{pale}{self._path(mean, style)}", mean

    def _path(self, points: Points, style: str) -> str:
        places = [self._place(*point) for point in points]
        if len(places) == 1:
            (x, y) = places[0]
            return f'<path {style} d="M{x - 3} {y}H{x + 3}" clip-path="url(#frame)"/>'
        text = "L".join(f"{x} {y}" for x, y in places)
        return f'<path {style} d="M{text}" clip-path="url(#frame)"/>'

    def _dots(self, line: Line, points: Points) -> str:
        if not line.dots:
            return ""
        return "".join(
            f'<circle class="c{line.colour % 8}" cx="{x}" cy="{y}" r="2.5"/>'
            for x, y in itertools.starmap(self._place, points)
        )

    def _data(self, drawn: list[Points]) -> str:
        lines = [
            {
                "label": line.label,
                "points": [[step, float(f"{value:.5g}")] for step, value in points],
            }
            for line, points in zip(self.lines, drawn, strict=True)
        ]
        text = json.dumps({"x": self._x, "lines": lines}, separators=(",", ":"))
        # Nothing in it can end the script, and the figure stays well-formed XML.
        return text.replace("<", "\\u003c").replace("&", "\\u0026")


def _dash(line: Line) -> str:
    return _DASHES[line.dash % len(_DASHES)]


def _legend(line: Line) -> str:
    return (
        f'<li><svg viewBox="0 0 24 8" width="24" height="8"><path class="line c{line.colour % 8}" '
        f'stroke-dasharray="{_dash(line)}" d="M0 4H24"/></svg>{escape(line.label)}</li>'
    )
