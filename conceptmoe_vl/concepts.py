"""From tokens to concepts and back: merging (section 3.2), smoothing (eq. 5), plug-back (eq. 6).

Notable: **a boundary closes its chunk**. With boundaries at 1, 3 and 6, c_1 = h_1, c_2 = h_2 + h_3,
c_3 = h_4 + h_5 + h_6, and h_7 belongs to no concept yet (Figure 1).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from conceptmoe_vl.chunk import Boundaries, ImagePatches, TokenKinds
from conceptmoe_vl.layout import PackedLayout


@dataclasses.dataclass(frozen=True)
class ConceptMap:
    """Which tokens make a concept, which concept a token reads, and who precedes whom.

    With a cache, every document has one *carried* concept, the last one that earlier calls closed;
    the carried concepts stand before the M new ones wherever an index says "extended".

    Attributes:
        boundary_M: stream index of the token at which each concept stands (it closed it, or seeded
            it).
        merged_into_T: concept that each token becomes part of; M + g for those still open in
            document g.
        read_T: extended index of the concept that each token reads, psi(n).
        previous_M: extended index of each concept's predecessor pi(m); itself where there is none.
        layout: the documents of the concept stream.
        carried: G with a cache, else 0.
        is_full_step: a decoding step in which every document has one token.
    """

    boundary_M: Tensor
    merged_into_T: Tensor
    read_T: Tensor
    previous_M: Tensor
    layout: PackedLayout
    carried: int
    is_full_step: bool = False

    @property
    def count(self) -> int:
        return self.boundary_M.shape[0]


def map_concepts(
    boundaries: Boundaries,
    kinds: TokenKinds,
    layout: PackedLayout,
    positions: str,
    past_concepts: tuple[int, ...] | None = None,
) -> ConceptMap:
    """Numbers the concepts of a packed stream.

    Args:
        boundaries, kinds, layout: the decisions, modalities and documents of the T tokens.
        positions: `boundary` or `index`, the rotary positions of the concept stream.
        past_concepts: concepts already in the cache per document; None without a cache.
    """
    mask_T = boundaries.mask_T
    if past_concepts is not None and layout.max_length == 1 and boundaries.parent_P is None:
        return _map_step(mask_T, layout, positions, past_concepts)
    carried = 0 if past_concepts is None else len(layout.lengths)
    closed_T = mask_T.long().cumsum(0)
    closed_before = torch.cat((closed_T.new_zeros(1), closed_T))[layout.cu_seqlens.long()]
    lengths = tuple(closed_before.diff().tolist())
    boundary_M = mask_T.nonzero().squeeze(1)
    document_T = layout.document_T
    next_T = closed_T - mask_T.long()
    merged_T = torch.where(
        next_T < closed_before[1:][document_T], next_T, sum(lengths) + document_T
    )
    read_T = closed_T - 1 + carried
    previous_M = torch.arange(len(boundary_M), device=mask_T.device) - 1 + carried
    if carried:
        read_T = torch.where(closed_T > closed_before[:-1][document_T], read_T, document_T)
        first = closed_before[:-1][closed_before.diff() > 0]
        previous_M = previous_M.index_put((first,), document_T[boundary_M[first]])
    if boundaries.parent_P is not None and kinds.patches is not None:
        region_P, previous_P = _regions(boundaries, kinds.patches, closed_T)
        token_P = kinds.patches.token_P
        merged_T = merged_T.index_put((token_P,), region_P)
        read_T = read_T.index_put((token_P,), region_P + carried)
        seed_P = mask_T[token_P]
        previous_M = previous_M.index_put((region_P[seed_P],), previous_P[seed_P] + carried)
    previous_M = previous_M.clamp(min=0)
    concept_layout = PackedLayout.from_lengths(
        lengths,
        mask_T.device,
        past_lengths=past_concepts,
        positions_T=layout.positions_T[boundary_M] if positions == "boundary" else None,
        rows=layout.rows,
    )
    return ConceptMap(boundary_M, merged_T, read_T, previous_M, concept_layout, carried)


def _map_step(
    mask_T: Tensor, layout: PackedLayout, positions: str, past_concepts: tuple[int, ...]
) -> ConceptMap:
    """The same for a decoding step, from one look at the boundaries: a few lists are quicker than
    twenty small kernels.
    """
    carried, device = len(layout.lengths), mask_T.device
    lengths = [0] * carried
    boundary: list[int] = []
    read, merged, previous = [], [], []
    fired = mask_T.tolist()
    count = sum(fired)
    documents = [document for document, length in enumerate(layout.lengths) if length]
    for token, (document, closes) in enumerate(zip(documents, fired, strict=True)):
        if closes:
            lengths[document] = 1
            merged.append(len(boundary))
            read.append(carried + len(boundary))
            boundary.append(token)
            previous.append(document)
        else:
            merged.append(count + document)
            read.append(document)
    per_token = torch.tensor([merged, read], dtype=torch.int64, device=device)
    per_concept = torch.tensor([boundary, previous], dtype=torch.int64, device=device)
    closes_at = layout.positions_T if count == len(fired) else None
    if positions == "boundary" and closes_at is None:
        closes_at = layout.positions_T[per_concept[0]]
    concept_layout = PackedLayout.from_lengths(
        lengths,
        device,
        past_lengths=past_concepts,
        positions_T=closes_at if positions == "boundary" else None,
        rows=layout.rows,
    )
    return ConceptMap(
        boundary_M=per_concept[0],
        merged_into_T=per_token[0],
        read_T=per_token[1],
        previous_M=per_concept[1],
        layout=concept_layout,
        carried=carried,
        is_full_step=layout.is_full_step,
    )


def _regions(
    boundaries: Boundaries, patches: ImagePatches, closed_T: Tensor
) -> tuple[Tensor, Tensor]:
    """Region of every patch, and of every patch's parent: chains of parents end in a seed."""
    token_P = patches.token_P
    pointer_T = torch.arange(closed_T.shape[0], device=closed_T.device)
    parent_T = pointer_T.index_put((token_P,), boundaries.parent_P)
    root_T = torch.where(boundaries.mask_T, pointer_T, parent_T)
    for _ in range(max(patches.longest - 1, 1).bit_length()):
        root_T = root_T[root_T]
    region_T = closed_T[root_T] - 1
    return region_T[token_P], region_T[boundaries.parent_P]


