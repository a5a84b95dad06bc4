"""The endless stream of packed batches.

Notable:
- the order of an epoch is a function of seed, source and epoch alone, and the sources of a mixture
  follow from seed, rank and place: all ranks together see each sample of an epoch exactly once;
- the position is a few numbers and the samples held ready: resuming costs no re-reading, and
  another number of ranks loses and repeats nothing;
- every sample that gives no tokens is counted by reason and named in the log.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from conceptmoe_vl.errors import UserError
from conceptmoe_vl.processing import ConceptMoEVLProcessor
from data_pipelines.batch import PackedBatch
from data_pipelines.config import DataConfig
from data_pipelines.encoding import Document, SampleEncoder, Skipped
from data_pipelines.mixing import Mixture
from data_pipelines.opening import NoSampleError, SampleError, open_sources
from data_pipelines.order import Pick, RankOrder, place_of, places_from
from data_pipelines.packing import next_pack
from data_pipelines.prefetch import Encoded, encoded_in_order
from data_pipelines.sampling import Source, generator
from data_pipelines.state import FORMAT, check_state, merge_states

__all__ = ["PackedStream", "SampleError", "build_stream"]

logger = logging.getLogger(__name__)

_COUNTED = ("samples", "tokens", "images")
_EMPTY_EPOCHS = 20  # with nothing of the split in them, after which there is nothing


class _Ready(NamedTuple):
    """A document at hand: piece `piece` of the `pieces` of a sample."""

    pick: Pick
    piece: int
    pieces: int
    document: Document
    num_bytes: int


class PackedStream:
    """Iterates over `PackedBatch`es; use `build_stream`.

    Attributes:
        skipped: samples that gave no tokens, by reason, since the start of the run.
        over_length: samples that were `truncated` or `split` to fit, by that.
        delivered: samples, tokens and images by source, since the start of the run.
        documents: documents delivered since the start of the run.
    """

    def __init__(
        self,
        config: DataConfig,
        sources: Sequence[Source],
        processor: ConceptMoEVLProcessor,
        rank: int,
        world_size: int,
    ) -> None:
        self.config = config
        self.rank, self.world_size = rank, world_size
        self.num_samples = sum(source.num_samples for source in sources)
        self.skipped: Counter[str] = Counter()
        self.over_length: Counter[str] = Counter()
        self.delivered: dict[str, dict[str, int]] = {}
        self.documents = 0
        weights = [each.weight for each in config.source_configs if each.weight is not None]
        self._order = RankOrder(
            [source.num_samples for source in sources],
            Mixture(weights, config.seed, rank, world_size) if weights else None,
            *(rank, world_size, config.epochs),
        )
        self._sources = sources
        self._identity = _identity(config, sources, rank, world_size)
        self._processor = processor
        self._encoder = SampleEncoder(
            config,
            [source.samples for source in sources],
            [source.names for source in sources],
            processor,
        )
        self._ready: list[_Ready] = []
        self._epoch_skips: Counter[str] = Counter()
        self._epoch_faults = 0
        self._skips_in_a_row = self._unused_in_a_row = 0
        self._encoded: Iterator[Encoded] | None = None

    @property
    def epoch(self) -> int:
        """Epoch of the next sample to be read, from 0."""
        return self._order.epoch

    @property
    def samples_per_epoch(self) -> int:
        """Samples of this rank in an epoch, rounded up."""
        return self._order.samples_per_epoch

    def __iter__(self) -> PackedStream:
        return self

    def __next__(self) -> PackedBatch:
        """The next batch; `StopIteration` after `config.epochs` epochs.

        Raises:
            SampleError: a damaged sample under `on_error: raise`, or more than its limit.
            NoSampleError: an epoch without a usable sample; the next call looks further.
        """
        chosen = next_pack(
            self._ready,
            length=lambda entry: len(entry.document),
            budget=self.config.tokens_per_batch,
            refill=self._refill,
        )
        if not chosen:
            raise StopIteration
        for entry in chosen:
            self._deliver(entry)
        documents = [entry.document for entry in chosen]
        return PackedBatch.pack(
            [document.sample for document in documents],
            keys=[document.key for document in documents],
            sources=[document.source for document in documents],
        )

    def filler(self) -> PackedBatch:
        """What a rank whose stream has ended gives while others go on; it counts nowhere."""
        return PackedBatch.filler(self._processor.tokenizer.eos_token_id)

    def _deliver(self, entry: _Ready) -> None:
        document = entry.document
        counts = self.delivered.setdefault(document.source, dict.fromkeys(_COUNTED, 0))
        counts["samples"] += entry.piece == 0
        counts["tokens"] += len(document)
        counts["images"] += len(document.sample.images)
        if entry.piece == 0 and document.over_length:
            self.over_length[document.over_length] += 1
        self.documents += 1

    def _refill(self) -> None:
        """Takes samples until there are enough at hand, by number and by bytes."""
        if self._encoded is None:
            places = places_from(self._order, self._sources)
            self._encoded = encoded_in_order(self._encoder, places, self.config.num_workers)
        while self._has_room():
            result = next(self._encoded, None)
            if result is None:
                return
            epoch = self.epoch
            pick = self._order.take()
            assert pick is not None
            self._add(pick, result, epoch)
            if self.epoch != epoch:
                self._end_epoch(epoch)

    def _has_room(self) -> bool:
        if len(self._ready) >= self.config.pack_lookahead:
            return False
        held = sum(entry.num_bytes for entry in self._ready)
        return held < self.config.pack_lookahead_bytes

    def _add(self, pick: Pick, result: Encoded, epoch: int) -> None:
        if isinstance(result, Skipped):
            self._count(result, epoch)
        elif result:
            self._skips_in_a_row = self._unused_in_a_row = 0
            self._ready += [_ready(pick, piece, result) for piece in range(len(result))]
            return
        self._unused_in_a_row += 1
        if self._unused_in_a_row > _EMPTY_EPOCHS * self.samples_per_epoch:
            raise NoSampleError(
                f"no sample of the split '{self.config.split}' is usable: "
                f"{self._unused_in_a_row} in a row were of the other split or skipped; change "
                f"data.held_out, which is {self.config.held_out}, or add data"
            )

    def _end_epoch(self, epoch: int) -> None:
        if self._epoch_skips:
            counts = ", ".join(f"{reason} {n}" for reason, n in sorted(self._epoch_skips.items()))
            logger.warning(
                "epoch %d, rank %d: skipped %d of %d samples: %s",
                *(epoch, self.rank, sum(self._epoch_skips.values())),
                *(self.samples_per_epoch, counts),
            )
        self._epoch_skips.clear()
        self._epoch_faults = 0

    def _count(self, skipped: Skipped, epoch: int) -> None:
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
                f"{self._epoch_faults} damaged samples in epoch {epoch}, the limit is {limit} "
                f"of {self.samples_per_epoch} samples; the last one: {skipped.message}; repair "
                "the data, or raise data.max_skips or data.max_skip_share"
            )
        if self._skips_in_a_row >= self.samples_per_epoch:
            counts = ", ".join(f"{reason} {n}" for reason, n in sorted(self.skipped.items()))
            raise NoSampleError(
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
        """The position behind the last batch (see `state`)."""
        return {
            **self._identity,
            "picks": self._order.picks,
            "sources": [
                {**same, "pending": list(position.pending), "next": position.next}
                for same, position in zip(
                    self._identity["sources"], self._order.positions, strict=True
                )
            ],
            "ready": [[*entry.pick, entry.piece, entry.pieces] for entry in self._ready],
            "documents": self.documents,
            "delivered": {name: dict(counts) for name, counts in self.delivered.items()},
            "skipped": dict(self.skipped),
            "over_length": dict(self.over_length),
            "epoch_skips": dict(self._epoch_skips),
            "epoch_faults": self._epoch_faults,
            "skips_in_a_row": self._skips_in_a_row,
            "unused_in_a_row": self._unused_in_a_row,
        }

    def load_state_dict(self, state: dict[str, Any] | Sequence[dict[str, Any]]) -> None:
        """Continues behind the batch that was the last when `state` was taken.

        Args:
            state: of this rank; or of all ranks of a run with any number of them, which are then
                dealt out anew (see `merge_states`).

        Raises:
            UserError: the state belongs to other data or another seed.
        """
        if not isinstance(state, dict):
            state = merge_states(state, self.world_size)[self.rank]
        check_state(state, self._identity)
        self.close()
        if state["weights"] != self._identity["weights"]:
            logger.warning(
                "the weights of data.sources have changed from %s to %s; they hold from here on",
                *(state["weights"], self._identity["weights"]),
            )
        self._order.picks = state["picks"]
        for position, given in zip(self._order.positions, state["sources"], strict=True):
            position.pending, position.next = deque(given["pending"]), given["next"]
        self.documents = state["documents"]
        self.delivered = {name: dict(counts) for name, counts in state["delivered"].items()}
        self.skipped = Counter(state["skipped"])
        self.over_length = Counter(state["over_length"])
        self._epoch_skips = Counter(state["epoch_skips"])
        self._epoch_faults = state["epoch_faults"]
        self._skips_in_a_row = state["skips_in_a_row"]
        self._unused_in_a_row = state["unused_in_a_row"]
        self._restore_ready(state["ready"])

    def _restore_ready(self, entries: list[list[int]]) -> None:
        """Encodes the documents at hand again."""
        self._ready = []
        encoded: dict[Pick, Encoded] = {}
        for source, k, piece, pieces in entries:
            pick = Pick(source, k)
            if pick not in encoded:
                encoded[pick] = self._encoder.encode(place_of(pick, self._sources))
                if isinstance(result := encoded[pick], Skipped):
                    self._count(
                        result, self.epoch
                    )  # the file was changed without a change of its size
            result = encoded[pick]
            if isinstance(result, Skipped):
                continue
            if len(result) != pieces:
                raise UserError(
                    f"sample {place_of(pick, self._sources).number} gave {pieces} pieces when the "
                    f"checkpoint was written and gives {len(result)} now: its shard has been "
                    "changed; restore it, or start a new run"
                )
            self._ready.append(_ready(pick, piece, result))

    def close(self) -> None:
        """Ends the workers and closes the shards; the stream can be used again afterwards."""
        self._encoded = None
        self._encoder.close()
        for source in self._sources:
            source.close()


def _ready(pick: Pick, piece: int, documents: tuple[Document, ...]) -> _Ready:
    document = documents[piece]
    return _Ready(pick, piece, len(documents), document, document.num_bytes)


def _identity(
    config: DataConfig, sources: Sequence[Source], rank: int, world_size: int
) -> dict[str, Any]:
    """What must be the same, or dealt out anew, for a state to fit."""
    named = config.source_configs
    weights = [each.weight.points for each in named if each.weight is not None]
    names = [each.name for each in named] if weights else ["all"]
    probe = generator(config.seed, 0).permutation(1000).tobytes()
    return {
        "format": FORMAT,
        "rank": rank,
        "world_size": world_size,
        "seed": config.seed,
        "shuffle": config.shuffle,
        "held_out": config.held_out,
        "split": config.split,
        "split_at": config.tokens_per_batch if config.over_length == "split" else 0,
        "order": hashlib.sha256(probe).hexdigest()[:16],
        "weights": [[list(point) for point in points] for points in weights],
        "sources": [
            {"name": name, "fingerprint": source.fingerprint()}
            for name, source in zip(names, sources, strict=True)
        ],
    }


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
    sources, num_damaged = open_sources(config, world_size)
    stream = PackedStream(config, sources, processor, rank, world_size)
    if rank == 0 and num_damaged:
        stream.skipped["truncated_shard"] = num_damaged
    return stream
