"""Conversations of shards, cut into questions that can be asked alone."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from conceptmoe_vl.errors import UserError
from eval.tasks import Question


def load_questions(
    folder: Path, split: str, kind_of: Callable[[list[str]], str], build: str
) -> list[Question]:
    """All questions of the shards `folder/split-*.tar`, in the shards' order.

    Args:
        kind_of: references -> the group that the report lists the question under.
        build: what `python -m data_pipelines build` calls this data, for the error message.

    Raises:
        UserError: there are no such shards, one is cut off, or a record is damaged; names the shard
            and the key. Nothing is skipped.
    """
    shards = sorted(folder.glob(f"{split}-*.tar"))
    if not shards:
        raise UserError(
            f"there are no shards '{folder}/{split}-*.tar'; make them with "
            f"python -m data_pipelines build {build} {folder}, or name their folder with --data"
        )
    questions: list[Question] = []
    for shard in shards:
        for key, members in read_shard(shard):
            questions += questions_of(shard, key, members, kind_of)
    keys = {question.key for question in questions}
    if len(keys) != len(questions):
        raise UserError(
            f"'{folder}' holds {len(questions) - len(keys)} questions twice; build the shards again"
        )
    return questions


def read_shard(shard: Path) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Records of a tar in their order: key and members by extension.

    Raises:
        UserError: the tar cannot be read to its end.
    """
    records: dict[str, dict[str, bytes]] = {}
    try:
        with tarfile.open(shard) as tar:
            for member in tar:
                if member.isfile():
                    key, _, extension = member.name.partition(".")
                    file = tar.extractfile(member)
                    records.setdefault(key, {})[extension] = file.read() if file else b""
    except (tarfile.TarError, OSError, EOFError) as error:
        raise UserError(f"shard '{shard}' cannot be read ({error}); build it again") from error
    yield from records.items()


def questions_of(
    shard: Path, key: str, members: dict[str, bytes], kind_of: Callable[[list[str]], str]
) -> Iterator[Question]:
    """A record's questions, each with the images that came before it and no earlier answer."""
    where = f"shard '{shard}', record '{key}'"
    images = _images_in_order(members)
    seen = 0
    asked: str | None = None
    number = 0
    for message in _messages(where, members):
        role, (text, placeholders) = message["role"], _text_and_placeholders(where, message)
        if role == "user":
            seen += placeholders
            asked = text
        elif role == "assistant":
            if asked is None:
                raise UserError(f"{where}: an answer stands before any question")
            if seen > len(images):
                raise UserError(f"{where}: {seen} image placeholders, but {len(images)} images")
            references = [text]
            yield Question(f"{key}#{number}", images[:seen], asked, references, kind_of(references))
            asked, number = None, number + 1
    if number == 0 or asked is not None:
        raise UserError(f"{where}: a question has no answer")
    if seen != len(images):
        raise UserError(f"{where}: {seen} image placeholders, but {len(images)} images")


def _images_in_order(members: dict[str, bytes]) -> list[bytes]:
    """Members `imgN.EXT` by their number."""
    numbered = []
    for extension, data in members.items():
        name = extension.partition(".")[0]
        if name.startswith("img") and name[3:].isdigit():
            numbered.append((int(name[3:]), data))
    return [data for _, data in sorted(numbered)]


def _messages(where: str, members: dict[str, bytes]) -> list[dict[str, Any]]:
    if "json" not in members:
        raise UserError(f"{where}: there is no member '.json'; build the shards again")
    try:
        messages = json.loads(members["json"])["messages"]
    except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise UserError(f"{where}: the member '.json' has no 'messages' ({error!r})") from error
    if not (
        isinstance(messages, list) and all(isinstance(m, dict) and "role" in m for m in messages)
    ):
        raise UserError(f"{where}: 'messages' is no list of messages with roles")
    return messages


def _text_and_placeholders(where: str, message: dict[str, Any]) -> tuple[str, int]:
    content = message.get("content")
    if isinstance(content, str):
        return content, 0
    if not (isinstance(content, list) and all(isinstance(part, dict) for part in content)):
        raise UserError(f"{where}: a message's content is neither text nor a list of parts")
    texts = [str(part.get("text", "")) for part in content if part.get("type") == "text"]
    return "".join(texts), sum(part.get("type") == "image" for part in content)
