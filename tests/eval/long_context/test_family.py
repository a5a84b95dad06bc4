"""The questions of all tasks: lengths, depths, keys, controls, and answers that must score 0."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conceptmoe_vl.errors import UserError
from eval.long_context.family import (
    GENERATORS,
    Plan,
    figures,
    length_name,
    long_tasks,
    read_depths,
    read_lengths,
)
from eval.long_context.image_tasks import load_pictures
from eval.long_context.prompt import Drawing
from eval.tasks import Scored
from tests.eval.long_context.processors import tiny_processor
from tests.eval.shards import png

GRID = (0.0, 0.5, 1.0)
LENGTH = 3000
_FEW = settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck))


def questions_of(name, processor=None, **fields):
    plan = Plan(**{"lengths": [LENGTH], "grid": GRID, "samples": 1, **fields})
    (task,) = long_tasks(processor or tiny_processor(), [name], plan)
    return task, list(task.load(None))


@pytest.mark.parametrize("name", GENERATORS)
@_FEW
@given(seed=st.integers(0, 10**9), length=st.integers(1900, 6000))
def test_prompts_fill_their_length(name, seed, length):
    processor = tiny_processor()
    _, questions = questions_of(name, processor, seed=seed, lengths=[length])
    assert len({question.key for question in questions}) == len(questions) == 4
    # The length is that of the prompt that the model reads, and no further word has room.
    assert all(length - 24 < question.details["tokens"] <= length for question in questions)
    asked = with_bytes(questions[-2].messages)
    ids = processor.encode(asked, add_generation_prompt=True).input_ids
    assert len(ids) == questions[-2].details["tokens"]


def with_bytes(messages):
    """Messages as the runner gives them to the model: pictures fetched."""
    return [
        {
            "role": message["role"],
            "content": [
                {"type": "image", "image": part["image"]()} if part["type"] == "image" else part
                for part in message["content"]
            ],
        }
        for message in messages
    ]


@pytest.mark.parametrize("name", GENERATORS)
def test_the_same_seed_gives_the_same_questions(name):
    def plain(question):
        parts = [part.get("text") or part["image"].name for part in question.messages[0]["content"]]
        return question.key, question.kind, parts, question.references, question.details

    one, two = (questions_of(name)[1] for _ in range(2))
    assert list(map(plain, one)) == list(map(plain, two))
    other = questions_of(name, seed=1)[1]
    assert not {q.references[0] for q in one} & {q.references[0] for q in other} or (
        one[0].details["shape"] == "sequence"
    )


TEXT_NEEDLES = [
    name for name in GENERATORS if name.startswith("niah") or name == "mm_retrieve_text"
]


@pytest.mark.parametrize("name", [*TEXT_NEEDLES, "variable_tracking"])
def test_needles_stand_where_they_are_said_to(name):
    _, questions = questions_of(name, grid=(0.0, 0.3, 0.7, 1.0))
    for question in questions:
        document = question.text.partition("\n\n")[2].rpartition("\n\nQuestion:")[0]
        wanted, depths = question.details["wanted"], question.details["depths"]
        if question.details["control"]:
            assert not any(key in question.text for key in wanted)
            continue
        assert len(wanted) == len(depths)
        found = [document.index(key) / len(document) for key in wanted]
        # A sentence is up to 2 % of the document, and needles push each other on.
        assert found == pytest.approx(depths, abs=0.1)


@pytest.mark.parametrize("name", [name for name in GENERATORS if GENERATORS[name].one_depth])
def test_every_depth_has_its_questions(name):
    _, questions = questions_of(name, samples=2)
    kinds = [question.kind for question in questions]
    assert kinds == [*["depth 0"] * 2, *["depth 0.5"] * 2, *["depth 1"] * 2, *["control"] * 2]


def test_picture_needles_stand_at_their_depth():
    _, questions = questions_of("mm_retrieve_image")
    for question in questions:
        pictures = [part["image"] for part in question.messages[0]["content"] if "image" in part]
        key, depth = question.references[0], question.details["depth"]
        figure = re.search(r"with the (\w+ \w+)\?", question.text)[1]
        shown = [place for place, picture in enumerate(pictures) if picture.name.startswith(figure)]
        if question.details["control"]:
            assert shown == []
            continue
        assert pictures[shown[0]].name == f"{figure} {key}"
        assert len(shown) == 1
        assert shown[0] / (len(pictures) - 1) == pytest.approx(depth, abs=0.02)


def occurrences(question, name):
    """Places of a name: (part, character)."""
    document = question.messages[0]["content"]
    places = []
    for number, part in enumerate(document):
        if part["type"] == "image":
            places += [(number, 0)] if part["image"].name.startswith(name) else []
        else:
            places += [
                (number, match.start())
                for match in re.finditer(f"Just then the {name} was seen", part["text"])
            ]
    return places


@pytest.mark.parametrize("name", ["mm_count_text", "mm_count_image"])
def test_counts_are_what_the_document_holds(name):
    for question in questions_of(name, samples=3)[1]:
        names = re.findall(r"the ([a-z]+[ -][a-z]+)[,?]", question.text.rpartition("Question:")[2])
        assert len(names) == 3
        counts = [len(occurrences(question, name)) for name in names]
        expected = [int(count) for count in question.details["wanted"]]
        assert counts == ([0, 0, 0] if question.details["control"] else expected)


@pytest.mark.parametrize("name", ["mm_order_text", "mm_order_image"])
def test_the_order_is_that_of_the_document(name):
    for question in questions_of(name, samples=3)[1]:
        names = dict(re.findall(r"\((\d)\) ([a-z]+[ -][a-z]+)", question.text[-400:]))
        places = {number: occurrences(question, name) for number, name in names.items()}
        if question.details["control"]:
            assert not any(places.values())
            continue
        assert all(len(found) == 1 for found in places.values())
        assert sorted(places, key=lambda number: places[number]) == question.details["wanted"]
        assert question.details["wanted"] != sorted(names)


@pytest.mark.parametrize(("name", "count"), [("common_words", 10), ("frequent_words", 3)])
def test_the_wanted_words_are_the_most_common(name, count):
    for question in questions_of(name, samples=2)[1]:
        document = question.text.partition("\n\n")[2].rpartition("\n\nQuestion:")[0]
        words = re.findall(r"[a-z]+-[a-z]+|[A-Z]{6}", document)
        times = {word: words.count(word) for word in set(words)}
        wanted = question.details["wanted"]
        others = max(number for word, number in times.items() if word not in wanted)
        assert len(wanted) == count
        if question.details["control"]:
            assert all(times[word] <= others for word in wanted)
        else:
            assert min(times[word] for word in wanted) > others


@pytest.mark.parametrize("policy", ["fixed", "tiles"])
def test_pictures_of_the_user(tmp_path, policy):
    for number, size in enumerate((20, 33, 70)):
        (tmp_path / f"{number}.png").write_bytes(png("red", size))
    pictures = load_pictures(tmp_path)
    processor = tiny_processor(size_policy=policy)
    _, questions = questions_of("mm_retrieve_image", processor, pictures=pictures)
    for question in questions[-2:]:
        ids = processor.encode(with_bytes(question.messages), add_generation_prompt=True).input_ids
        assert len(ids) == question.details["tokens"] <= LENGTH
        shown = [part["image"].name for part in question.messages[0]["content"] if "image" in part]
        drawn = [name for name in shown if not name.endswith(".png")]
        assert len(drawn) == (not question.details["control"])
        assert len(shown) > 10


def test_pictures_that_cannot_be_used(tmp_path):
    with pytest.raises(UserError, match="holds no pictures"):
        load_pictures(tmp_path)
    (tmp_path / "a.png").write_bytes(png()[:40])
    with pytest.raises(UserError, match=r"--images: .*a\.png"):
        load_pictures(tmp_path)


def test_a_text_of_the_user_is_the_haystack(tmp_path):
    text = tmp_path / "mine.txt"
    text.write_text("Call me Ishmael. Some years ago I sailed. ")
    _, questions = questions_of("niah_single", haystack=str(text))
    assert all(question.text.count("Ishmael") > 20 for question in questions)
    assert questions[0].details["haystack"] == str(text)


def test_questions_are_made_when_they_are_looked_at(monkeypatch):
    plan = Plan([LENGTH], GRID, 100)
    (task,) = long_tasks(tiny_processor(), ["niah_single"], plan)
    questions = task.load(None)
    assert len(questions) == 400
    assert [question.key for question in questions[399:]] == ["control-99"]
    assert questions[:4][-1].key == "depth-0-3"


def test_figures_leave_the_controls_out():
    _, questions = questions_of("niah_single")
    samples = [
        Scored(question, parsed, score)
        for question, parsed, score in zip(
            questions, ["1", "2", "", "3333"], [1.0, 0.5, 0.0, 0.0], strict=True
        )
    ]
    assert figures(samples) == {"accuracy": 0.5, "control": 0.0, "control_named": 1.0}
    assert math.isnan(figures(samples[:3])["control"])


def test_models_without_pictures():
    plan = Plan([LENGTH], GRID, 1)
    assert long_tasks(tiny_processor(images=False), ["niah_single"], plan)
    with pytest.raises(UserError, match="mm_order_text needs pictures"):
        long_tasks(tiny_processor(images=False), ["mm_order_text"], plan)


@pytest.mark.parametrize(
    ("name", "length", "part"),
    [
        ("niah_singel", 3000, "the nearest is 'niah_single'"),
        ("niah_single", 64, "long/niah_single@64: 64 tokens are too few"),
        ("common_words", 300, "hold about"),
        ("frequent_words", 150, "long/frequent_words@150: 150 tokens are too few"),
        ("mm_count_image", 256, "long/mm_count_image@256: 256 tokens are too few"),
    ],
)
def test_what_cannot_be_asked(name, length, part):
    with pytest.raises(UserError, match=part):
        questions_of(name, lengths=[length])


def test_lengths_and_depths_from_the_command_line():
    assert read_lengths("16k, 1k,1000,1K") == [1000, 1024, 16384]
    assert read_depths("1") == [0.5]
    assert read_depths("5") == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert read_depths("0.5,0") == [0.0, 0.5]
    assert [length_name(length) for length in (4096, 131072, 1000)] == ["4k", "128k", "1000"]


@pytest.mark.parametrize(
    ("read", "text"),
    [
        *((read_lengths, text) for text in ("", "4kb", "0", "-1k", "1.5k")),
        *((read_depths, text) for text in ("", "0", "-1", "2.5", "a", "0,2", "nan")),
    ],
)
def test_lengths_and_depths_that_are_none(read, text):
    with pytest.raises(UserError, match=r"--lengths|--depths"):
        read(text)


def test_a_drawing_is_made_when_it_is_called():
    _, questions = questions_of("mm_retrieve_image")
    picture = next(p["image"] for p in questions[0].messages[0]["content"] if "image" in p)
    assert isinstance(picture, Drawing)
    assert picture()[:8] == b"\x89PNG\r\n\x1a\n"
    assert picture() == picture()


@pytest.mark.parametrize("length", [186, 188, 190])  # the first question of each would fit
def test_a_length_that_some_question_exceeds_is_refused_before_anything_is_asked(length):
    with pytest.raises(UserError, match="too few, its question and needles alone take"):
        long_tasks(tiny_processor(), ["niah_single"], Plan([length], (0.5,), 3))


def test_a_length_that_the_longest_question_fills_holds_all():
    (task,) = long_tasks(tiny_processor(), ["niah_single"], Plan([194], (0.5,), 3))
    assert all(question.details["tokens"] <= 194 for question in task.load(None))
