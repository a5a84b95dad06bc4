"""The vision tower and the projector into the language model's width.

The tower is any plain or NaFlex ViT of timm.
"""

from __future__ import annotations

import dataclasses
import json
from functools import lru_cache, partial
from typing import Any

import timm
import torch
from timm.layers import ConvNormAct, HybridEmbed, LayerNorm2d
from timm.models import register_model
from timm.models.vision_transformer import VisionTransformer
from timm.models.vision_transformer_hybrid import ConvStem
from torch import Tensor, nn

from conceptmoe_vl.attention import SHORT
from conceptmoe_vl.configuration import VisionConfig
from conceptmoe_vl.products import Linear
from conceptmoe_vl.tiling import join_tiles


class ResidualConvolution(nn.Module):
    """`x + gelu(norm(conv3x3(x)))` at the resolution of patches: `[I, D, rows, columns]`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = ConvNormAct(
            width, width, kernel_size=3, norm_layer=LayerNorm2d, act_layer=nn.GELU
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x)


@register_model
def conceptmoe_vit_conv(pretrained: bool = False, **kwargs: Any) -> VisionTransformer:
    """A small ViT whose patches come from three strided convolutions: it learns from few images.

    Args (beside VisionTransformer's own): patch_size 8 (fixed by the strides), embed_dim, depth,
    num_heads, stem_blocks (residual 3 x 3 convolutions over patches before the transformer; each
    widens what a patch sees by one patch on every side).
    The norms of the stem are LayerNorms: statistics of a batch would make images depend on each
    other.
    """
    if pretrained:
        raise ValueError(
            "vision.model conceptmoe_vit_conv has no pretrained weights; "
            "set vision.pretrained: false"
        )
    for unused in ("pretrained_cfg", "pretrained_cfg_overlay", "cache_dir"):
        kwargs.pop(unused, None)
    width = kwargs.pop("embed_dim", 192)
    kwargs.pop("patch_size", None)
    blocks = kwargs.pop("stem_blocks", 0)
    strided = ConvStem(
        in_chans=kwargs.get("in_chans", 3),
        depth=3,
        channels=(width // 4, width // 2, width),
        stride=(2, 2, 2),
        norm_layer=LayerNorm2d,
        act_layer=nn.GELU,
    )
    stem = nn.Sequential(strided, *(ResidualConvolution(width) for _ in range(blocks)))
    embed = partial(HybridEmbed, backbone=stem, proj=False)
    arguments: dict[str, Any] = {"depth": 4, "num_heads": max(width // 64, 1), **kwargs}
    return VisionTransformer(patch_size=1, embed_dim=width, embed_layer=embed, **arguments)


@dataclasses.dataclass(frozen=True)
class VisionGeometry:
    """What the image processor must know of a tower: pixels per patch edge, the normalisation."""

    patch_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    naflex: bool


def vision_geometry(config: VisionConfig) -> VisionGeometry:
    """Geometry of a configured tower; the timm model is built on the meta device, without weights.

    Raises:
        ValueError: timm does not know the model, or it is no ViT.
    """
    return _geometry(json.dumps(dataclasses.asdict(config), sort_keys=True))


@lru_cache(maxsize=16)
def _geometry(serialised: str) -> VisionGeometry:
    config = VisionConfig(**json.loads(serialised))
    with torch.device("meta"):
        model = build_tower(dataclasses.replace(config, pretrained=False))
    defaults = getattr(model, "pretrained_cfg", None) or {}
    return VisionGeometry(
        patch_size=_patch_size(model),
        mean=tuple(config.mean or defaults.get("mean") or (0.5, 0.5, 0.5)),
        std=tuple(config.std or defaults.get("std") or (0.5, 0.5, 0.5)),
        naflex=hasattr(model, "embeds"),
    )


def _patch_size(model: nn.Module) -> int:
    embed = model.embeds if hasattr(model, "embeds") else model.patch_embed
    if hasattr(embed, "feat_ratio"):
        size = embed.feat_ratio()
        size = size if isinstance(size, (tuple, list)) else (size, size)
    else:
        size = embed.patch_size
    if size[0] != size[1]:
        raise ValueError(
            f"the vision tower has patches of {size[0]} x {size[1]} pixels; square ones are needed"
        )
    return int(size[0])


def build_tower(config: VisionConfig) -> nn.Module:
    """The timm model without head and without the layers above `select_layer`.

    Raises:
        ValueError: timm does not know the model, it is no ViT, or its arguments do not fit.
    """
    arguments = {"num_classes": 0, "global_pool": "", **config.model_args}
    if not timm.is_model(config.model):
        raise ValueError(
            f"vision.model '{config.model}' is no timm model; timm.list_models() names them"
        )
    if "naflex" not in config.model:
        arguments.setdefault("img_size", config.image_size)
    if config.size_policy == "native" and "naflex" not in config.model:
        raise ValueError(
            f"vision.size_policy native needs a NaFlex model (naflexvit_...), "
            f"vision.model is '{config.model}'"
        )
    # On the meta device a checkpoint follows that holds the tower: nothing is to be downloaded
    # then.
    pretrained = config.pretrained and torch.empty(0).device.type != "meta"
    try:
        model = timm.create_model(config.model, pretrained=pretrained, **arguments)
    except TypeError as error:  # an argument that its constructor does not know
        raise ValueError(
            f"vision.model '{config.model}' does not take these arguments: {error}; choose a ViT, "
            "or mend vision.model_args"
        ) from error
    if not hasattr(model, "blocks") or not hasattr(model, "forward_intermediates"):
        raise ValueError(
            f"vision.model '{config.model}' is no ViT: it has no blocks of transformer layers"
        )
    depth = len(model.blocks)
    if depth + config.select_layer < 0:
        raise ValueError(
            f"vision.select_layer is {config.select_layer}, but '{config.model}' has {depth} blocks"
        )
    last = depth + config.select_layer
    # Weights that no output depends on would have no gradient, and stall the reductions of ZeRO.
    model.prune_intermediate_layers([last], prune_norm=config.select_layer != -1, prune_head=True)
    return model


class VisionTower(nn.Module):
    """Images to packed patch features, raster order, images end to end.

    Args:
        config: the `vision` section.
    """

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.model = build_tower(config)
        if next(self.model.parameters()).device.type != "meta":
            _keep_weights(self.model)
        self.patch_size = _patch_size(self.model)
        self.config = config
        self.width = self.model.embed_dim * config.downsample**2

    def forward(
        self,
        pixel_values: Tensor,
        grids: list[list[int]],
        patch_coord: Tensor | None = None,
        patch_valid: Tensor | None = None,
    ) -> Tensor:
        """`[P, width]` features of image tokens.

        Args:
            pixel_values: `[I, 3, S, S]`, or `[I, N, patch * patch * 3]` with native aspect; under
                tiles every tile is one of the I.
            grids: rows and columns of each image's tokens; under tiles of each plane's.
            patch_coord, patch_valid: native aspect only.

        Raises:
            ValueError: pixels and grids do not fit each other.
        """
        entries = self.entries_of(grids)
        if sum(entries) != len(pixel_values):
            raise ValueError(
                f"pixel_values has {len(pixel_values)} images or tiles, but the {len(grids)} rows "
                f"of image_grid_hw stand for {sum(entries)}; build inputs with the processor"
            )
        self._choose_attention(pixel_values)
        arguments: dict[str, Any] = {}
        if patch_coord is not None:
            arguments = {"patch_coord": patch_coord, "patch_valid": patch_valid}
        features = self.model.forward_intermediates(
            pixel_values.to(self._dtype()),
            indices=[len(self.model.blocks) - 1],
            norm=self.config.select_layer == -1,
            output_fmt="NLC",
            intermediates_only=True,
            **arguments,
        )[0]
        if patch_coord is not None:
            return self._native_tokens(features, grids)
        return self._square_tokens(features, grids, entries)

    @property
    def side(self) -> int:
        """Rows, and columns, of a square's tokens."""
        return self.config.image_size // (self.patch_size * self.config.downsample)

    def entries_of(self, grids: list[list[int]]) -> list[int]:
        """How many entries of `pixel_values` make up each grid: 1, or under tiles its tiles."""
        if self.config.size_policy == "native":
            return [1] * len(grids)
        side, single = self.side, self.config.size_policy == "fixed"
        for rows, columns in grids:
            if rows % side or columns % side or (single and rows * columns != side * side):
                raise ValueError(
                    f"an image of {rows} x {columns} tokens is not made of squares of {side} x "
                    f"{side}; build inputs with the processor"
                )
        return [(rows // side) * (columns // side) for rows, columns in grids]

    def _choose_attention(self, pixel_values: Tensor) -> None:
        """Few patches on CPU: plain products.

        They are 6 times faster than the fused kernel in bfloat16 (64 patches).
        """
        patches = pixel_values[0].numel() // (3 * self.patch_size**2)
        fused = pixel_values.device.type != "cpu" or patches > SHORT
        for block in self.model.blocks:
            if hasattr(block.attn, "fused_attn"):
                block.attn.fused_attn = fused

    def _dtype(self) -> torch.dtype:
        return next(p.dtype for p in self.model.parameters() if p.is_floating_point())

    def _native_tokens(self, features_IPD: Tensor, grids: list[list[int]]) -> Tensor:
        """Drops padding patches and joins squares of `downsample` patches into one token each."""
        edge = self.config.downsample
        tokens = []
        for features, (rows, columns) in zip(features_IPD, grids, strict=True):
            patches = features[: rows * columns * edge * edge]
            tokens.append(_joined(patches[None], rows, columns, edge).flatten(0, 2))
        return torch.cat(tokens)

    def _square_tokens(
        self, features_IPD: Tensor, grids: list[list[int]], entries: list[int]
    ) -> Tensor:
        """Joins patches into tokens, and tiles into planes."""
        tokens = _joined(features_IPD, self.side, self.side, self.config.downsample)
        if max(entries) == 1:
            return tokens.flatten(0, 2)
        planes = zip(tokens.split(entries), grids, strict=True)
        return torch.cat([join_tiles(tiles, rows // self.side) for tiles, (rows, _) in planes])


def _joined(features_IPD: Tensor, rows: int, columns: int, edge: int) -> Tensor:
    """Squares of `edge` x `edge` patches as one token each: `[I, rows, columns, edge² * D]`."""
    squares = features_IPD.unflatten(1, (rows, edge, columns, edge))
    return squares.transpose(2, 3).flatten(3)


def _keep_weights(model: nn.Module) -> None:
    """Tells transformers that timm has started (or loaded) these weights itself."""
    for module in model.modules():
        module._is_hf_initialized = True
        for parameter in module.parameters(recurse=False):
            parameter._is_hf_initialized = True


def build_projector(config: VisionConfig, vision_width: int, hidden_size: int) -> nn.Module:
    """From patch features to token embeddings."""
    if config.projector == "linear":
        return Linear(vision_width, hidden_size)
    return nn.Sequential(
        nn.LayerNorm(vision_width),
        Linear(vision_width, hidden_size),
        nn.GELU(),
        Linear(hidden_size, hidden_size),
    )
