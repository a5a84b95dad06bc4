"""torch's FLOP counter with the two operators that it does not know."""

from __future__ import annotations

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

_MAPS = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
    torch.ops.aten.bmm,
    torch.ops.aten.baddbmm,
)


def _grouped(a_shape, b_shape, *_, out_shape=None, **__) -> int:
    """Every row of a `[S, in]` meets one matrix of b `[E, in, out]`."""
    return 2 * a_shape[0] * b_shape[1] * b_shape[2]


def _attention(q_shape, k_shape, v_shape, *_, out_shape=None, **__) -> int:
    """The counter's own formula; grouped heads are repeated first."""
    repeats = q_shape[1] // k_shape[1]
    k_shape, v_shape = ((b, h * repeats, s, d) for b, h, s, d in (k_shape, v_shape))
    return sdpa_flop_count(q_shape, k_shape, v_shape)


def flops_of(run) -> tuple[int, int]:
    """(without attention maps, attention maps) of what `run()` computes."""
    mapping = {
        torch.ops.aten._grouped_mm: _grouped,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    }
    counter = FlopCounterMode(display=False, custom_mapping=mapping)
    with counter, torch.no_grad():
        run()
    counts = counter.get_flop_counts()["Global"]
    maps = sum(counts.get(op, 0) for op in _MAPS)
    return sum(counts.values()) - maps, maps
