"""The MoE block against a loop over tokens and experts, values and gradients; R16 of the field
reports.
"""

from __future__ import annotations

import pytest
import torch

from conceptmoe_vl.moe import MoEBlock
from tests.reference.transformer import moe_block


def make_block(experts=4, top_k=2, shared=0, norm=True, d=16, f=8):
    block = MoEBlock(d, f, experts, top_k, shared, norm)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return block


def reference_parts(block):
    """Float64 leaves of a block's weights in the reference's arguments."""
    leaf = {
        name: parameter.detach().double().requires_grad_()
        for name, parameter in block.named_parameters()
    }
    gate_up, down = leaf["experts.gate_up_proj"], leaf["experts.down_proj"]
    width = gate_up.shape[1] // 2
    experts = [(gate_up[e, :width], gate_up[e, width:], down[e]) for e in range(gate_up.shape[0])]
    shared = None
    if block.shared is not None:
        shared = tuple(leaf[f"shared.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return leaf, experts, shared


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("shared", [0, 2])
@pytest.mark.parametrize("tokens", [1, 7, 33])
def test_block_equals_reference_with_every_gradient(tokens, shared, norm):
    block = make_block(shared=shared, norm=norm)
    x = torch.randn(tokens, 16, requires_grad=True)
    out, statistics = block(x)
    weights = torch.randn(tokens, 16)
    loss = (out * weights).sum() + statistics.z + (statistics.probability_E * torch.arange(4)).sum()
    loss.backward()

    leaf, experts, shared_weights = reference_parts(block)
    y = x.detach().double().requires_grad_()
    ref, logits, probabilities, chosen = moe_block(
        y, leaf["gate.weight"], experts, 2, norm, shared_weights
    )
    z = (torch.logsumexp(logits, 1) ** 2).sum()
    ((ref * weights.double()).sum() + z + (probabilities.sum(0) * torch.arange(4)).sum()).backward()

    torch.testing.assert_close(out.double(), ref, atol=1e-5, rtol=1e-5)
    assert statistics.slots_E.tolist() == [sum(e in row for row in chosen) for e in range(4)]
    assert (statistics.tokens, statistics.chosen) == (tokens, 2)
    torch.testing.assert_close(
        statistics.probability_E.double(), probabilities.sum(0), atol=1e-5, rtol=1e-5
    )
    torch.testing.assert_close(x.grad.double(), y.grad, atol=1e-4, rtol=1e-4)
    for name, parameter in block.named_parameters():
        expected = leaf[name].grad
        expected = torch.zeros_like(leaf[name]) if expected is None else expected
        torch.testing.assert_close(parameter.grad.double(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("tokens", [1, 12])
@pytest.mark.parametrize("autocast", [False, True])
def test_idle_experts_get_zero_gradients_not_none(tokens, autocast):
    """R16: one expert wins every token; the others have zero rows in the grouped product."""
    block = make_block(top_k=1)
    with torch.no_grad():
        block.gate.weight.zero_()
        block.gate.weight[2] = 1.0
    x = torch.rand(tokens, 16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out, statistics = block(x)
    (out.float().square().sum() + statistics.z).backward()
    assert statistics.slots_E.tolist() == [0, 0, tokens, 0]
    assert torch.isfinite(out).all()
    for parameter in block.parameters():
        assert parameter.grad is not None
        assert torch.isfinite(parameter.grad).all()
    for idle in (0, 1, 3):
        assert not block.experts.gate_up_proj.grad[idle].any()
        assert not block.experts.down_proj.grad[idle].any()


def test_router_stays_float32_under_autocast():
    """R16: with the same hidden states autocast picks the same experts for at least 99.9 % of
    tokens.
    """
    block = make_block(experts=16)
    x = torch.randn(2000, 16)
    _, exact = block(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert block.gate(x).dtype == torch.float32
        _, mixed = block(x)
    moved = (exact.slots_E - mixed.slots_E).abs().sum().item()
    assert moved <= 0.001 * 2000 * 2


def test_mixed_precision_inputs_keep_their_dtype():
    block = make_block(shared=1)
    with torch.autocast("cpu", torch.bfloat16):
        for dtype in (torch.float32, torch.bfloat16):
            out, _ = block(torch.randn(5, 16, dtype=dtype))
            assert out.dtype == dtype
            assert torch.isfinite(out).all()


def test_no_tokens_at_all():
    """A rank may hold no token for a stage; shapes, finiteness and gradients survive."""
    block = make_block()
    out, statistics = block(torch.zeros(0, 16))
    assert out.shape == (0, 16)
    (out.sum() + statistics.z + statistics.probability_E.sum()).backward()
    assert all(torch.isfinite(p.grad).all() for p in block.parameters() if p.grad is not None)


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("shared", [0, 1])
@pytest.mark.parametrize("tokens", [1, 2, 7, 32])
def test_few_tokens_without_statistics_are_the_same_block(tokens, shared, norm):
    """A decoding step touches the chosen experts alone; one expert may take all or a single one."""
    block = make_block(experts=8, shared=shared, norm=norm)
    x = torch.randn(tokens, 16)
    with torch.no_grad():
        assert block.experts.is_few(x)
        expected, _ = block(x)
        out, statistics = block(x, False)
        assert statistics is None
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
        torch.nn.init.zeros_(block.gate.weight)  # all tokens to the same experts
        torch.testing.assert_close(block(x, False)[0], block(x)[0], atol=1e-5, rtol=1e-5)
        assert not block.experts.is_few(x.bfloat16())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert not block.experts.is_few(x)
    assert not block.experts.is_few(x)  # with gradients
