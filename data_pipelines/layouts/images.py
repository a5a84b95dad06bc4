"""Images that records name: read from one folder and from nowhere else."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from conceptmoe_vl.images import ImageError, decode_image
from data_pipelines.records import RecordError

_MAX_BYTES = 1 << 29  # of an encoded file: a record may name anything in the folder

_SHOWN = 120  # characters

# First bytes of the files whose suffixes `records.IMAGE_MEMBER` knows.
_MAGIC = (
    *((b"\x89PNG", "png"), (b"\xff\xd8\xff", "jpg"), (b"GIF8", "gif"), (b"BM", "bmp")),
    *((b"II*\0", "tif"), (b"MM\0*", "tif")),
)
_BRANDS = {b"avif": "avif", b"avis": "avif", b"heic": "heic", b"heix": "heic", b"mif1": "heif"}


class EncodedImage(NamedTuple):
    """An image file: how messages call it, its bytes, and the field that names it."""

    name: str
    data: bytes
    field: str

    def decode(self) -> Image.Image:
        """The picture as training sees it.

        Raises:
            ImageError: with the field.
        """
        try:
            return decode_image(self.data, name=self.name)
        except ImageError as error:
            raise ImageError(error.reason, str(error), self.field) from error


def suffix_of(data: bytes) -> str | None:
    """The suffix of an encoded image by its first bytes; None: a kind that shards do not hold."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "webp"
    if data[4:8] == b"ftyp":
        return _BRANDS.get(data[8:12])
    return next((suffix for magic, suffix in _MAGIC if data.startswith(magic)), None)


def _shown(reference: Any) -> str:
    """In quotes, short, and without line breaks or control characters: it stands in messages."""
    text = repr(reference)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 4]}...{text[-1]}"


class ImageFolder:
    """The images of one folder.

    Args:
        folder: what paths in records are relative to.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._root = folder.resolve()

    def read(self, reference: Any, field: str) -> EncodedImage:
        """The image of a path, or of the mapping `{"bytes": ..., "path": ...}` of parquet files.

        Args:
            field: where the reference stands in its record, for messages.

        Raises:
            RecordError: the reference is no path, or leads out of the folder.
            ImageError: there is no such file, or it is too large.
        """
        if isinstance(reference, dict):
            data = reference.get("bytes")
            if isinstance(data, bytes):
                return EncodedImage(_shown(str(reference.get("path") or field))[1:-1], data, field)
            reference = reference.get("path")
        if not isinstance(reference, str) or not reference:
            raise RecordError(
                "bad_field", f"'{field}' is {_shown(reference)}; give an image's path", field
            )
        if "://" in reference:
            raise ImageError(
                "missing", f"{_shown(reference)} is an address; download it, name the file", field
            )
        return EncodedImage(_shown(reference)[1:-1], self._bytes(reference, field), field)

    def _bytes(self, reference: str, field: str) -> bytes:
        try:
            path = (self._root / reference).resolve()
            inside = path.is_relative_to(self._root)
            if inside and path.is_file():
                if path.stat().st_size > _MAX_BYTES:
                    raise ImageError(
                        "too_large",
                        f"{_shown(reference)} has more than {_MAX_BYTES} bytes; shrink it",
                        field,
                    )
                return path.read_bytes()
        # ValueError: a zero byte in the path; RuntimeError: links in a circle
        except (OSError, ValueError, RuntimeError) as error:
            if isinstance(error, ImageError):
                raise
            # Its own text repeats the whole path.
            detail = getattr(error, "strerror", None) or str(error)
            raise ImageError(
                "missing", f"{_shown(reference)} cannot be read ({detail})", field
            ) from error
        if not inside:
            raise RecordError(
                "outside_folder",
                f"{_shown(reference)} leads out of the folder '{self.folder}'",
                field,
            )
        raise ImageError(
            "missing", f"the folder '{self.folder}' holds no file {_shown(reference)}", field
        )
