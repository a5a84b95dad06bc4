"""Parameters and FLOPs of a model, from its configuration alone.

One multiply-add is 2 FLOPs and only matrix products count, which is what torch's `FlopCounterMode`
does: norms, activations, softmax, the scan of eq. 5 and gathers are none. An attention map is
counted whole (T * T), although causal kernels skip its upper half. The tests hold every figure
against that counter and against the parameters of the real model.

| component | what belongs to it |
| --- | --- |
| vision, projector | the tower, and the way to token embeddings |
| embedding | the table of token embeddings |
| encoder, concept, decoder | layers of E, C, D; the decoder's hold joint decoding (eq. 7) |
| chunk | the router of boundaries (eq. 3), its thresholds, and the map d -> d_c where C is wider |
| dechunk | the linear map d_c -> d |
| head | the final norm and the head; with tied embeddings the matrix counts as the embedding's |
"""

from __future__ import annotations

import dataclasses
import math

from conceptmoe_vl.configuration import ConceptMoEVLConfig
from conceptmoe_vl.sections import TextConfig
from conceptmoe_vl.vision_cost import image_tokens, vision_flops, vision_parameters

COMPONENTS = (
    *("vision", "projector", "embedding", "encoder", "chunk", "concept", "dechunk", "decoder"),
    "head",
)


@dataclasses.dataclass(frozen=True)
class Parameters:
    """Numbers of a component. `active`: those that one token passes (K of E experts, else all)."""

    total: int = 0
    active: int = 0

    def __add__(self, other: Parameters) -> Parameters:
        return Parameters(self.total + other.total, self.active + other.active)

    def times(self, count: int) -> Parameters:
        return Parameters(self.total * count, self.active * count)


@dataclasses.dataclass(frozen=True)
class Flops:
    """FLOPs of a component. `maps`: query-key and weight-value products; `rest`: all others."""

    rest: float = 0
    maps: float = 0

    @property
    def total(self) -> float:
        return self.rest + self.maps

    def __add__(self, other: Flops) -> Flops:
        return Flops(self.rest + other.rest, self.maps + other.maps)


@dataclasses.dataclass(frozen=True)
class DecodingCost:
    """What one generated token costs in one component.

    Attributes:
        flops: FLOPs. weight_bytes: weights read, shared by the rows of a batch. cache_bytes: keys
            and values read and written.
    """

    flops: Flops = Flops()
    weight_bytes: float = 0.0
    cache_bytes: float = 0.0

    @property
    def bytes(self) -> float:
        return self.weight_bytes + self.cache_bytes

    def __add__(self, other: DecodingCost) -> DecodingCost:
        return DecodingCost(
            self.flops + other.flops,
            self.weight_bytes + other.weight_bytes,
            self.cache_bytes + other.cache_bytes,
        )


@dataclasses.dataclass(frozen=True)
class _Layer:
    """Sizes of one layer of E, C or D."""

    width: int
    query: int  # N * H
    key: int  # N_kv * H
    experts: int
    chosen: int
    expert: int  # parameters of one expert: 3 * D * F
    shared: int  # parameters of the shared experts and their gate
    vectors: int  # norms and biases, which no product counts
    joint: int  # parameters of joint decoding's projections, 0 without

    @classmethod
    def of(cls, text: TextConfig, concept: bool = False, joint: bool = False) -> _Layer:
        size = text.head_dim
        assert size is not None  # TextConfig fills it in
        d = text.width_of_concepts if concept else text.hidden_size
        query, key = text.num_attention_heads * size, text.num_key_value_heads * size
        expert = 3 * d * text.moe_intermediate_size
        return cls(
            width=d,
            query=query,
            key=key,
            experts=text.experts_of_concepts if concept else text.num_experts,
            chosen=text.experts_per_concept if concept else text.num_experts_per_tok,
            expert=expert,
            shared=3 * d * text.width_of_shared + (d if text.shared_expert_gate else 0),
            vectors=2 * d + _qk_norms(text) + _biases(text, d),
            joint=d * (query + 2 * key) if joint else 0,
        )

    @property
    def always(self) -> int:
        """Parameters that every token passes."""
        return self.dense + self.vectors + (self.joint + self.width if self.joint else 0)

    @property
    def dense(self) -> int:
        """Weights of the products that every token passes: projections, router, shared experts."""
        projections = self.width * (2 * self.query + 2 * self.key)
        return projections + self.experts * self.width + self.shared

    @property
    def parameters(self) -> Parameters:
        experts, chosen = self.experts * self.expert, self.chosen * self.expert
        return Parameters(self.always + experts, self.always + chosen)

    def flops(self, tokens: float, seen: float, joint_rows: float = 0) -> Flops:
        """Of `tokens` tokens that attend to `seen` positions each."""
        rest = 2 * tokens * (self.dense + self.chosen * self.expert) + 2 * joint_rows * self.joint
        return Flops(rest, 4 * self.query * tokens * seen)

    def weights_read(self, rows: float) -> float:
        """Weights that a step of `rows` tokens reads; the router is taken to spread evenly."""
        distinct = self.experts * (1 - (1 - self.chosen / self.experts) ** rows)
        return self.always + distinct * self.expert


