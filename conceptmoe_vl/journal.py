"""What a cache remembers of its latest calls, so that their last tokens can be taken back exactly.

Keys and values need no memory of their own: a row is cut by its length alone. What the chunk module
carries from token to token is another matter: it is worked out again from the encoder states, keys
and smoothed concepts of the latest calls. A small call is kept by reference, at no cost; of a long
one only the last tokens are copied, so that a prefill's states are freed.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from conceptmoe_vl.chunk import Boundaries, TokenKinds
from conceptmoe_vl.concepts import OpenChunks
from conceptmoe_vl.layout import PackedLayout

# Tokens of all rows and calls together: assisted decoding drafts 20 or so at a time, for one row.
_TOKENS = 512


@dataclasses.dataclass
class ChunkState:
    """What one row's chunk module, merge and dechunk know of the past.

    All `[B, ...]`, None before a call. Tensors are replaced, never written in place.

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

    @property
    def bytes(self) -> int:
        tensors = [self.last_key_GD, self.smoothed_GD]
        if self.open_chunks is not None:
            tensors += [self.open_chunks.sum_GD, self.open_chunks.count_G]
        return sum(x.numel() * x.element_size() for x in tensors if x is not None)

    @classmethod
    def stacked(cls, states: Sequence[ChunkState]) -> ChunkState:
        """The rows of several states of one model, end to end."""
        made = dataclasses.replace(states[0])
        for state in states[1:]:
            made.join(state)
        return made

    def join(self, other: ChunkState, keep: Tensor | slice = slice(None)) -> None:
        """Chosen rows, and behind them those of another state of the same model."""
        self.last_key_GD = _behind(self.last_key_GD, other.last_key_GD, keep)
        self.smoothed_GD = _behind(self.smoothed_GD, other.smoothed_GD, keep)
        mine, theirs = self.open_chunks, other.open_chunks
        if mine is not None and theirs is not None:
            self.open_chunks = OpenChunks(
                torch.cat((mine.sum_GD[keep], theirs.sum_GD)),
                torch.cat((mine.count_G[keep], theirs.count_G)),
            )


def _behind(first: Tensor | None, second: Tensor | None, keep: Tensor | slice) -> Tensor | None:
    if first is None or second is None:  # a model that has no such state has it in no cache
        return None
    return torch.cat((first[keep], second))