@dataclasses.dataclass(frozen=True)
class OpenChunks:
    """What documents carry from one call to the next: their tokens that no boundary has closed yet.

    Attributes:
        sum_GD: `[G, D]` sums of their states. count_G: `[G]` how many they are.
    """

    sum_GD: Tensor
    count_G: Tensor


def merge_tokens(
    h_TD: Tensor, concepts: ConceptMap, merge: str, open_chunks: OpenChunks | None = None
) -> tuple[Tensor, OpenChunks | None]:
    """Merges the tokens of each concept (section 3.2).

    Args:
        h_TD: encoder states. merge: sum | boundary | mean.
        open_chunks: what the documents carry over from earlier calls; None without a cache.

    Returns:
        `[M, D]` concepts, and what is still open after this call (None without a cache or with
        `boundary`, which needs no sums).
    """
    if merge == "boundary":
        return h_TD.index_select(0, concepts.boundary_M), open_chunks
    if open_chunks is not None and concepts.is_full_step:
        return _merge_step(h_TD, concepts, merge, open_chunks)
    count, documents = concepts.count, len(concepts.layout.lengths)
    sums = h_TD.new_zeros(count + documents, h_TD.shape[1], dtype=torch.float32)
    sums = sums.index_add(0, concepts.merged_into_T, h_TD.float())
    if merge == "sum" and open_chunks is None:
        return sums[:count].to(h_TD.dtype), None
    ones = torch.ones_like(concepts.merged_into_T, dtype=torch.float32)
    counts = torch.zeros_like(sums[:, 0]).index_add(0, concepts.merged_into_T, ones)
    if open_chunks is not None:
        # An open chunk goes on in the first concept that its document closes here, or stays open.
        lengths = torch.tensor(concepts.layout.lengths, device=sums.device)
        stays = count + torch.arange(documents, device=sums.device)
        goes_on = torch.where(lengths > 0, concepts.layout.cu_seqlens[:-1].long(), stays)
        sums = sums.index_add(0, goes_on, open_chunks.sum_GD)
        counts = counts.index_add(0, goes_on, open_chunks.count_G)
        # Copies: views would keep the sums of all concepts for as long as a cache is kept.
        open_chunks = OpenChunks(sums[count:].clone(), counts[count:].clone())
    merged = sums[:count]
    if merge == "mean":
        merged = merged / counts[:count, None]
    return merged.to(h_TD.dtype), open_chunks


def _merge_step(
    h_TD: Tensor, concepts: ConceptMap, merge: str, open_chunks: OpenChunks
) -> tuple[Tensor, OpenChunks]:
    """A decoding step of every document: token g joins the open chunk g, and a boundary closes it.

    Counts are kept up only where `mean` needs them.
    """
    sums, counts = open_chunks.sum_GD + h_TD.float(), open_chunks.count_G
    merged = sums.index_select(0, concepts.boundary_M)
    if merge == "mean":
        counts = counts + 1.0
        merged = merged / counts.index_select(0, concepts.boundary_M)[:, None]
        counts = counts.index_fill(0, concepts.boundary_M, 0.0)
    sums = sums.index_fill(0, concepts.boundary_M, 0.0)
    return merged.to(h_TD.dtype), OpenChunks(sums, counts)


