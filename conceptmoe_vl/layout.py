"""The one packed layout: a stream of T tokens (or M concepts), documents end to end, no padding.

A `PackedLayout` is made once a level and call, and travels with the states instead of loose
arguments.
"""

from __future__ import annotations

import dataclasses
import itertools
from functools import cached_property

import torch
from torch import Tensor

# Documents share a padded batch while each fills at least this share of its row.
_FILLED = 0.8


@dataclasses.dataclass(frozen=True)
class PackedLayout:
    """Where the documents of one packed stream lie, and what stands before them in a cache.

    Attributes:
        cu_seqlens: `[G + 1]` int32, offsets of the documents in the stream, from 0 to T.
        lengths: the same as G Python integers, so that no kernel call waits for the device.
        past_lengths: tokens of each document that are already in a cache (zeros without one).
        positions_T: `[T]` int64, the rotary position of every token.
        rows: cache row of each document; None without a cache.
    """

    cu_seqlens: Tensor
    lengths: tuple[int, ...]
    past_lengths: tuple[int, ...]
    positions_T: Tensor
    rows: tuple[int, ...] | None = None

    @classmethod
    def from_lengths(
        cls,
        lengths: list[int] | tuple[int, ...],
        device: torch.device,
        past_lengths: tuple[int, ...] | None = None,
        positions_T: Tensor | None = None,
        rows: tuple[int, ...] | None = None,
    ) -> PackedLayout:
        """A layout of documents of these lengths; positions count from each one's past length."""
        lengths = tuple(lengths)
        past = past_lengths or (0,) * len(lengths)
        counts = torch.tensor((0, *lengths), dtype=torch.int32, device=device)
        cu_seqlens = counts.cumsum(0, dtype=torch.int32)
        if positions_T is None:
            repeats = counts[1:].long()
            offset = torch.tensor(past, device=device) - cu_seqlens[:-1]
            total = sum(lengths)
            positions_T = torch.arange(total, device=device) + offset.repeat_interleave(
                repeats, output_size=total
            )
        return cls(cu_seqlens, lengths, past, positions_T, rows)

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Tensor, total: int) -> PackedLayout:
        """A layout from document offsets.

        Raises:
            ValueError: the offsets do not rise from 0 to `total`.
        """
        offsets = cu_seqlens.tolist()
        lengths = [end - start for start, end in itertools.pairwise(offsets)]
        if not offsets or offsets[0] != 0 or offsets[-1] != total or min(lengths, default=0) < 0:
            raise ValueError(
                f"cu_seqlens must rise from 0 to the number of tokens ({total}), "
                f"got {offsets[:3]} ... {offsets[-1:]}"
            )
        return cls.from_lengths(lengths, cu_seqlens.device)

    @property
    def total(self) -> int:
        return sum(self.lengths)

    @property
    def max_length(self) -> int:
        return max(self.lengths, default=0)

    @property
    def has_past(self) -> bool:
        return any(self.past_lengths)

    @cached_property
    def document_T(self) -> Tensor:
        """`[T]` int64: which document each token belongs to."""
        counts = self.cu_seqlens.diff().long()
        return torch.arange(len(self.lengths), device=counts.device).repeat_interleave(
            counts, output_size=self.total
        )

    @cached_property
    def batches(self) -> tuple[list[tuple[int, int, slice | Tensor]], Tensor | None]:
        """Documents of similar length together, for kernels that take rectangular batches.

        Returns:
            Entries of (documents, padded length, where their tokens lie: a slice, or indices that
            repeat a document's last token as padding), and `[T]` where each token stands in the
            batches end to end; None where that is the stream's own order.
        """
        filled = [(length, int(i)) for i, length in enumerate(self.lengths) if length]
        offsets = [0, *itertools.accumulate(self.lengths)]
        if len({length for length, _ in filled}) <= 1 or len(filled) == 1:
            length = filled[0][0] if filled else 0
            return [(len(filled), length, slice(0, self.total))], None
        entries: list[tuple[int, int, slice | Tensor]] = []
        place = [0] * len(self.lengths)
        placed = 0
        filled.sort(reverse=True)
        while filled:
            longest = filled[0][0]
            members = [i for length, i in filled if length >= _FILLED * longest]
            filled = filled[len(members) :]
            for number, i in enumerate(members):
                place[i] = placed + number * longest
            placed += len(members) * longest
            if len(members) == 1:
                start = offsets[members[0]]
                entries.append((1, longest, slice(start, start + longest)))
                continue
            starts = torch.tensor([offsets[i] for i in members])
            lasts = torch.tensor([offsets[i + 1] - 1 for i in members])
            index = torch.minimum(starts[:, None] + torch.arange(longest), lasts[:, None])
            entries.append((len(members), longest, index.flatten().to(self.cu_seqlens.device)))
        moved = torch.tensor(place, device=self.cu_seqlens.device) - self.cu_seqlens[:-1]
        place_T = torch.arange(self.total, device=moved.device) + moved[self.document_T]
        return entries, place_T

    @cached_property
    def place_T(self) -> Tensor:
        """`[T]` int64: each token's place in its document, what a cache holds of it included."""
        past = torch.tensor(self.past_lengths, device=self.cu_seqlens.device)
        offset = past - self.cu_seqlens[:-1]
        return torch.arange(self.total, device=offset.device) + offset[self.document_T]

    @cached_property
    def starts(self) -> Tensor:
        """Offsets of the first tokens of the documents that are not empty."""
        return self.cu_seqlens[:-1][self.cu_seqlens.diff() > 0].long()
