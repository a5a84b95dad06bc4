"""The configuration of a converted model: the source's fields, a plan's, and the command's."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from conceptmoe_vl.configuration import ConceptMoEVLConfig
from conceptmoe_vl.conversion.families import Family, read_source, text_fields
from conceptmoe_vl.errors import UserError
from conceptmoe_vl.field_checks import check_known_keys
from conceptmoe_vl.sections import (
    ChunkConfig,
    TextConfig,
    VisionConfig,
    build_section,
)

# Fields of `text` that are taken from a plan. It may repeat all others, with the source's values.
_PLANNED = (
    *("encoder_layers", "concept_layers", "decoder_layers", "concept_loops"),
    *("concept_num_experts_per_tok", "balance_loss_weight", "router_z_loss_weight"),
)
_PLANNED_UPCYCLED = ("num_experts", "num_experts_per_tok", "concept_num_experts")
LARGEST_SEED = 2**32 - 1
UPCYCLED_EXPERTS, UPCYCLED_CHOSEN = 8, 2  # sparse upcycling's usual


@dataclasses.dataclass(frozen=True)
class ConversionSettings:
    """What the command's options choose; None leaves a choice to the plan or to the defaults.

    Fields:
        encoder_layers, decoder_layers: depths of E and D; default an eighth of all layers each.
        joint_layers: last layers of D that also read the concept (default 0).
        ratio: tokens per concept (default 2). router, merge, residual, ema: fields of `chunk`
            (default cosine, boundary, delta, False).
        experts, experts_per_token: of upcycled dense models (default 8 and 2).
        plan: sections `text`, `chunk` and `vision` of a plan.
        vision: a timm name. image_size: pixels. vision_pretrained: load timm's weights.
        seed: of new weights that are random, 0 to 2^32 - 1.
        max_shard_bytes: of one file of weights.
        tokenizer: a folder with another tokenizer than the source's.
    """

    encoder_layers: int | None = None
    decoder_layers: int | None = None
    joint_layers: int | None = None
    ratio: float | None = None
    router: str | None = None
    merge: str | None = None
    residual: str | None = None
    ema: bool | None = None
    experts: int | None = None
    experts_per_token: int | None = None
    plan: dict[str, Any] = dataclasses.field(default_factory=dict)
    vision: str | None = None
    image_size: int | None = None
    vision_pretrained: bool = False
    seed: int = 0
    max_shard_bytes: int = 5 * 10**9
    tokenizer: Path | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.seed <= LARGEST_SEED:
            raise UserError(f"--seed is {self.seed}; give a number of 0 to {LARGEST_SEED}")


def read_plan(path: Path) -> dict[str, Any]:
    """The sections `text`, `chunk` and `vision` of a YAML file, or of its section `model`.

    Raises:
        UserError: no such file, or no section `text` in it.
    """
    from conceptmoe_vl.training.yaml_io import read_yaml

    values = read_yaml(path)
    model = values.get("model", values)
    if not isinstance(model, dict) or not isinstance(model.get("text"), dict):
        raise UserError(f"'{path}' is no plan: it has no section 'text' or 'model.text'")
    return {name: model.get(name) for name in ("text", "chunk", "vision")}


def text_section(
    settings: ConversionSettings, family: Family, source: dict[str, Any], layers: int
) -> TextConfig:
    """The `text` section, with the source's vocabulary.

    Args:
        source: the fields that the source's configuration gives. layers: its depth.

    Raises:
        UserError: depths that do not fit, or a plan for another model.
    """
    plan = {k: v for k, v in (settings.plan.get("text") or {}).items() if v is not None}
    taken = (*_PLANNED, *_PLANNED_UPCYCLED) if family.dense else _PLANNED
    fields = {**source, **{name: plan[name] for name in taken if name in plan}}
    chosen = {"num_experts": settings.experts, "num_experts_per_tok": settings.experts_per_token}
    if family.dense:
        fields = {
            "num_experts": UPCYCLED_EXPERTS,
            "num_experts_per_tok": UPCYCLED_CHOSEN,
            **fields,
            **{name: value for name, value in chosen.items() if value is not None},
        }
    elif any(value is not None for value in chosen.values()):
        raise UserError(
            "--experts and --experts-per-token are for dense models; this one has experts already"
        )
    fields |= _depths(settings, fields, layers)
    try:
        check_known_keys(plan, [field.name for field in dataclasses.fields(TextConfig)], "text")
        text = build_section("text", fields)
    except ValueError as error:
        raise UserError(f"the plan or the options do not fit this model: {error}") from error
    _refuse_another_model(text, {k: v for k, v in plan.items() if k not in taken})
    return text


def source_config(
    folder: Path, encoder_layers: int | None = None, decoder_layers: int | None = None
) -> ConceptMoEVLConfig:
    """What `convert` makes of a source without chunking, from its config.json alone.

    The vocabulary is the source's: added tokens are not counted.

    Args:
        encoder_layers, decoder_layers: as in `ConversionSettings`.

    Raises:
        UserError: see `read_source`, `text_fields` and `text_section`.
    """
    family, source = read_source(folder)
    fields = {**text_fields(folder, family, source), "vocab_size": source.vocab_size}
    settings = ConversionSettings(encoder_layers=encoder_layers, decoder_layers=decoder_layers)
    text = text_section(settings, family, fields, source.num_hidden_layers)
    return ConceptMoEVLConfig(text=text, chunk={"router": "none", "concept_residual": "delta"})


def _refuse_another_model(text: TextConfig, plan: dict[str, Any]) -> None:
    ours = {
        **dataclasses.asdict(text),
        "concept_hidden_size": text.width_of_concepts,
        "concept_num_experts": text.experts_of_concepts,
        # grows by the added tokens
        "vocab_size": plan.get("vocab_size"),
    }
    for name, value in plan.items():
        if value != ours[name]:
            raise UserError(
                f"the plan says text.{name} {value!r}, but this source has {ours[name]!r}: "
                "pretrained layers are kept as they are; plan from this model, with strategy "
                "experts or loops"
            )


def _depths(settings: ConversionSettings, fields: dict[str, Any], layers: int) -> dict[str, int]:
    """Depths of E, C and D, which together are the source's.

    The prototype that DESIGN.md 3.3 reports took 4 of 30 layers each for E and D.
    """
    eighth = max(round(layers / 8), 1)
    given = (settings.encoder_layers, settings.decoder_layers)
    encoder, decoder = (
        fields.get(f"{stage}_layers", eighth) if own is None else own
        for stage, own in zip(("encoder", "decoder"), given, strict=True)
    )
    concept = layers - encoder - decoder
    if min(encoder, decoder) < 0 or concept < 1:
        raise UserError(
            f"the source has {layers} layers, of which E is to have {encoder} and D {decoder}; "
            "leave at least one for C (--encoder-layers, --decoder-layers)"
        )
    planned = fields.get("concept_layers")
    if planned is not None and given == (None, None) and planned != concept:
        raise UserError(
            f"the plan has {encoder + planned + decoder} layers, the source {layers}; plan from "
            "this model"
        )
    return {"encoder_layers": encoder, "concept_layers": concept, "decoder_layers": decoder}


def chunk_section(settings: ConversionSettings) -> ChunkConfig:
    """The `chunk` section: a plan's, under what the options say, over the defaults of conversion.

    Raises:
        UserError: an unknown key or a wrong value.
    """
    plan = {k: v for k, v in (settings.plan.get("chunk") or {}).items() if v is not None}
    options = {
        "router": settings.router,
        "merge": settings.merge,
        "concept_residual": settings.residual,
        "ema": settings.ema,
        "target_ratio": settings.ratio,
        "joint_decoding_layers": settings.joint_layers,
    }
    fields = {
        "merge": "boundary",
        "concept_residual": "delta",
        "ema": False,
        **plan,
        **{name: value for name, value in options.items() if value is not None},
    }
    try:
        return build_section("chunk", fields)
    except ValueError as error:
        raise UserError(f"the plan or the options do not fit: {error}") from error


def vision_section(settings: ConversionSettings) -> VisionConfig | None:
    """The `vision` section, None for a text-only model.

    Raises:
        UserError: an unknown key, a wrong value, or options without a tower.
    """
    plan = settings.plan.get("vision")
    options = {
        "model": settings.vision,
        "image_size": settings.image_size,
        "pretrained": settings.vision_pretrained or None,
    }
    given = {name: value for name, value in options.items() if value is not None}
    if plan is None and settings.vision is None:
        if given:
            raise UserError("--image-size and --vision-pretrained need --vision TIMM_NAME")
        return None
    try:
        return build_section("vision", {**(plan or {}), **given})
    except ValueError as error:
        raise UserError(f"the plan or the options do not fit: {error}") from error
