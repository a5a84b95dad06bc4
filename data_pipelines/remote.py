"""Remote shards as a source of the stream: read in order, several side by side.

Notable:
- an epoch's order is a permutation of the shards, laid end to end and cut into `interleave` equal
  lanes; position p is sample p // interleave of lane p % interleave. So a rank whose number of
  ranks divides `interleave` reads its own lanes alone, one shard of each at a time;
- the position in a lane is a function of the position in the epoch: resuming opens the shards of
  the lanes and passes over what is before;
- a shard that cannot be read as its manifest says is an error that names it, or a counted loss of
  the samples concerned.
"""

from __future__ import annotations

import collections
import hashlib
import logging
from collections.abc import Mapping, Sequence

import numpy as np

from conceptmoe_vl.errors import UserError
from data_pipelines.remote_opening import BLOCK_BYTES, StreamError
from data_pipelines.remote_shards import RemoteShard
from data_pipelines.remote_streams import Limits, RemoteFile
from data_pipelines.remote_tar import TarFaultError, TarSamples
from data_pipelines.sampling import Place, RawSample, generator
from data_pipelines.shard_index import IndexedSample

logger = logging.getLogger(__name__)

_ORDERS_KEPT = 2  # a stream's end of an epoch and the start of the next are in use together


class RemoteShardError(UserError):
    """A shard cannot be read as its manifest says."""


