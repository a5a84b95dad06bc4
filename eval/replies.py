"""What the model made of each question, kept on disk: the journal of an evaluation and its cache.

An evaluation that was killed goes on from the replies written already, and one that is started
again with the same model, questions and settings asks nothing anew.

    OUTPUT/replies/MODEL/RANK.jsonl     one line a reply: {"key": sha256, "reply": {...}}

MODEL is the start of a checksum over the files of the model, the sources of `conceptmoe_vl`, the
versions of the libraries, device type, dtype and compression. A line's key is a checksum over the
question as it is asked: messages with the checksums of their images, choices, mode, and what ends
an answer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conceptmoe_vl.errors import UserError
from conceptmoe_vl.files import sha256_of
from eval.tasks import Image, Question, Task


@dataclass(frozen=True)
class Reply:
    """What came of one question.

    Fields:
        text, raw, prompt, prompt_tokens, answer_tokens: as in `conceptmoe_vl.asking.Answer`; of
            choices and texts, whose likelihood alone is taken, `text` and `raw` are empty.
        tokens, concepts: of the prompt, by modality.
        log_likelihoods: (nats, tokens) of each choice, or of the text.
    """

    text: str
    raw: str
    prompt: str
    prompt_tokens: int
    answer_tokens: int
    tokens: Mapping[str, int] = field(default_factory=dict)
    concepts: Mapping[str, int] = field(default_factory=dict)
    log_likelihoods: tuple[tuple[float, int], ...] = ()

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Reply:
        """Raises `KeyError`, `TypeError` or `ValueError` where the values are no reply's."""
        pairs = tuple((float(total), int(count)) for total, count in values["log_likelihoods"])
        return cls(**{**values, "log_likelihoods": pairs})


class ReplyStore:
    """Replies by key; every new one is on disk before the next question is asked.

    Args:
        folder: of one model and its settings; made when the first reply is added.
        rank: of this process; each writes a file of its own, and reads those of all.
        reuse: read what is there. Otherwise every question is asked, and replies are added.
    """

    def __init__(self, folder: Path, rank: int = 0, reuse: bool = True) -> None:
        self._path = folder / f"{rank}.jsonl"
        self._replies: dict[str, Reply] = {}
        for path in sorted(folder.glob("*.jsonl")) if reuse else ():
            self._read(path)
        self._file: int | None = None

    def _read(self, path: Path) -> None:
        for line in path.read_bytes().splitlines():
            # A line that a killed process did not finish is a question not asked yet.
            with contextlib.suppress(ValueError, KeyError, TypeError):
                row = json.loads(line)
                self._replies[row["key"]] = Reply.from_json(row["reply"])

    def get(self, key: str) -> Reply | None:
        return self._replies.get(key)

    def add(self, key: str, reply: Reply) -> None:
        """Raises `UserError` where the file cannot be written."""
        row = {"key": key, "reply": dataclasses.asdict(reply)}
        try:
            if self._file is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
                os.write(self._file, b"\n")  # behind a line that was not finished
            line = (json.dumps(row, ensure_ascii=False) + "\n").encode()
            if os.write(self._file, line) != len(line):
                raise OSError("the disk is full")
        except OSError as error:
            raise UserError(
                f"a reply cannot be written to '{self._path}' ({error}); make room there, or name "
                "another folder with --output"
            ) from error
        self._replies[key] = reply

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def checksum(value: Any) -> str:
    """sha256 of a JSON value, in hexadecimal digits."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def folder_checksum(folder: Path, pattern: str = "*") -> str:
    """Checksum over names and contents of a folder's files, hidden ones left out."""
    files = [path for path in folder.glob(pattern) if path.is_file() and path.name[0] != "."]
    names = {path.relative_to(folder).as_posix(): path for path in files}
    return checksum({name: sha256_of(path) for name, path in names.items()})


class ImageChecksums:
    """Checksums of images, those of the latest ones kept: questions about one image are neighbours.

    A path is known again by what the file system says of it; a function by being equal, so that
    functions that read one file should be. For one evaluation: the next one reads anew.
    """

    def __init__(self, most: int = 1024) -> None:
        self._of_file = functools.lru_cache(most)(lambda path, *state: sha256_of(path))
        self._of_made = functools.lru_cache(most)(lambda make: _checksum_of(make()))

    def __call__(self, image: Image) -> str:
        """Raises `OSError` or `UserError` where it cannot be read."""
        if isinstance(image, (str, Path)):
            state = os.stat(image)
            return self._of_file(
                str(image), state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns
            )
        return self._of_made(image) if callable(image) else _checksum_of(image)


def _checksum_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def question_key(
    task: Task, question: Question, checksum_of: Callable[[Image], str] | None = None
) -> str:
    """Checksum over all of a question that can change the reply.

    Args:
        checksum_of: of an image; an `ImageChecksums` reads those that questions share once.

    Raises:
        UserError: an image cannot be read; names the question.
    """
    text = question.references[:1] if task.mode == "perplexity" else []
    checksum_of = checksum_of or ImageChecksums()
    return checksum(
        {
            "messages": [
                _with_checksums(message, question, checksum_of) for message in question.messages
            ],
            "choices": list(question.choices),
            "text": list(text),
            "mode": task.mode,
            "max_new_tokens": task.max_new_tokens,
            "stop": list(task.stop),
            "shares_prefixes": task.shares_prefixes,
        }
    )


def _with_checksums(
    message: dict[str, Any], question: Question, checksum_of: Callable[[Image], str]
) -> dict[str, Any]:
    content = message["content"]
    if isinstance(content, str):
        return message
    parts = [
        {"type": "image", "image": _image_checksum(part["image"], question, checksum_of)}
        if part["type"] == "image"
        else part
        for part in content
    ]
    return {**message, "content": parts}


def _image_checksum(image: Image, question: Question, checksum_of: Callable[[Image], str]) -> str:
    try:
        return checksum_of(image)
    except (OSError, UserError) as error:
        raise UserError(
            f"question '{question.key}' cannot be asked: an image cannot be read ({error}); check "
            "the files of the data"
        ) from error
