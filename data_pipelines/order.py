"""Which samples a rank reads, in which order."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

Place = tuple[int, int]
"""Epoch and number of the sample, both from 0."""


@dataclasses.dataclass(frozen=True)
class EpochOrder:
    """A function of seed and epoch; rank r of W takes every W-th sample of it, from the r-th on.

    Holds no stream: what runs ahead of a stream refers to this alone, so that a dropped stream ends
    its workers at once.

    Fields:
        num_samples: of the data set.
        epochs: how many there are; None: endless.
    """

    num_samples: int
    rank: int
    world_size: int
    seed: int
    shuffle: bool
    epochs: int | None

    def __len__(self) -> int:
        """Samples of this rank in an epoch."""
        return len(range(self.rank, self.num_samples, self.world_size))

    def epoch(self, epoch: int) -> np.ndarray:
        """Numbers of this rank's samples in an epoch, in their order."""
        if self.shuffle:
            rng = np.random.Generator(np.random.PCG64([self.seed, epoch]))
            order = rng.permutation(self.num_samples)
        else:
            order = np.arange(self.num_samples)
        return order[self.rank :: self.world_size]

    def places(self, epoch: int, position: int) -> Iterator[Place]:
        """This rank's samples from a position on, epoch after epoch."""
        while self.epochs is None or epoch < self.epochs:
            for number in self.epoch(epoch)[position:].tolist():
                yield epoch, number
            epoch, position = epoch + 1, 0
