"""easy-VQA (Zhou 2019, MIT): 5,000 pictures of one coloured shape, 48,248 questions.

The pictures come with the pip package `easy-vqa`. One sample is one picture with all its
questions as the turns of one conversation; the turns are marked independent, so that training may
shuffle them and an evaluation may ask each alone. The official split is kept apart in `train-*`
and `test-*`.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from conceptmoe_vl.errors import UserError
from data_pipelines.writing import new_folder, write_manifest, write_shards

NAME = "easy_vqa"

Sample = tuple[str, dict, list[tuple[str, bytes]]]


def build(out: Path, samples_per_shard: int = 1000, force: bool = False) -> dict[str, Any]:
    """Writes the shards of both splits and the manifest.

    Raises:
        UserError: the package is missing or incomplete, or `out` cannot be used.
    """
    package = _package()
    splits = {
        "train": (package.get_train_questions(), package.get_train_image_paths()),
        "test": (package.get_test_questions(), package.get_test_image_paths()),
    }
    manifest: dict[str, Any] = {
        "source": NAME,
        "license": "MIT, Copyright (c) 2019 Victor Zhou",
        "splits": {},
    }
    with new_folder(out, force) as folder:
        for split, (questions, paths) in splits.items():
            samples = _samples(split, questions, paths)
            shards = write_shards(folder, split, samples, samples_per_shard)
            manifest["splits"][split] = {
                "samples": sum(shard["samples"] for shard in shards),
                "questions": len(questions[0]),
                "shards": shards,
            }
        write_manifest(folder, manifest)
    return manifest


def _package() -> Any:
    try:
        import easy_vqa
    except ImportError as error:
        raise UserError(
            "building easy_vqa needs its pictures: pip install easy-vqa (or conceptmoe-vl[eval])"
        ) from error
    return easy_vqa


def _samples(split: str, questions: Any, paths: dict[int, str]) -> Iterator[Sample]:
    """Samples in the order of the pictures' numbers; questions keep the package's order."""
    by_image: dict[int, list[tuple[str, str]]] = collections.defaultdict(list)
    for text, answer, image in zip(*questions, strict=True):
        by_image[image].append((text, answer))
    for image in sorted(by_image):
        if image not in paths:
            raise UserError(f"easy-vqa has no {split} picture {image}; install the package again")
        yield (
            f"{split}{image:06d}",
            _record(by_image[image]),
            [("png", Path(paths[image]).read_bytes())],
        )


def _record(pairs: list[tuple[str, str]]) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    for text, answer in pairs:
        messages += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
    messages[0]["content"] = [{"type": "image"}, {"type": "text", "text": pairs[0][0]}]
    return {"messages": messages, "source": NAME, "independent_turns": True}
