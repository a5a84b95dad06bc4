"""What can be evaluated. A task is a small description; runner and report serve them all."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conceptmoe_vl.errors import UserError


@dataclass(frozen=True)
class Question:
    """One question, asked alone.

    Fields:
        key: unique within the task; the record's key and the question's number in it.
        messages: what the model is given: images as encoded files, no earlier answer.
        references: answers that count as right.
        kind: the group that the report lists it under.
    """

    key: str
    messages: list[dict[str, Any]]
    references: Sequence[str]
    kind: str

    @property
    def text(self) -> str:
        """The last turn's words."""
        parts = self.messages[-1]["content"]
        return "".join(part["text"] for part in parts if part["type"] == "text")


@dataclass(frozen=True)
class Task:
    """How one data set is evaluated.

    Fields:
        name: what `--tasks` takes.
        description: one line for the report.
        default_data: folder that is read when `--data` is not given.
        load: folder -> questions, in a fixed order. Raises `UserError` where a record is damaged:
            an evaluation leaves nothing out.
        parse: answer text -> what is scored and written down as `parsed`.
        score: (parsed, references) -> score, 0 or 1.
        max_new_tokens: longest answer, in tokens.
        official_size: questions of the official test set; another count is reported beside the
            score, as the score is then no official one.
    """

    name: str
    description: str
    default_data: str
    load: Callable[[Path], list[Question]]
    parse: Callable[[str], str]
    score: Callable[[str, Sequence[str]], float]
    max_new_tokens: int
    official_size: int | None = None


def all_tasks() -> dict[str, Task]:
    from eval.tasks import easy_vqa

    return {task.name: task for task in (easy_vqa.TASK,)}


def get_tasks(names: str) -> list[Task]:
    """Tasks by their names, separated by commas.

    Raises:
        UserError: a name is unknown; names the nearest one and all of them.
    """
    known = all_tasks()
    chosen: dict[str, Any] = {}
    for name in filter(None, (part.strip() for part in names.split(","))):
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
            raise UserError(
                f"--tasks: unknown task '{name}'; the nearest is '{near}', all: {', '.join(known)}"
            )
        chosen[name] = known[name]
    if not chosen:
        raise UserError(f"--tasks names no task; choose among: {', '.join(known)}")
    return list(chosen.values())