class LaneOrder:
    """The order of an epoch.

    Args:
        sizes: samples of each shard.
        permutation: numbers of the shards, in the order in which they are laid end to end.
        lanes: pieces that the row of shards is cut into, equal but for one sample.
    """

    def __init__(self, sizes: np.ndarray, permutation: np.ndarray, lanes: int) -> None:
        self._permutation, self._lanes = permutation, lanes
        self._first = np.cumsum(sizes) - sizes  # number of each shard's first sample
        self._ends = np.cumsum(sizes[permutation])
        self._starts = np.empty_like(self._first)  # place of each shard's first sample in the row
        self._starts[permutation] = self._ends - sizes[permutation]
        total = int(sizes.sum())
        lengths = np.array([-(-(total - lane) // lanes) for lane in range(lanes)])
        self._lane_starts = np.cumsum(lengths) - lengths

    def __getitem__(self, position: int) -> int:
        """Number of the sample at a position of the epoch."""
        place = self._lane_starts[position % self._lanes] + position // self._lanes
        shard = self._permutation[np.searchsorted(self._ends, place, side="right")]
        return int(self._first[shard] + place - self._starts[shard])

    def find(self, number: int) -> tuple[int, int, int]:
        """Lane, shard, and number in the shard, of a sample."""
        shard = int(np.searchsorted(self._first, number, side="right")) - 1
        index = number - int(self._first[shard])
        place = int(self._starts[shard]) + index
        return int(np.searchsorted(self._lane_starts, place, side="right")) - 1, shard, index


class RemoteSource:
    """Shards that are read in order, as a source of the stream (see `sampling.Source`).

    Args:
        shards: at least one, with at least one sample together.
        number: of the source among those of the stream.
        seed: of the order.
        shuffle: False keeps the order of shards and samples, in every epoch; every rank then reads
            all shards.
        interleave: shards read side by side, over all ranks.
        on_fault: raise | skip: what becomes of samples that a shard does not give.
        max_samples: samples used, the first ones of the shards; None: all.
        names: see `sampling.Source`.
    """

    samples: Sequence[IndexedSample] | None = None

    def __init__(
        self,
        shards: Sequence[RemoteShard],
        number: int,
        seed: int,
        shuffle: bool,
        interleave: int,
        limits: Limits,
        on_fault: str = "raise",
        max_samples: int | None = None,
        names: Mapping[str, str] | None = None,
    ) -> None:
        self.names: Mapping[str, str] = names or {}
        ends = np.cumsum([shard.samples for shard in shards], dtype=np.int64)
        self.num_samples = int(ends[-1] if max_samples is None else min(max_samples, ends[-1]))
        used = np.diff(np.minimum(ends, self.num_samples), prepend=0)
        # Without the empty ones every number belongs to one shard.
        self._shards = [shard for shard, size in zip(shards, used, strict=True) if size]
        self._sizes = used[used > 0]
        self._number, self._seed, self._shuffle = number, seed, shuffle
        self._interleave = interleave if shuffle else 1
        self._limits, self._on_fault = limits, on_fault
        self._orders: collections.OrderedDict[int, LaneOrder] = collections.OrderedDict()
        self._open: dict[int, _OpenShard] = {}  # by lane

    def fingerprint(self) -> str:
        """Changes with a shard's name, size or samples, and with the order."""
        digest = hashlib.sha256()
        for shard, size in zip(self._shards, self._sizes.tolist(), strict=True):
            name = shard.shown.rpartition("/")[2]
            digest.update(repr((name, shard.samples, size, shard.size, shard.sha256)).encode())
        return f"{digest.hexdigest()[:16]}-interleave-{self._interleave}"

    def order(self, epoch: int) -> LaneOrder:
        if not self._shuffle:
            epoch = 0
        if epoch not in self._orders:
            if len(self._orders) >= _ORDERS_KEPT:
                self._orders.popitem(last=False)
            self._orders[epoch] = self._make_order(epoch)
        self._orders.move_to_end(epoch)
        return self._orders[epoch]

    def _make_order(self, epoch: int) -> LaneOrder:
        permutation = np.arange(len(self._shards))
        if self._shuffle:
            generator(self._seed, epoch, source=self._number).shuffle(permutation)
        return LaneOrder(self._sizes, permutation, self._interleave)

    def fetch(self, place: Place) -> RawSample:
        """The sample's files; or, under `on_fault: skip`, why they are lost.

        Raises:
            RemoteShardError: they cannot be read, under `on_fault: raise`.
        """
        lane, shard, index = self.order(place.epoch).find(place.number)
        reading = self._open.get(lane)
        if reading is None or not reading.can_give(self._shards[shard], index):
            self._drop(lane)
            reading = self._open[lane] = _OpenShard(self._shards[shard], self._limits)
        try:
            sample = reading.take(index)
        except (StreamError, TarFaultError) as error:
            return self._lost(reading, index, error)
        if index + 1 == self._sizes[shard]:
            self._drop(lane)
        return sample

    def _lost(self, reading: _OpenShard, index: int, error: Exception) -> RawSample:
        name = reading.shard.shown
        message = f"shard '{name}', sample {index} of {reading.shard.samples}: {error}"
        if self._on_fault == "raise":
            raise RemoteShardError(
                f"{message}; repair the shard or the way to it, or set data.on_truncated_shard to "
                "skip"
            ) from error
        reason = "unreadable_shard" if isinstance(error, StreamError) else "truncated_shard"
        return RawSample(name, f"sample-{index}", reason=reason, message=str(error))

    def _drop(self, lane: int) -> None:
        reading = self._open.pop(lane, None)
        if reading is not None:
            reading.close()

    def close(self) -> None:
        for lane in list(self._open):
            self._drop(lane)


class _OpenShard:
    """A shard that is being read; a fault stays for all samples behind it."""

    def __init__(self, shard: RemoteShard, limits: Limits) -> None:
        self.shard = shard
        self._file = RemoteFile(shard.address, shard.size, limits)
        self._samples = TarSamples(self._file, shard.shown)
        self._fault: Exception | None = None
        self._fault_at = 0

    def can_give(self, shard: RemoteShard, index: int) -> bool:
        """Whether a sample of a shard is this one's, and not behind it already."""
        position = self._samples.position if self._fault is None else self._fault_at
        return shard is self.shard and index >= position

    def take(self, index: int) -> RawSample:
        """The sample with this number in the shard.

        Raises:
            StreamError, TarFaultError: it cannot be read; or it is the last one and the shard does
                not end there as it should.
        """
        if self._fault is not None:
            raise self._fault
        if self._samples.position == 0 and index:
            logger.info("shard '%s': passing over %d samples", self.shard.shown, index)
        try:
            sample = self._samples.take(index)
            if index + 1 == self.shard.samples:
                self._check_end()
        except (StreamError, TarFaultError) as error:
            self._fault, self._fault_at = error, min(index, self._samples.position)
            self._file.close()
            raise
        return sample

    def _check_end(self) -> None:
        """Reads what is left: more samples, or the rest of the file and its command's status."""
        if more := self._samples.count_rest():
            raise TarFaultError(
                f"the shard holds {self.shard.samples + more} samples, its manifest says "
                f"{self.shard.samples}; write the manifest again"
            )
        while self._file.read(BLOCK_BYTES):
            pass

    def close(self) -> None:
        self._file.close()
