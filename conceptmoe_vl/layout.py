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
# Positions that one kernel call may read in vain in a decoding step rather than have a second call
# made: both cost about 25 us on a CPU core with 4 heads of 32 (1 KiB a position).
_CALL_POSITIONS = 256


@dataclasses.dataclass(frozen=True)
class StepGroup:
    """Neighbouring cache rows that one kernel call reads in a decoding step.

    Attributes:
        first, stop: the rows. longest: positions read of each.
        token_B: token of each row (any, where the row has none), an index or a slice.
        mask_B11S: bool, what each row may see; None where all see everything.
    """

    first: int
    stop: int
    longest: int
    token_B: slice | Tensor
    mask_B11S: Tensor | None


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
        if max(lengths, default=0) <= 1:  # a decoding step: lists are quicker than index arithmetic
            offsets = list(itertools.accumulate(lengths, initial=0))
            cu_seqlens = torch.tensor(offsets, dtype=torch.int32, device=device)
            if positions_T is None:
                places = [before for before, new in zip(past, lengths, strict=True) if new]
                positions_T = torch.tensor(places, dtype=torch.int64, device=device)
            return cls(cu_seqlens, lengths, past, positions_T, rows)
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

    @cached_property
    def total(self) -> int:
        return sum(self.lengths)

    @cached_property
    def max_length(self) -> int:
        return max(self.lengths, default=0)

    @cached_property
    def has_past(self) -> bool:
        return any(self.past_lengths)

    @cached_property
    def is_full_step(self) -> bool:
        """Whether this is a decoding step in which every cache row gets exactly one token."""
        return self.rows is not None and self.max_length == 1 and self.total == len(self.lengths)

    @cached_property
    def longest_row(self) -> int:
        """Tokens of the longest row behind this call."""
        rows = zip(self.past_lengths, self.lengths, strict=True)
        return max((past + new for past, new in rows), default=0)

    @cached_property
    def common_past(self) -> int | None:
        """The past length where all rows have the same one, None otherwise."""
        return self.past_lengths[0] if len(set(self.past_lengths)) == 1 else None

    @cached_property
    def document_T(self) -> Tensor:
        """`[T]` int64: which document each token belongs to."""
        if self.max_length <= 1:
            own = [i for i, length in enumerate(self.lengths) if length]
            return torch.tensor(own, dtype=torch.int64, device=self.cu_seqlens.device)
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
        if self.max_length <= 1:
            return torch.arange(self.total, device=self.cu_seqlens.device)
        return self.cu_seqlens[:-1][self.cu_seqlens.diff() > 0].long()

    @cached_property
    def step_groups(self) -> tuple[list[StepGroup], Tensor | None]:
        """Which cache rows each kernel call of a decoding step reads; made once for all layers.

        Caches are read in place: rows without a token split the calls, or are read in vain where
        that is cheaper, as is what a row lacks to the longest of its group. A GPU gets one call.

        Returns:
            The groups, and `[T]` where each token's output stands in the groups' outputs end to
            end; None where that is the stream's own order.
        """
        assert self.rows is not None
        device = self.cu_seqlens.device
        limit = float("inf") if device.type != "cpu" else _CALL_POSITIONS
        documents = [i for i, length in enumerate(self.lengths) if length]
        tokens = sorted(
            (self.rows[i], self.past_lengths[i] + 1, token) for token, i in enumerate(documents)
        )
        groups: list[list[tuple[int, int, int]]] = []
        first, longest = 0, 0
        for row, total, token in tokens:
            together = (row - first + 1) * max(longest, total)
            apart = (groups[-1][-1][0] - first + 1) * longest + total if groups else 0
            if groups and together - apart <= limit:
                groups[-1].append((row, total, token))
                longest = max(longest, total)
            else:
                groups.append([(row, total, token)])
                first, longest = row, total
        place, entries, outputs = [0] * len(tokens), [], 0
        for group in groups:
            entries.append(_step_group(group, device))
            for row, _, token in group:
                place[token] = outputs + row - group[0][0]
            outputs += entries[-1].stop - entries[-1].first
        in_order = place == list(range(outputs))
        return entries, None if in_order else torch.tensor(place, device=device)


def _step_group(members: list[tuple[int, int, int]], device: torch.device) -> StepGroup:
    """A group of (row, positions, token), rows ascending."""
    first, stop = members[0][0], members[-1][0] + 1
    longest = max(total for _, total, _ in members)
    totals, tokens = [longest] * (stop - first), [members[0][2]] * (stop - first)
    for row, total, token in members:
        totals[row - first], tokens[row - first] = total, token
    mask = None
    if min(totals) != longest:
        seen = torch.tensor(totals, device=device)[:, None]
        mask = (torch.arange(longest, device=device) < seen)[:, None, None]
    start = tokens[0]
    if tokens == list(range(start, start + len(tokens))):
        return StepGroup(first, stop, longest, slice(start, start + len(tokens)), mask)
    return StepGroup(first, stop, longest, torch.tensor(tokens, device=device), mask)
