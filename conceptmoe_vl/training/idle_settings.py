"""Fields of `model` that the rest of it leaves without effect: refused before the run."""

from __future__ import annotations

from conceptmoe_vl.configuration import ConceptMoEVLConfig
from conceptmoe_vl.field_checks import refuse_idle

from .config import ModelSection

_LEARNED = ("cosine", "linear")


def check_effect(section: ModelSection, config: ConceptMoEVLConfig) -> None:
    """Refuses given fields of `text`, `chunk` and `vision` that this model does not use.

    A model without a learned router keeps the chunk section of the model that it is compared with.

    Args:
        config: that of the section, over that of `init_from`.

    Raises:
        UserError: the first one.
    """
    text, chunk, vision = config.text, config.chunk, config.vision
    learned = chunk.router in _LEARNED
    idle = [
        ("text", not text.qk_norm, {"qk_norm_over"}, "text.qk_norm is false"),
        ("chunk", chunk.image_mode != "grid", {"neighborhood"}, "chunk.image_mode is sequential"),
        *(
            ("chunk", learned and chunk.noise != noise, {name}, f"chunk.noise is {chunk.noise}")
            for noise, name in (("bernoulli", "tau"), ("gaussian", "sigma"))
        ),
        ("chunk", chunk.router == "linear", {"init"}, "chunk.router is linear"),
        (
            "chunk",
            learned and chunk.ratio_scope != "modality",
            {"image_target_ratio", "text_target_ratio"},
            f"chunk.ratio_scope is {chunk.ratio_scope}, not modality",
        ),
    ]
    if vision is not None:
        policy = vision.size_policy
        idle += [
            ("vision", policy != wanted, {name}, f"vision.size_policy is {policy}, not {wanted}")
            for wanted, name in (("tiles", "max_tiles"), ("native", "max_patches"))
        ]
    for name, holds, fields, because in idle:
        if holds:
            given = fields & set(getattr(section, name) or ())
            refuse_idle(getattr(config, name), f"model.{name}", given, f"{because}; set that")
