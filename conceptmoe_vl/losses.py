"""The losses: chunked cross entropy, ratio loss (eq. 4), balance loss and z-loss of the routers.

Statistics are summed over all tokens of all modalities and samples on every data-parallel rank, so
that the gradient is that of one process that holds the whole batch (DESIGN.md 3.5).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from conceptmoe_vl.chunk import Boundaries
from conceptmoe_vl.chunk_values import ChunkValues
from conceptmoe_vl.compression import MODALITIES
from conceptmoe_vl.configuration import ChunkConfig
from conceptmoe_vl.layout import PackedLayout
from conceptmoe_vl.moe import RouterStatistics
from conceptmoe_vl.products import compute_dtype

# Logits of one chunk: 4 M entries are 16 MiB in float32, whatever the vocabulary.
_LOGIT_ENTRIES = 1 << 22
# Logits whose softmax is made at once on a CPU, so that they stay in its cache.
_SOFTMAX_ENTRIES = 1 << 19


def sum_over_ranks(local: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """The sum over data-parallel ranks; its gradient is world size times the local one.

    Gradients are averaged over ranks afterwards, so the result is the gradient of the whole sum.
    One collective; every rank must call it equally often.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(group) == 1:
        return local
    world = dist.get_world_size(group)
    total = local.detach().clone()
    dist.all_reduce(total, group=group)
    scaled = local * world
    return total + (scaled - scaled.detach())


@dataclasses.dataclass(frozen=True)
class AuxiliaryLosses:
    """Unweighted losses (scalars, float32) and what they were computed from.

    Attributes:
        ratio, balance, router_z: the losses.
        tokens_per_concept: measured ratio 1 / F over everything; ratio_by_modality: the same by
            modality; ratio_by_target: by drawn ratio (None without `target_ratios`).
        load_LE: share of slots per executed MoE layer, a list of `[E]` tensors.
        entropy_L: mean entropy of the router's choice in the same layers, over log E.
    """

    ratio: Tensor
    balance: Tensor
    router_z: Tensor
    tokens_per_concept: Tensor
    ratio_by_modality: dict[str, Tensor]
    ratio_by_target: dict[float, Tensor] | None
    load_LE: list[Tensor]
    entropy_L: list[Tensor]


def auxiliary_losses(
    chunk: ChunkConfig,
    boundaries: Boundaries,
    image_T: Tensor,
    layout: PackedLayout,
    routers: list[RouterStatistics],
    across_ranks: bool,
    filler: bool = False,
    values: ChunkValues | None = None,
) -> AuxiliaryLosses:
    """All losses that need statistics, with one collective for the lot.

    Args:
        chunk: the `chunk` section. boundaries: p and b. image_T: `[T]` bool. layout: documents.
        routers: statistics of every executed MoE layer. across_ranks: sum over data-parallel ranks.
        filler: leaves this rank's tokens out of every sum; their gradient is zero.
        values: where the run's schedule is; None: the configured values.
    """
    values = values or ChunkValues.of(chunk)
    parts = [_ratio_sums(chunk, boundaries, image_T, layout, values)]
    for router in routers:
        entropy = router.z.new_zeros(()) if router.entropy is None else router.entropy
        tokens = router.z.new_tensor(router.tokens)
        scalars = torch.stack((router.z.double(), tokens.double(), entropy.double()))
        parts += [router.slots_E.double(), router.probability_E.double(), scalars]
    sums = torch.cat(parts)
    if filler:
        sums = sums * 0.0
    if across_ranks:
        sums = sum_over_ranks(sums)
    ratio_sums, *router_sums = sums.split([part.numel() for part in parts])
    # drawn ratios x modalities (text, image) x (sum of p, sum of b, tokens)
    by_target, sample = ratio_sums[:-2].view(-1, 2, 3), ratio_sums[-2:]
    balances, z_losses, loads, entropies = _router_losses(router_sums)
    zero = sums.new_zeros(())
    counted_R23 = by_target.detach()
    counted = counted_R23.sum(0)
    return AuxiliaryLosses(
        ratio=_ratio_loss(chunk, by_target, sample, values).float(),
        balance=(torch.stack(balances).mean() if balances else zero).float(),
        router_z=(torch.stack(z_losses).mean() if z_losses else zero).float(),
        tokens_per_concept=_tokens_per_concept(counted.sum(0)),
        ratio_by_modality={
            name: _tokens_per_concept(sums) for name, sums in zip(MODALITIES, counted, strict=True)
        },
        ratio_by_target={
            ratio: _tokens_per_concept(sums)
            for ratio, sums in zip(chunk.target_ratios or (), counted_R23.sum(1), strict=True)
        }
        if boundaries.target_G is not None
        else None,
        load_LE=loads,
        entropy_L=entropies,
    )


