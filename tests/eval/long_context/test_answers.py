"""Answers to every task: what scores nothing, and in which forms right keys are read."""

from __future__ import annotations

import json
import re
import string

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data_pipelines.sources.scene_drawing import COLORS
from eval.long_context.family import GENERATORS, Plan, long_tasks
from eval.long_context.image_tasks import FIGURES
from eval.long_context.keys import listed
from eval.long_context.prompt import document_of
from eval.long_context.words import ADJECTIVES, NOUNS
from tests.eval.long_context.processors import tiny_processor

_FEW = settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck))
SEEDS = st.integers(0, 10**9)
LISTINGS = (
    "",
    "none",
    string.digits,
    " ".join(string.digits),
    ", ".join(string.digits),
    ", ".join(string.digits[1:]),
    ", ".join(reversed(string.digits)),
    ", ".join(map(str, range(100))),
    ", ".join(COLORS),
    ", ".join(FIGURES),
    " ".join(ADJECTIVES + NOUNS),
    ", ".join(NOUNS),
    ", ".join(f"{adjective}-{noun}" for adjective in ADJECTIVES for noun in NOUNS),
    string.ascii_uppercase,
)


def asked(name, seed, length=3000):
    """The score of an answer to each of a task's questions, and the questions."""
    plan = Plan([length], (0.0, 0.5, 1.0), samples=1, seed=seed)
    (task,) = long_tasks(tiny_processor(), [name], plan)
    questions = list(task.load(None))
    return lambda answer, question: task.score(task.parse(answer, question), question), questions


@pytest.mark.parametrize("name", GENERATORS)
@_FEW
@given(seed=SEEDS)
def test_repeating_the_prompt_scores_nothing(name, seed):
    grade, questions = asked(name, seed)
    for question in questions:
        prompt = question.text
        closing = prompt[prompt.rindex("\n\nQuestion:") :]
        sentences = re.split(r"(?<=\.) ", prompt)
        answers = [prompt, closing, closing * 2, *("".join(sentences[-n:]) for n in range(1, 9))]
        # Whatever length it is cut to: beyond 1,200 characters no answer is read any more.
        answers += [prompt[:end] for end in range(1, 1200, 13)]
        answers += [prompt[-start:] for start in range(1, 1200, 7)]
        assert not any(grade(answer, question) for answer in answers)


@pytest.mark.parametrize("name", GENERATORS)
@_FEW
@given(seed=SEEDS, length=st.integers(200, 260))
def test_a_piece_of_the_document_scores_nothing(name, seed, length):
    grade, questions = asked(name, seed)
    for question in questions:
        prompt = question.text
        found = [prompt.find(key) for key in question.details["wanted"]]
        starts = {start for place in found for start in range(place - length, place + 1, 23)}
        starts |= set(range(0, len(prompt), 101))
        for start in starts:
            piece = prompt[max(start, 0) :][:length]
            assert grade(piece, question) == 0.0, piece


@pytest.mark.parametrize("name", GENERATORS)
@_FEW
@given(seed=SEEDS)
def test_listings_score_nothing(name, seed):
    grade, questions = asked(name, seed)
    for question in questions:
        content = question.messages[0]["content"]
        found = [part["image"].name for part in content if "image" in part] + re.findall(
            r"[0-9a-f]{8}-[0-9a-f-]{27}|\d{4,}|[a-z]+-[a-z]+|[A-Z]{6}|\d", question.text
        )
        candidates = (" ".join(found), ", ".join(dict.fromkeys(found)))
        assert not any(grade(answer, question) for answer in (*LISTINGS, *candidates))


def needles_of(question):
    """The needles' own sentences, in the words of the document; the keys where it has none."""
    sentences = re.findall(r"(?:The special|VAR) [^.]*\.", document_of(question.text))
    keys = question.details["wanted"]
    own = [one for one in sentences if re.split(" |=", one.rstrip("."))[-1] in keys]
    if question.details["shape"] == "coded word":
        own = [one for one in sentences if one.split()[1] in keys]
    return " ".join(own) if own and not question.details["control"] else listed(keys)


@pytest.mark.parametrize("name", GENERATORS)
@_FEW
@given(seed=SEEDS)
def test_right_keys_score_in_all_their_forms(name, seed):
    grade, questions = asked(name, seed)
    for question in questions:
        keys = question.details["wanted"]
        for answer in (
            question.references[0],
            listed(keys),
            " ".join(keys),
            "\n".join(keys),
            f"The magic word is {listed(keys)}.",
            f"**{listed(keys)}**",
            ", ".join(f"**{key}**" for key in keys),
            ", ".join(f"_{key}_" for key in keys),
            ", ".join(f"`{key}`" for key in keys),
            "Sure! The answer is:\n" + "\n".join(f"- {key}" for key in keys) + "\n",
            "Here they are:\n\n" + "\n".join(f"{n}. {key}" for n, key in enumerate(keys, 1)),
            "\n".join(f"{n}) **{key}**" for n, key in enumerate(keys, 1)),
            json.dumps(keys),
            f"```json\n{json.dumps({'answer': keys}, indent=2)}\n```",
            json.dumps({f"key {chr(97 + n)}": key for n, key in enumerate(keys)}),
            needles_of(question),
            "\n".join(f"The one of tranquil things asked for is {key}." for key in keys),
            f"Based on the text above, the answer to the question is {listed(keys)}. Let me know "
            "if there is anything else that I can look up for you!",
        ):
            assert grade(answer, question) == 1.0, answer


@pytest.mark.parametrize("name", [name for name in GENERATORS if "order" not in name])
def test_the_examples_before_and_behind_the_document_are_as_many_keys_all_wrong(name):
    grade, questions = asked(name, 0)
    for question in questions:
        example = re.search(r"\n\nExample of an answer: (.*)\n\nQuestion: .*", question.text)[1]
        assert len(example.split(", ")) == len(question.details["wanted"])
        assert all(key in question.text.partition("\n\n")[0] for key in example.split(", "))
        assert grade(example, question) == 0.0
        assert grade(f"{example}, {question.references[0]}", question) == 0.0
