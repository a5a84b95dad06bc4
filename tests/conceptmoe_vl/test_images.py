"""`decode_image`: one defined outcome for every colour mode, orientation and broken file."""

from __future__ import annotations

import contextlib
import io
import struct
import subprocess
import sys
import zlib

import numpy as np
import pytest
from PIL import Image

from conceptmoe_vl.image_processing import ConceptMoEVLImageProcessor
from conceptmoe_vl.images import ImageError, decode_image
from tests.peak_memory import linux


def encoded(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def picture(width: int = 48, height: int = 32) -> Image.Image:
    """Grey with a red left edge: no orientation looks like another."""
    array = np.full((height, width, 3), 128, np.uint8)
    array[:, :8] = (220, 20, 20)
    array[:6, 30:] = (20, 20, 220)
    return Image.fromarray(array)


STORED_AS = {  # how a camera stores an upright picture, by orientation tag
    1: lambda image: image,
    2: lambda image: image.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
    3: lambda image: image.transpose(Image.Transpose.ROTATE_180),
    4: lambda image: image.transpose(Image.Transpose.FLIP_TOP_BOTTOM),
    5: lambda image: image.transpose(Image.Transpose.TRANSPOSE),
    6: lambda image: image.transpose(Image.Transpose.ROTATE_90),
    7: lambda image: image.transpose(Image.Transpose.TRANSVERSE),
    8: lambda image: image.transpose(Image.Transpose.ROTATE_270),
}


def with_orientation(tag: int, kind: str = "JPEG") -> bytes:
    exif = Image.Exif()
    exif[0x0112] = tag
    options = {"quality": 95, "subsampling": 0} if kind == "JPEG" else {}
    return encoded(STORED_AS[tag](picture()), kind, exif=exif, **options)


@pytest.mark.parametrize("tag", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_orientation_is_applied_and_the_tag_dropped(tag, kind, tmp_path):
    data = with_orientation(tag, kind)
    path = tmp_path / "photo"
    path.write_bytes(data)
    upright = np.asarray(picture()).astype(int)
    arrays = [
        np.asarray(decode_image(source))
        for source in (data, path, str(path), Image.open(io.BytesIO(data)))
    ]
    for array in arrays:
        assert array.shape == upright.shape
        assert np.abs(array - upright).mean() < 6
        assert np.array_equal(array, arrays[0])
    assert not decode_image(data).getexif()


def test_the_image_processor_decodes_in_the_same_way():
    processor = ConceptMoEVLImageProcessor("native", patch_size=8, max_patches=64)
    turned, upright = (processor.process(with_orientation(tag)) for tag in (6, 1))
    assert turned.grid == upright.grid == (4, 6)
    assert (turned.pixels - upright.pixels).abs().mean() < 0.05


def transparent(mode: str) -> Image.Image:
    image = Image.new("RGBA", (20, 10), (0, 0, 0, 0))
    image.paste((0, 0, 0, 255), (5, 2, 15, 8))
    if mode != "P":
        return image.convert(mode)
    palette = Image.new("P", image.size, 0)
    palette.putpalette([255, 0, 255, 0, 0, 0])
    palette.paste(1, (5, 2, 15, 8))
    palette.info["transparency"] = 0
    return palette


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
@pytest.mark.parametrize("background", [(255, 255, 255), (10, 200, 30)])
def test_transparency_is_composited_on_the_background(mode, background):
    image = transparent(mode)
    array = np.asarray(decode_image(encoded(image), background))
    assert tuple(array[0, 0]) == background
    assert tuple(array[5, 10]) == (0, 0, 0)
    assert np.array_equal(array, np.asarray(decode_image(image, background)))


def test_half_transparent_pixels_mix():
    image = Image.new("RGBA", (4, 4), (200, 0, 0, 128))
    pixel = np.asarray(decode_image(encoded(image)))[0, 0].astype(int)
    assert np.abs(pixel - (227, 127, 127)).max() <= 1


def test_a_colour_key_is_transparent():
    data = encoded(Image.new("RGB", (4, 4), (1, 2, 3)), transparency=(1, 2, 3))
    assert tuple(np.asarray(decode_image(data))[0, 0]) == (255, 255, 255)


@pytest.mark.parametrize(
    ("image", "kind", "expected"),
    [
        (Image.new("L", (6, 4), 77), "PNG", 77),
        (Image.new("1", (6, 4), 1), "PNG", 255),
        (Image.fromarray(np.full((4, 6), 257 * 90, np.uint16)), "PNG", 90),
        (Image.fromarray(np.full((4, 6), 257 * 90, np.uint16)), "TIFF", 90),
        (Image.fromarray(np.full((4, 6), 0.5, np.float32)), "TIFF", 128),
        (Image.fromarray(np.full((4, 6), 50.0, np.float32)), "TIFF", 50),
        (Image.fromarray(np.full((4, 6), 257 * 90, np.int32)), "TIFF", 90),
        (Image.fromarray(np.full((4, 6), 90, np.int32)), "TIFF", 90),
    ],
)
def test_grey_modes_become_three_equal_channels(image, kind, expected):
    array = np.asarray(decode_image(encoded(image, kind)))
    assert array.shape == (4, 6, 3)
    assert array.dtype == np.uint8
    assert (array == expected).all()


def test_cmyk_is_converted():
    data = encoded(Image.new("CMYK", (16, 16), (0, 255, 255, 0)), "JPEG", quality=95)
    red, green, blue = np.asarray(decode_image(data))[8, 8].astype(int)
    assert red > 200
    assert max(green, blue) < 60


@pytest.mark.parametrize(
    "ink",  # cyan, magenta, yellow and black, of 255
    [(0, 255, 255, 0), (255, 0, 255, 0), (255, 255, 0, 0), (30, 90, 200, 0), (10, 200, 60, 120)],
)
def test_ycck_is_converted(ink):
    """Adobe's CMYK is stored inverted; the transform 2 is YCbCr of the complement of the first
    three stored values, as of an RGB picture, beside K. Pillow writes transform 0 alone."""
    cyan, magenta, yellow, black = ink
    # Stored is 255 - ink, whose complement, the "RGB" that is transformed, is the ink itself.
    luma = 0.299 * cyan + 0.587 * magenta + 0.114 * yellow
    stored = (luma, 128 + (yellow - luma) / 1.772, 128 + (cyan - luma) / 1.402, 255 - black)
    written = tuple(255 - round(min(max(value, 0), 255)) for value in stored)  # Pillow inverts
    data = bytearray(encoded(Image.new("CMYK", (16, 16), written), "JPEG", quality=100))
    transform = data.index(b"Adobe") + 11
    assert data[transform] == 0
    data[transform] = 2
    expected = [(255 - part) * (255 - black) / 255 for part in (cyan, magenta, yellow)]
    pixels = np.asarray(decode_image(bytes(data))).astype(int)
    assert np.abs(pixels - expected).max() <= 3


def test_the_first_frame_of_an_animation_is_taken():
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "lime", "blue")]
    data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert tuple(np.asarray(decode_image(data))[0, 0]) == (255, 0, 0)
    opened = Image.open(io.BytesIO(data))
    opened.seek(2)
    assert tuple(np.asarray(decode_image(opened))[0, 0]) == (255, 0, 0)


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_a_decoded_file_is_a_plain_image_without_metadata(kind):
    image = decode_image(with_orientation(1, kind))
    assert type(image) is Image.Image
    assert (image.mode, image.info, dict(image.getexif())) == ("RGB", {}, {})
    assert image.size == image.copy().size == np.asarray(image).shape[1::-1]


