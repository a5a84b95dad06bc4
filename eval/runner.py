"""Asks a task's questions, or takes likelihoods, and counts how far each prompt was compressed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from conceptmoe_vl.asking import Answer, make_answer
from conceptmoe_vl.continuous_batching import RequestError, generate_all, log_likelihoods
from conceptmoe_vl.errors import UserError
from conceptmoe_vl.prefixes import PrefixCache
from eval.replies import ImageChecksums, Reply, ReplyStore, question_key
from eval.tasks import Question, Scored, Task

MODALITIES = ("image", "text")
_Unanswered = Iterator[tuple[str, Question]]  # keys and questions, each looked at when it is due


@dataclass(frozen=True)
class Sample:
    """One question with all that came of it; a line of `samples.jsonl`."""

    question: Question
    reply: Reply
    parsed: str
    score: float
    score_normalised: float | None = None

    @property
    def scored(self) -> Scored:
        pairs = self.reply.log_likelihoods
        return Scored(self.question, self.parsed, self.score, self.score_normalised, pairs)

    def to_row(self) -> dict[str, Any]:
        return {
            "key": self.question.key,
            "kind": self.question.kind,
            "question": self.question.text,
            "prompt": self.reply.prompt,
            "prompt_tokens": self.reply.prompt_tokens,
            "tokens": dict(self.reply.tokens),
            "concepts": dict(self.reply.concepts),
            "raw": self.reply.raw,
            "parsed": self.parsed,
            "references": list(self.question.references),
            "choices": list(self.question.choices),
            "log_likelihoods": [list(pair) for pair in self.reply.log_likelihoods],
            "score": self.score,
            "score_normalised": self.score_normalised,
            "details": dict(self.question.details),
        }


def to_sample(task: Task, question: Question, reply: Reply) -> Sample:
    """The reply read and scored.

    A choice is the one with the highest log-likelihood, of equal ones the first. The second score
    is that of the choice with the highest log-likelihood per character. Of a text the score is the
    geometric mean of its tokens' probabilities.
    """
    if task.mode == "generate":
        parsed = task.parse(reply.text, question)
        return Sample(question, reply, parsed, task.score(parsed, question))
    if task.mode == "perplexity":
        ((total, tokens),) = reply.log_likelihoods
        return Sample(question, reply, f"{math.exp(-total / tokens):.6g}", math.exp(total / tokens))
    totals = [total for total, _ in reply.log_likelihoods]
    per_character = [
        total / len(choice) for total, choice in zip(totals, question.choices, strict=True)
    ]
    parsed, normalised = (
        task.parse(question.choices[values.index(max(values))], question)
        for values in (totals, per_character)
    )
    return Sample(
        question, reply, parsed, task.score(parsed, question), task.score(normalised, question)
    )


def count_by_modality(
    model: Any, ids_T: Tensor, boundary_T: Tensor
) -> tuple[dict[str, int], dict[str, int]]:
    """Tokens and concepts of a prompt. Boundaries that are forced (document starts, image marks)
    count, as they do in training.
    """
    is_image = ids_T == (-1 if model.config.vision is None else model.config.image_token_id)
    chosen = dict(zip(MODALITIES, (is_image, ~is_image), strict=True))
    return (
        {name: int(part.sum()) for name, part in chosen.items()},
        {name: int(boundary_T[part].sum()) for name, part in chosen.items()},
    )


@dataclass
class Asked:
    """The replies to questions, in their order, and how much work they were.

    Fields:
        keys: checksums of the questions as they were asked.
        new: replies that were not in the store. seconds: wall time of asking for them.
    """

    replies: list[Reply]
    keys: list[str]
    new: int
    seconds: float


@dataclass(frozen=True)
class Asker:
    """A model with all that its replies depend on, and how many questions it takes at once.

    Fields:
        batch_size: answers that are generated together; it changes none of them.
        compression: wanted tokens per concept; None: what the model was trained for.
        prefixes: what questions share, kept from one to the next; its size changes none of them.
    """

    model: Any
    processor: Any
    batch_size: int
    compression: float | None = None
    prefixes: PrefixCache = field(default_factory=PrefixCache)

    def ask(
        self,
        task: Task,
        questions: Sequence[Question],
        store: ReplyStore,
        on_replies: Callable[[int], None] = lambda count: None,
    ) -> Asked:
        """Asks every question alone; what the store holds is not asked again.

        Args:
            on_replies: called with the number of replies that have come in since its last call.

        Raises:
            UserError: an image cannot be decoded; the key is named. Nothing is skipped.
        """
        started = time.perf_counter()
        keys: list[str] = []
        asked: set[str] = set()
        checksum_of = ImageChecksums()

        def unanswered() -> Iterator[tuple[str, Question]]:
            for question in questions:
                key = question_key(task, question, checksum_of)
                keys.append(key)
                # Equal questions have equal replies: each is asked once.
                if key in asked or store.get(key) is not None:
                    on_replies(1)
                else:
                    asked.add(key)
                    yield key, question

        def keep(key: str, reply: Reply) -> None:
            store.add(key, reply)
            on_replies(1)

        ask = self._generate if task.mode == "generate" else self._take_likelihoods
        ask(task, unanswered(), keep)
        found = [store.get(key) for key in keys]
        replies = [each for each in found if each is not None]
        return Asked(replies, keys, len(asked), time.perf_counter() - started)

    def _generate(self, task: Task, todo: _Unanswered, keep: Callable[[str, Reply], None]) -> None:
        taken: list[tuple[str, Question]] = []
        counts: dict[int, tuple[dict[str, int], dict[str, int]]] = {}

        def conversations() -> Iterator[list[dict[str, Any]]]:
            for key, question in todo:
                taken.append((key, question))
                yield question.messages

        def count(number: int, ids: list[int], boundary_T: Tensor) -> None:
            counts[number] = count_by_modality(self.model, torch.tensor(ids), boundary_T)

        def on_answer(number: int, answer: Answer) -> None:
            keep(taken[number][0], _to_reply(answer, counts.pop(number)))

        with _named_by(lambda number: taken[number][1]):
            generate_all(
                self.model,
                self.processor,
                conversations(),
                task.max_new_tokens,
                self.batch_size,
                task.stop,
                self.compression,
                on_answer,
                prefixes=self._prefixes_of(task),
                on_prompt=count,
            )

    def _prefixes_of(self, task: Task) -> PrefixCache:
        return self.prefixes if task.shares_prefixes else PrefixCache(0)

    def _take_likelihoods(
        self, task: Task, todo: _Unanswered, keep: Callable[[str, Reply], None]
    ) -> None:
        """One question at a time, on all devices: the same sums to the bit, whatever stands beside
        it. Its choices share their prompt.
        """
        for key, question in todo:
            keep(key, self._likelihoods_of(task, question))

    def _likelihoods_of(self, task: Task, question: Question) -> Reply:
        texts = question.choices if task.mode == "choose" else question.references[:1]
        if not texts or (task.mode == "choose" and not question.messages):
            needed = "messages and choices" if task.mode == "choose" else "a reference"
            raise UserError(f"question '{question.key}': mode {task.mode} needs {needed}")
        prompts: list[tuple[list[int], Tensor]] = []
        requests = [(question.messages or "", text) for text in texts]
        with _named_by(lambda number: question):
            found = log_likelihoods(
                self.model,
                self.processor,
                requests,
                self.batch_size,
                self.compression,
                self._prefixes_of(task),
                lambda number, ids, boundary_T: prompts.append((ids, boundary_T)),
            )
        ((ids, boundary_T),) = prompts
        answer = make_answer(ids, [], self.model, self.processor)
        counts = count_by_modality(self.model, torch.tensor(ids), boundary_T)
        return _to_reply(answer, counts, tuple((each.sum, each.tokens) for each in found))


def _to_reply(
    answer: Answer,
    counts: tuple[dict[str, int], dict[str, int]],
    pairs: tuple[tuple[float, int], ...] = (),
) -> Reply:
    return Reply(
        *(answer.text, answer.raw, answer.prompt, answer.prompt_tokens, answer.answer_tokens),
        *counts,
        pairs,
    )


@contextmanager
def _named_by(question_of: Callable[[int], Question]) -> Iterator[None]:
    """Names the question of a request that cannot be asked."""
    try:
        yield
    except RequestError as error:
        key = question_of(error.number).key
        raise UserError(f"question '{key}' cannot be asked: {error}") from error
