"""Prompts of tasks, traced: their tokens' kinds, and where the answer can be read."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from conceptmoe_vl.chunk_trace import ChunkTrace, trace_conversation
from conceptmoe_vl.errors import UserError
from conceptmoe_vl.tokenizing import special_ids
from eval.chunks.statistics import Traced
from eval.chunks.words import kinds_of
from eval.tasks import Question


def trace_questions(
    model: Any,
    processor: Any,
    task: str,
    questions: Sequence[Question],
    scores: Mapping[str, float],
    compression: float | None = None,
    on_prompt: Callable[[], None] = lambda: None,
) -> list[Traced]:
    """The chunking of every question's prompt.

    Args:
        scores: by key, of answers at the same compression; may lack any.

    Raises:
        UserError: a question cannot be asked; its key is named.
    """
    found, special = [], special_ids(processor.tokenizer)
    for question in questions:
        try:
            trace = trace_conversation(model, processor, question.messages, compression)
        except UserError as error:
            raise UserError(f"question '{question.key}' cannot be asked: {error}") from error
        texts = token_texts(processor, trace)
        is_special = [token in special for token in trace.ids.tolist()]
        kinds = kinds_of(texts, trace.is_image.tolist(), is_special)
        evidence = evidence_of(question, trace, texts)
        found.append(Traced(task, question, trace, kinds, scores.get(question.key), evidence))
        on_prompt()
    return found


def token_texts(processor: Any, trace: ChunkTrace) -> list[str]:
    """Every token decoded alone."""
    names = {token: processor.tokenizer.decode([token]) for token in set(trace.ids.tolist())}
    return [names[token] for token in trace.ids.tolist()]


def evidence_of(question: Question, trace: ChunkTrace, texts: Sequence[str]) -> np.ndarray | None:
    """Tokens that the answer can be read from; None where nothing tells.

    Where the data name a box in the picture (`details["box"]`: left, top, right, bottom as shares
    of its sides), the patches that it touches; else the tokens of the last place in the prompt
    where one of the references stands.
    """
    box = question.details.get("box")
    if box is not None and trace.planes:
        return _patches_in(trace, box)
    whole = "".join(texts).lower()
    starts = np.cumsum([0, *map(len, texts)])
    for reference in question.references:
        wanted = reference.strip().lower()
        places = [
            found.span() for found in re.finditer(rf"(?<!\w){re.escape(wanted)}(?!\w)", whole)
        ]
        if wanted and places:
            begin, end = places[-1]
            return (starts[:-1] < end) & (starts[1:] > begin) & ~trace.is_image
    return None


def _patches_in(trace: ChunkTrace, box: Sequence[float]) -> np.ndarray:
    """`[T]` bool: patches of the first image that a box touches; of its finest plane."""
    plane = trace.images()[0][-1]
    left, top, right, bottom = box
    row, column = np.divmod(np.arange(plane.rows * plane.columns), plane.columns)
    touched = (column + 1 > left * plane.columns) & (column < right * plane.columns)
    touched &= (row + 1 > top * plane.rows) & (row < bottom * plane.rows)
    found = np.zeros(len(trace.ids), bool)
    found[plane.tokens] = touched
    return found
