"""The mixture-of-experts block: float32 router, fused experts, optional shared ones.

DESIGN.md 3.6.
."""

from __future__ import annotations

import dataclasses
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conceptmoe_vl.experts import Experts
from conceptmoe_vl.products import Linear


@dataclasses.dataclass(frozen=True)
class RouterStatistics:
    """Sums of one execution of one MoE block over its tokens; the losses aggregate them over ranks.

    Attributes:
        slots_E: `[E]` chosen slots of each expert, no gradient. probability_E: `[E]` summed router
            probabilities, with gradient. z: scalar, summed squared logsumexp of the router logits.
        tokens: T. chosen: K.
        entropy: scalar, summed entropy of the tokens' router probabilities over log E, no gradient.
    """

    slots_E: Tensor
    probability_E: Tensor
    z: Tensor
    tokens: int
    chosen: int
    entropy: Tensor | None = None


class MoEBlock(nn.Module):
    """Top-k routed SwiGLU experts plus shared ones.

    Args:
        hidden_size: D. intermediate_size: F of one expert. num_experts: E. num_experts_per_tok: K.
        num_shared_experts: shared experts, fused into one SwiGLU (0: none).
        norm_topk_prob: divide the K probabilities by their sum.
        shared_intermediate_size: width of the shared SwiGLU; None: that many widths of an expert.
        shared_expert_gate: multiply its output by a sigmoid of the token.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        num_experts_per_tok: int,
        num_shared_experts: int,
        norm_topk_prob: bool,
        shared_intermediate_size: int | None = None,
        shared_expert_gate: bool = False,
    ) -> None:
        super().__init__()
        self.num_experts_per_tok = num_experts_per_tok
        self.norm_topk_prob = norm_topk_prob
        self.gate = Router(hidden_size, num_experts)
        self.experts = Experts(num_experts, hidden_size, intermediate_size)
        shared = shared_intermediate_size or intermediate_size * num_shared_experts
        self.shared = SwiGLU(hidden_size, shared) if num_shared_experts else None
        self.shared_gate = Linear(hidden_size, 1, bias=False) if shared_expert_gate else None

    def forward(
        self, x_TD: Tensor, statistics: bool = True
    ) -> tuple[Tensor, RouterStatistics | None]:
        """`[T, D]` output in the input's dtype, and the router's statistics if wanted."""
        logits_TE = self.gate(x_TD)
        probability_TE = logits_TE.softmax(-1)
        weight_TK, expert_TK = probability_TE.topk(self.num_experts_per_tok, dim=-1)
        if self.norm_topk_prob:
            weight_TK = weight_TK / weight_TK.sum(-1, keepdim=True)
        if not statistics and self.experts.is_few(x_TD):
            out_TD = self.experts(x_TD, expert_TK, weight_TK, None)
            return self._with_shared(x_TD, out_TD), None
        counts_E = torch.zeros(logits_TE.shape[1], dtype=torch.int64, device=x_TD.device)
        counts_E = counts_E.scatter_add(
            0, expert_TK.flatten(), torch.ones_like(expert_TK).flatten()
        )
        out_TD = self._with_shared(x_TD, self.experts(x_TD, expert_TK, weight_TK, counts_E))
        if not statistics:
            return out_TD, None
        norm_T = logits_TE.logsumexp(-1)
        with torch.no_grad():  # sum of -p log p, as log p = logit - norm
            entropy = norm_T.sum() - (probability_TE * logits_TE).sum()
        return out_TD, RouterStatistics(
            slots_E=counts_E,
            probability_E=probability_TE.sum(0),
            z=norm_T.square().sum(),
            tokens=x_TD.shape[0],
            chosen=self.num_experts_per_tok,
            entropy=entropy / math.log(max(logits_TE.shape[1], 2)),
        )

    def _with_shared(self, x_TD: Tensor, out_TD: Tensor) -> Tensor:
        if self.shared is None:
            return out_TD
        shared_TD = self.shared(x_TD)
        if self.shared_gate is not None:
            shared_TD = self.shared_gate(x_TD).sigmoid() * shared_TD
        return out_TD + shared_TD.to(out_TD.dtype)


class Router(nn.Module):
    """Linear router, always float32: bfloat16 logits swap experts of nearly equal probability."""

    def __init__(self, hidden_size: int, num_experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))

    def forward(self, x_TD: Tensor) -> Tensor:
        with torch.autocast(x_TD.device.type, enabled=False):
            return F.linear(x_TD.float(), self.weight.float())


class SwiGLU(nn.Module):
    """`down(silu(gate(x)) * up(x))` without biases."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_TD)) * self.up_proj(x_TD)).to(x_TD.dtype)
