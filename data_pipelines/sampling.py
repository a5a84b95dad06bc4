"""Sources of samples: what local and remote shards have in common for the stream.

A source is numbered samples and, for each epoch, an order of them. The endless sequence of a
source is k = 0, 1, 2, ...: epoch k // num_samples, position k % num_samples in the order of that
epoch. The stream deals these k out to its ranks; it knows nothing of shards.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from data_pipelines.shards import IndexedSample, ShardIndex

_ORDERS_KEPT = 2  # a stream's end of an epoch and the start of the next are in use together


@dataclasses.dataclass(frozen=True)
class RawSample:
    """A sample's files, read in the training process, before anything is parsed or decoded.

    Fields:
        shard: path or address, for messages; `shard/key` names the sample.
        members: contents by name without the key (`json`, `img0.png`).
        repeated: members that stand twice in the shard.
        reason, message: why the sample could not be read, where it could not; "" where it was.
            Such a sample is counted under that reason as damaged.
    """

    shard: str
    key: str
    members: dict[str, bytes] = dataclasses.field(default_factory=dict)
    repeated: tuple[str, ...] = ()
    reason: str = ""
    message: str = ""

    @property
    def name(self) -> str:
        """`shard/key`, as that of an `IndexedSample`."""
        return f"{self.shard.rpartition('/')[2]}/{self.key}"


class Place(NamedTuple):
    """A sample of a source in an epoch: all that its encoding depends on.

    Fields:
        source: number of the source, from 0.
        epoch: of that source, from 0.
        number: of the sample in its source, from 0.
        raw: the sample's files, where the source hands them over; None: a worker reads them.
    """

    source: int
    epoch: int
    number: int
    raw: RawSample | None = None


class EpochOrder(Protocol):
    """The order of an epoch; a numpy array is one."""

    def __getitem__(self, position: int, /) -> int:
        """Number of the sample at this position; every number stands at one position."""


class Source(Protocol):
    """What the stream asks of a source. It lives in the training process alone.

    Attributes:
        num_samples: at least 1. Everything that `order` tells of.
        samples: where each sample lies, for workers that read by offset; None where `fetch` reads.
        names: the data set's name of a shard, for counts and losses by source; shards that are not
            there leave it to the record. A `RawSample` has the same `shard`.
    """

    num_samples: int
    samples: Sequence[IndexedSample] | None
    names: Mapping[str, str]

    def fingerprint(self) -> str:
        """Changes when a sample is added, removed, renamed or resized."""

    def order(self, epoch: int) -> EpochOrder:
        """The order of an epoch: a function of seed, source and epoch alone, for any number of
        ranks. The positions that a rank asks for ascend within an epoch, in steps of the number of
        ranks, but for few samples after a resume.
        """

    def fetch(self, place: Place) -> RawSample | None:
        """The sample's files, or None: the workers read it by its number from `samples`.

        Called for ascending positions of an epoch (see `order`); any other place must give the same
        files, but may take longer.
        """

    def close(self) -> None:
        """Ends what is open; the source can be used again afterwards."""


class LocalSource:
    """Indexed shards on a local disk, in a full permutation each epoch.

    Args:
        index: the samples to use.
        number: of the source among those of the stream.
        seed: of the order.
        shuffle: False keeps the order of the shards in every epoch.
        names: see `Source`.
    """

    def __init__(
        self,
        index: ShardIndex,
        number: int,
        seed: int,
        shuffle: bool,
        names: Mapping[str, str] | None = None,
    ) -> None:
        self.samples: Sequence[IndexedSample] | None = index.samples
        self.names: Mapping[str, str] = names or {}
        self.num_samples = len(index.samples)
        self._index = index
        self._number, self._seed, self._shuffle = number, seed, shuffle
        self._orders: collections.OrderedDict[int, np.ndarray] = collections.OrderedDict()

    def fingerprint(self) -> str:
        return self._index.fingerprint()

    def order(self, epoch: int) -> np.ndarray:
        """`[num_samples]` uint32 or int64: the samples' numbers in their order."""
        if not self._shuffle:
            epoch = 0
        if epoch not in self._orders:
            if len(self._orders) >= _ORDERS_KEPT:
                self._orders.popitem(last=False)
            self._orders[epoch] = self._permutation(epoch)
        self._orders.move_to_end(epoch)
        return self._orders[epoch]

    def _permutation(self, epoch: int) -> np.ndarray:
        dtype = np.uint32 if self.num_samples < 2**32 else np.int64
        numbers = np.arange(self.num_samples, dtype=dtype)
        if self._shuffle:
            generator(self._seed, epoch, source=self._number).shuffle(numbers)
        return numbers

    def fetch(self, place: Place) -> None:
        """None: the workers read by offset."""

    def close(self) -> None:
        """Nothing is open: the workers' readers are their own."""


def generator(*entropy: int, source: int = 0) -> np.random.Generator:
    """Random numbers of a place in the stream. Sources differ by their number alone, and the first
    one's are those of a stream without named sources.
    """
    key = (source,) if source else ()
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(entropy, spawn_key=key)))


def is_held_out(key: str, share: float) -> bool:
    """Whether a sample belongs to the held-out split: a function of its key and the share alone.
    A sample that is held out at some share is held out at every larger one.
    """
    digest = hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64