@dataclasses.dataclass(frozen=True)
class CallRecord:
    """One call, or the end of one.

    Attributes:
        before: state of the rows before its tokens. token_lengths, concept_lengths: their lengths
            then.
        columns: columns of its padded inputs. kept_BN: which of them hold tokens; None: all.
        offsets: first token of each row in the tensors below.
        h_TD: encoder states, None where nothing is summed. key_TD: keys of the chunk module.
        smoothed_MD: smoothed concepts that the call closed. mask_T: `[T]` bool, boundaries.
        inside_T: `[T]` bool, patches that are not their image's first one; None without images.
        merged_T: `[T]` bool, patches that belong to a region of the plane; None without them.
    """

    before: ChunkState
    token_lengths: tuple[int, ...]
    concept_lengths: tuple[int, ...]
    columns: int
    kept_BN: Tensor | None
    offsets: tuple[int, ...]
    h_TD: Tensor | None
    key_TD: Tensor | None
    smoothed_MD: Tensor | None
    mask_T: Tensor
    inside_T: Tensor | None
    merged_T: Tensor | None

    @property
    def size(self) -> int:
        return self.columns * len(self.offsets)

    def tokens_before(self, column: int) -> list[int]:
        """Tokens of each row in the first columns."""
        if self.kept_BN is None:
            return [column] * len(self.offsets)
        return self.kept_BN[:, :column].sum(1).tolist()

    def whole_images_from(self, column: int) -> int:
        """The first column from this one on before which no row has a part of an image alone."""
        if self.inside_T is None:
            return column
        inside, ends = self.inside_T.tolist(), self.tokens_before(self.columns)
        table = None if self.kept_BN is None else self.kept_BN.long().cumsum(1).tolist()

        def cuts(column: int) -> bool:
            for row, (offset, end) in enumerate(zip(self.offsets, ends, strict=True)):
                n = column if table is None or not column else table[row][column - 1]
                if n < end and inside[offset + n]:
                    return True
            return False

        while cuts(column):
            column += 1
        return column

    def state_at(self, column: int) -> tuple[ChunkState, tuple[int, ...], tuple[int, ...]]:
        """The state after the first columns, and the rows' tokens and concepts then."""
        kept = self.tokens_before(column)
        fired = self.mask_T.tolist()
        closed = list(itertools.accumulate(fired, initial=0))
        spans = [(start, start + n) for start, n in zip(self.offsets, kept, strict=True)]
        lasts = [stop - 1 if stop > start else None for start, stop in spans]
        counts = [closed[stop] - closed[start] for start, stop in spans]
        concepts = [
            closed[stop] - 1 if n else None for (_, stop), n in zip(spans, counts, strict=True)
        ]
        state = ChunkState(
            _updated(self.before.last_key_GD, self.key_TD, lasts),
            self._open_chunks(spans, fired),
            _updated(self.before.smoothed_GD, self.smoothed_MD, concepts),
        )
        tokens = tuple(a + b for a, b in zip(self.token_lengths, kept, strict=True))
        closed_now = tuple(a + b for a, b in zip(self.concept_lengths, counts, strict=True))
        return state, tokens, closed_now

    def _open_chunks(self, spans: list[tuple[int, int]], fired: list[bool]) -> OpenChunks | None:
        """Sums over the tokens behind each row's last boundary; all before it belong to it."""
        before, h_TD = self.before.open_chunks, self.h_TD
        if h_TD is None:
            return before
        merged = None if self.merged_T is None else self.merged_T.tolist()
        tokens, rows, goes_on = [], [], []
        for row, (start, stop) in enumerate(spans):
            closing = next((t for t in range(stop - 1, start - 1, -1) if fired[t]), None)
            goes_on.append(closing is None)
            for t in range(start if closing is None else closing + 1, stop):
                if merged is None or not merged[t]:
                    tokens.append(t)
                    rows.append(row)
        sums = h_TD.new_zeros(len(spans), h_TD.shape[1], dtype=torch.float32)
        row_S = torch.tensor(rows, dtype=torch.int64, device=h_TD.device)
        token_S = torch.tensor(tokens, dtype=torch.int64, device=h_TD.device)
        sums = sums.index_add(0, row_S, h_TD.index_select(0, token_S).float())
        counts = row_S.bincount(minlength=len(spans)).float()
        if before is not None:
            stays = torch.tensor(goes_on, device=h_TD.device)
            sums = sums + before.sum_GD * stays[:, None]
            counts = counts + before.count_G * stays
        return OpenChunks(sums, counts)

    def first(self, column: int) -> CallRecord:
        """The record of the first columns alone."""
        kept_BN = None if self.kept_BN is None else self.kept_BN[:, :column]
        return dataclasses.replace(self, columns=column, kept_BN=kept_BN)

    def last(self, columns: int) -> CallRecord:
        """Copies of the last columns, fewer where the cut would go through an image."""
        cut = self.whole_images_from(self.columns - columns)
        state, token_lengths, concept_lengths = self.state_at(cut)
        firsts, stops = self.tokens_before(cut), self.tokens_before(self.columns)
        spans = [
            (offset + first, offset + stop)
            for offset, first, stop in zip(self.offsets, firsts, stops, strict=True)
        ]
        lengths = [stop - start for start, stop in spans]
        where = [t for span in spans for t in range(*span)]
        token_S = torch.tensor(where, dtype=torch.int64, device=self.mask_T.device)
        mask_S = self.mask_T[token_S]
        concept_S = (self.mask_T.long().cumsum(0) - 1)[token_S[mask_S]]
        return CallRecord(
            state,
            token_lengths,
            concept_lengths,
            self.columns - cut,
            None if self.kept_BN is None else self.kept_BN[:, cut:].clone(),
            tuple(itertools.accumulate(lengths[:-1], initial=0)),
            _taken(self.h_TD, token_S),
            _taken(self.key_TD, token_S),
            _taken(self.smoothed_MD, concept_S),
            mask_S,
            _taken(self.inside_T, token_S),
            _taken(self.merged_T, token_S),
        )


