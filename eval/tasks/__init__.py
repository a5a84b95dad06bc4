"""What can be evaluated. A task is a small description; runner and report serve them all.

A module of this package defines `TASK`, or several as `TASKS`; `all_tasks` finds it by itself.
"""

from __future__ import annotations

import difflib
import importlib
import math
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from conceptmoe_vl.errors import UserError

Image = bytes | str | Path | Callable[[], bytes]
"""An encoded file, its path, or a function that gives its bytes. The function is called just before
the question is asked, so that the images of a large set are never in memory together."""

Mode = Literal["generate", "choose", "perplexity"]


@dataclass(frozen=True)
class Question:
    """One question, asked alone.

    Fields:
        key: unique within the task; of shards the record's key and the question's number in it.
        messages: what the model is given, no earlier answer; image parts hold an `Image`.
        references: answers that count as right.
        kind: the group that the report lists it under.
        choices: options; in mode `choose` the continuations whose log-likelihoods are compared.
        details: what `score` and `metrics` need beyond the references (boxes, depth, length). JSON
            alone; written to `samples.jsonl`. Questions with one `cluster` (an image with several
            questions) are resampled together.
    """

    key: str
    messages: list[dict[str, Any]]
    references: Sequence[str]
    kind: str = ""
    choices: Sequence[str] = ()
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The last turn's words."""
        if not self.messages:
            return ""
        content = self.messages[-1]["content"]
        if isinstance(content, str):
            return content
        return "".join(part["text"] for part in content if part["type"] == "text")


@dataclass(frozen=True)
class Scored:
    """A question with what was read from the answer, and its score from 0 to 1.

    Fields:
        score_normalised: in mode `choose` the score of the choice with the highest log-likelihood
            per character; None otherwise.
        log_likelihoods: in mode `choose` and `perplexity` (log-likelihood in nats, tokens) of each
            choice or of the text.
    """

    question: Question
    parsed: str
    score: float
    score_normalised: float | None = None
    log_likelihoods: Sequence[tuple[float, int]] = ()


@dataclass(frozen=True)
class RatioOfSums:
    """Figures that are each a ratio of two sums over the samples: means, precision, perplexity.

    As `Task.metrics` it is resampled by sums alone, which is a thousand times faster than calling a
    function again for every resample. Sums are exact (`math.fsum`), whatever the order.

    Fields:
        parts: sample -> numerator and denominator of each figure, the same names for every sample.
        transform: what is done with the ratios, a numpy function such as `numpy.exp`.
    """

    parts: Callable[[Scored], dict[str, tuple[float, float]]]
    transform: Callable[[Any], Any] | None = None

    def __call__(self, samples: Sequence[Scored]) -> dict[str, float]:
        """The figures; NaN where a denominator is 0."""
        parts = [self.parts(sample) for sample in samples]
        figures = {}
        for name in parts[0]:
            top, bottom = (math.fsum(part[name][i] for part in parts) for i in (0, 1))
            ratio = top / bottom if bottom else math.nan
            figures[name] = ratio if self.transform is None else float(self.transform(ratio))
        return figures


def _score_parts(sample: Scored) -> dict[str, tuple[float, float]]:
    parts = {"accuracy": (sample.score, 1.0)}
    if sample.score_normalised is not None:
        parts["accuracy_normalised"] = (sample.score_normalised, 1.0)
    return parts


mean_score = RatioOfSums(_score_parts)
"""The mean of the scores as `accuracy`; in mode `choose` also `accuracy_normalised`."""


def _perplexity_parts(sample: Scored) -> dict[str, tuple[float, float]]:
    text = sample.question.references[0]
    ((total, tokens),) = sample.log_likelihoods
    return {
        "perplexity": (-total, tokens),
        "word_perplexity": (-total, len(text.split())),
        "byte_perplexity": (-total, len(text.encode())),
    }


mean_perplexity = RatioOfSums(_perplexity_parts, np.exp)
"""Of mode `perplexity`: exp of the negative log-likelihood of all texts by token, by word (what
stands between blanks) and by byte of UTF-8; the last two do not depend on the tokenizer."""


@dataclass(frozen=True)
class Task:
    """How one data set is evaluated.

    Fields:
        name: what `--tasks` takes.
        description: one line for the report.
        default_data: folder that is read when `--data` is not given.
        load: folder -> questions, in a fixed order. Raises `UserError` where a record is damaged:
            an evaluation leaves nothing out.
        parse: (answer text, question) -> what is scored and written down as `parsed`; "" where the
            model abstained or nothing can be read from the answer: such answers are counted.
        score: (parsed, question) -> score, 0 to 1.
        max_new_tokens: longest answer, in tokens.
        mode: answers are generated; or the choice with the highest log-likelihood is the answer; or
            only the log-likelihood of a text is taken.
        stop: strings that end an answer; the answer ends before them.
        metrics: samples (at least one) -> the data set's figures, the first of them the headline. A
            pure function of the samples, in any number: the bootstrap resamples them.
        official_size: questions of the official test set; another count is reported beside the
            score, as the score is then no official one.
        shares_prefixes: whether questions share images or examples; False: each prompt is computed
            in one pass.
        scoring: JSON, for `results.json`: what parse and score were made from, if not from code.
    """

    name: str
    description: str
    default_data: str
    load: Callable[[Path], Sequence[Question]]
    parse: Callable[[str, Question], str]
    score: Callable[[str, Question], float]
    max_new_tokens: int
    mode: Mode = "generate"
    stop: tuple[str, ...] = ()
    metrics: Callable[[Sequence[Scored]], dict[str, float]] = mean_score
    official_size: int | None = None
    shares_prefixes: bool = True
    scoring: Mapping[str, Any] = field(default_factory=dict)


def all_tasks() -> dict[str, Task]:
    """The tasks of this package's modules by their names, in the order of the names."""
    found: dict[str, Task] = {}
    for module_info in pkgutil.iter_modules(__path__, f"{__name__}."):
        module = importlib.import_module(module_info.name)
        own = [module.TASK] if hasattr(module, "TASK") else getattr(module, "TASKS", [])
        found |= {task.name: task for task in own}
    return dict(sorted(found.items()))


def get_tasks(names: str) -> list[Task]:
    """Tasks by their names or by the YAML files that describe them, separated by commas.

    Raises:
        UserError: a name is unknown; names the nearest one and all of them. A file cannot be used,
            or two tasks have one name.
    """
    from eval.described import read_task

    known = all_tasks()
    chosen: dict[str, tuple[str, Task]] = {}
    for name in filter(None, (part.strip() for part in names.split(","))):
        if name.endswith((".yaml", ".yml")):
            task = read_task(Path(name))
        elif name in known:
            task = known[name]
        else:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
            raise UserError(
                f"--tasks: unknown task '{name}'; the nearest is '{near}', all: "
                f"{', '.join(known)}, or YAML files"
            )
        before = chosen.setdefault(task.name, (name, task))[0]
        if before != name:
            raise UserError(
                f"--tasks: '{before}' and '{name}' are both named '{task.name}'; give one of them "
                "another name"
            )
    if not chosen:
        raise UserError(f"--tasks names no task; choose among: {', '.join(known)}, or YAML files")
    return [task for _, task in chosen.values()]
