"""Which checkpoints convert: how each family's configuration reads as a `text` section.

What a family needs is expressed by fields of the section; what the section cannot express is
refused with the field's name and value, never approximated.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig

from conceptmoe_vl.errors import UserError
from conceptmoe_vl.field_checks import ROPE_SCALINGS

_MLA = (
    "its latent attention (MLA) has keys and values of different sizes and rotates only a part of "
    "each head, which the layers here do not have"
)
_REFUSED = {
    "deepseek_v2": _MLA,
    "deepseek_v3": _MLA,
    "qwen3_next": "its linear attention layers have no counterpart here",
    "qwen3_5_moe": "its linear attention layers have no counterpart here",
    "gpt_oss": "its attention sinks and clipped activations have no counterpart here",
    "qwen2_vl": "only the language model of qwen3_vl_moe is extracted",
    "qwen3_vl": "only the language model of qwen3_vl_moe is extracted",
}


@dataclasses.dataclass(frozen=True)
class Family:
    """A kind of checkpoint.

    Attributes:
        read: the fields of `text` that are this family's own, from its configuration.
        dense: its MLPs become experts (sparse upcycling). prefix: of its decoder's tensors.
        ignored: prefixes of tensors that are left behind.
    """

    read: Callable[[Any], dict[str, Any]]
    dense: bool = False
    prefix: str = "model"
    ignored: tuple[str, ...] = ()


def _experts(config: Any, width: int, normalise: bool) -> dict[str, Any]:
    return {
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.num_experts_per_tok,
        "moe_intermediate_size": width,
        "norm_topk_prob": normalise,
    }


def _bias(config: Any) -> str:
    return "all" if config.attention_bias else "none"


def _qwen3_moe(config: Any) -> dict[str, Any]:
    experts = _experts(config, config.moe_intermediate_size, config.norm_topk_prob)
    return {**experts, "qk_norm": True, "attention_bias": _bias(config)}


def _qwen3_vl_moe(config: Any) -> dict[str, Any]:
    experts = _experts(config, config.moe_intermediate_size, True)
    return {**experts, "qk_norm": True, "attention_bias": _bias(config)}


def _olmoe(config: Any) -> dict[str, Any]:
    return {
        **_experts(config, config.intermediate_size, config.norm_topk_prob),
        "qk_norm": True,
        "qk_norm_over": "all_heads",
        "attention_bias": _bias(config),
    }


def _mixtral(config: Any) -> dict[str, Any]:
    # It takes the softmax over the chosen two alone, which is the whole one divided by its sum.
    return {**_experts(config, config.intermediate_size, True), "qk_norm": False}


def _qwen2_moe(config: Any) -> dict[str, Any]:
    return {
        **_experts(config, config.moe_intermediate_size, config.norm_topk_prob),
        "qk_norm": False,
        "attention_bias": "qkv" if config.qkv_bias else "none",
        "num_shared_experts": 1,
        "shared_intermediate_size": config.shared_expert_intermediate_size,
        "shared_expert_gate": True,
    }


def _dense(config: Any) -> dict[str, Any]:
    """Llama and its like; `norm_topk_prob` is what makes upcycling exact."""
    bias = {"qwen2": "qkv", "mistral": "none"}.get(config.model_type)
    return {
        "moe_intermediate_size": config.intermediate_size,
        "norm_topk_prob": True,
        "qk_norm": config.model_type == "qwen3",
        "attention_bias": bias or _bias(config),
    }


FAMILIES = {
    "qwen3_moe": Family(_qwen3_moe),
    "qwen3_vl_moe": Family(
        _qwen3_vl_moe, prefix="model.language_model", ignored=("model.visual.",)
    ),
    "olmoe": Family(_olmoe),
    "mixtral": Family(_mixtral),
    "qwen2_moe": Family(_qwen2_moe),
    **{name: Family(_dense, dense=True) for name in ("llama", "mistral", "qwen2", "qwen3")},
}


def read_source(folder: Path) -> tuple[Family, Any]:
    """The family of a checkpoint and the configuration of its language model.

    Raises:
        UserError: no checkpoint, one of an unsupported family, or one with a part that is not
            supported.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"'{folder}' holds no config.json; name the folder of a checkpoint")
    try:
        kind = json.loads(path.read_text(encoding="utf-8")).get("model_type")
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"'{path}' is no readable JSON object: {error}") from error
    if not isinstance(kind, str) or kind not in FAMILIES:
        reason = _REFUSED.get(str(kind), "its layers are not known")
        raise UserError(
            f"'{folder}' is a model of type {kind!r}, which cannot be converted: {reason}; "
            f"supported are {', '.join(FAMILIES)}"
        )
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, TypeError, KeyError, StrictDataclassError) as error:
        raise UserError(
            f"'{path}' is refused by transformers: {' '.join(str(error).split())[:300]}"
        ) from error
    quantised = getattr(config, "quantization_config", None)
    if quantised is not None:
        raise UserError(f"'{folder}' is quantised; save a dequantised checkpoint first")
    tied = config.tie_word_embeddings  # the whole model's counts, whatever its text part says
    config = config.get_text_config()
    config.tie_word_embeddings = tied
    _refuse_what_is_not_expressed(folder, FAMILIES[kind], config)
    return FAMILIES[kind], config


