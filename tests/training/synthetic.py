"""A small deterministic stream of packed batches for the trainer's tests.

The documents of an optimiser step depend on the step alone and are dealt out to ranks and
micro-batches in order, so that the same step can be cut in any way.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterator

import torch

from data_pipelines.batch import PackedBatch
from tests.tiny import END, Document, image_inputs, make_document


def document(number: int, image: bool, masked: bool = False) -> tuple[Document, list[int]]:
    """Document `number` and its labels: an image perhaps, then 5 to 20 words.

    The second half of the words is supervised, or nothing if `masked`, so that documents differ in
    their numbers of supervised tokens.
    """
    words = 5 + (7 * number) % 16
    made = make_document(["image", words] if image else [words], seed=number)
    supervised = 0 if masked else words - words // 2
    kept = len(made.ids) - supervised
    return made, [-100] * kept + list(made.ids[kept:])


def pack(documents: list[tuple[Document, list[int]]], keys: list[str]) -> PackedBatch:
    ends = [0, *itertools.accumulate(len(made.ids) for made, _ in documents)]
    return PackedBatch(
        input_ids=torch.tensor([token for made, _ in documents for token in made.ids]),
        labels=torch.tensor([label for _, labels in documents for label in labels]),
        cu_seqlens=torch.tensor(ends, dtype=torch.int32),
        keys=keys,
        sources=["even" if int(key.split("-")[1]) % 2 == 0 else "odd" for key in keys],
        **image_inputs([made for made, _ in documents]),
    )


class SyntheticStream:
    """Documents by step, dealt out to ranks and micro-batches.

    Args:
        per_step: documents of a step.
        images: all | none | first_half (only the first half of a step's documents has images).
        masked_steps: steps (from 0) whose documents have no supervised token.
        poisoned: (step, number) pairs of documents whose image is not finite.
        steps: steps after which the stream ends; None: endless.
        missing: (step, number) pairs of documents that do not exist. A batch without documents ends
            the stream of its rank.
    """

    def __init__(
        self,
        rank: int = 0,
        world_size: int = 1,
        accumulation: int = 1,
        per_step: int = 4,
        images: str = "all",
        masked_steps: tuple[int, ...] = (),
        poisoned: tuple = (),
        steps: int | None = None,
        missing: tuple = (),
    ) -> None:
        self._rank, self._accumulation, self._per_step = rank, accumulation, per_step
        self._size = per_step // (world_size * accumulation)
        self._images, self._masked_steps, self._steps = images, masked_steps, steps
        self._missing = {tuple(pair) for pair in missing}
        self._poisoned = {tuple(pair) for pair in poisoned}
        self._position = 0
        self.skipped: collections.Counter[str] = collections.Counter(too_long=rank + 1)
        self.over_length = {"split": 1 + rank}
        self.delivered = {"even": {"samples": 2 + rank}, f"only-{rank}": {"samples": 1}}
        self.keys_seen: list[str] = []
        self.epoch = 0

    def __iter__(self) -> Iterator[PackedBatch]:
        while True:
            step, micro = divmod(self._position, self._accumulation)
            if step == self._steps:
                return
            first = (self._rank * self._accumulation + micro) * self._size
            numbers = [
                number
                for number in range(first, first + self._size)
                if (step, number) not in self._missing
            ]
            if not numbers:
                return
            self._position += 1
            keys = [f"doc-{step * self._per_step + number}" for number in numbers]
            self.keys_seen += keys
            yield pack([self._document(step, number) for number in numbers], keys)

    def _document(self, step: int, number: int) -> tuple[Document, list[int]]:
        half = number < self._per_step // 2
        image = self._images == "all" or (self._images == "first_half" and half)
        made, labels = document(step * self._per_step + number, image, step in self._masked_steps)
        if (step, number) in self._poisoned:
            made = dataclasses.replace(made, pixels=tuple(p * torch.nan for p in made.pixels))
        return made, labels

    def filler(self) -> PackedBatch:
        return PackedBatch.filler(END)

    def state_dict(self) -> dict:
        return {"position": self._position, "accumulation": self._accumulation}

    def load_state_dict(self, state: dict | list[dict]) -> None:
        """A list is of the ranks of a run with another number of them, between two steps."""
        if isinstance(state, list):
            (step,) = {each["position"] // each["accumulation"] for each in state}
            self._position = step * self._accumulation
        else:
            self._position = state["position"] // state["accumulation"] * self._accumulation
