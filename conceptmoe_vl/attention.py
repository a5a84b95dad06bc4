"""Causal attention over packed documents, with and without a cache.

One interface, fastest kernel inside. On CUDA: `torch.nn.attention.varlen.varlen_attn`. On CPU,
measured forward and backward on one thread, SDPA a document / SDPA in one padded batch / plain
products:

| documents | bfloat16 | float32 |
| --- | --- | --- |
| 32 x 176, 6 heads of 32 | 215 / 154 / 39 ms | 113 / 60 / 74 ms |
| 4 x 1,024, 8 heads of 32 | 168 / 151 / 305 ms | 198 / 191 / 549 ms |

So documents of similar length share a padded batch (causality keeps the padding on the right from
being seen), short bfloat16 ones are plain matrix products, and a block mask (5 to 9 times slower)
is never used.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from conceptmoe_vl.layout import PackedLayout

_VARLEN_DTYPES = (torch.bfloat16, torch.float16)
# Longest documents for which plain products beat the fused kernel in bfloat16 on CPU.
SHORT = 384


def packed_attention(q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, layout: PackedLayout) -> Tensor:
    """Causal attention inside each document of a packed stream.

    Args:
        q_TNH: `[T, N, H]` queries; k_TNH, v_TNH: `[T, N_kv, H]` with N a multiple of N_kv.
        layout: the documents; past lengths are ignored.

    Returns:
        `[T, N, H]` attended values.
    """
    if q_TNH.is_cuda and q_TNH.dtype in _VARLEN_DTYPES:
        return _varlen_attention(q_TNH, k_TNH, v_TNH, layout)
    batches, place_T = layout.batches
    outputs = []
    for documents, length, where in batches:
        parts = (
            x[where] if isinstance(where, slice) else x.index_select(0, where)
            for x in (q_TNH, k_TNH, v_TNH)
        )
        q, k, v = (x.unflatten(0, (documents, length)) for x in parts)
        outputs.append(_causal(q, k, v).flatten(0, 1))
    out = torch.cat(outputs) if len(outputs) != 1 else outputs[0]
    return out if place_T is None else out.index_select(0, place_T)


def _varlen_attention(q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, layout: PackedLayout) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    cu, longest = layout.cu_seqlens, layout.max_length
    return varlen_attn(
        q_TNH,
        k_TNH.contiguous(),
        v_TNH.contiguous(),
        cu,
        cu,
        longest,
        longest,
        window_size=(-1, 0),
        enable_gqa=q_TNH.shape[1] != k_TNH.shape[1],
    )


def _causal(q_BTNH: Tensor, k_BTNH: Tensor, v_BTNH: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q_BTNH, k_BTNH, v_BTNH))
    if q.device.type == "cpu" and q.dtype == torch.bfloat16 and q.shape[2] <= SHORT:
        repeats = q.shape[1] // k.shape[1]
        if repeats > 1:
            k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
        flat = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
        out = _ShortCausalAttention.apply(*flat).view(q.shape)
    else:
        grouped = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    return out.transpose(1, 2)


class _ShortCausalAttention(torch.autograd.Function):
    """softmax(q k^T / sqrt(H) + causal mask) v on `[batch, L, H]`, L small."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        batch, length, size = q.shape
        mask = q.new_full((length, length), float("-inf")).triu(1).expand(batch, length, length)
        weights = torch.baddbmm(mask, q, k.transpose(1, 2), alpha=size**-0.5).softmax(-1)
        ctx.save_for_backward(q, k, v, weights)
        return torch.bmm(weights, v)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, weights = ctx.saved_tensors
        grad_weights = torch.bmm(grad, v.transpose(1, 2))
        grad_scores = torch.ops.aten._softmax_backward_data(
            grad_weights, weights, -1, weights.dtype
        ).mul_(q.shape[-1] ** -0.5)
        grad_q = torch.bmm(grad_scores, k)
        grad_k = torch.bmm(grad_scores.transpose(1, 2), q)
        return grad_q, grad_k, torch.bmm(weights.transpose(1, 2), grad)


def cached_attention(
    q_TNH: Tensor, keys_BNSH: Tensor, values_BNSH: Tensor, layout: PackedLayout
) -> Tensor:
    """Attention of new tokens over all that a cache holds for their rows, themselves included.

    Args:
        q_TNH: `[T, N, H]` queries of the new tokens, documents end to end.
        keys_BNSH, values_BNSH: `[B, N_kv, S, H]` cache buffers that already hold the new tokens.
        layout: documents with `rows` and `past_lengths` before this call.

    Returns:
        `[T, N, H]` attended values.
    """
    if layout.max_length == 1:
        return _decode_attention(q_TNH, keys_BNSH, values_BNSH, layout)
    assert layout.rows is not None
    outputs, start = [], 0
    for row, length, past in zip(layout.rows, layout.lengths, layout.past_lengths, strict=True):
        if length == 0:
            continue
        total = past + length
        q = q_TNH[start : start + length].transpose(0, 1).unsqueeze(0)
        k, v = (x[row : row + 1, :, :total] for x in (keys_BNSH, values_BNSH))
        seen = torch.ones(length, total, dtype=torch.bool, device=q.device).tril(past)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=seen, enable_gqa=q.shape[1] != k.shape[1]
        )
        outputs.append(out[0].transpose(0, 1))
        start += length
    return torch.cat(outputs)


def _decode_attention(
    q_TNH: Tensor, keys_BNSH: Tensor, values_BNSH: Tensor, layout: PackedLayout
) -> Tensor:
    """One new token for each of some rows: a single batched call over the longest of them."""
    assert layout.rows is not None
    active = [i for i, length in enumerate(layout.lengths) if length]
    rows = [layout.rows[i] for i in active]
    totals = [layout.past_lengths[i] + 1 for i in active]
    longest = max(totals)
    keys, values = keys_BNSH[:, :, :longest], values_BNSH[:, :, :longest]
    if rows != list(range(keys.shape[0])):
        index = torch.tensor(rows, device=q_TNH.device)
        keys, values = keys[index], values[index]
    mask = None
    if min(totals) != longest:
        lengths = torch.tensor(totals, device=q_TNH.device)
        mask = (torch.arange(longest, device=q_TNH.device) < lengths[:, None])[:, None, None]
    q = q_TNH[:, :, None]
    gqa = q.shape[1] != keys.shape[1]
    out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=gqa)
    return out[:, :, 0]
