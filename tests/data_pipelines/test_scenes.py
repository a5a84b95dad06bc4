"""`scenes`: every answer is true of the pixels, and a seed gives the same bytes."""

from __future__ import annotations

import hashlib
import io
import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data_pipelines import DataConfig, build_stream
from data_pipelines.__main__ import main
from data_pipelines.building import BuildOptions, build
from data_pipelines.shards import ShardReader, index_shards
from data_pipelines.sources import scene_drawing as drawing
from data_pipelines.sources.scene_questions import MOST_QUESTIONS, thousandths
from data_pipelines.sources.scenes import LEVELS, new_sample, recipe
from data_pipelines.writing import ShardSize
from tests.data_pipelines.test_cli import failure

SAMPLES = 60  # scenes that each level's answers are checked on


def samples(level: int):
    """Scene, question-answer pairs and pixels `[128, 128, 3]`."""
    drawn: set[bytes] = set()
    for number in range(SAMPLES):
        scene, pairs, picture, digest = new_sample(f"7/train/{number}", level, drawn)
        drawn.add(digest)
        yield scene, pairs, np.asarray(Image.open(io.BytesIO(picture)))


def components(mask: np.ndarray) -> list[tuple[int, int, int, int]]:
    """Boxes of the connected parts (8 neighbours) of a mask `[H, W]`, by a plain flood."""
    left = {(int(y), int(x)) for y, x in zip(*np.nonzero(mask), strict=True)}
    boxes = []
    while left:
        part, border = [], [left.pop()]
        while border:
            y, x = border.pop()
            part.append((y, x))
            for near in ((y + dy, x + dx) for dy in (-1, 0, 1) for dx in (-1, 0, 1)):
                if near in left:
                    left.remove(near)
                    border.append(near)
        rows, columns = zip(*part, strict=True)
        boxes.append((min(columns), min(rows), max(columns) + 1, max(rows) + 1))
    return sorted(boxes)


def boxes_by_color(pixels: np.ndarray) -> dict[str, list[tuple[int, int, int, int]]]:
    return {
        name: components((pixels == color).all(axis=2)) for name, color in drawing.COLORS.items()
    }


