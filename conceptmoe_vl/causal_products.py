"""Causal attention as matrix products: what the fused kernel of a CPU does slowly in bfloat16.

Both work on `[B, N, L, H]` queries with `[B, N_kv, L, H]` keys and values, N a multiple of N_kv.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

_LOG2_E = math.log2(math.e)
# Key heads and queries of one tile: 4 x (2 x 128) x 1,024 scores are 2 MiB in bfloat16. Measured
# backward, 4 documents of 1,024, 8 heads of 32 on 4, one core: 1 x 128 101 ms, 4 x 128 78,
# 8 x 128 78, 4 x 64 83, 2 x 256 91.
_TILE_HEADS, _TILE_QUERIES = 4, 128


class ShortCausalAttention(torch.autograd.Function):
    """softmax(q k^T / sqrt(H) + causal mask) v, with the whole square of weights, for small L."""

    @staticmethod
    def forward(ctx: Any, q_BNLH: Tensor, k_BKLH: Tensor, v_BKLH: Tensor) -> Tensor:
        repeats = q_BNLH.shape[1] // k_BKLH.shape[1]
        if repeats > 1:
            k_BKLH, v_BKLH = (x.repeat_interleave(repeats, dim=1) for x in (k_BKLH, v_BKLH))
        q, k, v = (x.reshape(-1, *x.shape[2:]) for x in (q_BNLH, k_BKLH, v_BKLH))
        batch, length, size = q.shape
        mask = q.new_full((length, length), float("-inf")).triu(1).expand(batch, length, length)
        weights = torch.baddbmm(mask, q, k.transpose(1, 2), alpha=size**-0.5).softmax(-1)
        ctx.save_for_backward(q, k, v, weights)
        ctx.shape, ctx.repeats = q_BNLH.shape, repeats
        return torch.bmm(weights, v).view(q_BNLH.shape)

    @staticmethod
    def backward(ctx: Any, grad_BNLH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, weights = ctx.saved_tensors
        grad = grad_BNLH.reshape(q.shape)
        grad_weights = torch.bmm(grad, v.transpose(1, 2))
        grad_scores = torch.ops.aten._softmax_backward_data(
            grad_weights, weights, -1, weights.dtype
        ).mul_(q.shape[-1] ** -0.5)
        grad_q = torch.bmm(grad_scores, k).view(ctx.shape)
        grad_k = torch.bmm(grad_scores.transpose(1, 2), q).view(ctx.shape)
        grad_v = torch.bmm(weights.transpose(1, 2), grad).view(ctx.shape)
        if ctx.repeats > 1:
            grad_k, grad_v = (x.unflatten(1, (-1, ctx.repeats)).sum(2) for x in (grad_k, grad_v))
        return grad_q, grad_k, grad_v


class TiledCausalAttention(torch.autograd.Function):
    """The fused kernel forward, and a backward pass of products over tiles that stay in the cache.

    With w = exp(s - log sum exp s) and D = sum(grad * out), the gradient of the scores is
    w * (grad v^T - D) (Dao et al. 2022, algorithm 4). Both differences come out of the products
    themselves: -log sum exp and -D stand as further columns of q and grad, beside columns of ones
    in k and v, each as a sum of three bfloat16 numbers, which hold a float32. So the scores are
    rounded after the subtraction, where the large weights are the small numbers, and two
    elementwise passes are all that is left.
    """

    @staticmethod
    def forward(ctx: Any, q_BNLH: Tensor, k_BKLH: Tensor, v_BKLH: Tensor) -> Tensor:
        out, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q_BNLH, k_BKLH, v_BKLH, 0.0, True
        )
        ctx.save_for_backward(q_BNLH, k_BKLH, v_BKLH, out, log_sum)
        return out

    @staticmethod
    def backward(ctx: Any, grad_BNLH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q_BNLH, k_BKLH, v_BKLH, out, log_sum = ctx.saved_tensors
        heads, scale = k_BKLH.shape[1], q_BNLH.shape[-1] ** -0.5
        # The R query heads that share a key head are further queries of it: M = B N_kv.
        q, grad, out = (x.unflatten(1, (heads, -1)).flatten(0, 1) for x in (q_BNLH, grad_BNLH, out))
        log_sum = log_sum.unflatten(1, (heads, -1)).flatten(0, 1)
        k, v = k_BKLH.flatten(0, 1), v_BKLH.flatten(0, 1)
        q_long = _with_columns(q * (scale * _LOG2_E), log_sum * -_LOG2_E)
        grad_long = _with_columns(grad, -(grad.float() * out.float()).sum(-1))
        ones = k.new_ones(*k.shape[:2], 3)
        k_long, v_long = (torch.cat((x, ones), -1).transpose(1, 2) for x in (k, v))
        grad_q = torch.empty_like(q, memory_format=torch.contiguous_format)
        grad_k, grad_v = (torch.zeros(x.shape, dtype=torch.float32) for x in (k, v))
        mask = q.new_full((_TILE_QUERIES, _TILE_QUERIES), float("-inf")).triu(1)
        for first in range(0, len(k), _TILE_HEADS):
            part = slice(first, first + _TILE_HEADS)
            for start in range(0, k.shape[1], _TILE_QUERIES):
                stop = min(start + _TILE_QUERIES, k.shape[1])
                rows, keys = (part, slice(None), slice(start, stop)), (part, slice(stop))
                queries, count = (q.shape[1], stop - start), stop - start
                weights = torch.bmm(q_long[rows].flatten(1, 2), k_long[part, :, :stop])
                weights.unflatten(1, queries)[..., start:].add_(mask[:count, :count])
                weights.exp2_()
                scores = torch.bmm(grad_long[rows].flatten(1, 2), v_long[part, :, :stop])
                scores.mul_(weights)
                grad_q[rows] = torch.bmm(scores, k[keys]).unflatten(1, queries)
                grad_k[keys] += torch.bmm(scores.transpose(1, 2), q[rows].flatten(1, 2))
                grad_v[keys] += torch.bmm(weights.transpose(1, 2), grad[rows].flatten(1, 2))
        return (
            grad_q.mul_(scale).view(q_BNLH.shape),
            grad_k.mul_(scale).to(k.dtype).view(k_BKLH.shape),
            grad_v.to(v.dtype).view(v_BKLH.shape),
        )


def _with_columns(x: Tensor, column: Tensor) -> Tensor:
    """x `[..., H]` in bfloat16 and a float32 column `[...]` as three more, which sum to it."""
    high = column.to(x.dtype)
    rest = column - high.float()
    middle = rest.to(x.dtype)
    low = (rest - middle.float()).to(x.dtype)
    return torch.cat((x, torch.stack((high, middle, low), -1)), -1)
