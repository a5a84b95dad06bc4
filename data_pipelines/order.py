"""Which samples a rank reads, in which order, and where it stands.

Rank r of W takes k = r, r + W, r + 2 W, ... of every source's endless sequence (see `sampling`), so
all ranks together see each sample of an epoch exactly once.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from data_pipelines.mixing import Mixture
from data_pipelines.sampling import Place, Source


class Pick(NamedTuple):
    """A sample of a source's endless sequence: number of the source, and k."""

    source: int
    k: int


@dataclasses.dataclass
class Position:
    """What a rank has yet to take of a source: `pending`, then next, next + W, next + 2 W, ...

    Fields:
        pending: ascending, all below `next`; filled by a resume with another number of ranks.
        next: the first k behind them.
    """

    pending: collections.deque[int]
    next: int

    @property
    def first(self) -> int:
        return self.pending[0] if self.pending else self.next


class RankOrder:
    """The picks of a rank.

    Holds no stream: what runs ahead of a stream refers to a copy of this alone, so that a dropped
    stream ends its workers at once.

    Args:
        sizes: samples of each source.
        mixture: chooses the source of a pick; None: there is one source.
        epochs: of the one source, after which the picks end; None: endless.

    Attributes:
        picks: taken so far; after a resume with another number of ranks, what it would be had it
            always been this number.
        positions: one a source.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        mixture: Mixture | None,
        rank: int,
        world_size: int,
        epochs: int | None,
    ) -> None:
        self._sizes, self._mixture = tuple(sizes), mixture
        self._rank, self._world_size, self._epochs = rank, world_size, epochs
        self.picks = 0
        self.positions = [Position(collections.deque(), rank) for _ in sizes]

    def copy(self) -> RankOrder:
        """The same order at the same place; moving one does not move the other."""
        other = copy.copy(self)
        other.positions = [Position(each.pending.copy(), each.next) for each in self.positions]
        return other

    @property
    def epoch(self) -> int:
        """Epoch of the next pick. Of a mixture: passes over as many samples as all sources hold."""
        if self._mixture is not None:
            return (self.picks * self._world_size + self._rank) // sum(self._sizes)
        epoch = self.positions[0].first // self._sizes[0]
        return epoch if self._epochs is None else min(epoch, self._epochs)

    @property
    def samples_per_epoch(self) -> int:
        """Samples of this rank in an epoch, rounded up."""
        return -(-sum(self._sizes) // self._world_size)

    def take(self) -> Pick | None:
        """The next pick; None at the end."""
        source = 0 if self._mixture is None else self._mixture.source(self.picks)
        position = self.positions[source]
        k = position.first
        if self._epochs is not None and k >= self._epochs * self._sizes[source]:
            return None
        if position.pending:
            position.pending.popleft()
        else:
            position.next += self._world_size
        self.picks += 1
        return Pick(source, k)


def place_of(pick: Pick, sources: Sequence[Source]) -> Place:
    """Epoch and number of a pick, with its files where the source hands them over."""
    source = sources[pick.source]
    epoch, position = divmod(pick.k, source.num_samples)
    place = Place(pick.source, epoch, int(source.order(epoch)[position]))
    return place._replace(raw=source.fetch(place))


def places_from(order: RankOrder, sources: Sequence[Source]) -> Iterator[Place]:
    """The places of an order from where it stands, without moving it."""
    ahead = order.copy()
    while (pick := ahead.take()) is not None:
        yield place_of(pick, sources)