def kind_by_pixels(pixels: np.ndarray, color: str, box: tuple[int, int, int, int]) -> str:
    """The kind of a shape from its corners, the middles of its sides and its area."""
    left, top, right, bottom = box
    mask = (pixels[top:bottom, left:right] == drawing.COLORS[color]).all(axis=2)
    if mask.all():
        return "square"
    if mask[-1].all():
        return "triangle"
    share = mask.mean()
    if mask[: len(mask) // 4, : len(mask) // 4].any():
        return "circle" if share > 0.7 else "?"
    # A diamond covers half of its box and widens evenly; a cross has arms of one width.
    return "cross" if mask[1].sum() == mask[0].sum() else "diamond"


def shapes_by_pixels(pixels: np.ndarray) -> list[tuple[str, str, tuple[int, int, int, int]]]:
    return [
        (color, kind_by_pixels(pixels, color, box), box)
        for color, boxes in boxes_by_color(pixels).items()
        for box in boxes
    ]


def answer_by_pixels(question: str, shapes: list) -> str | None:
    """The answer by what was found in the pixels; None for questions about text."""
    names = [f"{color} {kind}" for color, kind, _ in shapes]
    if question == "How many shapes are there?":
        return str(len(shapes))
    if match := re.fullmatch(r"How many (\w+) shapes are there\?", question):
        return str(sum(color == match[1] for color, _, _ in shapes))
    if match := re.fullmatch(r"How many (\w+?)(?:(?<=s)es|s) are there\?", question):
        return str(sum(kind == match[1] for _, kind, _ in shapes))
    if match := re.fullmatch(r"Is there an? (\w+ \w+)\?", question):
        return "yes" if match[1] in names else "no"
    if match := re.fullmatch(r"What color is the (\w+)\?", question):
        return " ".join(color for color, kind, _ in shapes if kind == match[1])
    if match := re.fullmatch(r"What shape is (\w+)\?", question):
        return " ".join(kind for color, kind, _ in shapes if color == match[1])
    if match := re.fullmatch(r"Give the box of the (\w+ \w+)\.", question):
        (box,) = (box for color, kind, box in shapes if f"{color} {kind}" == match[1])
        return " ".join(str(round(value * 1000 / 128)) for value in box)
    if match := re.fullmatch(r"Is the (\w+ \w+) (left of|above) the (\w+ \w+)\?", question):
        one, two = (shapes[names.index(name)][2] for name in (match[1], match[3]))
        axis = 0 if match[2] == "left of" else 1
        return "yes" if (one[axis] + one[axis + 2]) < (two[axis] + two[axis + 2]) else "no"
    if match := re.fullmatch(r"What is the (leftmost|rightmost|topmost|lowest) shape\?", question):
        side = ("leftmost", "topmost", "rightmost", "lowest").index(match[1])
        ends = [box[side] for _, _, box in shapes]
        return names[ends.index(min(ends) if side < 2 else max(ends))]
    return None


@pytest.mark.parametrize("level", [1, 2, 3])
def test_answers_about_shapes_are_true_of_the_pixels(level):
    checked = set()
    for scene, pairs, pixels in samples(level):
        shapes = shapes_by_pixels(pixels)
        drawn = [(shape.color, shape.kind, shape.box) for shape in scene.shapes]
        assert sorted(shapes) == sorted(drawn)
        for question, answer in pairs:
            expected = answer_by_pixels(question, shapes)
            if expected is not None:
                assert answer == expected, (question, drawn)
                checked.add(question.split(" the ")[0].split()[0] + question[-8:])
    assert len(checked) > 5


def test_texts_stand_where_they_are_asked_for():
    for scene, pairs, pixels in samples(3):
        answers = dict(pairs)
        ink = (pixels == drawing.INK).all(axis=2)
        for place, half in (("top", ink[:26]), ("bottom", ink[102:])):
            text = answers.get(f"What is written at the {place}?")
            assert half.any() == (text is not None)
            if text is None:
                continue
            (word,) = (word for word in scene.words if word.place == place)
            assert word.text == text
            # The same dots as the text alone gives, somewhere: nothing is cut or covered.
            alone = Image.new("RGB", (128, 128), "white")
            drawing._write(alone, text, 0, 0, word.scale)
            dots = (np.asarray(alone) == drawing.INK).all(axis=2)
            assert np.array_equal(cropped(half), cropped(dots))
        assert not ink[26:102].any()
        if "How many characters does the text have?" in answers:
            assert answers["How many characters does the text have?"] == str(
                len(scene.words[0].text)
            )


def cropped(mask: np.ndarray) -> np.ndarray:
    rows, columns = np.nonzero(mask)
    return mask[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]


def values_by_pixels(pixels: np.ndarray, chart: drawing.Chart) -> list[int]:
    """Heights over the axis at the places of the chart, in units."""
    mask = (pixels == drawing.COLORS[chart.color]).all(axis=2)
    values = []
    for x in drawing.chart_places(len(chart.names)):
        rows = np.nonzero(mask[:, x])[0]
        # Of a point's marker the middle counts.
        top = rows.min() if chart.kind == "bar" else (rows.min() + rows.max()) // 2
        values.append((drawing.CHART_BOTTOM - int(top)) / drawing.UNIT)
    return values


def test_answers_about_charts_are_true_of_the_pixels():
    kinds = set()
    for scene, pairs, pixels in samples(4):
        chart = scene.chart
        kinds.add(chart.kind)
        values = dict(zip(chart.names, values_by_pixels(pixels, chart), strict=True))
        assert list(values.values()) == list(chart.values)
        if chart.kind == "bar":
            mask = (pixels == drawing.COLORS[chart.color]).all(axis=2)
            assert len(components(mask)) == len(values)
        for question, answer in pairs:
            assert answer == chart_answer(question, chart.kind, values), question
    assert kinds == {"bar", "line"}


def chart_answer(question: str, kind: str, values: dict[str, int]) -> str:
    letters = re.findall(r"\b([A-Z])\b", question)
    if question == "Is this a bar chart or a line chart?":
        return kind
    if question.startswith("How many"):
        return str(len(values))
    if question.startswith("Is "):
        return "yes" if values[letters[0]] > values[letters[1]] else "no"
    if question.startswith("What is the difference"):
        return f"{abs(values[letters[0]] - values[letters[1]]):g}"
    if question.startswith("What is the sum"):
        return f"{sum(values.values()):g}"
    if question.startswith("What is the value"):
        return f"{values[letters[0]]:g}"
    pick = max if "largest" in question else min
    if question.startswith("Which letter"):
        return " ".join(name for name in values if values[name] == pick(values.values()))
    return f"{pick(values.values()):g}"


@pytest.mark.parametrize("level", LEVELS)
def test_questions_are_different_few_and_answers_are_balanced(level):
    answers = []
    for _, pairs, _ in samples(level):
        asked = [question for question, _ in pairs]
        assert 5 <= len(asked) <= MOST_QUESTIONS
        assert len(set(asked)) == len(asked)
        answers += [answer for question, answer in pairs if question.startswith("Is the")]
        answers += [answer for question, answer in pairs if question.startswith("Is ")]
    decided = [answer for answer in answers if answer in ("yes", "no")]
    assert 0.3 < decided.count("yes") / len(decided) < 0.7


def test_boxes_are_in_thousandths():
    assert thousandths((0, 32, 64, 128)) == "0 250 500 1000"


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_a_seed_gives_the_same_bytes_whatever_happened_before(tmp_path):
    in_twenties = BuildOptions(ShardSize(20))
    build(recipe(samples=40, seed=3), tmp_path / "one", in_twenties)
    random.seed(5)
    build(recipe(samples=40, seed=3), tmp_path / "two", in_twenties)
    build(recipe(samples=40, seed=4), tmp_path / "other", in_twenties)
    assert digests(tmp_path / "one") == digests(tmp_path / "two")
    one, other = digests(tmp_path / "one"), digests(tmp_path / "other")
    shards = ("train-000000", "train-000001", "test-000000")
    files = {f"{shard}.{kind}" for shard in shards for kind in ("tar", "index.json")}
    assert one.keys() == other.keys() == {*files, "manifest.json", "rejects.json"}
    one.pop("rejects.json")
    assert not set(one.values()) & set(other.values())


def records(pattern: str):
    reader = ShardReader()
    for sample in index_shards([pattern]).samples:
        yield json.loads(reader.read(sample, "json")), reader.read(sample, "img0.png")


def test_no_picture_is_in_both_splits_or_twice(tmp_path):
    # Level 1 repeats itself soonest.
    build(recipe(samples=300, level=1), tmp_path / "out")
    pictures = [picture for _, picture in records(str(tmp_path / "out" / "*.tar"))]
    assert len(pictures) == 300
    assert len(set(pictures)) == 300


def test_levels_by_the_command(tmp_path, capsys):
    out = tmp_path / "all"
    assert main(["build", "scenes", str(out), "--samples", "40", "--seed", "1"]) == 0
    assert "36 samples" in capsys.readouterr().out
    found = [record["source"] for record, _ in records(str(out / "train-*.tar"))]
    assert found[:5] == ["scenes_1", "scenes_2", "scenes_3", "scenes_4", "scenes_1"]
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["license"].startswith("Apache-2.0")
    assert manifest["splits"]["test"]["samples"] == 4
    out = tmp_path / "third"
    assert main(["build", "scenes", str(out), "--samples", "10", "--level", "3"]) == 0
    capsys.readouterr()
    third = list(records(str(out / "*.tar")))
    assert {record["source"] for record, _ in third} == {"scenes_3"}
    record = third[0][0]
    assert record["scene"]["level"] == 3
    assert record["scene"]["words"][0]["text"] in json.dumps(record["messages"])


def test_wrong_options_are_one_line(tmp_path, capsys):
    out = str(tmp_path / "x")
    assert "--level is 5" in failure(capsys, "build", "scenes", out, "--level", "5")
    assert "--samples is 1;" in failure(capsys, "build", "scenes", out, "--samples", "1")
    assert "--seed is -1" in failure(capsys, "build", "scenes", out, "--seed", "-1")
    assert "no meaning" in failure(capsys, "build", "easy_vqa", out, "--level", "1")
    assert not (tmp_path / "x").exists()


def test_scenes_become_packed_batches(processor, tmp_path):
    build(recipe(samples=40), tmp_path / "out")
    config = DataConfig(
        shards=str(tmp_path / "out" / "train-*.tar"),
        tokens_per_batch=4096,
        epochs=1,
        questions_per_conversation=4,
        shuffle_questions=True,
    )
    stream = build_stream(config, processor)
    keys = [key for batch in stream for key in batch.keys]
    assert len(keys) == len(set(keys)) == 36
    assert not stream.skipped


@pytest.mark.parametrize("level", LEVELS)
def test_the_pictures_of_the_documentation_are_the_first_ones_of_seed_0(level):
    path = Path(__file__).parents[2] / "docs" / "images" / f"scenes_{level}.png"
    assert path.stat().st_size < 20_000
    _, _, picture, _ = new_sample(f"0/train/{level - 1}", level, set())
    shown = np.asarray(Image.open(path).convert("RGB"))
    assert np.array_equal(shown, np.asarray(Image.open(io.BytesIO(picture))))
