"""Which part and which layer of the model a parameter belongs to, by its name.

A part is decided by names of modules on the way to a parameter, the first rule that matches:

| part | parameters |
| --- | --- |
| lora | adapters |
| projector | between the vision tower and the language model |
| vision | the timm tower |
| chunk | the boundary router and what joins concepts to tokens |
| embedding | the token embedding and the head |
| experts | expert matrices and their routers |
| rest | attention, norms and all else |
"""

from __future__ import annotations

import re
from typing import Any

PARTS = ("vision", "projector", "chunk", "experts", "embedding", "rest")
RATED_PARTS = (*PARTS, "lora")  # those that may have a learning rate of their own
LAYER_STACKS = ("vision", "encoder", "concept", "decoder")

# Names of the modules that make up a part.
MODULES = {
    "lora": ("lora_A", "lora_B"),
    "projector": ("projector",),
    "vision": ("vision", "vision_tower", "tower"),
    "chunk": ("chunk", "to_concept", "from_concept", "joint"),
    "embedding": ("embed_tokens", "lm_head"),
    "experts": ("experts", "shared", "shared_gate", "gate"),
}

_LAYER = re.compile(
    r"^(?:vision\.model\.blocks|language_model\.(encoder|concept|decoder)\.layers)\.(\d+)\."
)
# What stands behind the blocks of a tower, so that freezing its first blocks leaves it alone.
_BEHIND_BLOCKS = re.compile(r"^vision\.model\.(norm|fc_norm|attn_pool|head)\b")


def part_of(name: str) -> str:
    """The part that a parameter of this dotted name belongs to."""
    pieces = name.split(".")
    for part, modules in MODULES.items():
        if any(piece in modules for piece in pieces):
            return part
    return "rest"


def layer_of(name: str) -> tuple[str, int] | None:
    """Stack and number of the layer that a parameter of this dotted name is in.

    What stands before a tower's blocks (patches, positions, class tokens) has the number -1; what
    is in no layer gives None.
    """
    match = _LAYER.match(name)
    if match is not None:
        return match[1] or "vision", int(match[2])
    before_blocks = name.startswith("vision.model.") and not _BEHIND_BLOCKS.match(name)
    return ("vision", -1) if before_blocks else None


def layer_range(layers: Any) -> tuple[int, int] | None:
    """First and last of the layers that a value of `freeze_layers` means; None: it means none."""
    first, last = layers if isinstance(layers, list) and len(layers) == 2 else (0, layers)
    if any(isinstance(each, bool) or not isinstance(each, int) for each in (first, last)):
        return None
    last = last if isinstance(layers, list) else last - 1
    return (first, last) if 0 <= first <= last else None