def _router_losses(
    sums: Sequence[Tensor],
) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
    """Balance loss, z loss, load and mean entropy of every router.

    Args:
        sums: of each router its slots `[E]`, its probabilities `[E]`, and z, tokens and entropy.
    """
    balances, z_losses, loads, entropies = [], [], [], []
    for slots_E, probability_E, scalars in zip(sums[::3], sums[1::3], sums[2::3], strict=True):
        z, tokens, entropy = scalars
        load_E = slots_E / slots_E.sum().clamp(min=1)
        # 1 for uniform routing, E when one expert takes all.
        balances.append(load_E.numel() * (load_E * probability_E / tokens.clamp(min=1)).sum())
        z_losses.append(z / tokens.clamp(min=1))
        loads.append(load_E.float())
        entropies.append((entropy / tokens.clamp(min=1)).detach().float())
    return balances, z_losses, loads, entropies


def _tokens_per_concept(sums: Tensor) -> Tensor:
    """Measured ratio of (sum of p, sum of b, tokens)."""
    return (sums[2] / sums[1].clamp(min=1)).float()


def _ratio_sums(
    chunk: ChunkConfig,
    boundaries: Boundaries,
    image_T: Tensor,
    layout: PackedLayout,
    values: ChunkValues,
) -> Tensor:
    """`[6 R + 2]`: for every drawn ratio the sums of p, b and 1 over text, then over image tokens.

    Then the sum over documents of their own loss, and G. R is 1 without `target_ratios`.
    """
    p_T, b_T = boundaries.probability_T.double(), boundaries.mask_T.double()
    rows = torch.stack((p_T, b_T, torch.ones_like(p_T)))
    group_T, groups = image_T.long(), 2
    if boundaries.target_G is not None:
        group_T = group_T + 2 * boundaries.target_G[layout.document_T]
        groups = 2 * len(chunk.target_ratios or ())
    sums = torch.cat([rows @ (group_T == group).double() for group in range(groups)])
    sample = p_T.new_zeros(2)
    if chunk.ratio_scope == "sample" and chunk.router != "none":
        per_document = p_T.new_zeros(3, len(layout.lengths)).index_add(1, layout.document_T, rows)
        p_G, b_G, n_G = per_document[:, per_document[2] > 0]
        losses_G = _eq4(values.loss_target(chunk.target_ratio), b_G / n_G, p_G / n_G)
        sample = torch.stack((losses_G.sum(), losses_G.new_tensor(float(len(n_G)))))
    return torch.cat((sums, sample))


def _ratio_loss(
    chunk: ChunkConfig, by_target: Tensor, sample: Tensor, values: ChunkValues
) -> Tensor:
    """Eq. 4 over the configured scope; over several groups it is their mean, weighted by tokens.

    Args:
        by_target: `[R, 2, 3]` sums of p, b and 1 by drawn ratio and modality. sample: sum, G.
    """
    if chunk.router == "none":
        return by_target.sum() * 0.0
    if chunk.ratio_scope == "sample":
        return sample[0] / sample[1].clamp(min=1)
    # Outside training, and without several ratios, all documents are one group.
    ratios = (chunk.target_ratios or []) if by_target.shape[0] > 1 else [chunk.target_ratio]
    total, tokens = by_target.new_zeros(()), by_target.new_zeros(())
    for ratio, sums in zip(ratios, by_target, strict=True):
        groups = [(ratio, sums.sum(0))]
        if chunk.ratio_scope == "modality":
            own = (chunk.text_target_ratio, chunk.image_target_ratio)
            groups = [(target or ratio, part) for target, part in zip(own, sums, strict=True)]
        for target, (p, b, n) in groups:
            if target == 1:  # every token is a boundary: there is nothing to ask for
                continue
            count = n.detach().clamp(min=1)
            loss = _eq4(values.loss_target(target), b / count, p / count)
            total = total + loss * n.detach()
            tokens = tokens + n.detach()
    return total / tokens.clamp(min=1)