def smooth(
    value_MD: Tensor,
    probability_M: Tensor,
    concepts: ConceptMap,
    carried_GD: Tensor | None,
    doublings: int | None,
) -> Tensor:
    """Eq. 5 over the forest of predecessors, in float32: x_m = p_m value_m + (1 - p_m) x_pi(m).

    Args:
        value_MD: concept values. probability_M: p at their boundaries.
        carried_GD: last smoothed value of each document from the cache; None without one.
        doublings: how often to double the pointers; None stops when nothing is left to add.

    Returns:
        `[G + M, D]` with a cache, else `[M, D]`: the extended index of `ConceptMap`.
    """
    value = value_MD.float() * probability_M[:, None]
    decay = 1.0 - probability_M
    if carried_GD is None:
        return _ForestScan.apply(value, decay, concepts.previous_M, doublings)
    if concepts.layout.max_length <= 1 and concepts.is_full_step:
        # No concept follows another new one.
        before_MD = carried_GD.index_select(0, concepts.previous_M)
        return torch.cat((carried_GD, torch.addcmul(value, decay[:, None], before_MD)))
    decay = torch.cat((decay.new_zeros(carried_GD.shape[0]), decay))
    value = torch.cat((carried_GD.float(), value))
    roots = torch.arange(carried_GD.shape[0], device=value.device)
    return _ForestScan.apply(value, decay, torch.cat((roots, concepts.previous_M)), doublings)


def doublings_for(concepts: ConceptMap, deterministic: bool) -> int | None:
    """How many pointer doublings are exact.

    Five where 1 - p is at most one half, else log2 of the longest. On the CPU the scan looks itself
    when to stop, since that costs no synchronisation there.
    """
    if not concepts.boundary_M.is_cuda:
        return None
    longest = max(concepts.layout.max_length + (1 if concepts.carried else 0), 1)
    exact = math.ceil(math.log2(longest)) if longest > 1 else 0
    return min(exact, 5) if deterministic else exact


class _ForestScan(torch.autograd.Function):
    """x = value + decay * x[previous], solved by pointer doubling.

    Its transpose gives the gradient. Written by hand because autograd would keep one [M, D] tensor
    for every doubling.
    """

    @staticmethod
    def forward(
        ctx: Any, value: Tensor, decay: Tensor, previous: Tensor, doublings: int | None
    ) -> Tensor:
        ctx.doublings = doublings
        x, a, pointer = value, decay, previous
        for _ in _doubling_steps(decay, doublings):
            x = torch.addcmul(x, a[:, None], x.index_select(0, pointer))
            a, pointer = a * a[pointer], pointer[pointer]
            if doublings is None and not _matters(a):
                break
        ctx.save_for_backward(x, decay, previous)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, decay, previous = ctx.saved_tensors
        y, a, pointer = grad, decay, previous
        for _ in _doubling_steps(decay, ctx.doublings):
            y = y.index_add(0, pointer, a[:, None] * y)
            a, pointer = a * a[pointer], pointer[pointer]
            if ctx.doublings is None and not _matters(a):
                break
        grad_decay = (y * x.index_select(0, previous)).sum(1)
        return y, grad_decay, None, None


def _doubling_steps(decay: Tensor, doublings: int | None) -> range:
    if doublings is not None:
        return range(doublings)
    # A chain of M concepts needs ceil(log2 M) doublings; usually the scan stops long before.
    return range(max(decay.shape[0] - 1, 0).bit_length() if _matters(decay) else 0)


def _matters(a: Tensor) -> bool:
    return a.numel() > 0 and a.max().item() > 1e-10


def plug_back(
    h_TD: Tensor,
    u_XD: Tensor,
    boundaries: Boundaries,
    concepts: ConceptMap,
    gathered: bool = False,
) -> Tensor:
    """Eq. 6: z_n = h_n + s_n u_psi(n).

    s_n = 1 with the gradient of the confidence in the decision taken. `gathered`: u_XD is already
    u_psi(n).
    """
    read_TD = u_XD if gathered else u_XD.index_select(0, concepts.read_T)
    p = boundaries.probability_T
    if not p.requires_grad:
        return h_TD + read_TD.to(h_TD.dtype)
    confidence_T = torch.where(boundaries.mask_T, p, 1.0 - p)
    straight_T = 1.0 + (confidence_T - confidence_T.detach())
    return h_TD + (straight_T[:, None] * read_TD).to(h_TD.dtype)
