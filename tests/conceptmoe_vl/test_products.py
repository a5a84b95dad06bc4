"""Rounded rows change neither values nor gradients, and leave few shapes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from conceptmoe_vl.experts import Experts
from conceptmoe_vl.modeling import LanguageModelHead
from conceptmoe_vl.products import Linear, few_rows_product, round_rows, row_multiple


def test_only_bfloat16_on_the_cpu_is_rounded() -> None:
    x = torch.randn(1000, 8)
    assert row_multiple(1000, x) == 1
    assert round_rows(x) is x
    assert row_multiple(1000, x.bfloat16()) == 64
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert row_multiple(1000, x) == 64
        assert round_rows(x).shape == (1024, 8)
        assert round_rows(x).dtype == torch.bfloat16


@pytest.mark.parametrize("rows", [1, 15, 16, 100, 127, 511, 513, 5000])
def test_at_most_an_eighth_is_added(rows: int) -> None:
    x = torch.randn(rows, 3).bfloat16()
    rounded = round_rows(x)
    assert rows <= rounded.shape[0] <= rows * 1.125
    assert torch.equal(rounded[:rows], x)
    assert not rounded[rows:].any()


@pytest.mark.parametrize("rows", [1, 77, 333])
def test_linear_equals_the_plain_layer(rows: int) -> None:
    torch.manual_seed(0)
    ours = Linear(24, 40)
    x = torch.randn(rows, 24)
    results = []
    for layer in (ours, lambda value: F.linear(value, ours.weight, ours.bias)):
        given = x.clone().requires_grad_()
        ours.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = layer(given)
        assert out.shape == (rows, 40)
        out.float().square().sum().backward()
        results.append((out.float(), given.grad, ours.weight.grad, ours.bias.grad))
    for ours_value, plain in zip(*results, strict=True):
        torch.testing.assert_close(ours_value, plain, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("tokens", [203, 1001])
@pytest.mark.parametrize("unused", [False, True])
def test_rounded_groups_equal_a_loop_over_slots(tokens: int, unused: bool) -> None:
    """bfloat16 experts against plain float32 loops over tokens: values and gradients."""
    torch.manual_seed(1)
    experts = Experts(4, 16, 24)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.copy_(torch.randn_like(parameter).bfloat16() * 0.2)
    x = torch.randn(tokens, 16).bfloat16().float()
    scores = torch.rand(tokens, 4)
    if unused:
        scores[:, 2] = -1.0
    weight, expert = scores.topk(2)
    weight = weight.bfloat16().float()
    counts = torch.bincount(expert.flatten(), minlength=4)
    upstream = torch.randn(tokens, 16)

    def gradients(run: Callable) -> list:
        given, weights = x.clone().requires_grad_(), weight.clone().requires_grad_()
        experts.zero_grad()
        out = run(given, weights)
        (out * upstream).sum().backward()
        grads = [parameter.grad.clone() for parameter in experts.parameters()]
        return [out.detach(), given.grad, weights.grad, *grads]

    def fast(given, weights):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return experts(given, expert, weights, counts)

    def slow(given, weights):
        rows = []
        for token in range(tokens):
            total = torch.zeros(16)
            for slot in range(2):
                chosen = int(expert[token, slot])
                gate, up = (experts.gate_up_proj[chosen] @ given[token]).chunk(2)
                value = experts.down_proj[chosen] @ (F.silu(gate) * up)
                total = total + weights[token, slot] * value
            rows.append(total)
        return torch.stack(rows)

    for ours, reference in zip(gradients(fast), gradients(slow), strict=True):
        scale = reference.abs().max().item()
        torch.testing.assert_close(ours, reference, rtol=5e-2, atol=2e-2 * max(scale, 1e-3))


@pytest.mark.parametrize("rows", [1, 2, 8])
def test_few_rows_turned_round(rows):
    x, weight = torch.randn(rows, 24), torch.randn(40, 24)
    expected = (x.double() @ weight.double().T).T
    torch.testing.assert_close(few_rows_product(x, weight).double(), expected, atol=1e-5, rtol=1e-5)
    out = torch.full((40, rows + 2), float("nan"))
    few_rows_product(x, weight, out[:, 1 : rows + 1])
    torch.testing.assert_close(out[:, 1 : rows + 1].double(), expected, atol=1e-5, rtol=1e-5)
    assert out[:, 0].isnan().all()
    assert out[:, -1].isnan().all()


@pytest.mark.parametrize("shape", [(1, 24), (3, 24), (8, 24), (9, 24), (2, 1, 24), (0, 24)])
def test_the_head_of_few_rows_is_a_linear_layer(shape):
    head = LanguageModelHead(24, 40, bias=False)
    x = torch.randn(shape)
    expected = torch.nn.functional.linear(x, head.weight)
    with torch.no_grad():
        out = head(x)
    assert out.is_contiguous()
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    head(x).sum().backward()
    assert head.weight.grad is not None
