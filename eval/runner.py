"""Asks a task's questions in batches and measures how far the model compressed its prompts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from conceptmoe_vl.asking import Answer, answer_conversations
from conceptmoe_vl.errors import UserError
from eval.tasks import Question, Scored, Task

MODALITIES = ("image", "text")


@dataclass(frozen=True)
class Sample:
    """One question with all that came of it; a line of `samples.jsonl`."""

    question: Question
    answer: Answer
    parsed: str
    score: float

    @property
    def scored(self) -> Scored:
        return Scored(self.question, self.parsed, self.score)

    def to_row(self) -> dict[str, Any]:
        return {
            "key": self.question.key,
            "kind": self.question.kind,
            "question": self.question.text,
            "prompt": self.answer.prompt,
            "prompt_tokens": self.answer.prompt_tokens,
            "raw": self.answer.raw,
            "parsed": self.parsed,
            "references": list(self.question.references),
            "score": self.score,
            "details": dict(self.question.details),
        }


@dataclass
class RatioMeter:
    """Tokens and concepts of all prompts, by modality.

    Counted are prompts alone: of a generated step the rows that have already ended would count too.
    Boundaries that are forced (document starts, image marks) count, as they do in training.
    """

    tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(MODALITIES, 0))
    concepts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(MODALITIES, 0))

    @contextmanager
    def watch(self, model: Any) -> Iterator[RatioMeter]:
        """Counts every prompt that the model reads within the block."""
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
        packed = ids.flatten() if mask is None else ids[mask[:, -ids.shape[1] :].bool()]
        is_image = packed == (-1 if model.config.vision is None else model.config.image_token_id)
        is_boundary = output.chunks.boundary_mask
        if is_boundary.numel() != packed.numel():
            raise RuntimeError(
                f"the model reports {is_boundary.numel()} boundaries for {packed.numel()} tokens"
            )
        for modality, chosen in zip(MODALITIES, (is_image, ~is_image), strict=True):
            self.tokens[modality] += int(chosen.sum())
            self.concepts[modality] += int(is_boundary[chosen].sum())

    def ratio(self, modality: str | None = None) -> float | None:
        """Tokens per concept, of one modality or of all; None where nothing was counted."""
        chosen = MODALITIES if modality is None else (modality,)
        tokens = sum(self.tokens[name] for name in chosen)
        concepts = sum(self.concepts[name] for name in chosen)
        return tokens / concepts if concepts else None


@dataclass
class Evaluation:
    """What a task's questions came to; `seconds` is wall time without loading the model."""

    task: Task
    samples: list[Sample]
    ratios: RatioMeter
    seconds: float


def evaluate(
    model: Any,
    processor: Any,
    task: Task,
    questions: Sequence[Question],
    batch_size: int,
    on_batch: Callable[[list[Sample]], None] = lambda batch: None,
    compression: float | None = None,
) -> Evaluation:
    """Asks every question alone, in the given order.

    Args:
        batch_size: questions that are answered at once, left-padded; it changes no answer.
        on_batch: called with the samples of each batch as soon as they are scored.
        compression: wanted tokens per concept; None: what the model was trained for.

    Raises:
        UserError: an image cannot be decoded; the key is named. Nothing is skipped.
    """
    samples: list[Sample] = []
    ratios = RatioMeter()
    started = time.perf_counter()
    with ratios.watch(model), torch.inference_mode():
        for start in range(0, len(questions), batch_size):
            batch = _ask(model, processor, task, questions[start : start + batch_size], compression)
            samples += batch
            on_batch(batch)
    return Evaluation(task, samples, ratios, time.perf_counter() - started)


def _ask(
    model: Any,
    processor: Any,
    task: Task,
    questions: Sequence[Question],
    compression: float | None,
) -> list[Sample]:
    try:
        conversations = [_with_images(question.messages) for question in questions]
        answers = answer_conversations(
            model, processor, conversations, task.max_new_tokens, compression
        )
    except UserError as error:
        if len(questions) == 1:
            raise UserError(f"question '{questions[0].key}' cannot be asked: {error}") from error
        # Somewhere in the batch: asked one by one, the culprit names itself.
        return [
            sample
            for one in questions
            for sample in _ask(model, processor, task, [one], compression)
        ]
    samples = []
    for question, answer in zip(questions, answers, strict=True):
        parsed = task.parse(answer.text, question)
        samples.append(Sample(question, answer, parsed, task.score(parsed, question)))
    return samples


def _with_images(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
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
