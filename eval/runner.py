"""Asks a task's questions in batches and counts how far the model compressed each prompt."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from conceptmoe_vl.asking import answer_conversations
from conceptmoe_vl.errors import UserError
from eval.replies import Reply, ReplyStore, question_key
from eval.tasks import Question, Scored, Task

MODALITIES = ("image", "text")


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
    parsed = task.parse(reply.text, question)
    return Sample(question, reply, parsed, task.score(parsed, question))


@dataclass
class PromptCounter:
    """Tokens and concepts of each prompt that the model reads, by modality.

    Generated tokens are not counted: rows that have ended would count too. Boundaries that are
    forced (document starts, image marks) count, as they do in training.
    """

    tokens: list[dict[str, int]] = field(default_factory=list)
    concepts: list[dict[str, int]] = field(default_factory=list)

    @contextmanager
    def watch(self, model: Any) -> Iterator[PromptCounter]:
        """Counts every prompt that the model reads within the block, row by row."""
        handle = model.register_forward_hook(self._count, with_kwargs=True)
        try:
            yield self
        finally:
            handle.remove()

    def _count(self, model: Any, _args: tuple, inputs: dict[str, Any], output: Any) -> None:
        ids = inputs["input_ids"]
        if ids.shape[1] == 1:  # a generated token
            return
        mask = inputs.get("attention_mask")  # generation leaves it out where nothing is padded
        kept = torch.ones_like(ids).bool() if mask is None else mask[:, -ids.shape[1] :].bool()
        boundary = output.chunks.boundary_mask.cpu()
        lengths = kept.sum(1).tolist()
        if boundary.numel() != sum(lengths):
            raise RuntimeError(
                f"the model reports {boundary.numel()} boundaries for {sum(lengths)} tokens"
            )
        image_id = -1 if model.config.vision is None else model.config.image_token_id
        is_image = (ids[kept] == image_id).cpu()
        for row, fired in zip(is_image.split(lengths), boundary.split(lengths), strict=True):
            chosen = dict(zip(MODALITIES, (row, ~row), strict=True))
            self.tokens.append({name: int(part.sum()) for name, part in chosen.items()})
            self.concepts.append({name: int(fired[part].sum()) for name, part in chosen.items()})


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


def ask(
    model: Any,
    processor: Any,
    task: Task,
    questions: Sequence[Question],
    batch_size: int,
    store: ReplyStore,
    compression: float | None = None,
    on_replies: Callable[[int], None] = lambda count: None,
) -> Asked:
    """Asks every question alone, in the given order; what the store holds is not asked again.

    Args:
        batch_size: questions that are answered at once, left-padded; it changes no answer.
        compression: wanted tokens per concept; None: what the model was trained for.
        on_replies: called with the number of replies that have come in since its last call.

    Raises:
        UserError: an image cannot be decoded; the key is named. Nothing is skipped.
    """
    started = time.perf_counter()
    keys = [question_key(task, question) for question in questions]
    # Equal questions have equal replies: each is asked once.
    open_questions = {
        key: question
        for key, question in zip(keys, questions, strict=True)
        if store.get(key) is None
    }
    on_replies(len(questions) - len(open_questions))
    todo = list(open_questions.items())
    with torch.inference_mode():
        for start in range(0, len(todo), batch_size):
            batch = todo[start : start + batch_size]
            replies = _reply(model, processor, task, [q for _, q in batch], compression)
            for (key, _), reply in zip(batch, replies, strict=True):
                store.add(key, reply)
            on_replies(len(batch))
    found = [store.get(key) for key in keys]
    replies = [reply for reply in found if reply is not None]
    return Asked(replies, keys, len(todo), time.perf_counter() - started)


def _reply(
    model: Any,
    processor: Any,
    task: Task,
    questions: Sequence[Question],
    compression: float | None,
) -> list[Reply]:
    counter = PromptCounter()
    try:
        conversations = [with_images(question.messages) for question in questions]
        with counter.watch(model):
            answers = answer_conversations(
                model, processor, conversations, task.max_new_tokens, compression
            )
    except UserError as error:
        if len(questions) == 1:
            raise UserError(f"question '{questions[0].key}' cannot be asked: {error}") from error
        # Somewhere in the batch: asked one by one, the culprit names itself.
        return [
            reply
            for one in questions
            for reply in _reply(model, processor, task, [one], compression)
        ]
    return [
        Reply(
            answer.text,
            answer.raw,
            answer.prompt,
            answer.prompt_tokens,
            answer.answer_tokens,
            tokens,
            concepts,
        )
        for answer, tokens, concepts in zip(answers, counter.tokens, counter.concepts, strict=True)
    ]


def with_images(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with the images fetched that are given as functions."""

    def fetched(part: dict[str, Any]) -> dict[str, Any]:
        is_lazy = part["type"] == "image" and callable(part.get("image"))
        return {**part, "image": part["image"]()} if is_lazy else part

    return [
        {
            **message,
            "content": message["content"]
            if isinstance(message["content"], str)
            else [fetched(part) for part in message["content"]],
        }
        for message in messages
    ]
