"""easy-VQA (Zhou 2019, MIT): 5,000 pictures of one coloured shape, 48,248 questions.

The pictures come with the pip package `easy-vqa`. One sample is one picture with all its
questions as the turns of one conversation; the turns are marked independent, so that training may
shuffle them and an evaluation may ask each alone. The official split is kept apart in `train-*`
and `test-*`.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from conceptmoe_vl.errors import UserError
from data_pipelines.building import Made, Recipe

NAME = "easy_vqa"

_Item = tuple[str, list[tuple[str, str]], str]  # key, questions with answers, path of the picture


def recipe() -> Recipe:
    """Both official splits.

    Raises:
        UserError: the package is missing or incomplete.
    """
    package = _package()
    train = (package.get_train_questions(), package.get_train_image_paths())
    test = (package.get_test_questions(), package.get_test_image_paths())
    return Recipe(
        manifest={"source": NAME, "license": "MIT, Copyright (c) 2019 Victor Zhou"},
        splits={
            "train": partial(_items, "train", *train),
            "test": partial(_items, "test", *test),
        },
        make=_make,
        name=lambda item: item[0],
    )


def _package() -> Any:
    try:
        import easy_vqa
    except ImportError as error:
        raise UserError(
            "building easy_vqa needs its pictures: pip install easy-vqa (or conceptmoe-vl[eval])"
        ) from error
    return easy_vqa


def _items(split: str, questions: Any, paths: dict[int, str]) -> Iterator[_Item]:
    """Samples in the order of the pictures' numbers; questions keep the package's order."""
    by_image: dict[int, list[tuple[str, str]]] = collections.defaultdict(list)
    for text, answer, image in zip(*questions, strict=True):
        by_image[image].append((text, answer))
    for image in sorted(by_image):
        if image not in paths:
            raise UserError(f"easy-vqa has no {split} picture {image}; install the package again")
        yield f"{split}{image:06d}", by_image[image], paths[image]


def _make(item: _Item) -> Made:
    key, pairs, path = item
    picture = ("png", Path(path).read_bytes())
    return Made(key, _record(pairs), [picture], {"questions": len(pairs)})


def _record(pairs: list[tuple[str, str]]) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    for text, answer in pairs:
        messages += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
    messages[0]["content"] = [{"type": "image"}, {"type": "text", "text": pairs[0][0]}]
    return {"messages": messages, "source": NAME, "independent_turns": True}
