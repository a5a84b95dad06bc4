"""Experts stored fused and computed by grouped matrix products.

`gate_up_EDF` `[E, 2F, D]` and `down_EFD` `[E, D, F]` have the layout of transformers' fused
experts, gate first: the checkpoints of Qwen3-MoE and its relatives convert without a copy in
between.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype that matrix products have here: autocast's, where it is on, else the input's."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


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
        self, x_TD: Tensor, expert_TK: Tensor, weight_TK: Tensor, counts_E: Tensor
    ) -> Tensor:
        """`[T, D]` weighted sum over the chosen experts, in the input's dtype.

        Args:
            x_TD: token states. expert_TK: chosen experts. weight_TK: their weights.
            counts_E: how many of the T * K slots each expert has.
        """
        tokens, chosen = expert_TK.shape
        dtype = compute_dtype(x_TD)
        order = expert_TK.flatten().argsort(stable=True)
        token_of_slot = order // chosen
        offsets_E = counts_E.cumsum(0, dtype=torch.int32)
        # grouped_mm ignores autocast, so both sides are cast here.
        x_SD = x_TD.to(dtype).index_select(0, token_of_slot)
        gate_up = F.grouped_mm(x_SD, self.gate_up_proj.to(dtype).transpose(1, 2), offs=offsets_E)
        gate, up = gate_up.chunk(2, dim=-1)
        hidden_SF = F.silu(gate) * up
        # Weighting F columns here instead of D columns after the product is the same by linearity.
        hidden_SF = hidden_SF * weight_TK.flatten().index_select(0, order).to(dtype).unsqueeze(1)
        out_SD = F.grouped_mm(hidden_SF, self.down_proj.to(dtype).transpose(1, 2), offs=offsets_E)
        # The inverse permutation and a sum over K is deterministic on CUDA; index_add is not.
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(tokens * chosen, device=order.device)
        out_TKD = out_SD.index_select(0, inverse).view(tokens, chosen, out_SD.shape[1])
        return out_TKD.sum(1).to(x_TD.dtype)
