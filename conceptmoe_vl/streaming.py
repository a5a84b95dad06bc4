"""An answer as it is written, piece by piece, in the thread that reads it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList, TextIteratorStreamer


class _Stopped(StoppingCriteria):
    """Ends generation at the next token once nobody reads any longer."""

    def __init__(self) -> None:
        self.event = threading.Event()

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.full(input_ids.shape[:1], self.event.is_set(), device=input_ids.device)


def stream_text(model: Any, tokenizer: Any, inputs: Any, **settings: Any) -> Iterator[str]:
    """Generates in a thread of its own; yields the pieces of text, which join to the whole answer.

    transformers' `TextIteratorStreamer` alone leaves its reader waiting for ever when the thread
    that generates fails. Here the error is raised where the text is read. A reader that
    stops early (`close()`, or a `for` that is left) ends the generation with the next token.

    Args:
        tokenizer: of the model's processor.
        inputs: one prompt, as `processor.apply_chat_template` gives it.
        settings: of `model.generate`, without `streamer`.

    Raises:
        Exception: what `model.generate` raised, when everything before it was read.
    """
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    stopped = _Stopped()
    criteria = StoppingCriteriaList([*settings.pop("stopping_criteria", []), stopped])
    failures: list[Exception] = []

    def generate() -> None:
        try:
            model.generate(**inputs, streamer=streamer, stopping_criteria=criteria, **settings)
        except Exception as error:  # whatever it is, the reader must hear of it
            failures.append(error)
            streamer.on_finalized_text("", stream_end=True)

    thread = threading.Thread(target=generate, daemon=True)
    thread.start()
    try:
        yield from filter(None, streamer)  # an incomplete character comes as an empty piece
    finally:
        stopped.event.set()
        thread.join()
    if failures:
        raise failures[0]