def _taken(x: Tensor | None, index: Tensor) -> Tensor | None:
    return None if x is None else x.index_select(0, index)


def _updated(before: Tensor | None, new: Tensor | None, where: list[int | None]) -> Tensor | None:
    """`[B, ...]`: the entry of `new` for each row, the old one where it has none."""
    if new is None or all(i is None for i in where):
        return before
    index = torch.tensor([0 if i is None else i for i in where], device=new.device)
    chosen = new.index_select(0, index)
    if before is None:
        return chosen
    has = torch.tensor([i is not None for i in where], device=new.device)
    return torch.where(has[:, None], chosen, before)


def record_call(
    before: ChunkState,
    lengths: tuple[tuple[int, ...], tuple[int, ...]],
    columns: tuple[int, Tensor | None],
    layout: PackedLayout,
    kinds: TokenKinds,
    boundaries: Boundaries,
    h_TD: Tensor | None,
    smoothed_MD: Tensor | None,
) -> CallRecord:
    """The record of a call, cut to its end where it is long.

    Args:
        before: state before the call. lengths: tokens and concepts of the rows then.
        columns: columns of the padded inputs, and which of them hold tokens (None: all).
        layout, kinds, boundaries: of the call's tokens. h_TD: encoder states, where they are
            summed. smoothed_MD: the concepts that the call closed.
    """
    inside_T = merged_T = None
    if kinds.patches is not None:
        patches = kinds.patches
        inside_P = (patches.row_P > 0) | (patches.column_P > 0)
        inside_T = torch.zeros_like(kinds.image_T).index_put((patches.token_P,), inside_P)
        merged_T = kinds.image_T if boundaries.parent_P is not None else None
    record = CallRecord(
        before,
        *lengths,
        *columns,
        tuple(itertools.accumulate(layout.lengths[:-1], initial=0)),
        None if h_TD is None else h_TD.detach(),
        None if boundaries.key_TD is None else boundaries.key_TD.detach(),
        None if smoothed_MD is None else smoothed_MD.detach(),
        boundaries.mask_T,
        inside_T,
        merged_T,
    )
    most = max(_TOKENS // len(layout.lengths), 1)
    return record if record.columns <= most else record.last(most)


class Journal:
    """The latest calls, newest last: the last one always, earlier ones up to a number of tokens."""

    def __init__(self) -> None:
        self.records: deque[CallRecord] = deque()
        self.size = 0

    @property
    def columns(self) -> int:
        return sum(record.columns for record in self.records)

    def add(self, record: CallRecord) -> None:
        self.records.append(record)
        self.size += record.size
        while len(self.records) > 1 and self.size > _TOKENS:
            self.size -= self.records.popleft().size

    def clear(self) -> None:
        self.records.clear()
        self.size = 0

    def take_back(self, columns: int) -> tuple[ChunkState, tuple[int, ...], tuple[int, ...]]:
        """Forgets the last columns; the state, tokens and concepts of the rows before them.

        Raises:
            ValueError: the columns go further back than the journal, or end inside an image.
        """
        if columns > self.columns:
            raise ValueError(
                f"{columns} tokens cannot be taken back: the cache remembers its last "
                f"{self.columns} (the latest calls, {_TOKENS} tokens of all rows together; none "
                "after rows were reordered); start again with a fresh cache"
            )
        index = len(self.records)
        while columns > 0:
            index -= 1
            columns -= self.records[index].columns
        record, kept = self.records[index], -columns
        if record.whole_images_from(kept) != kept:
            raise ValueError(
                "tokens cannot be taken back up to the middle of an image: take back the whole "
                "image or nothing of it"
            )
        state = record.state_at(kept)
        for dropped in [self.records.pop() for _ in range(len(self.records) - index)]:
            self.size -= dropped.size
        if kept:
            self.records.append(record.first(kept))
            self.size += self.records[-1].size
        return state
