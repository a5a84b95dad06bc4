"""Parameters and FLOPs of the vision tower and the projector.

The tower may be any ViT of timm, so it is built on torch's meta device, where it takes no memory,
and counted there.
"""

from __future__ import annotations

import dataclasses
import json
from functools import lru_cache

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from conceptmoe_vl.configuration import VisionConfig
from conceptmoe_vl.vision import VisionTower, build_projector


@dataclasses.dataclass(frozen=True)
class _Counts:
    tower: int
    projector: int
    tower_flops: int
    map_flops: int
    projector_flops: int
    tokens: int


def vision_parameters(vision: VisionConfig, hidden_size: int) -> tuple[int, int]:
    """Parameters of the tower and of the projector."""
    counts = _counted(_key(vision), hidden_size)
    return counts.tower, counts.projector


def vision_flops(vision: VisionConfig, hidden_size: int) -> tuple[int, int, int]:
    """FLOPs of the largest image: the tower without its attention maps, its maps, the projector."""
    counts = _counted(_key(vision), hidden_size)
    return counts.tower_flops, counts.map_flops, counts.projector_flops


def vision_work(
    vision: VisionConfig, hidden_size: int, patches: float, squares: float
) -> tuple[float, float, float]:
    """The same three figures for pictures of any size.

    Args:
        patches: of all pictures. squares: sum of the squares of each native picture's patches;
            pictures of equal squares, or in tiles, need none.
    """
    counts = _counted(_key(vision), hidden_size)
    largest = counts.tokens * vision.downsample**2
    share = patches / largest
    maps = squares / largest**2 if vision.size_policy == "native" else share
    return counts.tower_flops * share, counts.map_flops * maps, counts.projector_flops * share


def image_tokens(vision: VisionConfig) -> int:
    """Tokens of the largest image.

    A square of `image_size`; under tiles `max_tiles` of them and the thumbnail; or `max_patches`
    patches of native aspect.
    """
    return _counted(_key(vision), 1).tokens


def _key(vision: VisionConfig) -> str:
    return json.dumps(dataclasses.asdict(vision), sort_keys=True)


@lru_cache(maxsize=32)
def _counted(serialised: str, hidden_size: int) -> _Counts:
    vision = dataclasses.replace(VisionConfig(**json.loads(serialised)), pretrained=False)
    with torch.device("meta"):
        tower = VisionTower(vision)
        projector = build_projector(vision, tower.width, hidden_size)
    if vision.size_policy == "native":
        tokens = vision.max_patches // vision.downsample**2
        flops, maps = _native_flops(tower, tokens * vision.downsample**2)
    else:
        squares = vision.max_tiles + (vision.max_tiles > 1) if vision.size_policy == "tiles" else 1
        tokens = squares * tower.side**2
        flops, maps = (squares * count for count in _square_flops(tower))
    per_token = sum(layer.weight.numel() for layer in _linear_layers(projector))
    return _Counts(
        tower=sum(p.numel() for p in tower.parameters()),
        projector=sum(p.numel() for p in projector.parameters()),
        tower_flops=flops,
        map_flops=maps,
        projector_flops=2 * tokens * per_token,
        tokens=tokens,
    )


def _linear_layers(module: nn.Module) -> list[nn.Linear]:
    return [layer for layer in module.modules() if isinstance(layer, nn.Linear)]


def _square_flops(tower: VisionTower) -> tuple[int, int]:
    """Of one square: the tower is run without data; its maps are the batched products."""
    for block in tower.model.blocks:
        if hasattr(block.attn, "fused_attn"):
            block.attn.fused_attn = False
    pixels = torch.zeros(1, 3, tower.config.image_size, tower.config.image_size, device="meta")
    indices = [len(tower.model.blocks) - 1]
    with FlopCounterMode(display=False) as counter:
        tower.model.forward_intermediates(pixels, indices=indices, intermediates_only=True)
    counts = counter.get_flop_counts()["Global"]
    maps = sum(counts.get(op, 0) for op in (torch.ops.aten.bmm, torch.ops.aten.baddbmm))
    return sum(counts.values()) - maps, maps


def _native_flops(tower: VisionTower, patches: int) -> tuple[int, int]:
    """By formula: a NaFlex ViT reads the sizes of its images, which the meta device has not."""
    model, positions = tower.model, patches + tower.model.num_prefix_tokens
    everywhere = sum(layer.weight.numel() for layer in _linear_layers(model))
    blocks = sum(layer.weight.numel() for layer in _linear_layers(model.blocks))
    flops = 2 * (patches * (everywhere - blocks) + positions * blocks)
    return flops, 4 * positions**2 * model.embed_dim * len(model.blocks)
