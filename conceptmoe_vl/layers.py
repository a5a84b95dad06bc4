"""The transformer layer that E, C and D share, and the stack that runs a schedule of them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, noop_context_fn
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from conceptmoe_vl.attention import cached_attention, packed_attention
from conceptmoe_vl.configuration import TextConfig
from conceptmoe_vl.layout import PackedLayout
from conceptmoe_vl.moe import MoEBlock, RouterStatistics
from conceptmoe_vl.products import Linear, round_rows
from conceptmoe_vl.recomputation import every_use_cast

if TYPE_CHECKING:
    from conceptmoe_vl.cache import KeyValueStore


class RMSNorm(nn.Module):
    """`x / rms(x) * weight` over the last dimension, computed in float32, returned in x's dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return _RMSNorm.apply(x, self.weight, self.eps)


class _RMSNorm(torch.autograd.Function):
    """`F.rms_norm` has no CPU kernel: eight operations, and as many again for the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x_float = x.float()
        norm = torch.linalg.vector_norm(x_float, dim=-1, keepdim=True)
        inverse = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        return (x_float * inverse).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, inverse = ctx.saved_tensors
        grad_float, normed, scale = grad.float(), x.float() * inverse, weight.float()
        product = grad_float * normed
        grad_weight = product.flatten(0, -2).sum(0).to(weight.dtype)
        mean = (product @ scale).div_(x.shape[-1]).unsqueeze(-1)
        grad_x = torch.addcmul(grad_float * scale, normed, mean, value=-1).mul_(inverse)
        return grad_x.to(x.dtype), grad_weight, None


def rotary_table(
    positions_T: Tensor, head_dim: int, theta: float, scaling: dict | None = None
) -> tuple[Tensor, Tensor]:
    """Cosines and sines `[T, 1, H / 2]` of the rotary embedding, float32.

    The frequencies are transformers' to the last bit: at position 4,096 one bit in a frequency is
    2e-4 in the angle, and a converted model is to give its source's logits.

    Args:
        scaling: `text.rope_scaling`.
    """
    if scaling is not None:
        frequencies, factor = scaled_frequencies(
            head_dim, theta, json.dumps(scaling), positions_T.device
        )
        angles = (positions_T.float()[:, None] * frequencies)[:, None]
        return angles.cos() * factor, angles.sin() * factor
    exponent = (
        torch.arange(0, head_dim, 2, device=positions_T.device, dtype=torch.float32) / head_dim
    )
    angles = (positions_T.float()[:, None] * (1.0 / theta**exponent))[:, None]
    return angles.cos(), angles.sin()


@lru_cache(maxsize=8)
def scaled_frequencies(
    head_dim: int, theta: float, scaling: str, device: torch.device
) -> tuple[Tensor, float]:
    """Frequencies `[H / 2]` of a scaled rotary embedding and the factor of its cosines and sines.

    Args:
        scaling: `text.rope_scaling` as JSON.
    """
    parameters = {**json.loads(scaling), "rope_theta": theta}
    config = LlamaConfig(
        hidden_size=head_dim, num_attention_heads=1, head_dim=head_dim, rope_parameters=parameters
    )
    return ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, device)


def rotate(x_TNH: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Applies the rotary embedding to heads, in the NeoX half layout of transformers' models."""
    cos, sin = (table.to(x_TNH.dtype) for table in rotary)
    return _Rotation.apply(x_TNH, cos, sin)


