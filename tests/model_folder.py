"""A saved model with random weights and its processor, as training exports them."""

from __future__ import annotations

from pathlib import Path

import torch

from conceptmoe_vl import ConceptMoEVLConfig, ConceptMoEVLForConditionalGeneration
from conceptmoe_vl.processing import build_processor
from conceptmoe_vl.tokenizing import IMAGE, IMAGE_END, IMAGE_START, TURN_END, train_tokenizer
from tests.tiny import randomize

_TEXTS = ("what is the color of the shape?", "is there a circle?", "what shape is it?", "red", "no")
_TEXT = {
    "hidden_size": 16,
    "encoder_layers": 1,
    "concept_layers": 1,
    "decoder_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 16,
    "max_position_embeddings": 256,
}
_VISION = {
    "model": "vit_tiny_patch16_224",
    "model_args": {"patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2},
    "image_size": 24,
    "projector": "linear",
}


def save_model_folder(
    folder: Path,
    vision: bool = True,
    seed: int = 0,
    chunk: dict | None = None,
    lively: bool = False,
    **fields,
) -> Path:
    """Writes weights, configuration, processor and generation settings; returns the folder.

    Args:
        chunk: the chunk section. lively: weights large enough for the answers to differ.
        fields: of the vision section.
    """
    torch.manual_seed(seed)
    tokenizer = train_tokenizer(_TEXTS, vocab_size=288)
    ids = {
        name: tokenizer.convert_tokens_to_ids(token)
        for name, token in (
            ("image_token_id", IMAGE),
            ("vision_start_token_id", IMAGE_START),
            ("vision_end_token_id", IMAGE_END),
            ("eos_token_id", TURN_END),
        )
    }
    config = ConceptMoEVLConfig(
        text={**_TEXT, "vocab_size": len(tokenizer)},
        chunk=chunk or {"image_mode": "grid", "init": "random"},
        vision={**_VISION, **fields} if vision else None,
        pad_token_id=tokenizer.pad_token_id,
        **ids,
    )
    model = ConceptMoEVLForConditionalGeneration(config)
    if lively:
        randomize(model, seed)
    model.save_pretrained(folder)
    build_processor(config, tokenizer).save_pretrained(folder)
    return folder
