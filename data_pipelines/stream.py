"""The endless stream of packed batches.

Notable:
- the order of an epoch is a function of seed and epoch alone; rank r of W takes every W-th sample
  of it from the r-th on, so all ranks together see each sample of an epoch exactly once;
- the position is an epoch, a number and the few samples held ready: resuming costs no re-reading;
- every sample that gives no tokens is counted by reason and named in the log.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any

from conceptmoe_vl.errors import UserError
from conceptmoe_vl.processing import ConceptMoEVLProcessor
from data_pipelines.batch import PackedBatch
from data_pipelines.config import DataConfig
from data_pipelines.encoding import Document, SampleEncoder, Skipped
from data_pipelines.order import EpochOrder, Place
from data_pipelines.packing import next_pack
from data_pipelines.prefetch import encoded_in_order
from data_pipelines.shards import ShardIndex, index_shards

logger = logging.getLogger(__name__)

_STATE_FORMAT = 2


class SampleError(UserError):
    """A damaged sample or shard, or too many of them."""


class PackedStream:
    """Iterates over `PackedBatch`es; use `build_stream`.

    Attributes:
        skipped: samples that gave no tokens, by reason, since the start (of this process).
        over_length: samples that were `truncated` or `split` to fit, by that.
        epoch: the epoch of the next sample to be read, from 0.
        documents: documents delivered so far.
    """

    def __init__(
        self,
        config: DataConfig,
        index: ShardIndex,
        processor: ConceptMoEVLProcessor,
        rank: int,
        world_size: int,
    ) -> None:
        self.config = config
        self.rank, self.world_size = rank, world_size
        self.skipped: Counter[str] = Counter()
        self.over_length: Counter[str] = Counter()
        self.epoch = 0
        self.documents = 0
        self.num_samples = len(index.samples)
        self._order = EpochOrder(
            self.num_samples, rank, world_size, config.seed, config.shuffle, config.epochs
        )
        self._fingerprint = index.fingerprint()
        self._encoder = SampleEncoder(config, index.samples, processor)
        self._position = 0  # within this rank's part of the epoch
        self._ready: list[tuple[Place, int, Document]] = []  # place, number of the piece
        self._epoch_skips: Counter[str] = Counter()
        self._epoch_faults = 0
        self._skips_in_a_row = 0
        self._source: Iterator[tuple[Place, tuple[Document, ...] | Skipped]] | None = None

    @property
    def samples_per_epoch(self) -> int:
        """Samples of this rank in an epoch."""
        return len(self._order)

    def __iter__(self) -> PackedStream:
        return self

    def __next__(self) -> PackedBatch:
        """The next batch; `StopIteration` after `config.epochs` epochs.

        Raises:
            SampleError: a damaged sample under `on_error: raise`, or more than its limit, or an
                epoch without a usable sample.
        """
        chosen = next_pack(
            self._ready,
            length=lambda entry: len(entry[2]),
            budget=self.config.tokens_per_batch,
            refill=self._refill,
        )
        if not chosen:
            raise StopIteration
        documents = [document for _, _, document in chosen]
        self.documents += len(documents)
        return PackedBatch.pack(
            [document.sample for document in documents],
            keys=[document.key for document in documents],
            sources=[document.source for document in documents],
        )

    def _refill(self) -> None:
        if self._source is None:
            self._source = encoded_in_order(
                self._encoder,
                self._order.places(self.epoch, self._position),
                self.config.num_workers,
            )
        while len(self._ready) < self.config.pack_lookahead:
            entry = next(self._source, None)
            if entry is None:
                return
            place, result = entry
            self._advance(place)
            if isinstance(result, Skipped):
                self._count(result)
            else:
                self._skips_in_a_row = 0
                self.over_length.update({result[0].over_length} - {""})
                self._ready += [(place, number, piece) for number, piece in enumerate(result)]
            if self._position == self.samples_per_epoch:
                self._end_epoch()

    def _advance(self, place: Place) -> None:
        self.epoch = place[0]
        self._position += 1

    def _end_epoch(self) -> None:
        if self._epoch_skips:
            counts = ", ".join(f"{reason} {n}" for reason, n in sorted(self._epoch_skips.items()))
            logger.warning(
                "epoch %d, rank %d: skipped %d of %d samples: %s",
                *(self.epoch, self.rank, sum(self._epoch_skips.values())),
                *(self.samples_per_epoch, counts),
            )
        self.epoch += 1
        self._position = 0
        self._epoch_skips.clear()
        self._epoch_faults = 0

    def _count(self, skipped: Skipped) -> None:
        self.skipped[skipped.reason] += 1
        self._epoch_skips[skipped.reason] += 1
        self._skips_in_a_row += 1
        if skipped.fault and self.config.on_error == "raise":
            raise SampleError(f"{skipped.message} (reason {skipped.reason})")
        logger.warning("skipped (%s): %s", skipped.reason, skipped.message)
        self._epoch_faults += skipped.fault
        limit = self._fault_limit()
        if limit is not None and self._epoch_faults > limit:
            raise SampleError(
                f"{self._epoch_faults} damaged samples in epoch {self.epoch}, the limit is {limit} "
                f"of {self.samples_per_epoch} samples; the last one: {skipped.message}; repair "
                "the data, or raise data.max_skips or data.max_skip_share"
            )
        if self._skips_in_a_row >= self.samples_per_epoch:
            counts = ", ".join(f"{reason} {n}" for reason, n in sorted(self.skipped.items()))
            raise SampleError(
                f"no sample is usable: {self._skips_in_a_row} in a row were skipped ({counts}); "
                f"the last one: {skipped.message}"
            )

    def _fault_limit(self) -> int | None:
        if self.config.on_error != "limit":
            return None
        if self.config.max_skips is not None:
            return self.config.max_skips
        return int(self.config.max_skip_share * self.samples_per_epoch)

    def state_dict(self) -> dict[str, Any]:
        """The position behind the last batch; plain numbers, strings, lists and mappings."""
        return {
            "format": _STATE_FORMAT,
            "rank": self.rank,
            "world_size": self.world_size,
            "seed": self.config.seed,
            "shuffle": self.config.shuffle,
            "fingerprint": self._fingerprint,
            "split_at": self.config.tokens_per_batch if self.config.over_length == "split" else 0,
            "epoch": self.epoch,
            "position": self._position,
            "ready": [[*place, piece] for place, piece, _ in self._ready],
            "documents": self.documents,
            "skipped": dict(self.skipped),
            "over_length": dict(self.over_length),
            "epoch_skips": dict(self._epoch_skips),
            "epoch_faults": self._epoch_faults,
            "skips_in_a_row": self._skips_in_a_row,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues behind the batch that was the last when `state` was taken.

        Raises:
            UserError: the state belongs to other data, another seed or another number of processes.
        """
        own = self.state_dict()
        for name, remedy in (
            ("format", "start a new run"),
            ("world_size", "resume with as many processes as before, or start a new run"),
            ("rank", "give each process its own state"),
            ("seed", "set data.seed back, or start a new run"),
            ("shuffle", "set data.shuffle back, or start a new run"),
            ("fingerprint", "the shards have changed: restore them, or start a new run"),
            ("split_at", "set data.over_length and tokens_per_batch back, or start a new run"),
        ):
            if state.get(name) != own[name]:
                raise UserError(
                    f"the data state of the checkpoint has {name} {state.get(name)!r}, this run "
                    f"has {own[name]!r}; {remedy}"
                )
        self.close()
        self.epoch, self._position = state["epoch"], state["position"]
        self.documents = state["documents"]
        self.skipped = Counter(state["skipped"])
        self.over_length = Counter(state["over_length"])
        self._epoch_skips = Counter(state["epoch_skips"])
        self._epoch_faults = state["epoch_faults"]
        self._skips_in_a_row = state["skips_in_a_row"]
        self._ready = []
        for epoch, number, piece in state["ready"]:
            result = self._encoder.encode(epoch, number)
            if isinstance(result, Skipped):  # the file was changed without a change of its size
                self._count(result)
            else:
                self._ready.append(((epoch, number), piece, result[piece]))

    def close(self) -> None:
        """Ends the workers and closes the shards; the stream can be used again afterwards."""
        self._source = None
        self._encoder.close()


def build_stream(
    config: DataConfig, processor: ConceptMoEVLProcessor, rank: int = 0, world_size: int = 1
) -> PackedStream:
    """The stream of one data-parallel process.

    Shards are split by sample, so their number need not fit the number of processes or workers.

    Raises:
        UserError: no shards, a damaged shard (unless `on_truncated_shard: skip`), or fewer samples
            than processes.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank is {rank}, world_size {world_size}; ranks go from 0")
    index = index_shards(config.shards)
    for shard, fault in index.damaged.items():
        message = f"shard '{shard}': {fault}"
        if config.on_truncated_shard == "raise":
            raise SampleError(f"{message}; copy it again, or set data.on_truncated_shard to skip")
        logger.warning("%s; its last sample and what follows are lost", message)
    samples = index.samples[: config.max_samples]
    if len(samples) < world_size:
        raise UserError(
            f"{len(index.shards)} shards hold {len(samples)} samples for {world_size} processes; "
            "each process needs one: add data or start fewer processes"
        )
    used = ShardIndex(samples, index.shards, index.damaged)
    stream = PackedStream(config, used, processor, rank, world_size)
    if rank == 0 and index.damaged:
        stream.skipped["truncated_shard"] = len(index.damaged)
    return stream
