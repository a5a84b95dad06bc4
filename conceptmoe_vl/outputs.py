"""What the model returns."""

from __future__ import annotations

import dataclasses

from torch import Tensor
from transformers.utils import ModelOutput

from conceptmoe_vl.cache import ConceptCache


@dataclasses.dataclass
class ChunkOutput(ModelOutput):
    """The chunking of one call, in the packed order.

    Attributes:
        boundary_prob: `[T]` float32 p. boundary_mask: `[T]` bool b. boundary_forced: `[T]` bool,
            boundaries that are set and not decided; with the router `none` all are.
        concept_index: `[T]` concept that each token reads, counted in this call; -1: one of an
            earlier call.
        cu_seqlens: `[G + 1]` document offsets.
        ratio: tokens per concept. ratio_by_modality: the same for `text` and `image` tokens. Both
            are None in a decoding step. ratio_by_target: the same for documents by their drawn
            ratio; None unless training with `chunk.target_ratios`.
    """

    boundary_prob: Tensor | None = None
    boundary_mask: Tensor | None = None
    boundary_forced: Tensor | None = None
    concept_index: Tensor | None = None
    cu_seqlens: Tensor | None = None
    ratio: Tensor | None = None
    ratio_by_modality: dict | None = None
    ratio_by_target: dict | None = None


@dataclasses.dataclass
class ConceptMoEVLOutput(ModelOutput):
    """Output of [`ConceptMoEVLForConditionalGeneration`].

    Attributes:
        loss: total: language, ratio, balance and z losses at their weights. lm_loss, ratio_loss,
            balance_loss, router_z_loss: each unweighted. All are None in a decoding step (one token
            a row behind a cache, no labels, no gradient), where nobody reads them; so is
            expert_load and router_entropy.
        logits: `[B, N, V]`, or `[T, V]` for packed inputs; None in training unless asked for.
        cache: the two-level cache. chunks: the chunking.
        states: `[T, D]` what the head reads, in the packed order; None unless asked for.
        lm_loss_per_token: `[S]` detached losses of the supervised tokens; supervised_positions:
            `[S]` their indices in the packed order.
        expert_load: share of slots `[executed layers, E]` by stage: encoder, concept, decoder.
        router_entropy: `[executed layers]` by stage, mean entropy of the tokens' router
            probabilities: 1 is uniform, 0 certain.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    lm_loss: Tensor | None = None
    ratio_loss: Tensor | None = None
    balance_loss: Tensor | None = None
    router_z_loss: Tensor | None = None
    cache: ConceptCache | None = None
    chunks: ChunkOutput | None = None
    states: Tensor | None = None
    lm_loss_per_token: Tensor | None = None
    supervised_positions: Tensor | None = None
    expert_load: dict | None = None
    router_entropy: dict | None = None

    @property
    def past_key_values(self) -> ConceptCache | None:
        """The cache under the name that transformers before 5.24 reads."""
        return self.cache