def _eq4(ratio: float, share: Tensor, mean_p: Tensor) -> Tensor:
    """R F G + R/(R-1) (1-F)(1-G); F, the share of boundaries, carries no gradient."""
    share = share.detach()
    return ratio * share * mean_p + ratio / (ratio - 1) * (1 - share) * (1 - mean_p)


def chunked_cross_entropy(
    h_SD: Tensor, weight_VD: Tensor, target_S: Tensor
) -> tuple[Tensor, Tensor]:
    """Summed and single token losses without ever holding `[S, V]` logits.

    The gradient is made chunk by chunk together with the loss, while a chunk's logits exist: memory
    stays at one chunk and no product is computed twice.

    Args:
        h_SD: states of the supervised positions. weight_VD: head. target_S: ids to predict.

    Returns:
        The differentiable sum (float32) and the detached losses `[S]`.
    """
    return _ChunkedCrossEntropy.apply(h_SD, weight_VD, target_S)


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, h_SD: Tensor, weight_VD: Tensor, target_S: Tensor
    ) -> tuple[Tensor, Tensor]:
        dtype = compute_dtype(h_SD)
        weight = weight_VD.to(dtype)
        needs_h, needs_weight = ctx.needs_input_grad[:2]
        rows = max(_LOGIT_ENTRIES // weight.shape[0], 64)
        losses = torch.empty(h_SD.shape[0], dtype=torch.float32, device=h_SD.device)
        grad_h = torch.empty_like(h_SD) if needs_h else None
        grad_weight = torch.zeros_like(weight_VD, dtype=torch.float32) if needs_weight else None
        for start in range(0, h_SD.shape[0], rows):
            part = slice(start, start + rows)
            h, target = h_SD[part].to(dtype), target_S[part, None]
            logits = h @ weight.T
            losses[part] = _token_losses(logits, target, needs_h or needs_weight)
            if not (needs_h or needs_weight):
                continue
            grad = logits  # by now
            if grad_h is not None:
                grad_h[part] = grad @ weight
            if grad_weight is not None and dtype == torch.float32:
                grad_weight.addmm_(grad.T, h)
            elif grad_weight is not None:
                grad_weight += grad.T @ h
        ctx.save_for_backward(grad_h, grad_weight)
        ctx.weight_dtype = weight_VD.dtype
        ctx.mark_non_differentiable(losses)
        return losses.sum(), losses

    @staticmethod
    def backward(
        ctx: Any, grad_sum: Tensor, _: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None]:
        grad_h, grad_weight = ctx.saved_tensors
        grad_h = None if grad_h is None else grad_h * grad_sum.to(grad_h.dtype)
        grad_weight = None if grad_weight is None else (grad_weight * grad_sum).to(ctx.weight_dtype)
        return grad_h, grad_weight, None


def _token_losses(logits_SV: Tensor, target_S1: Tensor, with_gradient: bool) -> Tensor:
    """`[S]` float32 losses; with `with_gradient` the logits become d loss / d logits, in place.

    By `softmax`, whose greatest probability p gives the normaliser, max - log p. float32 `exp`, and
    with it `logsumexp`, take twice as long on a CPU, and thirty times as long where the result is
    nearly 0, as it is in every model that is sure.
    """
    length, vocabulary = logits_SV.shape
    rows = length if logits_SV.is_cuda else max(_SOFTMAX_ENTRIES // vocabulary, 1)
    losses = []
    for logits, target in zip(logits_SV.split(rows), target_S1.split(rows), strict=True):
        probability = logits.softmax(-1, dtype=torch.float32)
        greatest = probability.amax(-1, keepdim=True).log()
        norm = logits.amax(-1, keepdim=True).float() - greatest
        losses.append((norm - logits.gather(1, target)).squeeze(1))
        if with_gradient:  # softmax - one-hot
            probability.scatter_add_(1, target, probability.new_full(target.shape, -1.0))
            logits.copy_(probability)
    return torch.cat(losses)