def _qk_norms(text: TextConfig) -> int:
    assert text.head_dim is not None  # TextConfig fills it in
    if not text.qk_norm:
        return 0
    heads = text.num_attention_heads + text.num_key_value_heads
    return text.head_dim * (heads if text.qk_norm_over == "all_heads" else 2)


def _biases(text: TextConfig, width: int) -> int:
    assert text.head_dim is not None  # TextConfig fills it in
    if text.attention_bias == "none":
        return 0
    heads = text.num_attention_heads + 2 * text.num_key_value_heads
    return text.head_dim * heads + (width if text.attention_bias == "all" else 0)


def _stages(config: ConceptMoEVLConfig) -> dict[str, list[_Layer]]:
    """Layers of E, C and D as stored (a looped layer once)."""
    text, joint = config.text, config.chunk.joint_decoding_layers
    first_joint = text.decoder_layers - joint
    return {
        "encoder": [_Layer.of(text)] * text.encoder_layers,
        "concept": [_Layer.of(text, concept=True)] * text.concept_layers,
        "decoder": [_Layer.of(text, joint=i >= first_joint) for i in range(text.decoder_layers)],
    }


def _executed(config: ConceptMoEVLConfig) -> dict[str, list[_Layer]]:
    """Layers of E, C and D as run: looped ones as often as they are passed."""
    stages = _stages(config)
    stages["concept"] = [stages["concept"][i] for i in config.text.concept_schedule]
    return stages


def count_parameters(config: ConceptMoEVLConfig) -> dict[str, Parameters]:
    """Parameters of every component; their sum is what `sum(p.numel())` of the model gives.

    The embedding counts whole as active, as in the names of published models (A3B and the like).
    """
    text, chunk = config.text, config.chunk
    d, width = text.hidden_size, text.width_of_concepts
    counts = dict.fromkeys(COMPONENTS, Parameters())
    for stage, layers in _stages(config).items():
        counts[stage] = sum((layer.parameters for layer in layers), Parameters())

    def dense(count: int) -> Parameters:
        return Parameters(count, count)

    router = {"cosine": 2 * d * d, "linear": d + 1}.get(chunk.router, 0)
    # the learned thresholds of several ratios
    router += len(chunk.target_ratios or ()) * (2 if chunk.ratio_scope == "modality" else 1)
    mapped = d * width if width != d else 0
    counts["embedding"] = dense(text.vocab_size * d)
    counts["chunk"], counts["dechunk"] = dense(router + mapped), dense(mapped)
    counts["head"] = dense(d + (0 if text.tie_word_embeddings else text.vocab_size * d))
    if config.vision is not None:
        tower, projector = vision_parameters(config.vision, d)
        counts["vision"], counts["projector"] = dense(tower), dense(projector)
    return counts


def ratio_of(config: ConceptMoEVLConfig, ratio: float | None = None) -> float:
    """Tokens per concept: `ratio`, or the configuration's target; 1 with router none.

    Raises:
        ValueError: the ratio is below 1.
    """
    if config.chunk.router == "none":
        return 1.0
    ratio = config.chunk.target_ratio if ratio is None else ratio
    if ratio < 1:
        raise ValueError(f"the ratio is {ratio}; a concept has at least one token: give 1 or more")
    return ratio


def count_concepts(config: ConceptMoEVLConfig, tokens: int, ratio: float | None = None) -> int:
    """Concepts of one document: T / R rounded up, since its first token always closes one."""
    return math.ceil(tokens / ratio_of(config, ratio) - 1e-9)


