"""Bytes of the two-level cache and of activations, from a configuration alone."""

from __future__ import annotations

import dataclasses

from conceptmoe_vl.configuration import ConceptMoEVLConfig
from conceptmoe_vl.flops import count_concepts


@dataclasses.dataclass(frozen=True)
class CacheBytes:
    """What a filled cache holds. Its buffers may be larger: they grow geometrically.

    Attributes:
        tokens: keys and values of E and D. concepts: those of C (one set a pass of a loop).
        state: what the chunk module, the open merge and the smoothing carry from call to call.
    """

    tokens: int
    concepts: int
    state: int

    @property
    def total(self) -> int:
        return self.tokens + self.concepts + self.state


def cache_bytes(
    config: ConceptMoEVLConfig,
    tokens: int,
    ratio: float | None = None,
    *,
    rows: int = 1,
    bytes_per_value: int = 4,
) -> CacheBytes:
    """Bytes that the cache holds of `rows` rows of `tokens` tokens each.

    Args:
        ratio: R; None: the configuration's target.
        bytes_per_value: of keys and values; sums, counts and smoothed concepts are float32.
    """
    text, chunk = config.text, config.chunk
    assert text.head_dim is not None  # TextConfig fills it in
    position = 2 * text.num_key_value_heads * text.head_dim * bytes_per_value * rows
    levels = text.encoder_layers + text.decoder_layers
    concepts = count_concepts(config, tokens, ratio)
    d, joint = text.hidden_size, chunk.joint_decoding_layers > 0
    state = 0
    if chunk.router == "cosine":
        state += d * bytes_per_value  # the last key
    if chunk.router != "none":
        state += (d + 1) * 4  # sum and count of the open chunk
    delta = chunk.concept_residual == "delta"
    if not (chunk.router == "none" and delta and not joint):
        state += d * (2 if delta and joint else 1) * 4  # the last smoothed concept
    return CacheBytes(
        tokens=levels * tokens * position,
        concepts=len(text.concept_schedule) * concepts * position,
        state=state * rows,
    )


def activation_bytes(
    config: ConceptMoEVLConfig,
    tokens: int,
    ratio: float | None = None,
    *,
    bytes_per_value: int = 4,
) -> dict[str, int]:
    """An estimate of what E, C and D keep for a backward pass, without checkpointing.

    A token keeps, in values, of one execution of a layer of width d with N query and N_kv key
    heads of size H, K of E experts of width F:

    | kept | values |
    | --- | --- |
    | two norms: input and output | 4 d |
    | QK-norm: heads before it | (N + N_kv) H |
    | queries, keys, values and outputs of attention | (2 N + 2 N_kv) H |
    | router logits and probabilities | 2 E |
    | experts: gathered input, gate and up, weighted product | K (d + 3 F) |
    | shared experts of width F_s: gate, up, SiLU, product; the sigmoid's factor | 4 F_s; d |

    Attention maps are kept by no kernel used for long documents, the vision tower and the loss
    are not in it, and autocast adds its copies. Measured against the tensors that autograd saved
    for float32 models on a CPU it was within a tenth.

    Returns:
        Bytes by component: encoder, concept, decoder.
    """
    text = config.text
    assert text.head_dim is not None  # TextConfig fills it in
    concepts = count_concepts(config, tokens, ratio)
    wide, narrow = text.num_attention_heads, text.num_key_value_heads
    heads = (wide + narrow) * text.head_dim * (3 if text.qk_norm else 2)

    def layer(d: int, experts: int, chosen: int) -> int:
        routed = 2 * experts + chosen * (d + 3 * text.moe_intermediate_size)
        shared = 4 * text.width_of_shared + (d if text.shared_expert_gate else 0)
        return (4 * d + heads + routed + shared) * bytes_per_value

    token = layer(text.hidden_size, text.num_experts, text.num_experts_per_tok)
    concept = layer(text.width_of_concepts, text.experts_of_concepts, text.experts_per_concept)
    return {
        "encoder": text.encoder_layers * tokens * token,
        "concept": len(text.concept_schedule) * concepts * concept,
        "decoder": text.decoder_layers * tokens * token,
    }
