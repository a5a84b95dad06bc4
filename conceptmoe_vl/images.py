"""The one place where a picture enters the project: training, evaluation, processor and demo.

Notable:
- the size is checked from the header, before a pixel is decoded, also where the picture lies in a
  container whose own header may say less; Pillow's own guard stays on;
- only formats on a list are opened: no PostScript or other format that starts a program;
- every failure is an [`ImageError`] with a short stable `reason`, so that skips can be counted.
"""

from __future__ import annotations

import contextlib
import io
import os
import struct
import warnings
import zlib
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from PIL import ExifTags, Image, UnidentifiedImageError

from conceptmoe_vl.errors import DataFaultError
from conceptmoe_vl.image_modes import MODE_ERRORS, flat_rgb

MAX_PIXELS = 64_000_000
"""Default limit, 256 MB in Pillow's RGB. Its guard refuses 179 million whatever is asked."""

WHITE = (255, 255, 255)

# Prefix checks come first, formats without a magic number last. EPS is left out on purpose: Pillow
# hands it to Ghostscript.
_FORMATS = (
    *("PNG", "JPEG", "MPO", "WEBP", "GIF", "BMP", "DIB", "TIFF", "AVIF", "HEIF", "JPEG2000"),
    *("PPM", "ICO", "QOI", "DDS", "SGI", "PCX", "TGA"),
)

# What Pillow 11 to 13 and pillow-heif raise for broken files (their own test images, fuzz cases).
_PILLOW_ERRORS = (*MODE_ERRORS, ImportError, MemoryError, struct.error, zlib.error)

_KINDS = (bytes, bytearray, memoryview, str, os.PathLike, Image.Image)

_JPEG_START = b"\xff\xd8\xff"
_JPEG2000_START = b"\xff\x4f\xff\x51"  # SOC and SIZ, the first two markers of a codestream

_TRANSPOSE = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class ImageError(DataFaultError):
    """An image that cannot be used.

    Attributes:
        reason: missing | empty | not_an_image | truncated | damaged | too_large | unsupported.
        field: the record's field or member that names the image, where there is one.
    """


def decode_image(
    data: Any,
    background: Sequence[int] = WHITE,
    max_pixels: int = MAX_PIXELS,
    name: str | None = None,
) -> Image.Image:
    """A picture as the model sees it: upright, opaque, 8-bit sRGB, without metadata.

    Turned by its EXIF orientation; transparency is composited on `background`; every colour mode
    is converted (`image_modes`), by the ICC profile where there is a usable one; of an animation
    the first frame is taken, of a HEIF file the primary picture.

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
        with warnings.catch_warnings():
            # Pillow's remarks on odd metadata and sizes: what matters ends as an ImageError.
            warnings.simplefilter("ignore")
            if isinstance(data, Image.Image):
                with _first_frame(data):
                    return _to_rgb(data, background, max_pixels, name, owned=False)
            with _open(data, name) as image:
                _check_inner_sizes(image.format, data, max_pixels, name)
                return _to_rgb(image, background, max_pixels, name, owned=True)
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
        # Pillow asks one format after the other; most pictures are JPEGs (MPO among them).
        formats = ("JPEG",) if bytes(data[:3]) == _JPEG_START else _usable_formats()
        return Image.open(io.BytesIO(data), formats=formats)
    path = Path(data)
    if not path.exists():
        remedy = "download it first" if "://" in str(data) else "check the path"
        raise ImageError("missing", f"{name} does not exist; {remedy}")
    if path.is_dir():
        raise ImageError("not_an_image", f"{name} is a folder; name an image file")
    if not path.is_file():
        raise ImageError("not_an_image", f"{name} is no regular file; name an image file")
    if path.stat().st_size == 0:
        raise ImageError("empty", f"{name} has no bytes; write the file again")
    return Image.open(path, formats=_usable_formats())


@contextlib.contextmanager
def _first_frame(image: Image.Image) -> Iterator[None]:
    """A caller's animation at its first frame, and back where it was afterwards."""
    # A HEIF file opens at its primary picture, which need not be the first one.
    frame = 0 if image.format == "HEIF" else image.tell()
    if frame == 0:
        yield
        return
    image.seek(0)
    try:
        yield
    finally:
        image.seek(frame)


