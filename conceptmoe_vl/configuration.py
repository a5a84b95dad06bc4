"""Configuration of ConceptMoE-VL: one file a model, three sections (`text`, `chunk`, `vision`).

Notable:
- every unknown key is an error that names the nearest known key, at every level;
- every value is checked where it enters, with the field's name and the remedy;
- `vision: null` gives a text-only model.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from transformers import PreTrainedConfig

from conceptmoe_vl.sections import (
    SECTIONS,
    ChunkConfig,
    TextConfig,
    VisionConfig,
    build_section,
    check_known_keys,
)

__all__ = [
    "ChunkConfig",
    "ConceptMoEVLConfig",
    "TextConfig",
    "VisionConfig",
    "build_section",
    "check_known_keys",
]


class ConceptMoEVLConfig(PreTrainedConfig):
    """Configuration of a whole model.

    Args:
        text, chunk, vision: mappings with the fields of [`TextConfig`], [`ChunkConfig`] and
            [`VisionConfig`]; `vision` None gives a text-only model.
        image_token_id, vision_start_token_id, vision_end_token_id: ids of the placeholder of one
            image token and of the marks around an image; needed when `vision` is given.
        pad_token_id, bos_token_id, eos_token_id: as in transformers.

    Raises:
        ValueError: a section holds an unknown key, a wrong type or a value out of range.
    """

    model_type = "conceptmoe_vl"
    # transformers reads a list
    keys_to_ignore_at_inference = ["past_key_values", "cache"]  # noqa: RUF012

    text: Any = None
    chunk: Any = None
    vision: Any = None
    image_token_id: int | None = None
    vision_start_token_id: int | None = None
    vision_end_token_id: int | None = None
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        self.text = build_section("text", self.text or {})
        self.chunk = build_section("chunk", self.chunk or {})
        self.vision = None if self.vision is None else build_section("vision", self.vision)
        self.tie_word_embeddings = self.text.tie_word_embeddings
        if self.chunk.joint_decoding_layers > self.text.decoder_layers:
            raise ValueError(
                f"chunk.joint_decoding_layers is {self.chunk.joint_decoding_layers}, "
                f"but the decoder has {self.text.decoder_layers} layers (text.decoder_layers)"
            )
        super().__post_init__(**kwargs)

    def to_dict(self) -> dict[str, Any]:
        output = super().to_dict()
        for section in SECTIONS:
            value = getattr(self, section)
            is_section = dataclasses.is_dataclass(value) and not isinstance(value, type)
            output[section] = dataclasses.asdict(value) if is_section else value
        return output

    def get_text_config(
        self, decoder: bool | None = None, encoder: bool | None = None
    ) -> ConceptMoEVLConfig:
        """Itself: the sections are plain dataclasses, generation reads its settings here."""
        return self

    # What transformers and lm-eval read from a text configuration.
    @property
    def vocab_size(self) -> int:
        return self.text.vocab_size

    @property
    def hidden_size(self) -> int:
        return self.text.hidden_size

    @property
    def num_hidden_layers(self) -> int:
        return self.text.encoder_layers + len(self.text.concept_schedule) + self.text.decoder_layers

    @property
    def num_attention_heads(self) -> int:
        return self.text.num_attention_heads

    @property
    def max_position_embeddings(self) -> int:
        return self.text.max_position_embeddings
