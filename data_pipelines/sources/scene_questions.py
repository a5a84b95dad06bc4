"""Exact questions and answers about a scene."""

from __future__ import annotations

import random
from collections import Counter

from data_pipelines.sources.scene_drawing import COLORS, KINDS, SIDE, Chart, Scene, Shape

Pair = tuple[str, str]

CLEARLY = 3  # pixels between two shapes before one counts as left of or above the other
MOST_QUESTIONS = 10


def questions(scene: Scene, rng: random.Random) -> list[Pair]:
    """At most ten pairs, each true of the scene; every kind that the level has is represented."""
    if scene.chart is not None:
        return _about_chart(scene.chart, rng)
    unique = [shape for shape in scene.shapes if _is_unique(shape.name, scene)]
    groups = [_counts(scene, rng), _existence(scene, rng)]
    if scene.level == 1:
        groups += [_features(scene)]
    else:
        groups += [_positions(unique, rng), _extremes(scene), _boxes(unique, rng)]
    if scene.level == 3:
        groups = [_texts(scene), *(group[:2] for group in groups)]
    pairs = [pair for group in groups for pair in group]
    first, rest = pairs[: len(groups[0])], pairs[len(groups[0]) :]
    return first + rng.sample(rest, min(len(rest), MOST_QUESTIONS - len(first)))


def _is_unique(name: str, scene: Scene) -> bool:
    return sum(shape.name == name for shape in scene.shapes) == 1


def _yes(condition: bool) -> str:
    return "yes" if condition else "no"


def _counts(scene: Scene, rng: random.Random) -> list[Pair]:
    colors = Counter(shape.color for shape in scene.shapes)
    kinds = Counter(shape.kind for shape in scene.shapes)
    present, any_color = rng.choice(sorted(colors)), rng.choice(sorted(COLORS))
    kind = rng.choice(KINDS)
    pairs = [
        ("How many shapes are there?", str(len(scene.shapes))),
        (f"How many {present} shapes are there?", str(colors[present])),
        (f"How many {any_color} shapes are there?", str(colors[any_color])),
        (f"How many {_plural(kind)} are there?", str(kinds[kind])),
    ]
    return list(dict.fromkeys(pairs))


def _plural(kind: str) -> str:
    return f"{kind}es" if kind.endswith("s") else f"{kind}s"


def _existence(scene: Scene, rng: random.Random) -> list[Pair]:
    """One question with yes and one with no, the latter close to what is there."""
    names = {shape.name for shape in scene.shapes}
    there = rng.choice(scene.shapes)
    near = [f"{color} {there.kind}" for color in sorted(COLORS)]
    near += [f"{there.color} {kind}" for kind in KINDS]
    absent = rng.choice([name for name in near if name not in names])
    return [
        (f"Is there {_article(name)} {name}?", _yes(name in names)) for name in (there.name, absent)
    ]


def _article(name: str) -> str:
    return "an" if name[0] in "aeiou" else "a"


def _features(scene: Scene) -> list[Pair]:
    colors = Counter(shape.color for shape in scene.shapes)
    kinds = Counter(shape.kind for shape in scene.shapes)
    pairs = []
    for shape in scene.shapes:
        if kinds[shape.kind] == 1:
            pairs.append((f"What color is the {shape.kind}?", shape.color))
        if colors[shape.color] == 1:
            pairs.append((f"What shape is {shape.color}?", shape.kind))
    return pairs


def _positions(unique: list[Shape], rng: random.Random) -> list[Pair]:
    """Left of and above, between shapes that lie clearly apart along that axis."""
    pairs = []
    for axis, word in ((0, "left of"), (1, "above")):
        apart = [
            (one, two)
            for one in unique
            for two in unique
            if one is not two and (_before(one, two, axis) or _before(two, one, axis))
        ]
        for one, two in rng.sample(apart, min(2, len(apart))):
            question = f"Is the {one.name} {word} the {two.name}?"
            pairs.append((question, _yes(_before(one, two, axis))))
    return pairs


def _before(one: Shape, two: Shape, axis: int) -> bool:
    return one.box[axis + 2] + CLEARLY <= two.box[axis]


def _extremes(scene: Scene) -> list[Pair]:
    pairs = []
    for axis, first, last in ((0, "leftmost", "rightmost"), (1, "topmost", "lowest")):
        ordered = sorted(scene.shapes, key=lambda shape: shape.box[axis])
        if len(ordered) > 1 and _before(ordered[0], ordered[1], axis):
            pairs.append((f"What is the {first} shape?", ordered[0].name))
        ends = sorted(scene.shapes, key=lambda shape: shape.box[axis + 2])
        if len(ends) > 1 and _before(ends[-2], ends[-1], axis):
            pairs.append((f"What is the {last} shape?", ends[-1].name))
    return pairs


def thousandths(box: tuple[int, ...]) -> str:
    """Left, top, right, bottom in thousandths of the picture's side, whatever it is resized to."""
    return " ".join(str(round(1000 * value / SIDE)) for value in box)


def _boxes(unique: list[Shape], rng: random.Random) -> list[Pair]:
    chosen = rng.sample(unique, min(2, len(unique)))
    return [(f"Give the box of the {shape.name}.", thousandths(shape.box)) for shape in chosen]


def _texts(scene: Scene) -> list[Pair]:
    pairs = [(f"What is written at the {word.place}?", word.text) for word in scene.words]
    if len(scene.words) == 1:
        word = scene.words[0]
        pairs += [
            ("Where is the text, at the top or at the bottom?", word.place),
            ("How many characters does the text have?", str(len(word.text))),
        ]
    else:
        top, bottom = (word.text for word in scene.words)
        pairs.append(("Is the same text at the top and at the bottom?", _yes(top == bottom)))
    return pairs


def _about_chart(chart: Chart, rng: random.Random) -> list[Pair]:
    values = dict(zip(chart.names, chart.values, strict=True))
    noun = "bars" if chart.kind == "bar" else "points"
    one, two = rng.sample(chart.names, 2)
    pairs = [
        ("Is this a bar chart or a line chart?", chart.kind),
        (f"How many {noun} are there?", str(len(values))),
        (f"Is {one} larger than {two}?", _yes(values[one] > values[two])),
        (f"What is the difference between {one} and {two}?", str(abs(values[one] - values[two]))),
        ("What is the sum of all values?", str(sum(values.values()))),
    ]
    for word, value in (("largest", max(chart.values)), ("smallest", min(chart.values))):
        holders = [name for name, other in values.items() if other == value]
        pairs.append((f"What is the {word} value?", str(value)))
        if len(holders) == 1:
            pairs.append((f"Which letter has the {word} value?", holders[0]))
    read = [(f"What is the value of {name}?", str(values[name])) for name in chart.names]
    return rng.sample(read, 3) + rng.sample(pairs, 7)
