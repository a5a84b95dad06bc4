"""Colour modes, depths and ICC profiles: each has one stated outcome."""

from __future__ import annotations

import io
import os
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, ImageCms, features

from conceptmoe_vl.images import ImageError, decode_image
from tests.conceptmoe_vl.test_images import encoded, one_colour_png
from tests.icc_profiles import linear_grey, one_ink_cmyk, swapped_rgb


def pixel(source, **options) -> tuple[int, ...]:
    return tuple(np.asarray(decode_image(source, **options))[0, 0].tolist())


def near(one, two, tolerance: int = 3) -> bool:
    return max(abs(a - b) for a, b in zip(one, two, strict=True)) <= tolerance


def tiff(bits: int, data: bytes, width: int, height: int) -> bytes:
    """An uncompressed grey TIFF with one strip."""
    tags = [
        *((256, 3, width), (257, 3, height), (258, 3, bits), (259, 3, 1), (262, 3, 1)),
        *((273, 4, 8), (277, 3, 1), (278, 3, height), (279, 4, len(data))),
    ]
    entries = b"".join(
        struct.pack("<HHI", tag, kind, 1) + struct.pack("<I", value) for tag, kind, value in tags
    )
    start = 8 + len(data)
    directory = struct.pack("<H", len(tags)) + entries + bytes(4)
    return b"II*\0" + struct.pack("<I", start) + data + directory


@pytest.mark.parametrize("mode", ["I;16", "I;16L", "I;16B", "I;16N"])
def test_16_bit_grey_is_divided_by_257_in_every_byte_order(mode):
    image = Image.new("I;16", (3, 2), 257 * 90)
    if mode != "I;16":
        order = ">u2" if mode == "I;16B" else "<u2"
        data = np.full((2, 3), 257 * 90, order).tobytes()
        image = Image.frombytes(mode, (3, 2), data)
    assert pixel(image) == (90, 90, 90)


def test_a_dark_16_bit_picture_stays_dark():
    dark = np.full((4, 4), 200, np.uint16)
    assert pixel(encoded(Image.fromarray(dark), "PNG")) == (1, 1, 1)
    pgm = b"P5 2 2 65535\n" + struct.pack(">4H", 200, 200, 200, 200)
    assert pixel(pgm) == (1, 1, 1)


def test_12_bit_tiff_is_scaled_by_its_depth():
    assert pixel(tiff(12, b"\xff\xff\xff" * 4, 4, 2)) == (255, 255, 255)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.0, 0.5, 1.0], [0, 128, 255]),
        ([0.0, 51.0, 255.0], [0, 51, 255]),
        ([0.0, 257.0, 65535.0], [0, 1, 255]),
        ([-1.0, 0.0, 1.0], [0, 128, 255]),
        ([0.0, 1e6, 2e6], [0, 128, 255]),
        ([np.nan, 0.5, 1.0], [0, 128, 255]),
        ([-np.inf, 0.2, np.inf], [0, 51, 255]),
        ([np.nan, np.nan, np.nan], [0, 0, 0]),
        ([-5.0, -5.0, -5.0], [255, 255, 255]),
    ],
)
def test_floats_take_the_smallest_range_that_holds_them(values, expected):
    image = Image.fromarray(np.array([values], np.float32))
    found = np.asarray(decode_image(encoded(image, "TIFF")))[0, :, 0]
    assert found.tolist() == expected


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0, 1, 255], [0, 1, 255]),
        ([0, 257, 65535], [0, 1, 255]),
        ([0, 65536, 131072], [0, 128, 255]),
        ([-100, 0, 100], [0, 128, 255]),
    ],
)
def test_integers_take_the_smallest_range_that_holds_them(values, expected):
    image = Image.fromarray(np.array([values], np.int32))
    found = np.asarray(decode_image(encoded(image, "TIFF")))[0, :, 0]
    assert found.tolist() == expected