def _check_inner_sizes(kind: str | None, source: Any, max_pixels: int, name: str) -> None:
    """Refuses containers that announce a small picture and hold a large one.

    Pillow takes the size of ICO and JPEG 2000 files from the container and decodes what lies in it.

    Args:
        kind: Pillow's name of the format.
        source: bytes or path. It is read anew: moving in an opened image's file would mislead
            decoders that read from its descriptor.
    """
    if kind not in ("ICO", "JPEG2000"):
        return
    data = Path(source).read_bytes() if isinstance(source, (str, os.PathLike)) else bytes(source)
    sizes = _icon_sizes(data) if kind == "ICO" else _codestream_sizes(data)
    for width, height in sizes:
        _check_size(width, height, max_pixels, name)


def _icon_sizes(data: bytes) -> Iterator[tuple[int, int]]:
    """Width and height of every picture of an ICO file, by its own PNG or bitmap header."""
    (count,) = struct.unpack_from("<H", data, 4)
    for number in range(count):
        _, start = struct.unpack_from("<II", data, 6 + 16 * number + 8)
        if len(data) < start + 24:
            continue  # Pillow refuses it where it is the one to be shown
        if data[start : start + 8] == b"\x89PNG\r\n\x1a\n":
            yield struct.unpack_from(">II", data, start + 16)
        else:
            old = data[start : start + 4] == struct.pack("<I", 12)  # the header of OS/2
            width, height = struct.unpack_from("<HH" if old else "<ii", data, start + 4)
            yield abs(width), abs(height) // 2  # picture and mask, one above the other


def _codestream_sizes(data: bytes) -> Iterator[tuple[int, int]]:
    """Width and height by every SIZ marker of a JPEG 2000 file."""
    start = data.find(_JPEG2000_START)
    while start >= 0:
        right, bottom, left, top = struct.unpack_from(">IIII", data, start + 8)
        yield max(0, right - left), max(0, bottom - top)
        start = data.find(_JPEG2000_START, start + 1)


def _check_size(width: int, height: int, max_pixels: int, name: str) -> None:
    if width * height > max_pixels:
        raise _too_large(
            name, f"{width} x {height} = {width * height} pixels, the limit is {max_pixels}"
        )


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
    if isinstance(error, MemoryError):
        return _too_large(name, "it does not fit into memory")
    # Some plugins raise OSError for variants that they do not know.
    if isinstance(error, (NotImplementedError, ImportError)) or detail.lower().startswith(
        "unsupported"
    ):
        return ImageError("unsupported", f"{name} cannot be decoded ({detail}); convert it to PNG")
    if "truncated" in detail.lower() or isinstance(error, EOFError):
        return ImageError("truncated", f"{name} ends early ({detail}); copy or download it again")
    return ImageError("damaged", f"{name} cannot be decoded ({detail}); write the file again")


def _to_rgb(
    image: Image.Image, background: Sequence[int], max_pixels: int, name: str, owned: bool
) -> Image.Image:
    """The picture as RGB; shares its pixels with `image` where that is `owned`, else never."""
    width, height = image.size
    _check_size(width, height, max_pixels, name)
    if width == 0 or height == 0:
        raise ImageError("empty", f"{name} has {width} x {height} pixels; write the file again")
    image.load()
    # What was decoded may be larger than what the header announced.
    _check_size(*image.size, max_pixels, name)
    turn = _TRANSPOSE.get(_orientation(image))
    rgb = flat_rgb(image, background)
    if turn is not None:
        rgb = rgb.transpose(turn)
    elif rgb is image:
        # The opened file's own pixels, in an image without its metadata; a caller's are copied.
        rgb = image._new(image.im) if owned else image.copy()
    rgb.info = {}
    return rgb


def _orientation(image: Image.Image) -> int:
    if image.format == "JPEG" and not any(name in image.info for name in ("exif", "xmp")):
        return 1  # as `getexif` would find out in 10 microseconds
    try:
        return int(image.getexif().get(ExifTags.Base.Orientation, 1))
    except _PILLOW_ERRORS:
        return 1  # unreadable metadata beside readable pixels: the picture counts as upright
