"""The one place where a picture enters the project: training, evaluation, processor and demo.

Notable:
- the size is checked from the header, before a pixel is decoded; Pillow's own guard stays on;
- only formats on a list are opened: no PostScript or other format that starts a program;
- every failure is an [`ImageError`] with a short stable `reason`, so that skips can be counted.
"""

from __future__ import annotations

import io
import os
import struct
import warnings
import zlib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import ExifTags, Image, UnidentifiedImageError

from conceptmoe_vl.errors import UserError

MAX_PIXELS = 64_000_000
"""Default limit, 192 MB as RGB. Pillow's guard refuses 179 million whatever is asked."""

WHITE = (255, 255, 255)

# Prefix checks come first, formats without a magic number last. EPS is left out on purpose: Pillow
# hands it to Ghostscript.
_FORMATS = (
    *("PNG", "JPEG", "MPO", "WEBP", "GIF", "BMP", "DIB", "TIFF", "AVIF", "HEIF", "JPEG2000"),
    *("PPM", "ICO", "QOI", "DDS", "SGI", "PCX", "TGA"),
)

# What Pillow 11 to 13 raise for broken files (its own test images and fuzz cases).
_PILLOW_ERRORS = (
    *(OSError, SyntaxError, ValueError, TypeError, KeyError, IndexError, AttributeError, EOFError),
    *(OverflowError, ZeroDivisionError, NotImplementedError, RuntimeError, AssertionError),
    *(MemoryError, struct.error, zlib.error),
)

_KINDS = (bytes, bytearray, memoryview, str, os.PathLike, Image.Image)

_TRANSPOSE = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

_SIXTEEN_TO_EIGHT_BITS = 257.0  # 65535 / 255


class ImageError(UserError):
    """An image that cannot be used.

    Attributes:
        reason: missing | empty | not_an_image | truncated | damaged | too_large | unsupported.
        field: the record's field or member that names the image, where there is one.
    """

    def __init__(self, reason: str, message: str, field: str = "") -> None:
        super().__init__(message)
        self.reason = reason
        self.field = field

    def __reduce__(self) -> tuple:
        return type(self), (self.reason, str(self), self.field)


def decode_image(
    data: Any,
    background: Sequence[int] = WHITE,
    max_pixels: int = MAX_PIXELS,
    name: str | None = None,
) -> Image.Image:
    """A picture as the model sees it: upright, opaque, 8-bit RGB, without metadata.

    Turned by its EXIF orientation; transparency is composited on `background`; grey, 1-bit, CMYK
    and palette images are converted; 16-bit grey is divided by 257; of an animation the first
    frame is taken.

    Args:
        data: encoded file as bytes, path of a file, or PIL image.
        background: RGB, 0 to 255.
        max_pixels: largest width times height, checked before decoding.
        name: how messages call the image; the path by default.

    Raises:
        ImageError: the picture cannot be used; `.reason` says why in one word.
        TypeError: `data` is none of the three kinds.
    """
    if not isinstance(data, _KINDS):
        raise TypeError(
            f"decode_image takes bytes, a path or a PIL image, not {type(data).__name__}"
        )
    name = _name_of(data, name)
    try:
        if isinstance(data, Image.Image):
            return _to_rgb(data, background, max_pixels, name)
        with warnings.catch_warnings():
            # Pillow's remarks on odd metadata and sizes: what matters ends as an ImageError.
            warnings.simplefilter("ignore")
            with _open(data, name) as image:
                return _to_rgb(image, background, max_pixels, name)
    except ImageError:
        raise
    except Image.DecompressionBombError as error:
        raise _too_large(name, str(error)) from error
    except _PILLOW_ERRORS as error:
        raise _explained(error, name) from error


def _name_of(data: Any, name: str | None) -> str:
    if name is not None:
        return f"image '{name}'"
    if isinstance(data, (str, os.PathLike)):
        return f"image '{os.fspath(data)}'"
    return "the given image"


@lru_cache(maxsize=1)
def _usable_formats() -> tuple[str, ...]:
    try:
        import pillow_heif

        pillow_heif.register_heif_opener()
    except ImportError:
        pass  # HEIC photos then end as `not_an_image` with the remedy
    Image.init()
    return tuple(kind for kind in _FORMATS if kind in Image.OPEN)


