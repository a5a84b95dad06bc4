"""Causal attention over packed documents, with and without a cache.

One interface, fastest kernel inside. On CUDA: `torch.nn.attention.varlen.varlen_attn`. On CPU,
measured forward and backward on one thread, SDPA a document / SDPA in one padded batch / plain
products:

| documents | bfloat16 | float32 |
| --- | --- | --- |
| 32 x 176, 6 heads of 32 | 215 / 154 / 39 ms | 113 / 60 / 74 ms |
| 4 x 1,024, 8 heads of 32 | 168 / 151 / 305 ms | 198 / 191 / 549 ms |

So documents of similar length share a padded batch (causality keeps the padding on the right from
being seen), short bfloat16 ones are plain matrix products, longer ones have a backward pass of
products, and a block mask (5 to 9 times slower) is never used.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from conceptmoe_vl.causal_products import ShortCausalAttention, TiledCausalAttention
from conceptmoe_vl.layout import PackedLayout

_VARLEN_DTYPES = (torch.bfloat16, torch.float16)
# Longest documents for which plain products beat the fused kernel in bfloat16 on CPU.
SHORT = 384
# Longest documents whose backward pass is made of products over tiles, on a CPU in bfloat16. Ours
# and the fused kernel's, 8 heads of 32 on 4: 8 x 512 64 / 149 ms, 4 x 1,024 78 / 105, 1 x 4,096
# 297 / 324.
MEDIUM = 1536
# Queries of one call behind a cache: entries of the mask, and bounds of the rows.
_MASK_ENTRIES, _FEWEST_QUERIES, _MOST_QUERIES = 1 << 20, 64, 256
# From how many new and old tokens on the two parts of `_in_two_parts` beat masked blocks on a CPU.
# 8 heads of 32 on 4, float32, one core, new behind old, blocks / parts: 20 behind 1,024 0.6 / 1.1
# ms, 1,024 behind 1,024 35 / 40, 1,024 behind 7,168 174 / 126, 4,096 behind 12,288 1,378 / 906.
_PARTS_NEW, _PARTS_OLD = 256, 2048


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
    is_slow_kernel = q.device.type == "cpu" and q.dtype == torch.bfloat16
    if is_slow_kernel and q.shape[2] <= SHORT:
        out = ShortCausalAttention.apply(q, k, v)
    elif is_slow_kernel and q.shape[2] <= MEDIUM and torch.is_grad_enabled():
        out = TiledCausalAttention.apply(q, k, v)
    else:
        grouped = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    return out.transpose(1, 2)


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
        return _step_attention(q_TNH, keys_BNSH, values_BNSH, layout)
    assert layout.rows is not None
    outputs, start = [], 0
    for row, length, past in zip(layout.rows, layout.lengths, layout.past_lengths, strict=True):
        if length == 0:
            continue
        q = q_TNH[start : start + length].transpose(0, 1).unsqueeze(0)
        k, v = (x[row : row + 1, :, : past + length] for x in (keys_BNSH, values_BNSH))
        in_parts = length >= _PARTS_NEW and past >= _PARTS_OLD
        if in_parts and q.device.type == "cpu" and not torch.is_grad_enabled():
            outputs.append(_in_two_parts(q, k, v, past))
        else:
            outputs += _in_blocks(q, k, v, past)
        start += length
    return torch.cat(outputs)


def _in_blocks(q_1NLH: Tensor, k_1NSH: Tensor, v_1NSH: Tensor, past: int) -> list[Tensor]:
    """Parts `[l, N, H]` of the attention of L new tokens behind `past` old ones.

    The queries come in blocks, each of which reads the keys up to its own end: no mask grows with
    the square of the length.
    """
    length, total = q_1NLH.shape[2], k_1NSH.shape[2]
    rows = min(max(_MASK_ENTRIES // total, _FEWEST_QUERIES), _MOST_QUERIES)
    gqa = q_1NLH.shape[1] != k_1NSH.shape[1]
    outputs = []
    for start in range(0, length, rows):
        stop = min(start + rows, length)
        end = past + stop
        seen = torch.ones(stop - start, end, dtype=torch.bool, device=q_1NLH.device)
        out = F.scaled_dot_product_attention(
            q_1NLH[:, :, start:stop],
            k_1NSH[:, :, :end],
            v_1NSH[:, :, :end],
            attn_mask=seen.tril(past + start),
            enable_gqa=gqa,
        )
        outputs.append(out[0].transpose(0, 1))
    return outputs


def _in_two_parts(q_1NLH: Tensor, k_1NSH: Tensor, v_1NSH: Tensor, past: int) -> Tensor:
    """`[L, N, H]`: the same as [`_in_blocks`], without a mask.

    softmax over old and new keys is the mean of both softmaxes, weighted by their sums of
    exponentials; the kernel that `scaled_dot_product_attention` calls on a CPU tells them.
    """
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    kv_heads, length = k_1NSH.shape[1], q_1NLH.shape[2]
    repeats = q_1NLH.shape[1] // kv_heads
    # All queries of the heads that share keys see all old ones: one long row of queries.
    folded = q_1NLH.unflatten(1, (kv_heads, repeats)).flatten(2, 3)
    old, old_sum = kernel(folded, k_1NSH[:, :, :past], v_1NSH[:, :, :past])
    old = old.unflatten(2, (repeats, length)).flatten(1, 2)
    old_sum = old_sum.unflatten(2, (repeats, length)).flatten(1, 2)
    k, v = (x[:, :, past:].repeat_interleave(repeats, dim=1) for x in (k_1NSH, v_1NSH))
    new, new_sum = kernel(q_1NLH, k, v, 0.0, True)
    # sigmoid of the difference of logarithms: the old keys' share of the sum.
    share = torch.sigmoid(old_sum - new_sum).unsqueeze(-1)
    return torch.lerp(new.float(), old.float(), share).to(q_1NLH.dtype)[0].transpose(0, 1)


def _step_attention(
    q_TNH: Tensor, keys_BNSH: Tensor, values_BNSH: Tensor, layout: PackedLayout
) -> Tensor:
    """One new token for each of some rows, the caches read in place.

    The query heads that share a key head stand as its queries: every key is read once. Measured on
    one CPU core, 16 rows of 1,030 positions, 8 heads of 32 on 4 key heads, cold caches: plain
    products 1.5 ms, the fused kernel 1.6, with `enable_gqa` 2.0, row by row 1.8; one row: the fused
    kernel 0.06, plain products 0.07.
    """
    groups, place_T = layout.step_groups
    q_TNRH = q_TNH.unflatten(1, (keys_BNSH.shape[1], -1))
    outputs = []
    for group in groups:
        k, v = (x[group.first : group.stop, :, : group.longest] for x in (keys_BNSH, values_BNSH))
        q, mask = q_TNRH[group.token_B], group.mask_B11S
        plain = q.dtype == torch.float32 and q.device.type == "cpu" and len(q) > 2
        if plain and not torch.is_grad_enabled():
            outputs.append(_few_queries(q, k, v, mask))
        else:
            outputs.append(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))
    out = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
    return (out if place_T is None else out.index_select(0, place_T)).flatten(1, 2)


def _few_queries(q_BNRH: Tensor, k_BNSH: Tensor, v_BNSH: Tensor, mask: Tensor | None) -> Tensor:
    scores = torch.matmul(q_BNRH * q_BNRH.shape[-1] ** -0.5, k_BNSH.transpose(2, 3))
    if mask is not None:
        scores = scores.masked_fill_(~mask, float("-inf"))
    return torch.matmul(scores.softmax(-1), v_BNSH)
