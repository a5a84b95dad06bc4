"""Packed and cached attention, rotary positions and RMSNorm against loops over tokens and heads."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from conceptmoe_vl.attention import cached_attention, packed_attention
from conceptmoe_vl.layers import RMSNorm, rotary_table, rotate
from conceptmoe_vl.layout import PackedLayout
from tests.reference import transformer as ref

CPU = torch.device("cpu")
SIZE = 8


def reference_attention(q, k, v):
    """Attention without rotation: positions 0 turn nothing."""
    return ref.causal_attention(q, k, v, [0] * q.shape[0], 1e4)


@pytest.mark.parametrize("lengths", [[1], [5, 9, 1], [4, 4, 4, 2], [0, 3, 0, 0, 3, 1]])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_packed_attention_equals_documents_alone(lengths, kv_heads):
    total = sum(lengths)
    inputs = [torch.randn(total, n, SIZE, requires_grad=True) for n in (4, kv_heads, kv_heads)]
    weights = torch.randn(total, 4, SIZE)
    out = packed_attention(*inputs, PackedLayout.from_lengths(lengths, CPU))
    (out * weights).sum().backward()

    copies = [x.detach().double().requires_grad_() for x in inputs]
    expected, start = [], 0
    for length in lengths:
        if length:
            expected.append(reference_attention(*(x[start : start + length] for x in copies)))
        start += length
    expected = torch.cat(expected)
    (expected * weights.double()).sum().backward()
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    for x, copy in zip(inputs, copies, strict=True):
        torch.testing.assert_close(x.grad.double(), copy.grad, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("lengths", [[385], [521, 700, 1], [1153, 1100]])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (10, 5)])
def test_medium_documents_in_bfloat16(lengths, heads, kv_heads):
    """The backward pass of products over tiles, lengths that fill no tile, more heads than a tile.

    Against float64: bfloat16 keeps 8 bits, so a relative error of 2^-7 over all entries is its own.
    Large scores, as trained models have them, make the softmax sharp.
    """
    total = sum(lengths)
    shapes = [(total, n, 16) for n in (heads, kv_heads, kv_heads)]
    inputs = [(2 * torch.randn(shape)).bfloat16().requires_grad_() for shape in shapes]
    weights = torch.randn(total, heads, 16).bfloat16()
    out = packed_attention(*inputs, PackedLayout.from_lengths(lengths, CPU))
    out.backward(weights)

    copies = [x.detach().double().requires_grad_() for x in inputs]
    expected = torch.cat(
        [
            F.scaled_dot_product_attention(
                *(x.transpose(0, 1) for x in parts), is_causal=True, enable_gqa=True
            ).transpose(0, 1)
            for parts in zip(*(x.split(lengths) for x in copies), strict=True)
        ]
    )
    expected.backward(weights.double())
    found = [out, *(x.grad for x in inputs)]
    wanted = [expected, *(copy.grad for copy in copies)]
    for a, b in zip(found, wanted, strict=True):
        assert (a.double() - b).norm() < 2**-6 * b.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(any),
    seed=st.integers(0, 999),
)
def test_any_mixture_of_lengths(dtype, lengths, seed):
    """Documents that share a padded batch, come in any order, and are empty; values and gradients.

    The peer is one float32 call of plain products a document: exact in float32, and bfloat16 keeps
    8 bits.
    """
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    inputs = [
        torch.randn(total, n, SIZE, generator=generator).to(dtype).requires_grad_()
        for n in (4, 2, 2)
    ]
    weights = torch.randn(total, 4, SIZE, generator=generator)
    out = packed_attention(*inputs, PackedLayout.from_lengths(lengths, CPU))
    assert out.dtype == dtype
    (out.float() * weights).sum().backward()
    copies = [x.detach().float().requires_grad_() for x in inputs]
    expected = []
    for q, k, v in zip(*(x.split(lengths) for x in copies), strict=True):
        k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
        scores = torch.einsum("tnh,snh->nts", q, k) * SIZE**-0.5
        hidden = torch.ones(scores.shape[1:]).triu(1).bool()
        weight = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        expected.append(torch.einsum("nts,snh->tnh", weight, v))
    expected = torch.cat(expected)
    (expected * weights).sum().backward()
    tolerance = (
        {"atol": 1e-5, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 0.06, "rtol": 0.03}
    )
    torch.testing.assert_close(out.float(), expected, **tolerance)
    for x, copy in zip(inputs, copies, strict=True):
        torch.testing.assert_close(x.grad.float(), copy.grad, **tolerance)


@pytest.mark.parametrize(
    ("past", "lengths", "rows"),
    [
        ([3, 0, 5], [2, 4, 1], [0, 1, 2]),
        ([3, 0, 5], [1, 1, 1], [0, 1, 2]),
        ([2, 6], [1, 1], [3, 1]),
        ([2, 6], [0, 1], [0, 2]),
        ([4, 4], [1, 1], [0, 1]),
    ],
)
def test_cached_attention_equals_the_whole_documents(past, lengths, rows):
    """Buffers hold NaN wherever no key was written, so that reading too far cannot pass."""
    total, longest = sum(lengths), max(p + n for p, n in zip(past, lengths, strict=True)) + 3
    keys, values = (torch.full((4, 2, longest, SIZE), float("nan")) for _ in range(2))
    q = torch.randn(total, 4, SIZE)
    expected, start = [], 0
    for row, before, length in zip(rows, past, lengths, strict=True):
        k, v = torch.randn(before + length, 2, SIZE), torch.randn(before + length, 2, SIZE)
        keys[row, :, : before + length] = k.transpose(0, 1)
        values[row, :, : before + length] = v.transpose(0, 1)
        padded = torch.cat((torch.zeros(before, 4, SIZE), q[start : start + length]))
        expected.append(reference_attention(padded.double(), k.double(), v.double())[before:])
        start += length
    layout = PackedLayout.from_lengths(lengths, CPU, past_lengths=tuple(past), rows=tuple(rows))
    out = cached_attention(q, keys.nan_to_num(0.0), values.nan_to_num(0.0), layout)
    torch.testing.assert_close(out.double(), torch.cat(expected), atol=1e-5, rtol=1e-5)


def filled(past, lengths, rows, buffers, heads=4, kv_heads=2):
    """Random queries, cache buffers, and what plain products over each row's keys give."""
    keys, values = (
        torch.randn(buffers, kv_heads, max(past) + max(lengths) + 3, SIZE) for _ in "kv"
    )
    q = torch.randn(sum(lengths), heads, SIZE)
    expected, start = [], 0
    for row, before, new in zip(rows, past, lengths, strict=True):
        own = (keys[row, :, : before + new], values[row, :, : before + new])
        k, v = (x.repeat_interleave(heads // kv_heads, 0).double() for x in own)
        scores = q[start : start + new].transpose(0, 1).double() @ k.transpose(1, 2) * SIZE**-0.5
        hidden = torch.ones(new, before + new).triu(before + 1).bool()
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        expected.append((weights @ v).transpose(0, 1))
        start += new
    layout = PackedLayout.from_lengths(lengths, CPU, past_lengths=tuple(past), rows=tuple(rows))
    return q, keys, values, layout, torch.cat(expected)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    past=st.lists(st.integers(0, 700), min_size=1, max_size=9),
    data=st.data(),
)
def test_steps_of_any_rows_read_the_cache_in_place(past, data):
    """Rows without a token, rows of different length, rows in another order than the documents."""
    lengths = data.draw(st.lists(st.integers(0, 1), min_size=len(past), max_size=len(past)))
    lengths[data.draw(st.integers(0, len(past) - 1))] = 1
    rows = data.draw(st.permutations(range(len(past))))
    q, keys, values, layout, expected = filled(past, lengths, rows, len(past))
    with torch.no_grad():
        out = cached_attention(q, keys, values, layout)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    groups, _ = layout.step_groups
    read = sum((group.stop - group.first) * group.longest for group in groups)
    needed = sum(p + 1 for p, n in zip(past, lengths, strict=True) if n)
    assert read <= needed + 256 * (sum(lengths) - len(groups))


@pytest.mark.parametrize(
    ("past", "lengths"), [([3000, 5], [300, 300]), ([2048], [256]), ([100, 0], [700, 3])]
)
@pytest.mark.parametrize("grad", [False, True])
def test_long_continuations(past, lengths, grad):
    """Blocks of queries, and old and new keys apart, against plain products."""
    q, keys, values, layout, expected = filled(past, lengths, range(len(past)), len(past))
    with torch.set_grad_enabled(grad):
        out = cached_attention(q, keys, values, layout)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


def test_rotary_table_turns_like_the_formula():
    positions = torch.tensor([0, 1, 5, 100])
    x = torch.randn(4, 2, SIZE)
    turned = rotate(x, rotary_table(positions, SIZE, 1e4))
    for t, position in enumerate(positions.tolist()):
        for head in range(2):
            expected = ref.rotate(x[t, head].double(), position, 1e4)
            torch.testing.assert_close(turned[t, head].double(), expected, atol=2e-5, rtol=1e-5)


def test_rms_norm_computes_in_float32():
    norm = RMSNorm(16, 1e-6)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(5, 16)
    expected = ref.rms_norm(x.double(), norm.weight.detach().double(), 1e-6)
    torch.testing.assert_close(norm(x).double(), expected, atol=1e-6, rtol=1e-5)
    assert norm(x.bfloat16()).dtype == torch.bfloat16