def _open(data: Any, name: str) -> Image.Image:
    if isinstance(data, (bytes, bytearray, memoryview)):
        if len(data) == 0:
            raise ImageError("empty", f"{name} has no bytes; write the file again")
        return Image.open(io.BytesIO(data), formats=_usable_formats())
    path = Path(data)
    if not path.exists():
        remedy = "download it first" if "://" in str(data) else "check the path"
        raise ImageError("missing", f"{name} does not exist; {remedy}")
    if path.is_dir():
        raise ImageError("not_an_image", f"{name} is a folder; name an image file")
    if path.stat().st_size == 0:
        raise ImageError("empty", f"{name} has no bytes; write the file again")
    return Image.open(path, formats=_usable_formats())


def _too_large(name: str, detail: str) -> ImageError:
    return ImageError("too_large", f"{name} is too large: {detail}; make it smaller")


def _explained(error: BaseException, name: str) -> ImageError:
    if isinstance(error, UnidentifiedImageError):
        return ImageError(
            "not_an_image",
            f"{name} is in no readable image format; give JPEG, PNG, WebP, GIF, TIFF or AVIF "
            "(HEIC needs the package pillow-heif)",
        )
    detail = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, PermissionError):
        return ImageError("missing", f"{name} cannot be opened ({detail}); check its permissions")
    if isinstance(error, NotImplementedError):
        return ImageError("unsupported", f"{name} cannot be decoded ({detail}); convert it to PNG")
    if "truncated" in detail.lower() or isinstance(error, EOFError):
        return ImageError("truncated", f"{name} ends early ({detail}); copy or download it again")
    return ImageError("damaged", f"{name} cannot be decoded ({detail}); write the file again")


def _to_rgb(
    image: Image.Image, background: Sequence[int], max_pixels: int, name: str
) -> Image.Image:
    width, height = image.size
    if width * height > max_pixels:
        raise _too_large(
            name, f"{width} x {height} = {width * height} pixels, the limit is {max_pixels}"
        )
    if width == 0 or height == 0:
        raise ImageError("empty", f"{name} has {width} x {height} pixels; write the file again")
    if getattr(image, "is_animated", False) and image.tell() != 0:
        image.seek(0)
    image.load()
    turn = _TRANSPOSE.get(_orientation(image))
    rgb = _flat_rgb(image, background)
    if turn is not None:
        return rgb.transpose(turn)
    # A caller's own PIL image must not change with ours.
    return rgb.copy() if rgb is image or rgb.info else rgb


def _orientation(image: Image.Image) -> int:
    try:
        return int(image.getexif().get(ExifTags.Base.Orientation, 1))
    except _PILLOW_ERRORS:
        return 1  # unreadable metadata beside readable pixels: the picture counts as upright


def _flat_rgb(image: Image.Image, background: Sequence[int]) -> Image.Image:
    mode = image.mode
    if mode == "RGB" and "transparency" not in image.info:
        rgb = image.copy() if image.info else image
    elif mode.startswith("I") or mode == "F":
        rgb = Image.fromarray(_eight_bits(np.asarray(image), mode)).convert("RGB")
    elif mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        # Premultiplied modes have no direct way to RGBA from La.
        layer = (image.convert("LA") if mode == "La" else image).convert("RGBA")
        rgb = Image.new("RGB", image.size, tuple(background))
        rgb.paste(layer, mask=layer.getchannel("A"))
    else:
        rgb = image.convert("RGB")
    rgb.info = {}
    return rgb


def _eight_bits(values: np.ndarray, mode: str) -> np.ndarray:
    """Grey values of 16-bit, 32-bit and float images as uint8.

    `I;16*` is 16-bit. `I` is taken as 8-bit or 16-bit by its largest value, beyond that it is
    scaled to its maximum. `F` is taken as 0..1 or 0..255 by its range, beyond that it is stretched.
    """
    grey = np.nan_to_num(values.astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0)
    low, high = float(grey.min()), float(grey.max())
    if mode.startswith("I;16") or (mode == "I" and 255 < high <= 65535):
        grey = grey / _SIXTEEN_TO_EIGHT_BITS
    elif mode == "I" and high > 65535:
        grey = grey * (255.0 / high)
    elif mode == "F" and low >= 0 and high <= 1:
        grey = grey * 255.0
    elif mode == "F" and (low < 0 or high > 255):
        grey = (grey - low) * (255.0 / max(high - low, np.finfo(np.float64).tiny))
    return np.clip(np.rint(grey), 0, 255).astype(np.uint8)