def forward_flops(
    config: ConceptMoEVLConfig,
    tokens: int,
    ratio: float | None = None,
    *,
    images: int = 0,
    logits: int | None = None,
    concepts: int | None = None,
) -> dict[str, Flops]:
    """FLOPs of one forward pass of one document by component.

    Args:
        tokens: T, image tokens included. ratio: R; None: the configuration's target.
        images: images among them, of the largest size that the configuration gives one tile.
        logits: positions that the head is computed for; None: all (prefill: 1).
        concepts: M, where it is known; None: T / R.

    Raises:
        ValueError: no tokens, a ratio below 1, or more image tokens than tokens.
    """
    if tokens < 1:
        raise ValueError(f"tokens is {tokens}; give 1 or more")
    text, chunk = config.text, config.chunk
    rows = count_concepts(config, tokens, ratio) if concepts is None else concepts
    d, width = text.hidden_size, text.width_of_concepts
    flops = dict.fromkeys(COMPONENTS, Flops())
    for stage, layers in _executed(config).items():
        count = rows if stage == "concept" else tokens
        flops[stage] = sum((x.flops(count, count, joint_rows=rows) for x in layers), Flops())
    mapped = 2 * rows * d * width if width != d else 0
    router = {"cosine": 2 * d * d, "linear": d}.get(chunk.router, 0)
    flops["chunk"] = Flops(2 * tokens * router + mapped)
    flops["dechunk"] = Flops(mapped * _ways_back(config))
    flops["head"] = Flops(2 * (tokens if logits is None else logits) * text.vocab_size * d)
    if images:
        if config.vision is None:
            raise ValueError(f"images is {images}, but this model is text-only (vision: null)")
        if images * image_tokens(config.vision) > tokens:
            raise ValueError(
                f"{images} images have {images * image_tokens(config.vision)} tokens, but tokens "
                f"is {tokens}; raise it, it counts image tokens too"
            )
        tower, maps, projector = vision_flops(config.vision, d)
        flops["vision"] = Flops(images * tower, images * maps)
        flops["projector"] = Flops(images * projector)
    return flops


def _ways_back(config: ConceptMoEVLConfig) -> int:
    """Products by the map d_c -> d: joint decoding reads the concept and `delta` its change."""
    chunk = config.chunk
    return 2 if chunk.concept_residual == "delta" and chunk.joint_decoding_layers else 1


def decoding_cost(
    config: ConceptMoEVLConfig,
    context: int,
    ratio: float | None = None,
    *,
    rows: int = 1,
    bytes_per_value: int = 4,
) -> dict[str, DecodingCost]:
    """What one row's next token costs on average, by component.

    C runs for the rows / R of a step whose boundary fires, so that its maps and its reading of
    the cache shrink by R twice: fewer positions, and only every R-th step. A step that fires for
    no row reads no weight of C.

    Args:
        context: tokens that each row holds before the step. ratio: R; None: the target.
        rows: rows of the batch, which share the weights that a step reads.
        bytes_per_value: of weights and cache, 4 for float32 and 2 for bfloat16.
    """
    r = ratio_of(config, ratio)
    fired = rows / r
    costs = dict.fromkeys(COMPONENTS, DecodingCost())
    for stage, layers in _executed(config).items():
        deep = stage == "concept"
        # Rows of a step that runs this stage, the share of steps that do, and what each row sees.
        active, share = (max(fired, 1.0), min(fired, 1.0)) if deep else (float(rows), 1.0)
        seen = (count_concepts(config, context, ratio) if deep else context) + 1
        for layer in layers:
            # Joint decoding projects the concept that a row carries and the one it closes.
            flops = layer.flops(active, seen, joint_rows=rows + fired)
            cache = active * 2 * layer.key * (seen + 1)
            costs[stage] += DecodingCost(
                Flops(flops.rest * share / rows, flops.maps * share / rows),
                layer.weights_read(active) * share * bytes_per_value / rows,
                cache * share * bytes_per_value / rows,
            )
    return costs | _decoding_beside_layers(config, r, rows, bytes_per_value)


def _decoding_beside_layers(
    config: ConceptMoEVLConfig, ratio: float, rows: int, bytes_per_value: int
) -> dict[str, DecodingCost]:
    text = config.text
    d, width = text.hidden_size, text.width_of_concepts
    share = min(rows / ratio, 1.0)
    router = {"cosine": 2 * d * d, "linear": d}.get(config.chunk.router, 0)
    mapped = d * width if width != d else 0
    ways = _ways_back(config)

    def cost(products: float, weights: float) -> DecodingCost:
        return DecodingCost(Flops(2 * products), weights * bytes_per_value / rows)

    return {
        "embedding": cost(0, rows * d),
        "chunk": cost(router + mapped / ratio, router + mapped * share),
        "dechunk": cost(mapped * ways / ratio, mapped * ways * share),
        "head": cost(text.vocab_size * d, text.vocab_size * d + d),
    }
