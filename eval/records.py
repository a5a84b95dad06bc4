"""Conversations of shards, cut into questions that can be asked alone."""

from __future__ import annotations

import functools
import glob
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from conceptmoe_vl.errors import UserError
from conceptmoe_vl.prompts import Picture, Turn
from data_pipelines.records import RecordError, pick_questions, read_record
from data_pipelines.shards import IndexedSample, ShardReader, index_shards
from data_pipelines.writing import MANIFEST
from eval.tasks import Image, Question


def load_questions(
    folder: Path, split: str, kind_of: Callable[[list[str]], str], build: str
) -> list[Question]:
    """All questions of the shards `folder/split-*.tar`, in the shards' order.

    Their images are read when they are asked for.

    Args:
        kind_of: references -> the group that the report lists the question under.
        build: what `python -m data_pipelines build` calls this data, for the error message.

    Raises:
        UserError: there are no such shards, one is cut off, or a record is damaged; names the shard
            and the key. Nothing is skipped.
    """
    if not any(folder.glob(f"{split}-*.tar")):
        raise UserError(
            f"there are no shards '{folder}/{split}-*.tar'; make them with "
            f"python -m data_pipelines build {build} {folder}, or name their folder with --data"
        )
    index = index_shards([f"{glob.escape(str(folder))}/{split}-*.tar"])
    for shard, fault in index.damaged.items():
        raise UserError(f"shard '{shard}' cannot be used: {fault}; build it again")
    reader = ShardReader()
    questions: list[Question] = []
    for sample in index.samples:
        try:
            questions += _questions_of(sample, reader, kind_of)
        except RecordError as error:
            raise UserError(f"record '{sample.key}' of '{sample.shard}': {error}") from error
    _check_manifest(folder / MANIFEST, split, len(questions))
    keys = {question.key for question in questions}
    if len(keys) != len(questions):
        raise UserError(
            f"'{folder}' holds {len(questions) - len(keys)} questions twice; build the shards again"
        )
    return questions


def _check_manifest(path: Path, split: str, count: int) -> None:
    """A shard that was left behind in copying must not make the test set smaller unseen."""
    if not path.is_file():
        return
    try:
        expected = json.loads(path.read_text(encoding="utf-8"))["splits"][split]["questions"]
    except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise UserError(f"'{path}' is no manifest ({error!r}); build the shards again") from error
    if count != expected:
        raise UserError(
            f"'{path}' promises {expected} {split} questions, the shards hold {count}; "
            "copy or build all of them"
        )


def _questions_of(
    sample: IndexedSample, reader: ShardReader, kind_of: Callable[[list[str]], str]
) -> Iterator[Question]:
    """A record's questions, each beside the record's images and no other question or answer."""
    if sample.repeated:
        raise RecordError("bad_field", f"the members {list(sample.repeated)} are there twice")
    conversation = read_record(reader.read(sample, "json"), sample.members, "")
    images = {
        name: functools.partial(reader.read, sample, name) for name in conversation.image_members
    }
    users = sum(turn.role == "user" for turn in conversation.turns)
    answers = sum(turn.role == "assistant" for turn in conversation.turns)
    if users != answers:
        raise RecordError("no_answer", f"{users} questions have {answers} answers")
    if users > 1 and not conversation.independent:
        raise RecordError(
            "bad_field",
            f"{users} questions that may build on each other cannot be asked alone; if each can, "
            "set 'independent_turns'",
        )
    for number in range(users):
        *asked, answer = pick_questions(conversation, [number]) if users > 1 else conversation.turns
        references = ["".join(str(part) for part in answer.parts)]
        messages = [_to_message(turn, images) for turn in asked]
        yield Question(f"{sample.key}#{number}", messages, references, kind_of(references))


def _to_message(turn: Turn, images: Mapping[str, Image]) -> dict[str, Any]:
    content = [
        {"type": "image", "image": images[part.image]}
        if isinstance(part, Picture)
        else {"type": "text", "text": part}
        for part in turn.parts
    ]
    return {"role": turn.role, "content": content}
