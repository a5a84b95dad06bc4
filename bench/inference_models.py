"""The models of `bench.inference`: a plain MoE, the paper's five matched configurations, the peer.

The names are the paper's (Figure 5): passes through the concept model's layers as a multiple of the
baseline's, experts a concept passes (a baseline token: 8), ratio R. Attention's and the router's
weights of a layer equal the weights of 8 experts, which is where the paper's numbers match: with
them, (2 · 8 + 8) experts at R = 2 and (1.5 · 8 + 4) at R = 1.5 cost what the baseline costs.

Boundaries follow a pattern instead of the projections' cosine, so that the speed does not depend
on training; the chunk module still computes everything that it computes for its own decision.
"""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from bench.plain_moe import make_pair
from conceptmoe_vl import ConceptMoEVLConfig, ConceptMoEVLForConditionalGeneration
from conceptmoe_vl.chunk import Boundaries, ChunkModule, TokenKinds
from conceptmoe_vl.configuration import ChunkConfig
from conceptmoe_vl.flops import count_parameters, forward_flops
from conceptmoe_vl.layout import PackedLayout

BASELINE, PEER = "MoE", "Qwen3-MoE"


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of the baseline: `text` fields that the peer has too, and layers of E, C and D."""

    fields: dict[str, Any]
    encoder: int
    concept: int
    decoder: int


# E and D hold a seventh of the layers, as 4 + 4 of about 60 in the paper. Four concept layers are
# the least that 1.25, 1.5 and 2 passes divide.
SHAPES = {
    "small": Shape(
        {
            "vocab_size": 8192,
            "hidden_size": 256,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": False,
        },
        encoder=1,
        concept=12,
        decoder=1,
    ),
    "tiny": Shape(
        {
            "vocab_size": 64,
            "hidden_size": 32,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "num_experts": 96,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 8,
            "norm_topk_prob": True,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": False,
        },
        encoder=1,
        concept=12,
        decoder=1,
    ),
}


@dataclasses.dataclass(frozen=True)
class Variant:
    """One of Figure 5: passes of the concept layers, experts per concept, ratio."""

    passes: Fraction
    experts: int
    ratio: Fraction


VARIANTS = {
    "2L-top8-R2": Variant(Fraction(2), 8, Fraction(2)),
    "1.5L-top13-R2": Variant(Fraction(3, 2), 13, Fraction(2)),
    "1L-top24-R2": Variant(Fraction(1), 24, Fraction(2)),
    "1L-top16-R1.5": Variant(Fraction(1), 16, Fraction(3, 2)),
    "1.25L-top11-R1.5": Variant(Fraction(5, 4), 11, Fraction(3, 2)),
}


def boundary_pattern(place: Tensor, ratio: Fraction) -> Tensor:
    """Whether a boundary stands at each place: the first N places hold N / R, rounded up.

    Integer arithmetic, so that it is exact at any place: ceil((n + 1) / R) > ceil(n / R).
    """
    return _ceil(place + 1, ratio) > _ceil(place, ratio)


def _ceil(n: Tensor, ratio: Fraction) -> Tensor:
    return (n * ratio.denominator + ratio.numerator - 1).div(ratio.numerator, rounding_mode="floor")


class PatternChunk(ChunkModule):
    """A chunk module whose decision is overridden by a pattern; its cost stays.

    p stays as computed, but at least one half at boundaries, as it is wherever the module decides
    itself. Row r of a batch is r places ahead in the pattern, so that rows close their concepts
    in different steps.

    Attributes:
        first_row: number of the first row of the next calls.
    """

    def __init__(self, config: ChunkConfig, hidden_size: int, ratio: Fraction) -> None:
        super().__init__(config, hidden_size)
        self.ratio = ratio
        self.first_row = 0

    def forward(
        self, h_TD: Tensor, kinds: TokenKinds, layout: PackedLayout, *rest: Any, **named: Any
    ) -> Boundaries:
        found = super().forward(h_TD, kinds, layout, *rest, **named)
        place_T = layout.place_T + layout.document_T + self.first_row
        mask_T = boundary_pattern(place_T, self.ratio) | kinds.forced_T
        p_T = found.probability_T
        p_T = torch.where(mask_T, p_T.clamp(min=0.5), p_T)
        return dataclasses.replace(found, probability_T=p_T, mask_T=mask_T)


def plain_config(shape: Shape) -> ConceptMoEVLConfig:
    """The baseline: every token is a concept."""
    layers = {
        "encoder_layers": shape.encoder,
        "concept_layers": shape.concept,
        "decoder_layers": shape.decoder,
    }
    chunk = {"router": "none", "concept_residual": "delta"}
    return ConceptMoEVLConfig(text={**shape.fields, **layers}, chunk=chunk)


def variant_config(shape: Shape, variant: Variant) -> ConceptMoEVLConfig:
    """The matched configuration: the same experts and layers, other passes, experts and ratio."""
    extra = shape.concept * (variant.passes - 1)
    if extra.denominator != 1:
        raise ValueError(f"{shape.concept} concept layers cannot be passed {variant.passes} times")
    looped = int(extra)
    first = (shape.concept - looped) // 2
    text = {
        **shape.fields,
        "encoder_layers": shape.encoder,
        "concept_layers": shape.concept,
        "decoder_layers": shape.decoder,
        "concept_loops": [[first, first + looped - 1, 2]] if looped else [],
        "concept_num_experts_per_tok": variant.experts,
    }
    chunk = {
        "target_ratio": float(variant.ratio),
        "init": "random",
        "joint_decoding_layers": shape.decoder,
    }
    return ConceptMoEVLConfig(text=text, chunk=chunk)


@dataclasses.dataclass
class Contestant:
    """A model under measurement. `ratio`: R of its pattern, 1 for the baseline and the peer."""

    name: str
    model: nn.Module
    ratio: Fraction
    config: ConceptMoEVLConfig

    @property
    def is_peer(self) -> bool:
        return self.name == PEER

    def from_row(self, row: int) -> None:
        """Numbers the rows of the next calls from `row`."""
        chunk = getattr(getattr(self.model, "language_model", None), "chunk", None)
        if isinstance(chunk, PatternChunk):
            chunk.first_row = row


def make_contestants(shape: Shape, names: list[str] | None = None) -> dict[str, Contestant]:
    """Baseline, variants and peer in float32 on the CPU, in evaluation mode.

    Args:
        names: which variants, and `Qwen3-MoE` for the peer; None: all.
    """
    baseline, peer = make_pair(shape.fields, shape.encoder, shape.concept, shape.decoder)
    found = {BASELINE: Contestant(BASELINE, baseline.eval(), Fraction(1), baseline.config)}
    for name, variant in VARIANTS.items():
        if names is not None and name not in names:
            continue
        model = ConceptMoEVLForConditionalGeneration(variant_config(shape, variant))
        lm = model.language_model
        chunk = PatternChunk(model.config.chunk, model.config.text.hidden_size, variant.ratio)
        chunk.load_state_dict(lm.chunk.state_dict())
        lm.chunk = chunk
        found[name] = Contestant(name, model.eval(), variant.ratio, model.config)
    if names is None or PEER in names:
        found[PEER] = Contestant(PEER, peer.eval(), Fraction(1), baseline.config)
    return found


def matching(contestants: dict[str, Contestant]) -> dict[str, dict[str, float]]:
    """Parameters, and FLOPs per token without attention maps, head left out, beside the baseline's.

    With chunking and joint decoding, which the paper's names leave out.
    """
    rows: dict[str, dict[str, float]] = {}
    for name, contestant in contestants.items():
        if contestant.is_peer:
            continue
        counts = count_parameters(contestant.config)
        tokens = 6 * 1024
        flops = forward_flops(contestant.config, tokens, float(contestant.ratio))
        deep = [flops[stage].rest for stage in ("encoder", "concept", "decoder")]
        rows[name] = {
            "parameters": sum(count.total for count in counts.values()),
            "flops_per_token": (sum(f.rest for f in flops.values()) - flops["head"].rest) / tokens,
            "concept_flops_per_token": deep[1] / tokens,
        }
    base = rows[BASELINE]
    for row in rows.values():
        row.update({f"{key}_to_baseline": row[key] / base[key] for key in base if key in _COMPARED})
    return rows


_COMPARED = ("parameters", "flops_per_token", "concept_flops_per_token")
