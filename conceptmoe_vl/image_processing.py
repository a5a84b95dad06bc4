"""Pictures to the vision tower's input: resize by policy, normalise, count the image's tokens.

Policies: `fixed` resizes every picture to one square (aspect is not kept); `tiles` to a grid of
such squares, and once more to one of them, its thumbnail; `native` keeps the aspect under a budget
of patches and cuts the picture into patches in timm's NaFlex order.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from transformers.image_processing_utils import BaseImageProcessor, BatchFeature

from conceptmoe_vl.errors import UserError
from conceptmoe_vl.images import MAX_PIXELS, decode_image
from conceptmoe_vl.tiling import choose_tiles, cut_tiles

_FIELDS = (
    *("size_policy", "image_size", "patch_size", "downsample", "max_patches", "max_tiles"),
    *("image_mean", "image_std", "background", "max_pixels", "accepts_images"),
)


class DecodedImage(NamedTuple):
    """What `decode_image` gave, so that it is not decoded and checked again."""

    image: Image.Image


@dataclasses.dataclass(frozen=True)
class ProcessedImage:
    """One picture, ready for the vision tower.

    Fields:
        pixels: float32; fixed: `[3, S, S]`; tiles: `[N, 3, S, S]`, the thumbnail, if there is one,
            and the tiles row by row; native: `[P, patch * patch * 3]`, patches in raster order,
            each channels last.
        grid: rows and columns of the image's tokens, after `downsample`; of tiles: all together.
        coord: `[P, 2]` int64, row and column of each patch; None unless native.
        thumbnail: rows and columns of the thumbnail's tokens; None without one.
    """

    pixels: torch.Tensor
    grid: tuple[int, int]
    coord: torch.Tensor | None = None
    thumbnail: tuple[int, int] | None = None

    @property
    def planes(self) -> tuple[tuple[int, int], ...]:
        """Rows and columns of each plane of tokens, in their order: the thumbnail stands first."""
        return (self.grid,) if self.thumbnail is None else (self.thumbnail, self.grid)

    @property
    def num_tokens(self) -> int:
        return sum(rows * columns for rows, columns in self.planes)


@lru_cache(maxsize=8)
def _affine(mean: tuple[float, ...], std: tuple[float, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    mean_3, std_3 = torch.tensor(mean).view(3, 1, 1), torch.tensor(std).view(3, 1, 1)
    return 1 / (255 * std_3), -mean_3 / std_3


class ConceptMoEVLImageProcessor(BaseImageProcessor):
    """Image processor of ConceptMoE-VL.

    Args:
        size_policy: fixed | tiles | native.
        image_size: pixels of the square's side (fixed, tiles).
        patch_size: pixels of a patch's side.
        downsample: side of the square of patches that becomes one token.
        max_patches: patches an image may have (native).
        max_tiles: tiles an image may have, beside its thumbnail (tiles).
        image_mean, image_std: per channel, of pixels in 0..1.
        background: RGB that transparent pictures are composited on.
        max_pixels: larger pictures are refused before they are decoded.
        accepts_images: False for a text-only model, which refuses every picture.

    Raises:
        ValueError: sizes that do not fit each other, or a policy that does not exist.
    """

    model_input_names = ["pixel_values", "image_grid_hw", "patch_coord", "patch_valid"]  # noqa: RUF012

    def __init__(
        self,
        size_policy: str = "fixed",
        image_size: int = 224,
        patch_size: int = 16,
        downsample: int = 1,
        max_patches: int = 1024,
        max_tiles: int = 6,
        image_mean: Sequence[float] = (0.5, 0.5, 0.5),
        image_std: Sequence[float] = (0.5, 0.5, 0.5),
        background: Sequence[int] = (255, 255, 255),
        max_pixels: int = MAX_PIXELS,
        accepts_images: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.size_policy = size_policy
        self.image_size = image_size
        self.patch_size = patch_size
        self.downsample = downsample
        self.max_patches = max_patches
        self.max_tiles = max_tiles
        self.image_mean = list(image_mean)
        self.image_std = list(image_std)
        self.background = list(background)
        self.max_pixels = max_pixels
        self.accepts_images = accepts_images
        self._check()

    def _check(self) -> None:
        if self.size_policy not in ("fixed", "tiles", "native"):
            raise ValueError(f"size_policy is {self.size_policy!r}; choose fixed, tiles or native")
        cell = self.patch_size * self.downsample
        if self.size_policy != "native" and self.image_size % cell:
            raise ValueError(
                f"vision.image_size {self.image_size} is no multiple of patch size times "
                f"downsample, {self.patch_size} x {self.downsample} = {cell}; take "
                f"{cell * max(1, round(self.image_size / cell))}"
            )
        if self.size_policy == "tiles" and self.max_tiles < 1:
            raise ValueError(f"vision.max_tiles is {self.max_tiles}; give 1 or more")
        if self.size_policy == "native" and self.max_patches < self.downsample**2:
            raise ValueError(
                f"vision.max_patches {self.max_patches} holds no token of {self.downsample} x "
                f"{self.downsample} patches; raise it"
            )

    @classmethod
    def from_vision_config(cls, vision: Any, **overrides: Any) -> ConceptMoEVLImageProcessor:
        """The processor that fits a `VisionConfig`; for None (text only) it refuses pictures."""
        if vision is None:
            return cls(accepts_images=False, **overrides)
        from conceptmoe_vl.vision import vision_geometry

        geometry = vision_geometry(vision)
        values: dict[str, Any] = {
            "size_policy": vision.size_policy,
            "image_size": vision.image_size,
            "patch_size": geometry.patch_size,
            "downsample": vision.downsample,
            "max_patches": vision.max_patches,
            "max_tiles": vision.max_tiles,
            "image_mean": geometry.mean,
            "image_std": geometry.std,
            "background": vision.background,
        }
        return cls(**{**values, **overrides})

    def to_dict(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in _FIELDS}
        return {**values, "image_processor_type": type(self).__name__}

    def process(self, image: Any) -> ProcessedImage:
        """One picture: what `decode_image` takes, a [`DecodedImage`], or an upright RGB array
        `[H, W, 3]` uint8.

        Raises:
            ImageError: it cannot be decoded.
            UserError: the model is text-only.
        """
        if not self.accepts_images:
            raise UserError(
                "this model takes no images (vision: null); remove them from the messages"
            )
        image, height, width = self._opened(image)
        target = self.target_size(height, width)
        rows, columns = (side // (self.patch_size * self.downsample) for side in target)
        pixels = self._pixels(image, target)
        if self.size_policy == "fixed":
            return ProcessedImage(pixels, (rows, columns))
        if self.size_policy == "native":
            patches, coord = self._patchify(pixels)
            return ProcessedImage(patches, (rows, columns), coord)
        tiles = cut_tiles(pixels, self.image_size)
        if len(tiles) == 1:  # it would be its own thumbnail
            return ProcessedImage(tiles, (rows, columns))
        thumbnail = self._pixels(image, (self.image_size, self.image_size))
        tokens = self.image_size // (self.patch_size * self.downsample)
        pixels = torch.cat([thumbnail[None], tiles])
        return ProcessedImage(pixels, (rows, columns), thumbnail=(tokens, tokens))

    @property
    def _affine(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Scale and offset `[3, 1, 1]` that normalise pixels in 0..255."""
        return _affine(tuple(self.image_mean), tuple(self.image_std))

    def _opened(self, image: Any) -> tuple[Any, int, int]:
        """The picture, decoded where it was not, its height and its width."""
        if isinstance(image, np.ndarray):
            if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
                raise ValueError(
                    f"an image array must be [H, W, 3] uint8, not {list(image.shape)} {image.dtype}"
                )
            return image, image.shape[0], image.shape[1]
        if isinstance(image, DecodedImage):
            image = image.image
        else:
            image = decode_image(image, self.background, self.max_pixels)
        return image, image.height, image.width

    def _pixels(self, image: Any, target: tuple[int, int]) -> torch.Tensor:
        """A picture resized to height and width `target`, normalised: `[3, H, W]` float32."""
        height, width = target
        if isinstance(image, np.ndarray) and image.shape[:2] != target:
            image = Image.fromarray(image)
        if isinstance(image, Image.Image) and image.size != (width, height):
            image = image.resize((width, height), Image.Resampling.BICUBIC)
        # A copy: arrays of PIL images are read-only, flipped ones have negative strides.
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).float().contiguous()
        scale, offset = self._affine
        return pixels.mul_(scale).add_(offset)

    def target_size(self, height: int, width: int) -> tuple[int, int]:
        """Height and width in pixels that a picture of this size is resized to."""
        if self.size_policy == "fixed":
            return self.image_size, self.image_size
        if self.size_policy == "tiles":
            rows, columns = choose_tiles(height, width, self.image_size, self.max_tiles)
            return rows * self.image_size, columns * self.image_size
        cell = self.patch_size * self.downsample
        budget = self.max_patches // self.downsample**2
        scale = min(1.0, math.sqrt(budget * cell * cell / (height * width)))
        rows = min(max(1, round(height * scale / cell)), budget)
        columns = min(max(1, round(width * scale / cell)), budget)
        while rows * columns > budget:  # rounding, or a strip thinner than a cell
            if rows >= columns:
                rows -= 1
            else:
                columns -= 1
        return rows * cell, columns * cell

    def _patchify(self, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`[3, H, W]` to patches `[P, patch * patch * 3]` and places `[P, 2]`, in timm's order."""
        size = self.patch_size
        rows, columns = pixels.shape[1] // size, pixels.shape[2] // size
        grid = pixels.view(3, rows, size, columns, size).permute(1, 3, 2, 4, 0)
        coord = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))
        return grid.reshape(rows * columns, size * size * 3), coord

    def preprocess(
        self, images: Any, return_tensors: str | None = None, **kwargs: Any
    ) -> BatchFeature:
        """Pictures (one or a list) as the model's keyword arguments, always torch tensors."""
        if not isinstance(images, (list, tuple)):
            images = [images]
        return BatchFeature(collate_images([self.process(image) for image in images]))


