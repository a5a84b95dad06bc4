"""Selective activation checkpointing: what a layer keeps for the backward pass, what it recomputes.

Kept are the results of matrix products and attention, which take nearly all of a layer's time;
recomputed is what stands between them (norms, rotations, SwiGLU, gathers of experts' tokens).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts

# Of the kernels behind attention and grouped products a version of torch may lack some. `baddbmm`
# is left out: its results are scores of attention [L, L] and whole matrices of adapted experts.
_KEPT = (
    "aten.mm",
    "aten.addmm",
    "aten.bmm",
    "aten._grouped_mm",
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention",
    "torch_attn._varlen_attn",
)


def keep_products() -> Any:
    """The two contexts of `torch.utils.checkpoint.checkpoint` (its `context_fn`)."""
    return create_selective_checkpoint_contexts(_kept_operations())


def _kept_operations() -> list[Any]:
    found = []
    for name in _KEPT:
        namespace, operation = name.split(".")
        packet = getattr(getattr(torch.ops, namespace), operation, None)
        if packet is not None:
            found.append(packet.default)
    return found


@contextlib.contextmanager
def every_use_cast() -> Iterator[None]:
    """Autocast casts a weight at each use, instead of once in a forward pass.

    Layers that run several times need it: recomputation must see the casts of the forward pass, and
    the gradients of the uses are summed in float32 instead of bfloat16.
    """
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
