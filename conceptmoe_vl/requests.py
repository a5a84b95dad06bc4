"""Prompts as evaluations give them: conversations, or texts that are rendered already."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from conceptmoe_vl.asking import check_images
from conceptmoe_vl.errors import UserError
from conceptmoe_vl.image_processing import collate_images
from conceptmoe_vl.processing import EncodedSample


@dataclasses.dataclass(frozen=True)
class Rendered:
    """A prompt that a chat template has already rendered: special tokens count in it.

    Fields:
        text: with one `<|image_pad|>` an image. images: what the processor takes.
    """

    text: str
    images: tuple[Any, ...] = ()


Prompt = list[dict] | str | Rendered


class RequestError(UserError):
    """A request that cannot be asked.

    Attributes:
        number: which one, from 0.
    """

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.number = number

    def __reduce__(self) -> tuple:
        return type(self), (self.number, str(self))


def encode_prompt(model: Any, processor: Any, prompt: Prompt, number: int = 0) -> EncodedSample:
    """The tokens and images of a prompt, its end being where the answer begins.

    Args:
        prompt: a conversation that ends with a user turn, whose images may be functions that fetch
            them; or a text that a chat template has already rendered.
        number: of the request, for errors.

    Raises:
        RequestError: it is no conversation, an image cannot be decoded, or the model takes none.
    """
    try:
        if isinstance(prompt, str):
            prompt = Rendered(prompt)
        if isinstance(prompt, Rendered):
            return processor.encode_text(prompt.text, prompt.images)
        check_images(model, prompt)
        return processor.encode(with_images(prompt), add_generation_prompt=True)
    except ValueError as error:
        raise RequestError(number, str(error)) from error


def with_images(messages: list[dict]) -> list[dict]:
    """The messages with the images fetched that are given as functions."""
    return [{**message, "content": _fetched(message["content"])} for message in messages]


def _fetched(content: Any) -> Any:
    if isinstance(content, str):
        return content
    return [
        {**part, "image": part["image"]()} if callable(part.get("image")) else part
        for part in content
    ]


def padded_inputs(model: Any, samples: Sequence[EncodedSample]) -> dict[str, Tensor]:
    """Prompts padded on the left, which the model takes out again, and their images."""
    width = max(len(sample.input_ids) for sample in samples)
    gaps = [width - len(sample.input_ids) for sample in samples]
    rows = [[0] * gap + sample.input_ids for gap, sample in zip(gaps, samples, strict=True)]
    inputs = {"input_ids": torch.tensor(rows, dtype=torch.int64)}
    if any(gaps):
        mask = [[0] * gap + [1] * (width - gap) for gap in gaps]
        inputs["attention_mask"] = torch.tensor(mask, dtype=torch.int64)
    inputs |= collate_images([image for sample in samples for image in sample.images])
    return {name: value.to(model.device) for name, value in inputs.items()}
