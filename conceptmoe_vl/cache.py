"""The two-level cache.

It holds keys and values of tokens for E and D, of concepts (1/R of them) for C, and per row what
the chunk module carries from one call to the next.

Buffers are preallocated and grow geometrically. Rows advance on their own: a padded batch holds no
padding here, and the concept level of a row grows only when one of its boundaries fires.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from conceptmoe_vl.configuration import ConceptMoEVLConfig
from conceptmoe_vl.journal import CallRecord, ChunkState, Journal
from conceptmoe_vl.layout import PackedLayout

# A grown buffer has room for a quarter more: every entry is copied four times at most on average,
# and no prefill is copied by the first step behind it.
_FIRST_CAPACITY, _SPARE = 64, 0.25
# The stores of a cache and the lengths of their rows.
_LEVELS = {
    "encoder": "token_lengths",
    "concept": "concept_lengths",
    "decoder": "token_lengths",
}


def check_cache(given: object) -> None:
    """Refuses a cache that is not this model's.

    Raises:
        ValueError: it is another class's, such as transformers' `DynamicCache` or old tuples.
    """
    if given is not None and not isinstance(given, ConceptCache):
        raise ValueError(
            f"the cache is a {type(given).__name__}; this model needs a ConceptCache: the one that "
            "a call with use_cache=True returned, or none"
        )


class KeyValueStore:
    """Keys and values of one executed layer for all rows: `[B, N_kv, capacity, H]` each."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def append(self, k_TNH: Tensor, v_TNH: Tensor, layout: PackedLayout) -> tuple[Tensor, Tensor]:
        """Writes the new tokens behind what their rows hold; returns both buffers."""
        self._reserve(len(layout.lengths), layout.longest_row, k_TNH)
        assert self.keys is not None
        assert self.values is not None
        if layout.total > len(layout.lengths):
            offsets = itertools.accumulate(layout.lengths, initial=0)
            spans = zip(offsets, layout.lengths, layout.past_lengths, strict=False)
            for row, (start, new, past) in enumerate(spans):
                for buffer, x_TNH in ((self.keys, k_TNH), (self.values, v_TNH)):
                    buffer[row, :, past : past + new] = x_TNH[start : start + new].transpose(0, 1)
        elif layout.is_full_step and layout.common_past is not None:
            self.keys[:, :, layout.common_past] = k_TNH
            self.values[:, :, layout.common_past] = v_TNH
        elif layout.total:  # decoding: one write for all rows
            row_T = layout.document_T
            self.keys[row_T, :, layout.place_T] = k_TNH
            self.values[row_T, :, layout.place_T] = v_TNH
        return self.keys, self.values

    def _reserve(self, rows: int, needed: int, like: Tensor) -> None:
        capacity = 0 if self.keys is None else self.keys.shape[2]
        if self.keys is not None and needed <= capacity:
            return
        capacity = _roomy(needed)
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = like.new_zeros(rows, like.shape[1], capacity, like.shape[2])
            if old is not None:
                new[:, :, : old.shape[2]] = old
            setattr(self, name, new)

    def select(self, index: Tensor) -> None:
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys[index], self.values[index]

    def gather(self, parts: Sequence[tuple[KeyValueStore, int, int]], room: int = 0) -> None:
        """Becomes rows of several stores of the same layer, its own among them.

        Args:
            parts: for each new row the store, the row in it, and how many positions it holds.
            room: positions that are to fit behind the longest of them.
        """
        filled = [(target, *part) for target, part in enumerate(parts) if part[2]]
        if not filled:
            self.keys = self.values = None
            return
        capacity = _roomy(max(length for *_, length in filled) + room)
        made = []
        for name in ("keys", "values"):
            like = getattr(filled[0][1], name)
            new = like.new_zeros(len(parts), like.shape[1], capacity, like.shape[3])
            for target, store, row, length in filled:
                new[target, :, :length] = getattr(store, name)[row, :, :length]
            made.append(new)
        self.keys, self.values = made

    @property
    def bytes(self) -> int:
        """Reserved bytes of both buffers."""
        tensors = [t for t in (self.keys, self.values) if t is not None]
        return sum(t.numel() * t.element_size() for t in tensors)

    def used_bytes(self, positions: int) -> int:
        """Bytes of this many positions, summed over the rows."""
        if self.keys is None:
            return 0
        return 2 * positions * self.keys.shape[1] * self.keys.shape[3] * self.keys.element_size()


