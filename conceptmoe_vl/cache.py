"""The two-level cache.

It holds keys and values of tokens for E and D, of concepts (1/R of them) for C, and per row what
the chunk module carries from one call to the next.

Buffers are preallocated and grow geometrically. Rows advance on their own: a padded batch holds no
padding here, and the concept level of a row grows only when one of its boundaries fires.
"""

from __future__ import annotations

import dataclasses
import itertools

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from conceptmoe_vl.concepts import OpenChunks
from conceptmoe_vl.configuration import ConceptMoEVLConfig
from conceptmoe_vl.layout import PackedLayout

_FIRST_CAPACITY = 64


class KeyValueStore:
    """Keys and values of one executed layer for all rows: `[B, N_kv, capacity, H]` each."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def append(self, k_TNH: Tensor, v_TNH: Tensor, layout: PackedLayout) -> tuple[Tensor, Tensor]:
        """Writes the new tokens behind what their rows hold; returns both buffers."""
        needed = max(
            (past + new for past, new in zip(layout.past_lengths, layout.lengths, strict=True)),
            default=0,
        )
        self._reserve(len(layout.lengths), needed, k_TNH)
        assert self.keys is not None
        assert self.values is not None
        if layout.total > len(layout.lengths):
            offsets = itertools.accumulate(layout.lengths, initial=0)
            spans = zip(offsets, layout.lengths, layout.past_lengths, strict=False)
            for row, (start, new, past) in enumerate(spans):
                for buffer, x_TNH in ((self.keys, k_TNH), (self.values, v_TNH)):
                    buffer[row, :, past : past + new] = x_TNH[start : start + new].transpose(0, 1)
        elif layout.total:  # decoding: one write for all rows
            row_T = layout.document_T
            self.keys[row_T, :, layout.place_T] = k_TNH
            self.values[row_T, :, layout.place_T] = v_TNH
        return self.keys, self.values

    def _reserve(self, rows: int, needed: int, like: Tensor) -> None:
        capacity = 0 if self.keys is None else self.keys.shape[2]
        if self.keys is not None and needed <= capacity:
            return
        capacity = max(needed, 2 * capacity, _FIRST_CAPACITY)
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = like.new_zeros(rows, like.shape[1], capacity, like.shape[2])
            if old is not None:
                new[:, :, : old.shape[2]] = old
            setattr(self, name, new)

    def select(self, index: Tensor) -> None:
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys[index], self.values[index]

    @property
    def bytes(self) -> int:
        tensors = [t for t in (self.keys, self.values) if t is not None]
        return sum(t.numel() * t.element_size() for t in tensors)


@dataclasses.dataclass
class ChunkState:
    """What one row's chunk module, merge and dechunk know of the past.

    All `[B, ...]`, None before a call.

    Attributes:
        last_key_GD: key of the last token. open_chunks: running merge of the open chunk.
        smoothed_GD: last smoothed concept (and, behind it, the smoothed change of residual
            `delta`).
    """

    last_key_GD: Tensor | None = None
    open_chunks: OpenChunks | None = None
    smoothed_GD: Tensor | None = None

    def select(self, index: Tensor) -> None:
        if self.last_key_GD is not None:
            self.last_key_GD = self.last_key_GD[index]
        if self.open_chunks is not None:
            self.open_chunks = OpenChunks(
                self.open_chunks.sum_GD[index], self.open_chunks.count_G[index]
            )
        if self.smoothed_GD is not None:
            self.smoothed_GD = self.smoothed_GD[index]


class ConceptCache(Cache):
    """Cache of a ConceptMoE language model, for transformers' `generate`.

    Args:
        config: the model's configuration.

    Attributes:
        token_lengths, concept_lengths: what each row holds at either level, Python integers.
        padded_length: columns of the padded inputs seen so far, what transformers calls sequence
            length.
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
        self.token_lengths: tuple[int, ...] = ()
        self.concept_lengths: tuple[int, ...] = ()
        self.padded_length = 0
        for store in self._stores():
            store.keys = store.values = None

    def _stores(self) -> list[KeyValueStore]:
        return [*self.encoder, *self.concept, *self.decoder]

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
        rows = torch.arange(len(self.token_lengths))
        self.batch_select_indices(rows.repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        chosen = indices.tolist()
        self.token_lengths = tuple(self.token_lengths[i] for i in chosen)
        self.concept_lengths = tuple(self.concept_lengths[i] for i in chosen)
        for store in self._stores():
            store.select(indices)
        self.chunk.select(indices)

    def crop(self, tokens_to_remove: int) -> None:
        raise ValueError(
            "a ConceptMoE cache cannot drop tokens: a merged concept does not tell its tokens "
            "apart; generate without assisted decoding"
        )

    @property
    def is_croppable(self) -> bool:
        return False

    @property
    def bytes(self) -> dict[str, int]:
        """Bytes of the buffers at either level."""
        return {
            "tokens": sum(store.bytes for store in (*self.encoder, *self.decoder)),
            "concepts": sum(store.bytes for store in self.concept),
        }