def test_a_callers_image_is_not_shared():
    image = picture()
    result = decode_image(image)
    result.paste((0, 0, 0), (0, 0, 48, 32))
    assert image.getpixel((0, 0)) == (220, 20, 20)


def one_colour_png(side: int) -> bytes:
    """A valid 8-bit grey PNG of any size, compressed a thousandfold."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        checksum = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + checksum

    compressor = zlib.compressobj(9)
    row = bytes(side + 1)
    rows = b"".join(compressor.compress(row) for _ in range(side)) + compressor.flush()
    header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
    )


@linux
@pytest.mark.parametrize("side", [9000, 20000])
def test_a_size_bomb_is_refused_before_it_is_decoded(side, tmp_path):
    bomb = tmp_path / "bomb.png"
    bomb.write_bytes(one_colour_png(side))
    program = (
        "import sys\n"
        "from conceptmoe_vl.resident_memory import peak_resident_bytes\n"
        "from conceptmoe_vl.images import ImageError, decode_image\n"
        "try:\n    decode_image(sys.argv[1])\n"
        "except ImageError as error:\n    print(error.reason, error)\n"
        "print(peak_resident_bytes())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(bomb)], capture_output=True, text=True, check=True
    )
    message, peak = done.stdout.splitlines()
    assert message.startswith("too_large")
    assert str(bomb) in message
    assert int(peak) < 1_000_000_000


def test_the_pixel_limit_can_be_set():
    data = encoded(picture())
    assert decode_image(data, max_pixels=48 * 32).size == (48, 32)
    with pytest.raises(ImageError, match="48 x 32 = 1536 pixels, the limit is 1535"):
        decode_image(data, max_pixels=48 * 32 - 1)


def test_pillows_guard_is_untouched():
    decode_image(encoded(picture()))
    assert Image.MAX_IMAGE_PIXELS == 1024**3 // 4 // 3


NOISE = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty"),
        (b"no picture at all", "not_an_image"),
        (encoded(Image.fromarray(NOISE), "JPEG")[:2000], "truncated"),
        (encoded(Image.fromarray(NOISE), "PNG")[:2000], "truncated"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not_an_image"),
    ],
)
def test_a_broken_file_has_a_reason(data, reason, tmp_path):
    path = tmp_path / "broken.bin"
    path.write_bytes(data)
    for source in (data, path):
        with pytest.raises(ImageError) as caught:
            decode_image(source)
        assert caught.value.reason == reason
        assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "TIFF", "WEBP", "BMP"])
def test_every_cut_of_a_file_ends_as_picture_or_image_error(kind):
    data = encoded(Image.fromarray(NOISE[:16, :16]), kind)
    for end in range(0, len(data), 13):
        with contextlib.suppress(ImageError):
            assert decode_image(data[:end]).size == (16, 16)


def test_missing_files_and_folders(tmp_path):
    with pytest.raises(ImageError, match="does not exist; check the path"):
        decode_image(tmp_path / "none.png")
    with pytest.raises(ImageError, match="download it first"):
        decode_image("https://example.org/cat.png")
    with pytest.raises(ImageError, match="is a folder"):
        decode_image(tmp_path)
    with pytest.raises(TypeError, match="list"):
        decode_image([1, 2])
