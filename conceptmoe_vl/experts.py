"""Experts stored fused and computed by grouped matrix products.

`gate_up_EDF` `[E, 2F, D]` and `down_EFD` `[E, D, F]` have the layout of transformers' fused
experts, gate first: the checkpoints of Qwen3-MoE and its relatives convert without a copy in
between.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conceptmoe_vl.products import FEW_ROWS, compute_dtype, few_rows_product, row_multiple


class Experts(nn.Module):
    """E SwiGLU networks; every token passes through K of them, weighted.

    Args:
        num_experts: E. hidden_size: D. intermediate_size: F of one expert.
    """

    def __init__(self, num_experts: int, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.gate_up_proj = nn.Parameter(
            torch.empty(num_experts, 2 * intermediate_size, hidden_size)
        )
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_size, intermediate_size))

    def forward(
        self, x_TD: Tensor, expert_TK: Tensor, weight_TK: Tensor, counts_E: Tensor | None
    ) -> Tensor:
        """`[T, D]` weighted sum over the chosen experts, in the input's dtype.

        Args:
            x_TD: token states. expert_TK: chosen experts. weight_TK: their weights.
            counts_E: how many of the T * K slots each expert has; None for few tokens (`is_few`).
        """
        if counts_E is None:
            return self._few(x_TD, expert_TK, weight_TK)
        tokens, chosen = expert_TK.shape
        dtype = compute_dtype(x_TD)
        order = expert_TK.flatten().argsort(stable=True)
        slot_S, offsets_E, inverse = _group_slots(order, counts_E, x_TD)
        # grouped_mm ignores autocast, so both sides are cast here.
        x_SD = x_TD.to(dtype).index_select(0, slot_S // chosen)
        gate_up = F.grouped_mm(x_SD, self.gate_up_proj.to(dtype).transpose(1, 2), offs=offsets_E)
        # Weighting F columns here instead of D columns after the product is the same by linearity.
        weight_S = weight_TK.flatten().index_select(0, slot_S).to(dtype)
        hidden_SF = _WeightedSwiGLU.apply(gate_up, weight_S)
        out_SD = F.grouped_mm(hidden_SF, self.down_proj.to(dtype).transpose(1, 2), offs=offsets_E)
        # The inverse permutation and a sum over K is deterministic on CUDA; index_add is not.
        out_TKD = out_SD.index_select(0, inverse).view(tokens, chosen, out_SD.shape[1])
        return out_TKD.sum(1).to(x_TD.dtype)

    def is_few(self, x_TD: Tensor) -> bool:
        """Whether these tokens may come without counts: a decoding step in float32 on a CPU."""
        return (
            x_TD.device.type == "cpu"
            and x_TD.shape[0] <= 4 * FEW_ROWS
            and not torch.is_grad_enabled()
            and compute_dtype(x_TD) == x_TD.dtype == self.down_proj.dtype == torch.float32
        )

    def _few(self, x_TD: Tensor, expert_TK: Tensor, weight_TK: Tensor) -> Tensor:
        """The same for few tokens: only the chosen experts are touched, by `few_rows_product`."""
        chosen = expert_TK.flatten().tolist()
        slots_of: dict[int, list[int]] = {}
        for slot, expert in enumerate(chosen):
            slots_of.setdefault(expert, []).append(slot)
        rows: list[int] = []
        row_of = [0] * len(chosen)
        for slots in slots_of.values():
            for slot in slots:
                row_of[slot] = len(rows)
                rows.append(slot)
            if len(slots) == 1:  # quicker as two rows
                rows.append(slots[0])
        groups = [(expert, max(len(slots), 2)) for expert, slots in slots_of.items()]
        slot_S = torch.tensor(rows)
        x_SD = x_TD.index_select(0, slot_S // expert_TK.shape[1])
        gate, up = _products(x_SD, self.gate_up_proj, groups).chunk(2, dim=-1)
        hidden_SF = F.silu(gate).mul_(up).mul_(weight_TK.flatten()[slot_S, None])
        out_SD = _products(hidden_SF, self.down_proj, groups)
        return out_SD.index_select(0, torch.tensor(row_of)).unflatten(0, expert_TK.shape).sum(1)


class _WeightedSwiGLU(torch.autograd.Function):
    """silu(gate) * up * weight of `[S, 2 F]` gates and ups and `[S]` weights.

    Keeps its inputs alone for the backward pass, not what lies between: 2 of the 5 values that an
    expert would keep for each of its F columns behind the first product.
    """

    @staticmethod
    def forward(ctx: Any, gate_up_SX: Tensor, weight_S: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up_SX, weight_S)
        gate, up = gate_up_SX.chunk(2, dim=-1)
        return F.silu(gate).mul_(up).mul_(weight_S.unsqueeze(1))

    @staticmethod
    def backward(ctx: Any, grad_SF: Tensor) -> tuple[Tensor, Tensor | None]:
        gate_up_SX, weight_S = ctx.saved_tensors
        gate, up = gate_up_SX.chunk(2, dim=-1)
        silu = F.silu(gate)
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = (grad_SF * (silu * up)).sum(1)
        weighted = grad_SF * weight_S.unsqueeze(1)
        grad_gate = torch.ops.aten.silu_backward(weighted * up, gate)
        return torch.cat((grad_gate, silu.mul_(weighted)), dim=-1), grad_weight


def _products(x_SI: Tensor, weight_EOI: Tensor, groups: list[tuple[int, int]]) -> Tensor:
    """`[S, O]`: the rows of each group, (expert, how many), times the weight of its expert."""
    out_OS = x_SI.new_empty(weight_EOI.shape[1], x_SI.shape[0])
    experts, counts = zip(*groups, strict=True)
    weights = weight_EOI.unbind(0)
    parts = zip(experts, x_SI.split(counts), out_OS.split(counts, dim=1), strict=True)
    for expert, part, out in parts:
        few_rows_product(part, weights[expert], out)
    return out_OS.T.contiguous()


def _group_slots(order: Tensor, counts_E: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of the grouped products: every expert's slots end to end, each group rounded up.

    A row that only rounds a group up repeats the first slot; no token reads it, so it changes
    neither values nor gradients.

    Args:
        order: `[T * K]` slots sorted by expert. counts_E: slots of each expert. x: the operand.

    Returns:
        slot_S: `[S]` slot that each row computes. offsets_E: where each group ends.
        inverse: `[T * K]` row of each slot.
    """
    slots, experts = order.numel(), counts_E.numel()
    multiple = row_multiple(slots // experts, x)
    ends_E = counts_E.cumsum(0)
    row = torch.arange(slots, device=order.device)
    slot_S = order
    if multiple > 1:
        rounded_E = (counts_E + multiple - 1) // multiple * multiple
        rounded_ends_E = rounded_E.cumsum(0)
        row = row + ((rounded_ends_E - rounded_E) - (ends_E - counts_E)).repeat_interleave(counts_E)
        slot_S = order.new_zeros(int(rounded_ends_E[-1])).index_put((row,), order)
        ends_E = rounded_ends_E
    inverse = torch.empty_like(order).index_put((order,), row)
    return slot_S, ends_E.to(torch.int32), inverse
