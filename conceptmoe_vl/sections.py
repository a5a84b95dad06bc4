"""The sections of a configuration (`text`, `chunk`, `vision`) and the checks of their fields."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from conceptmoe_vl.field_checks import (
    check_known_keys,
    check_rope_scaling,
    check_type,
    require,
    require_choice,
    require_numbers,
)

_ROUTERS = ("cosine", "linear", "fixed", "none")
_MERGES = ("sum", "boundary", "mean")


@dataclasses.dataclass
class TextConfig:
    """The language model: encoder E, concept model C and decoder D (DESIGN.md sections 2 and 3.6).

    Fields (counts unless a unit is given):
        vocab_size: rows of the embedding and of the head; may exceed the tokenizer's length.
        hidden_size: width d of tokens in E and D.
        concept_hidden_size: width d_c of concepts in C; None means `hidden_size`.
        encoder_layers, concept_layers, decoder_layers: layers of E, C and D.
        concept_loops: spans `[first, last, times]` of concept layers, both ends included, that are
            passed `times` times in a row.
        num_attention_heads, num_key_value_heads, head_dim: attention shape, the same in E, C, D;
            `head_dim` None means hidden_size / num_attention_heads.
        qk_norm: RMS-normalise queries and keys before rotation.
        qk_norm_over: head (every head by itself, Qwen3) | all_heads (all heads of a token together,
            OLMoE).
        attention_bias: none | qkv (Qwen2) | all (also behind the output projection).
        rope_theta: base of the rotary position embedding.
        rope_scaling: how its frequencies are stretched for longer contexts: `rope_type` (linear,
            llama3 or yarn) and that type's parameters, by transformers' names; None: not at all.
        max_position_embeddings: tokens; the length the model was trained for.
        num_experts, num_experts_per_tok: experts and top-k of E and D.
        concept_num_experts, concept_num_experts_per_tok: those of C; None means as in E and D.
        num_shared_experts: experts that every token passes, fused into one.
        shared_intermediate_size: hidden width of that one; None means `num_shared_experts` times
            `moe_intermediate_size`.
        shared_expert_gate: multiply its output by a sigmoid of the token (Qwen2-MoE).
        moe_intermediate_size: hidden width of one expert.
        norm_topk_prob: divide the chosen router probabilities by their sum.
        balance_loss_weight, router_z_loss_weight: weights in the total loss.
        rms_norm_eps: epsilon of every RMSNorm.
        initializer_range: standard deviation of initial weights.
        tie_word_embeddings: the head uses the embedding's matrix.
    """

    vocab_size: int = 32000
    hidden_size: int = 512
    concept_hidden_size: int | None = None
    encoder_layers: int = 2
    concept_layers: int = 8
    decoder_layers: int = 2
    concept_loops: list = dataclasses.field(default_factory=list)
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int | None = None
    qk_norm: bool = True
    qk_norm_over: str = "head"
    attention_bias: str = "none"
    rope_theta: float = 10000.0
    rope_scaling: dict | None = None
    max_position_embeddings: int = 8192
    num_experts: int = 16
    num_experts_per_tok: int = 2
    concept_num_experts: int | None = None
    concept_num_experts_per_tok: int | None = None
    num_shared_experts: int = 0
    shared_intermediate_size: int | None = None
    shared_expert_gate: bool = False
    moe_intermediate_size: int = 512
    norm_topk_prob: bool = True
    balance_loss_weight: float = 0.01
    router_z_loss_weight: float = 0.001
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_attention()
        self._check_experts()
        if self.rope_scaling is not None:
            check_rope_scaling(self.rope_scaling)
        self.concept_schedule  # noqa: B018  (checks concept_loops)

    def _check_numbers(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "num_attention_heads",
            "num_key_value_heads",
            "num_experts",
            "num_experts_per_tok",
            "moe_intermediate_size",
            "max_position_embeddings",
        ):
            value = getattr(self, name)
            require(
                isinstance(value, int) and value > 0,
                f"text.{name} is {value!r}; give a positive integer",
            )
        for name in ("encoder_layers", "concept_layers", "decoder_layers", "num_shared_experts"):
            value = getattr(self, name)
            require(
                isinstance(value, int) and value >= 0,
                f"text.{name} is {value!r}; give an integer of 0 or more",
            )
        require_numbers("text", self, "rope_theta", "rms_norm_eps", above=True)
        require_numbers(
            "text", self, "balance_loss_weight", "router_z_loss_weight", "initializer_range"
        )
        require_numbers(
            *("text", self, "head_dim", "concept_hidden_size", "shared_intermediate_size"),
            *("concept_num_experts", "concept_num_experts_per_tok"),
            least=1,
        )

    def _check_attention(self) -> None:
        if self.head_dim is None:
            require(
                self.hidden_size % self.num_attention_heads == 0,
                f"text.hidden_size {self.hidden_size} is no multiple of text.num_attention_heads "
                f"{self.num_attention_heads}; set text.head_dim",
            )
            self.head_dim = self.hidden_size // self.num_attention_heads
        require(
            self.head_dim % 2 == 0,
            f"text.head_dim is {self.head_dim}; rotary positions need an even size",
        )
        require(
            self.num_attention_heads % self.num_key_value_heads == 0,
            f"text.num_attention_heads {self.num_attention_heads} is no multiple of "
            f"text.num_key_value_heads {self.num_key_value_heads}",
        )
        require_choice("text", "qk_norm_over", self.qk_norm_over, ("head", "all_heads"))
        require_choice("text", "attention_bias", self.attention_bias, ("none", "qkv", "all"))

    def _check_experts(self) -> None:
        for stage, experts, chosen in (
            ("", self.num_experts, self.num_experts_per_tok),
            ("concept_", self.experts_of_concepts, self.experts_per_concept),
        ):
            require(
                0 < chosen <= experts,
                f"text.{stage}num_experts_per_tok is {chosen}, "
                f"but text.{stage}num_experts is {experts}",
            )
        for name in ("shared_intermediate_size", "shared_expert_gate"):
            require(
                not getattr(self, name) or self.num_shared_experts > 0,
                f"text.{name} is {getattr(self, name)!r}, but text.num_shared_experts is 0; set it "
                "to 1",
            )

    @property
    def width_of_shared(self) -> int:
        """Hidden width of the fused shared experts; 0 without any."""
        return self.shared_intermediate_size or self.num_shared_experts * self.moe_intermediate_size

    @property
    def width_of_concepts(self) -> int:
        return self.concept_hidden_size or self.hidden_size

    @property
    def experts_of_concepts(self) -> int:
        return self.concept_num_experts or self.num_experts

    @property
    def experts_per_concept(self) -> int:
        return self.concept_num_experts_per_tok or self.num_experts_per_tok

    @property
    def concept_schedule(self) -> list[int]:
        """Concept layers in the order of execution, looped spans repeated."""
        schedule, next_layer = [], 0
        for loop in self.concept_loops:
            require(
                isinstance(loop, (list, tuple))
                and len(loop) == 3
                and all(type(each) is int for each in loop),
                f"text.concept_loops holds {loop}; each entry is [first, last, times]",
            )
        for first, last, times in sorted(self.concept_loops):
            loop = [first, last, times]
            require(
                next_layer <= first <= last < self.concept_layers and times >= 1,
                f"text.concept_loops entry {loop} does not fit: spans lie within concept layers 0 "
                f"to {self.concept_layers - 1}, do not overlap, and are passed at least once",
            )
            schedule += list(range(next_layer, first)) + list(range(first, last + 1)) * times
            next_layer = last + 1
        return schedule + list(range(next_layer, self.concept_layers))


@dataclasses.dataclass
class ChunkConfig:
    """How tokens become concepts and come back (DESIGN.md sections 3.1 to 3.5).

    Fields:
        target_ratio: R, tokens per concept that the ratio loss asks for; above 1 unless `router` is
            none.
        router: cosine (eq. 3) | linear | fixed (every R-th token) | none (the plain MoE).
        merge: sum | boundary (the closing token alone) | mean.
        image_mode: sequential (raster order) | grid (neighbours in the image plane).
        neighborhood: 4 (left, up) | 8 (also up-left, up-right); grid mode only.
        noise: bernoulli | gaussian | none, in training only; `tau` and `sigma` are its strengths.
        init: identity | random start of the two projections of the cosine router.
        ratio_loss_weight: lambda, weight of eq. 4 in the total loss.
        ratio_scope: global (the paper) | modality | sample: over what F and G are averaged.
        image_target_ratio, text_target_ratio: targets of scope `modality`; None means
            `target_ratio`.
        ema: smooth the concepts by eq. 5; False returns them as they are.
        concept_residual: add (eq. 6) | delta (only what C changed).
        concept_positions: boundary (position of the closing token) | index (place in the concept
            stream).
        joint_decoding_layers: last layers of D that also read the concept (eq. 7).
        target_ratios: several ratios of 1 or more that one model is trained for, `target_ratio`
            among them; each document draws one, and each has its own learned threshold.
        calibration: what `conceptmoe-vl calibrate` stores: `ratios`, and for `all`, `text` and
            `image` tokens the threshold of p that reaches each (None: out of reach).
    """

    target_ratio: float = 2.0
    router: str = "cosine"
    merge: str = "sum"
    image_mode: str = "sequential"
    neighborhood: int = 4
    noise: str = "bernoulli"
    tau: float = 6.0
    sigma: float = 0.1
    init: str = "identity"
    ratio_loss_weight: float = 0.03
    ratio_scope: str = "global"
    image_target_ratio: float | None = None
    text_target_ratio: float | None = None
    ema: bool = True
    concept_residual: str = "add"
    concept_positions: str = "boundary"
    joint_decoding_layers: int = 0
    target_ratios: list | None = None
    calibration: dict | None = None

    def __post_init__(self) -> None:
        for name, choices in (
            ("router", _ROUTERS),
            ("merge", _MERGES),
            ("image_mode", ("sequential", "grid")),
            ("neighborhood", (4, 8)),
            ("noise", ("bernoulli", "gaussian", "none")),
            ("init", ("identity", "random")),
            ("ratio_scope", ("global", "modality", "sample")),
            ("concept_residual", ("add", "delta")),
            ("concept_positions", ("boundary", "index")),
        ):
            require_choice("chunk", name, getattr(self, name), choices)
        if self.router != "none":
            for name in ("target_ratio", "image_target_ratio", "text_target_ratio"):
                value = getattr(self, name)
                require(
                    value is None or 1 < value < math.inf,
                    f"chunk.{name} is {value}; it must be a number above 1 unless chunk.router is "
                    "none",
                )
        require_numbers("chunk", self, "sigma", "ratio_loss_weight")
        require_numbers("chunk", self, "tau", least=1)
        require(self.joint_decoding_layers >= 0, "chunk.joint_decoding_layers must not be negative")
        if self.target_ratios is not None:
            self._check_target_ratios(self.target_ratios)
        if self.calibration is not None:
            _check_calibration(self.calibration)

    def _check_target_ratios(self, ratios: list) -> None:
        shown = f"chunk.target_ratios is {ratios}"
        numbers = all(isinstance(r, (int, float)) and not isinstance(r, bool) for r in ratios)
        require(numbers and len(ratios) > 0, f"{shown}; give a list of numbers")
        require(all(1 <= r < math.inf for r in ratios), f"{shown}; every ratio must be at least 1")
        require(len(set(ratios)) == len(ratios), f"{shown}; give each ratio once")
        require(
            self.target_ratio in ratios,
            f"{shown}; chunk.target_ratio {self.target_ratio:g} must be among them: it is used "
            "where none is asked for",
        )
        require(
            self.router in ("cosine", "linear"),
            f"{shown}, but chunk.router is {self.router}; thresholds are learned for cosine and "
            "linear",
        )
        require(
            self.ratio_scope != "sample",
            f"{shown}, but chunk.ratio_scope is sample; choose global or modality",
        )
        own = (self.image_target_ratio, self.text_target_ratio)
        require(
            own == (None, None),
            f"{shown}, but chunk.image_target_ratio or chunk.text_target_ratio is set; with "
            "several ratios both modalities have the drawn one",
        )


def _check_calibration(table: dict) -> None:
    check_known_keys(table, ("ratios", "all", "text", "image"), "chunk.calibration")
    ratios = table.get("ratios", [])
    require(
        list(ratios) == sorted(ratios) and all(r > 1 for r in ratios),
        f"chunk.calibration.ratios is {ratios}; give rising ratios above 1",
    )
    for name in ("all", "text", "image"):
        values = table.get(name)
        require(
            isinstance(values, (list, tuple)) and len(values) == len(ratios),
            f"chunk.calibration.{name} needs one threshold for each of the {len(ratios)} ratios; "
            "run 'conceptmoe-vl calibrate' again",
        )


@dataclasses.dataclass
class VisionConfig:
    """The vision tower and its projector.

    Fields:
        model: a timm model name (`timm.list_models()`), a plain or NaFlex ViT.
        model_args: keyword arguments handed to `timm.create_model` (depth, embed_dim, ...).
        pretrained: load timm's pretrained weights.
        image_size: pixels of the square that fixed and tiled images are resized to.
        size_policy: fixed | tiles (several squares and a thumbnail) | native (own aspect, NaFlex).
        max_patches: patches an image may have under `native`.
        max_tiles: squares an image may have under `tiles`, beside the thumbnail.
        select_layer: block whose output is taken; -1 is the last one with the final norm, -2 the
            one before.
        projector: linear | mlp (two layers with GELU).
        downsample: edge of the square of patches that becomes one token (1: none).
        mean, std: per-channel normalisation of pixels in 0..1; None means the timm model's own.
        background: RGB that transparent pixels are composited on.
    """

    model: str = "vit_small_patch16_224"
    model_args: dict = dataclasses.field(default_factory=dict)
    pretrained: bool = False
    image_size: int = 224
    size_policy: str = "fixed"
    max_patches: int = 1024
    max_tiles: int = 6
    select_layer: int = -1
    projector: str = "mlp"
    downsample: int = 1
    mean: list | None = None
    std: list | None = None
    background: list = dataclasses.field(default_factory=lambda: [255, 255, 255])

    def __post_init__(self) -> None:
        require_choice("vision", "size_policy", self.size_policy, ("fixed", "tiles", "native"))
        require_choice("vision", "projector", self.projector, ("linear", "mlp"))
        for name in ("image_size", "max_patches", "max_tiles", "downsample"):
            value = getattr(self, name)
            require(
                isinstance(value, int) and value > 0,
                f"vision.{name} is {value!r}; give a positive integer",
            )
        for name in ("mean", "std", "background"):
            value = getattr(self, name)
            require(
                value is None
                or (len(value) == 3 and all(isinstance(each, (int, float)) for each in value)),
                f"vision.{name} is {value!r}; give three numbers: red, green, blue",
            )
        require(
            self.select_layer < 0,
            f"vision.select_layer is {self.select_layer}; count from the end: -1, -2, ...",
        )


SECTIONS = {"text": TextConfig, "chunk": ChunkConfig, "vision": VisionConfig}


def build_section(section: str, values: Any) -> Any:
    """A section's dataclass from a mapping (or the dataclass itself); unknown keys are errors."""
    kind = SECTIONS[section]
    if isinstance(values, kind):
        return values
    check_fields(section, values)
    return kind(**values)


def check_fields(section: str, values: Any) -> None:
    """Raises `ValueError` unless these are some of a section's fields, and of their types."""
    if not isinstance(values, dict):
        raise ValueError(
            f"configuration section '{section}' is {values!r}; give a mapping of its fields"
        )
    fields = {field.name: field for field in dataclasses.fields(SECTIONS[section])}
    check_known_keys(values, fields, section)
    for key, value in values.items():
        check_type(section, key, value, str(fields[key].type))