def _refuse_what_is_not_expressed(folder: Path, family: Family, config: Any) -> None:
    def get(name: str) -> Any:
        return getattr(config, name, None)

    window, kinds = get("sliding_window"), get("layer_types")
    slides = bool(window) and window < config.max_position_embeddings
    if kinds is not None:
        slides = slides and "sliding_attention" in kinds
    step = 1 if family.dense else get("decoder_sparse_step") or 1
    dense_layers = () if family.dense else get("mlp_only_layers") or ()
    found = (
        (config.hidden_act != "silu", "hidden_act", "experts here use silu"),
        (slides, "sliding_window", "attention here sees the whole document"),
        (bool(get("mlp_bias")), "mlp_bias", "experts here have no biases"),
        (get("clip_qkv") is not None, "clip_qkv", "queries and keys are not clipped here"),
        (bool(dense_layers), "mlp_only_layers", "every layer here has experts"),
        (step != 1, "decoder_sparse_step", "every layer here has experts"),
    )
    for wrong, name, reason in found:
        if wrong:
            raise UserError(
                f"'{folder}' cannot be converted: its {name} is {get(name)!r}, and {reason}"
            )


def rope_of(folder: Path, config: Any) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling` of a source's configuration.

    Raises:
        UserError: a scaling that depends on the length at hand, or on a part of the head.
    """
    given = {k: v for k, v in config.rope_parameters.items() if not k.startswith("mrope_")}
    theta, kind = given.pop("rope_theta"), given.pop("rope_type", "default")
    given.pop("type", None)
    if given.pop("partial_rotary_factor", 1.0) != 1.0:
        raise UserError(f"'{folder}' cannot be converted: it rotates only a part of each head")
    if kind == "default":
        return {"rope_theta": float(theta), "rope_scaling": None}
    if kind not in ROPE_SCALINGS:
        raise UserError(
            f"'{folder}' cannot be converted: its rope_type is {kind!r}; known are "
            f"{', '.join(ROPE_SCALINGS)}"
        )
    known = {name for names in ROPE_SCALINGS[kind] for name in names}
    kept = {name: value for name, value in given.items() if name in known and value is not None}
    return {"rope_theta": float(theta), "rope_scaling": {"rope_type": kind, **kept}}


def text_fields(folder: Path, family: Family, config: Any) -> dict[str, Any]:
    """The `text` section that a source's configuration gives, without the depths of E, C and D.

    Raises:
        UserError: see `rope_of`.
    """
    heads = config.num_attention_heads
    return {
        "hidden_size": config.hidden_size,
        "num_attention_heads": heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "initializer_range": config.initializer_range,
        "tie_word_embeddings": config.tie_word_embeddings,
        **rope_of(folder, config),
        **family.read(config),
    }
