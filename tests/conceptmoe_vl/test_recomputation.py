"""Activation checkpointing, of whole layers and selective: same numbers, and what is recomputed."""

from __future__ import annotations

import collections

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from conceptmoe_vl.training.preparing import recompute
from tests.tiny import make_document, packed, tiny_model

PRODUCTS = ("aten::mm", "aten::bmm", "aten::_grouped_mm", "aten::_scaled_dot_product")
DOCUMENTS = [make_document(["image", 40]), make_document([25], seed=1), make_document([25], seed=2)]


class Counter(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        self.counts[function._schema.name] += 1
        return function(*arguments, **(keywords or {}))

    @property
    def products(self) -> int:
        return sum(n for name, n in self.counts.items() if name.startswith(PRODUCTS))


def step(kind: str, dtype: torch.dtype, vision=None) -> tuple[torch.Tensor, dict, Counter]:
    """Loss, gradients and operations of one training step."""
    text = {"decoder_layers": 2, "num_shared_experts": 1, "concept_loops": [[0, 0, 2]]}
    model = tiny_model(text=text, vision=vision, noise="bernoulli").train()
    if kind != "none":
        recompute(model, selective=kind == "selective")
    documents = DOCUMENTS if vision else DOCUMENTS[1:]
    torch.manual_seed(0)
    with Counter() as counter:
        with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            loss = model(**packed(documents, labels=True)).loss
        loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters()}, counter


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["layers", "selective"])
def test_losses_and_gradients_are_the_same_bit_for_bit(kind, dtype):
    expected_loss, expected, _ = step("none", dtype, vision="plain")
    loss, gradients, _ = step(kind, dtype, vision="plain")
    assert torch.equal(loss, expected_loss)
    for name, gradient in gradients.items():
        assert torch.equal(gradient, expected[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_selective_recomputes_no_product_and_all_between_them(dtype):
    plain, layers, selective = (step(kind, dtype)[2] for kind in ("none", "layers", "selective"))
    assert selective.products == plain.products < layers.products
    between = "aten::silu"
    assert selective.counts[between] == layers.counts[between] > plain.counts[between]
