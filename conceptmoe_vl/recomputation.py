"""Selective activation checkpointing: what a layer keeps for the backward pass, what it recomputes.

Kept are the results of matrix products and attention, which take nearly all of a layer's time;
recomputed is what stands between them (norms, rotations, SwiGLU, gathers of experts' tokens).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
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
    kept = _kept_operations()
    forward, again = create_selective_checkpoint_contexts(kept)
    return _Only(forward, kept), _Only(again, kept)


class _Only(TorchDispatchMode):
    """Shows one of torch's two contexts the kept operations alone.

    They count every operation, and want those of the forward pass again. But ZeRO-3 gathers and
    frees a weight where it is needed: in the forward pass, in the recomputation, or in neither.
    """

    def __init__(self, mode: Any, kept: list[Any]) -> None:
        super().__init__()
        self._mode, self._kept = mode, kept

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # as torch's

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._kept:
            return self._mode.__torch_dispatch__(func, types, args, kwargs or {})
        return func(*args, **(kwargs or {}))


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