def png(depth: int, color: int, row: bytes, *chunks: tuple[bytes, bytes]) -> bytes:
    """A PNG of one row with one pixel."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", 1, 1, depth, color, 0, 0, 0)
    parts = [(b"IHDR", header), *chunks, (b"IDAT", zlib.compress(b"\0" + row)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)


def test_colour_keys_of_16_bit_files_are_transparent():
    background = (1, 2, 3)
    grey = struct.pack(">H", 5000)
    assert pixel(png(16, 0, grey, (b"tRNS", grey)), background=background) == background
    assert pixel(png(16, 0, grey, (b"tRNS", b"\0\0")), background=background) == (19, 19, 19)
    color = struct.pack(">3H", 5000, 60000, 300)
    assert pixel(png(16, 2, color, (b"tRNS", color)), background=background) == background


def test_a_palette_with_alpha_is_composited():
    image = Image.new("P", (2, 2), 0)
    image.putpalette([255, 0, 0, 0], "RGBA")
    assert pixel(image) == (255, 255, 255)


@pytest.mark.parametrize("mode", ["RGBa", "La", "PA", "RGBX", "YCbCr", "HSV", "CMYK", "LAB", "1"])
def test_every_mode_of_pillow_becomes_rgb(mode):
    image = Image.new(mode, (5, 4))
    assert decode_image(image).mode == "RGB"
    assert decode_image(image).size == (5, 4)


def test_lab_is_converted():
    lab = Image.new("LAB", (4, 4), (255, 128, 128))  # a and b have their zero at 128
    for source in (lab, encoded(lab, "TIFF")):
        assert near(pixel(source), (255, 255, 255))


def test_cmyk_of_jpeg_is_inverted_by_adobes_convention_and_of_tiff_is_not():
    ink = Image.new("CMYK", (16, 16), (0, 255, 255, 0))
    data = encoded(ink, "JPEG", quality=95)
    assert b"Adobe" in data
    assert near(pixel(data), (254, 0, 0))
    assert near(pixel(encoded(ink, "TIFF")), (255, 0, 0))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "TIFF"])
def test_an_rgb_profile_is_applied(kind):
    image = Image.new("RGB", (16, 16), (200, 30, 60))
    options = {"quality": 95, "subsampling": 0} if kind == "JPEG" else {}
    if kind == "WEBP":
        options = {"lossless": True}
    data = encoded(image, kind, icc_profile=swapped_rgb(), **options)
    assert near(pixel(data), (30, 200, 60), 6)
    opened = Image.open(io.BytesIO(data))
    assert pixel(opened) == pixel(data)


def test_profiles_of_transparent_grey_and_palette_pictures():
    color = Image.new("RGBA", (4, 4), (200, 30, 60, 255))
    assert near(pixel(encoded(color, icc_profile=swapped_rgb())), (30, 200, 60), 6)
    palette = color.convert("RGB").convert("P", palette=Image.Palette.ADAPTIVE)
    assert near(pixel(encoded(palette, icc_profile=swapped_rgb())), (30, 200, 60), 6)
    for mode, value in (("L", 55), ("LA", (55, 255))):
        grey = Image.new(mode, (4, 4), value)
        assert near(pixel(encoded(grey, icc_profile=linear_grey())), (128, 128, 128), 4)
    # Transparent parts show the background as it was asked for, not as a profile would turn it.
    clear = Image.new("RGBA", (4, 4), (0, 0, 0, 0))
    data = encoded(clear, icc_profile=swapped_rgb())
    assert pixel(data, background=(9, 99, 199)) == (9, 99, 199)


def test_a_cmyk_profile_is_applied():
    for kind in ("TIFF", "JPEG"):
        white = encoded(Image.new("CMYK", (16, 16), (0, 255, 255, 255)), kind)
        assert near(pixel(white), (0, 0, 0))  # without a profile all inks count
        options = {"icc_profile": one_ink_cmyk()}
        white = encoded(Image.new("CMYK", (16, 16), (0, 255, 255, 255)), kind, **options)
        assert near(pixel(white), (255, 255, 255), 4)


@pytest.mark.parametrize(
    "profile",
    [
        *(b"no profile", b"\0" * 200, swapped_rgb()[:300], linear_grey(), one_ink_cmyk()),
        swapped_rgb().replace(b"rXYZ", b"rXYY"),
    ],
)
def test_a_profile_that_cannot_be_used_is_ignored(profile):
    image = Image.new("RGB", (4, 4), (200, 30, 60))
    assert pixel(encoded(image, icc_profile=profile)) == (200, 30, 60)
    image.info["icc_profile"] = "text"
    assert pixel(image) == (200, 30, 60)


def test_an_srgb_profile_changes_nothing():
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    array = np.random.default_rng(0).integers(0, 256, (9, 9, 3), dtype=np.uint8)
    data = encoded(Image.fromarray(array), icc_profile=profile)
    assert np.array_equal(np.asarray(decode_image(data)), array)


def icon(width: int, picture: bytes) -> bytes:
    """An ICO file that announces a square of `width` and holds one picture."""
    entry = struct.pack("<BBBBHHII", width, width, 0, 0, 1, 32, len(picture), 22)
    return struct.pack("<HHH", 0, 1, 1) + entry + picture


def test_a_container_that_understates_its_picture_is_refused(tmp_path):
    assert decode_image(icon(16, one_colour_png(16))).size == (16, 16)
    liar = icon(16, one_colour_png(200))
    path = tmp_path / "liar.ico"
    path.write_bytes(liar)
    for source in (liar, path):
        with pytest.raises(ImageError, match="200 x 200") as caught:
            decode_image(source, max_pixels=199 * 200)
        assert caught.value.reason == "too_large"
    old_bitmap = struct.pack("<IHHHH", 12, 60, 60, 1, 24) + bytes(60 * 60 * 3)
    for bitmap in (encoded(Image.new("RGB", (60, 60)), "DIB"), old_bitmap):
        with pytest.raises(ImageError, match="60 x 30"):
            decode_image(icon(16, bitmap), max_pixels=1000)
    large = encoded(Image.new("RGB", (64, 64)), "JPEG2000")
    header = large.index(b"ihdr") + 4
    small = large[:header] + struct.pack(">II", 8, 8) + large[header + 8 :]
    with pytest.raises(ImageError, match="64 x 64") as caught:
        decode_image(small, max_pixels=1000)
    assert caught.value.reason == "too_large"


def test_a_callers_animation_stays_at_its_frame():
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "lime", "blue")]
    opened = Image.open(
        io.BytesIO(encoded(frames[0], "GIF", save_all=True, append_images=frames[1:]))
    )
    opened.seek(1)
    assert pixel(opened) == (255, 0, 0)
    assert opened.tell() == 1
    assert opened.convert("RGB").getpixel((0, 0)) == (0, 255, 0)


def test_heic_with_its_package():
    package = pytest.importorskip("pillow_heif")
    image = Image.new("RGB", (64, 48), (200, 30, 60))
    image.paste((0, 0, 0), (0, 0, 16, 48))
    buffer = io.BytesIO()
    package.from_pillow(image).save(buffer, quality=95)
    found = decode_image(buffer.getvalue())
    assert found.size == (64, 48)
    assert near(found.getpixel((40, 24)), (200, 30, 60), 8)
    assert near(found.getpixel((4, 24)), (0, 0, 0), 8)
    for end in range(0, len(buffer.getvalue()), 97):
        with pytest.raises(ImageError):
            decode_image(buffer.getvalue()[:end])


@pytest.mark.skipif(
    "avif" not in features.modules or not features.check("avif"), reason="this Pillow has no AVIF"
)
def test_avif():
    data = encoded(Image.new("RGBA", (32, 16), (200, 30, 60, 255)), "AVIF", quality=95)
    assert near(pixel(data), (200, 30, 60), 8)


def test_pipes_and_devices_are_no_images(tmp_path):
    pipe = tmp_path / "pipe.png"
    os.mkfifo(pipe)
    with pytest.raises(ImageError, match="no regular file"):
        decode_image(pipe)


def test_a_variant_that_pillow_does_not_know_is_unsupported():
    data = bytearray(encoded(Image.new("RGB", (4, 4)), "BMP"))
    data[28:30] = struct.pack("<H", 30000)  # bits per pixel
    with pytest.raises(ImageError) as caught:
        decode_image(bytes(data))
    assert caught.value.reason == "unsupported"


def test_running_out_of_memory_is_too_large(monkeypatch):
    def no_memory(*_):
        raise MemoryError

    monkeypatch.setattr(Image.Image, "load", no_memory)
    with pytest.raises(ImageError, match="does not fit into memory") as caught:
        decode_image(Image.new("RGB", (4, 4)))
    assert caught.value.reason == "too_large"


def test_a_jpeg_2000_file_is_read_by_path(tmp_path):
    # Its decoder reads from the file's descriptor, which the size check must not have moved.
    path = tmp_path / "picture.jp2"
    Image.new("RGB", (64, 64), (10, 200, 30)).save(path, irreversible=False)
    assert pixel(path) == (10, 200, 30)


def test_the_result_has_no_metadata():
    exif = Image.Exif()
    exif[0x0112] = 6
    for options in ({}, {"exif": exif}, {"icc_profile": swapped_rgb()}):
        image = decode_image(encoded(Image.new("RGB", (4, 4)), "JPEG", dpi=(72, 72), **options))
        assert image.info == {}
        assert not image.getexif()