def collate_images(images: Sequence[ProcessedImage]) -> dict[str, torch.Tensor]:
    """The model's image arguments of `I` pictures; empty without pictures.

    Returns:
        pixel_values `[I, 3, S, S]` or `[I, P, patch * patch * 3]`, image_grid_hw `[I, 2]` int64
        (under tiles a square and a plane each: thumbnails and pictures are images of their own),
        and for native pictures patch_coord `[I, P, 2]` int64 and patch_valid `[I, P]` bool, `P`
        being the patches of the largest one.
    """
    if not images:
        return {}
    planes = [plane for image in images for plane in image.planes]
    grid = torch.tensor(planes, dtype=torch.int64)
    if images[0].coord is None:
        squares = [p if p.dim() == 4 else p[None] for p in (image.pixels for image in images)]
        return {"pixel_values": torch.cat(squares), "image_grid_hw": grid}
    most = max(image.pixels.shape[0] for image in images)
    width = images[0].pixels.shape[1]
    pixels = torch.zeros(len(images), most, width)
    coord = torch.zeros(len(images), most, 2, dtype=torch.int64)
    valid = torch.zeros(len(images), most, dtype=torch.bool)
    for row, image in enumerate(images):
        count = image.pixels.shape[0]
        pixels[row, :count] = image.pixels
        if image.coord is not None:
            coord[row, :count] = image.coord
        valid[row, :count] = True
    return {
        "pixel_values": pixels,
        "image_grid_hw": grid,
        "patch_coord": coord,
        "patch_valid": valid,
    }
