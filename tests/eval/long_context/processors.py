"""Processors of tiny models: bytes with hardly a merge, so that lengths are counted finely."""

from __future__ import annotations

import functools

from conceptmoe_vl import ConceptMoEVLConfig
from conceptmoe_vl.processing import build_processor
from conceptmoe_vl.tokenizing import train_tokenizer

_TEXTS = (
    "The special number of amber-anchor is 4821937. The road goes on behind the trees.",
    "Question: What is the special code in the text above? Answer with the number alone.",
    "VAR ZUPOKA = VAR NADEKU. Remember them. Example: after the following text of words",
)
_VISION = {
    "model": "vit_tiny_patch16_224",
    "model_args": {"patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2},
    "image_size": 24,
    "projector": "linear",
}


@functools.lru_cache(maxsize=4)
def tiny_processor(images: bool = True, size_policy: str = "fixed"):
    """A processor whose pictures take 9 tokens each, by their sizes under another policy."""
    vision = {**_VISION, "size_policy": size_policy}
    if size_policy == "tiles":
        vision["max_tiles"] = 4
    config = ConceptMoEVLConfig(vision=vision) if images else None
    return build_processor(config, train_tokenizer(_TEXTS, vocab_size=400))