def _roomy(needed: int) -> int:
    """Positions that a buffer for this many has."""
    return needed + max(int(needed * _SPARE), _FIRST_CAPACITY)


class ConceptCache(Cache):
    """Cache of a ConceptMoE language model, for transformers' `generate`.

    Args:
        config: the model's configuration.

    Attributes:
        token_lengths, concept_lengths: what each row holds at either level, Python integers.
        padded_length: columns of the padded inputs seen so far, what transformers calls sequence
            length.
        chunk: state of the chunk module. journal: what is needed to take tokens back.
        columns_of_call: columns of the running call's padded inputs, and which of them hold tokens
            (None: all).
    """

    is_compileable = False

    def __init__(self, config: ConceptMoEVLConfig) -> None:
        super().__init__(layers=[])
        text = config.text
        self.encoder = [KeyValueStore() for _ in range(text.encoder_layers)]
        self.concept = [KeyValueStore() for _ in text.concept_schedule]
        self.decoder = [KeyValueStore() for _ in range(text.decoder_layers)]
        self.reset()

    def reset(self) -> None:
        self.chunk = ChunkState()
        self.journal = Journal()
        self.token_lengths: tuple[int, ...] = ()
        self.concept_lengths: tuple[int, ...] = ()
        self.padded_length = 0
        self.columns_of_call: tuple[int, Tensor | None] = (0, None)
        for store in self._stores():
            store.keys = store.values = None

    def _stores(self) -> list[KeyValueStore]:
        return [*self.encoder, *self.concept, *self.decoder]

    @property
    def _device(self) -> torch.device | None:
        return next((s.keys.device for s in self._stores() if s.keys is not None), None)

    def begin(self, rows: int) -> None:
        """Checks or sets the number of rows.

        Raises:
            ValueError: the cache holds another number of rows.
        """
        if not self.token_lengths:
            self.token_lengths = self.concept_lengths = (0,) * rows
        elif len(self.token_lengths) != rows:
            raise ValueError(
                f"the cache holds {len(self.token_lengths)} rows, the input has {rows}"
            )

    def advance(
        self, record: CallRecord, tokens: tuple[int, ...], concepts: tuple[int, ...]
    ) -> None:
        """Counts a finished call.

        Args:
            record: what is remembered of it. tokens, concepts: new ones of each row.
        """
        self.token_lengths = _added(self.token_lengths, tokens)
        self.concept_lengths = _added(self.concept_lengths, concepts)
        self.padded_length += self.columns_of_call[0]
        self.journal.add(record)

    def get_seq_length(self, layer_idx: int = 0, cache_position: Tensor | None = None) -> int:
        return self.padded_length

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        return -1

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.padded_length + query_length, 0

    @property
    def is_initialized(self) -> bool:
        return bool(self.token_lengths)

    def __len__(self) -> int:
        return len(self._stores())

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        rows = torch.arange(len(self.token_lengths), device=self._device)
        self.batch_select_indices(rows.repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        chosen = indices.tolist()
        if chosen == list(range(len(self.token_lengths))):
            return
        self._select(indices)

    def _select(self, indices: Tensor) -> None:
        chosen = indices.tolist()
        self.journal.clear()
        self.token_lengths = tuple(self.token_lengths[i] for i in chosen)
        self.concept_lengths = tuple(self.concept_lengths[i] for i in chosen)
        for store in self._stores():
            store.select(indices)
        self.chunk.select(indices)

    def join(self, other: ConceptCache, keep: Sequence[int] | None = None) -> None:
        """Puts the rows of another cache behind one's own; it changes no row.

        Buffers become as long as the longest row then needs. Calls before it cannot be taken back.

        Args:
            other: filled by the same model; it stays as it is.
            keep: own rows that stay, in their new order; None: all.

        Raises:
            ValueError: one of the two holds no rows, or the models have different layers.
        """
        if not self.token_lengths or not other.token_lengths:
            raise ValueError("a cache without rows cannot be joined; take the other one alone")
        rows = range(len(self.token_lengths)) if keep is None else keep
        for level, lengths in _LEVELS.items():
            mine, theirs = getattr(self, level), getattr(other, level)
            if len(mine) != len(theirs):
                raise ValueError(
                    f"the caches have {len(mine)} and {len(theirs)} {level} layers; join caches of "
                    "one model"
                )
            own, new = getattr(self, lengths), getattr(other, lengths)
            for store, their in zip(mine, theirs, strict=True):
                parts = [(store, row, own[row]) for row in rows]
                store.gather([*parts, *((their, row, length) for row, length in enumerate(new))])
        self.chunk.join(other.chunk, torch.tensor(rows, dtype=torch.int64, device=self._device))
        for lengths in set(_LEVELS.values()):
            own = getattr(self, lengths)
            setattr(self, lengths, (*(own[row] for row in rows), *getattr(other, lengths)))
        self.padded_length = max(self.padded_length, other.padded_length)
        self.journal.clear()

    @classmethod
    def stacked(cls, caches: Sequence[ConceptCache], room: int = 0) -> ConceptCache:
        """A cache of its own of all rows of some caches of one model, which stay as they are.

        Args:
            room: tokens of a row that are to fit without growing.
        """
        made = copy.copy(caches[0])
        for level, lengths in _LEVELS.items():
            stores = []
            for number in range(len(getattr(made, level))):
                stores.append(KeyValueStore())
                rows = (
                    (getattr(each, level)[number], row, length)
                    for each in caches
                    for row, length in enumerate(getattr(each, lengths))
                )
                stores[-1].gather(list(rows), room)
            setattr(made, level, stores)
        made.chunk, made.journal = ChunkState.stacked([each.chunk for each in caches]), Journal()
        for lengths in set(_LEVELS.values()):
            together = itertools.chain.from_iterable(getattr(each, lengths) for each in caches)
            setattr(made, lengths, tuple(together))
        made.padded_length = max(each.padded_length for each in caches)
        return made

    def rows(self, indices: Sequence[int]) -> ConceptCache:
        """A cache of its own of some rows, each as often as it is named."""
        chosen = copy.copy(self)
        for level in _LEVELS:
            setattr(chosen, level, [copy.copy(store) for store in getattr(self, level)])
        chosen.chunk, chosen.journal = dataclasses.replace(self.chunk), Journal()
        chosen._select(torch.tensor(indices, dtype=torch.int64, device=self._device))
        return chosen

    def crop(self, tokens_to_remove: int) -> None:
        """Takes the last columns back from every row, exactly, as if they had never been given.

        Args:
            tokens_to_remove: minus the number of columns, as transformers calls it; 0 does nothing.

        Raises:
            ValueError: the number is positive, goes further back than the cache remembers, or ends
                inside an image.
        """
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop({tokens_to_remove}): give a negative number, how many tokens to take back"
            )
        if tokens_to_remove == 0:
            return
        self.chunk, self.token_lengths, self.concept_lengths = self.journal.take_back(
            -tokens_to_remove
        )
        self.padded_length += tokens_to_remove

    @property
    def is_croppable(self) -> bool:
        return True

    @property
    def bytes(self) -> dict[str, int]:
        """Reserved bytes of the buffers at either level."""
        return {
            "tokens": sum(store.bytes for store in (*self.encoder, *self.decoder)),
            "concepts": sum(store.bytes for store in self.concept),
        }

    @property
    def used_bytes(self) -> dict[str, int]:
        """Bytes of the buffers that hold a token's or a concept's keys and values."""
        tokens, concepts = sum(self.token_lengths), sum(self.concept_lengths)
        token_stores = (*self.encoder, *self.decoder)
        return {
            "tokens": sum(store.used_bytes(tokens) for store in token_stores),
            "concepts": sum(store.used_bytes(concepts) for store in self.concept),
        }


def _added(lengths: tuple[int, ...], more: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(a + b for a, b in zip(lengths, more, strict=True))