class _Rotation(torch.autograd.Function):
    """Turns the pairs (first half, second half) by an angle; the gradient turns back."""

    @staticmethod
    def forward(ctx: Any, x_TNH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x_TNH, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(grad, cos, -sin), None, None


def _turned(x_TNH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x_TNH.chunk(2, dim=-1)
    out = torch.empty_like(x_TNH)
    out_first, out_second = out.chunk(2, dim=-1)
    torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out_second).addcmul_(first, sin)
    return out


class JointDecoding(nn.Module):
    """What eq. 7 adds to a layer's queries, keys and values: W^c of the normalised concept.

    The products run on the M concepts and are gathered for the T tokens afterwards, which is the
    same and costs R times less.
    """

    def __init__(self, text: TextConfig) -> None:
        super().__init__()
        d, size = text.hidden_size, text.head_dim
        assert size is not None  # TextConfig fills it in
        self.norm = RMSNorm(d, text.rms_norm_eps)
        self.q_proj = Linear(d, text.num_attention_heads * size, bias=False)
        self.k_proj = Linear(d, text.num_key_value_heads * size, bias=False)
        self.v_proj = Linear(d, text.num_key_value_heads * size, bias=False)
        for projection in (self.q_proj, self.k_proj, self.v_proj):
            projection.start = 0.0

    def forward(
        self, concept_MD: Tensor, concept_of_T: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        normed = self.norm(concept_MD)
        q, k, v = (proj(normed) for proj in (self.q_proj, self.k_proj, self.v_proj))
        if concept_of_T is None:  # token n reads concept n
            return q, k, v
        q, k, v = (x.index_select(0, concept_of_T) for x in (q, k, v))
        return q, k, v


class Attention(nn.Module):
    """Grouped-query causal attention with optional biases, QK-norm and joint decoding."""

    def __init__(self, text: TextConfig, hidden_size: int, joint: bool) -> None:
        super().__init__()
        assert text.head_dim is not None  # TextConfig fills it in
        self.head_dim = text.head_dim
        query = text.num_attention_heads * self.head_dim
        key = text.num_key_value_heads * self.head_dim
        bias = text.attention_bias != "none"
        self.q_proj = Linear(hidden_size, query, bias=bias)
        self.k_proj = Linear(hidden_size, key, bias=bias)
        self.v_proj = Linear(hidden_size, key, bias=bias)
        self.o_proj = Linear(query, hidden_size, bias=text.attention_bias == "all")
        self.norm_heads_together = text.qk_norm and text.qk_norm_over == "all_heads"
        if text.qk_norm:
            sizes = (query, key) if self.norm_heads_together else (self.head_dim, self.head_dim)
            self.q_norm, self.k_norm = (RMSNorm(size, text.rms_norm_eps) for size in sizes)
        else:
            self.q_norm, self.k_norm = nn.Identity(), nn.Identity()
        self.joint = JointDecoding(text) if joint else None

    def forward(
        self,
        x_TD: Tensor,
        layout: PackedLayout,
        rotary: tuple[Tensor, Tensor],
        concepts: tuple[Tensor, Tensor | None] | None,
        store: KeyValueStore | None,
    ) -> Tensor:
        tokens, x_RD = x_TD.shape[0], round_rows(x_TD)
        q, k, v = (proj(x_RD)[:tokens] for proj in (self.q_proj, self.k_proj, self.v_proj))
        if self.joint is not None and concepts is not None:
            joint_q, joint_k, joint_v = self.joint(*concepts)
            q, k, v = q + joint_q, k + joint_k, v + joint_v
        if self.norm_heads_together:
            q, k = self.q_norm(q), self.k_norm(k)
        q_TNH, k_TNH, v_TNH = (x.unflatten(-1, (-1, self.head_dim)) for x in (q, k, v))
        if not self.norm_heads_together:
            q_TNH, k_TNH = self.q_norm(q_TNH), self.k_norm(k_TNH)
        q_TNH, k_TNH = rotate(q_TNH, rotary), rotate(k_TNH, rotary)
        if store is not None:
            keys, values = store.append(k_TNH, v_TNH, layout)
        if store is not None and layout.has_past:
            out_TNH = cached_attention(q_TNH, keys, values, layout)
        else:
            out_TNH = packed_attention(q_TNH, k_TNH, v_TNH, layout)
        return self.o_proj(out_TNH.flatten(1))


class Layer(nn.Module):
    """Pre-norm attention and mixture of experts.

    Args:
        text: shapes. concept: whether the layer belongs to C. joint: whether it reads the concept
            (eq. 7).
    """

    def __init__(self, text: TextConfig, concept: bool = False, joint: bool = False) -> None:
        super().__init__()
        d = text.width_of_concepts if concept else text.hidden_size
        self.input_layernorm = RMSNorm(d, text.rms_norm_eps)
        self.self_attn = Attention(text, d, joint)
        self.post_attention_layernorm = RMSNorm(d, text.rms_norm_eps)
        self.mlp = MoEBlock(
            d,
            text.moe_intermediate_size,
            text.experts_of_concepts if concept else text.num_experts,
            text.experts_per_concept if concept else text.num_experts_per_tok,
            text.num_shared_experts,
            text.norm_topk_prob,
            text.shared_intermediate_size,
            text.shared_expert_gate,
        )

    def forward(
        self,
        x_TD: Tensor,
        layout: PackedLayout,
        rotary: tuple[Tensor, Tensor],
        concepts: tuple[Tensor, Tensor | None] | None = None,
        store: KeyValueStore | None = None,
        statistics: bool = True,
    ) -> tuple[Tensor, RouterStatistics | None]:
        attended = self.self_attn(self.input_layernorm(x_TD), layout, rotary, concepts, store)
        x_TD = x_TD + attended
        out_TD, counted = self.mlp(self.post_attention_layernorm(x_TD), statistics)
        return x_TD + out_TD, counted


class Stack(nn.Module):
    """Layers run in the order of a schedule; a looped layer appears in it more than once.

    Args:
        layers: the layers. schedule: layer indices in the order of execution.
        text: of the rotary embedding.

    Attributes:
        gradient_checkpointing: recompute layers in the backward pass.
        recompute_contexts: `context_fn` of that; None: all of a layer is recomputed.
    """

    def __init__(self, layers: list[Layer], schedule: list[int], text: TextConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.schedule = schedule
        assert text.head_dim is not None  # TextConfig fills it in
        self.theta, self.head_dim, self.scaling = text.rope_theta, text.head_dim, text.rope_scaling
        self.gradient_checkpointing = False
        self.recompute_contexts: Callable[[], Any] | None = None

    def forward(
        self,
        x_TD: Tensor,
        layout: PackedLayout,
        concepts: tuple[Tensor, Tensor | None] | None = None,
        stores: list[KeyValueStore] | None = None,
        statistics: bool = True,
    ) -> tuple[Tensor, list[RouterStatistics]]:
        """`[T, D]` states after all layers, and the statistics of every execution in order (none
        where they are not wanted).
        """
        rotary = rotary_table(layout.positions_T, self.head_dim, self.theta, self.scaling)
        collected = []
        is_looped = len(set(self.schedule)) < len(self.schedule)
        with every_use_cast() if is_looped else contextlib.nullcontext():
            for execution, index in enumerate(self.schedule):
                store = stores[execution] if stores is not None else None
                layer = self.layers[index]
                if self.gradient_checkpointing and self.training:
                    x_TD, counted = checkpoint(
                        *(layer, x_TD, layout, rotary, concepts, None),
                        use_reentrant=False,
                        context_fn=self.recompute_contexts or noop_context_fn,
                    )
                else:
                    x_TD, counted = layer(x_TD, layout, rotary, concepts, store, statistics)
                if counted is not None:
                    collected.append(counted)
        return x_TD, collected
