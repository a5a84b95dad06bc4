"""From every colour mode that Pillow knows to 8-bit sRGB without transparency.

Notable:
- grey deeper than 8 bits is scaled by the depth that the file states; where it states none, by one
  rule (`_eight_bits`);
- an ICC profile that cannot be used is left out: a picture with slightly wrong colours is worth
  more than none.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from PIL import Image, ImageCms

MODE_ERRORS = (
    *(OSError, SyntaxError, ValueError, TypeError, AttributeError, LookupError, EOFError),
    *(ArithmeticError, NotImplementedError, RuntimeError, AssertionError, BufferError),
)
"""What Pillow raises on metadata and conversions that it cannot follow."""

_BAND_PIXELS = 1 << 20  # deep grey is scaled in bands: 8 bytes a pixel at once would be 512 MB
_BITS_PER_SAMPLE = 258  # TIFF tag
_SPACES = {"GRAY": "L", "RGB ": "RGB", "CMYK": "CMYK", "Lab ": "LAB"}
_INVISIBLE_CHANGE = 2  # of 255: a profile that changes no colour by more counts as sRGB


def flat_rgb(image: Image.Image, background: Sequence[int]) -> Image.Image:
    """The picture as RGB, composited on `background` (0 to 255); itself where it is that already.

    Raises:
        MODE_ERRORS: Pillow cannot convert the mode.
    """
    profile = image.info.get("icc_profile")
    if image.mode == "RGB" and not profile and "transparency" not in image.info:
        return image
    image = _without_depth(image)
    if not image.has_transparency_data:
        return _to_srgb(image, profile)
    # Premultiplied grey has no direct way to RGBA.
    layer = (image.convert("LA") if image.mode == "La" else image).convert("RGBA")
    colors = _to_srgb(_grey_again(layer, image.mode), profile)
    rgb = Image.new("RGB", image.size, tuple(background))
    rgb.paste(colors, mask=layer.getchannel("A"))
    return rgb


def _grey_again(layer: Image.Image, mode: str) -> Image.Image:
    """Colours of an RGBA layer, in the space that the picture's profile speaks of."""
    return layer.getchannel("R") if mode in ("L", "LA", "La", "1") else layer.convert("RGB")


def _without_depth(image: Image.Image) -> Image.Image:
    """Deep grey as `L`, or `LA` where the file names a transparent value; others unchanged.

    A 16-bit RGB file comes from Pillow with the upper bytes alone, while its transparent colour
    keeps 16 bits.
    """
    key = image.info.get("transparency")
    if not (image.mode.startswith("I") or image.mode == "F"):
        if image.mode == "RGB" and isinstance(key, tuple) and max(key) > 255:
            image = image.copy()
            image.info["transparency"] = tuple(value >> 8 for value in key)
        return image
    values = np.asarray(image)
    grey = Image.fromarray(_eight_bits(values, _stated_maximum(image)))
    if isinstance(key, int):
        grey.putalpha(Image.fromarray(np.where(values == key, 0, 255).astype(np.uint8)))
    return grey


def _stated_maximum(image: Image.Image) -> int | None:
    """The value that is white in the file, or None where nothing says so."""
    if image.mode.startswith("I;16"):
        bits = getattr(image, "tag_v2", {}).get(_BITS_PER_SAMPLE, (16,))
        # Pillow hands out 12-bit samples unscaled.
        return (1 << bits[0]) - 1 if isinstance(bits, tuple) and bits[0] == 12 else 65535
    # Pillow scales deep PGM files to 16 bits, however dark they are.
    return 65535 if image.mode == "I" and image.format == "PPM" else None


def _eight_bits(values: np.ndarray, maximum: int | None) -> np.ndarray:
    """Grey values `[H, W]` of any type as uint8, black at 0.

    Args:
        maximum: the value that is white. None: white is the first of 1 (floats alone), 255 and
            65535 that no value exceeds; where values are negative or above 65535, black is the
            smallest and white the largest. NaN is black, infinities are black and white.
    """
    low, high = 0.0, float(maximum or 0)
    if maximum is None:
        low, high = _range(values)
    result = np.empty(values.shape, np.uint8)
    rows = max(1, _BAND_PIXELS // max(1, values.shape[1]))
    for start in range(0, len(values), rows):
        band = values[start : start + rows].astype(np.float64)
        grey = (band - low) * 255.0 / (high - low)
        grey = np.nan_to_num(np.clip(grey, 0.0, 255.0), nan=0.0)
        result[start : start + rows] = np.rint(grey).astype(np.uint8)
    return result


def _range(values: np.ndarray) -> tuple[float, float]:
    floats = values.dtype.kind == "f"
    finite = values[np.isfinite(values)] if floats else values
    if finite.size == 0:
        return 0.0, 1.0
    low, high = float(finite.min()), float(finite.max())
    for white in (1.0, 255.0, 65535.0) if floats else (255.0, 65535.0):
        if low >= 0 and high <= white:
            return 0.0, white
    return (low, high) if high > low else (low - 1.0, high)


def _to_srgb(image: Image.Image, profile: Any) -> Image.Image:
    """`image` without transparency as RGB; itself where nothing is to be done."""
    if image.mode == "LAB":
        transform = _lab_transform()
        return transform.apply(image)
    base = image
    if image.mode not in _SPACES.values():
        base = image.convert("L" if image.mode == "1" else "RGB")
    if isinstance(profile, bytes) and profile:
        transform = _transform(profile, base.mode)
        if transform is not None:
            try:
                return transform.apply(base)
            except (ImageCms.PyCMSError, *MODE_ERRORS):
                pass  # as if the file had no profile
    return base if base.mode == "RGB" else base.convert("RGB")


@lru_cache(maxsize=1)
def _lab_transform() -> Any:
    lab, srgb = ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB")
    return ImageCms.buildTransform(lab, srgb, "LAB", "RGB")


@lru_cache(maxsize=16)
def _transform(profile: bytes, mode: str) -> Any:
    """The way from a profile to sRGB with perceptual intent.

    None where there is none to go: the profile is broken, speaks of another colour space than the
    pixels, or changes nothing that one could see.
    """
    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        if _SPACES.get(source.profile.xcolor_space) != mode:
            return None
        srgb = ImageCms.createProfile("sRGB")
        transform = ImageCms.buildTransform(source, srgb, mode, "RGB", ImageCms.Intent.PERCEPTUAL)
        return None if _changes_nothing(transform, mode) else transform
    except (ImageCms.PyCMSError, ImportError, *MODE_ERRORS):
        return None


def _changes_nothing(transform: Any, mode: str) -> bool:
    """Whether all colours of a grid stay; saves a pass over every picture that names sRGB."""
    if mode == "CMYK":
        return False
    steps = range(0, 256, 17)
    bands = Image.getmodebands(mode)
    colors = np.array(list(itertools.product(steps, repeat=bands)), np.uint8)
    sample = Image.fromarray(colors.reshape(1, -1) if bands == 1 else colors[None])
    changed = np.asarray(transform.apply(sample)).astype(int)
    return bool(np.abs(changed - np.asarray(sample.convert("RGB"))).max() <= _INVISIBLE_CHANGE)
