"""Small ICC profiles of known effect, written byte by byte (ICC.1:2001-04)."""

from __future__ import annotations

import struct

_WHITE = (0.9642, 1.0, 0.8249)  # D50, the profile connection space's white
# sRGB's primaries, adapted to D50.
_RED, _GREEN, _BLUE = (
    (0.4361, 0.2225, 0.0139),
    (0.3851, 0.7169, 0.0971),
    (0.1431, 0.0606, 0.7141),
)


def _xyz(values: tuple[float, float, float]) -> bytes:
    return b"XYZ \0\0\0\0" + b"".join(struct.pack(">i", round(v * 65536)) for v in values)


def _gamma(value: float) -> bytes:
    return b"curv\0\0\0\0" + struct.pack(">IH", 1, round(value * 256)) + b"\0\0"


def _text(kind: bytes, text: bytes) -> bytes:
    if kind == b"text":
        return b"text\0\0\0\0" + text + b"\0"
    return b"desc\0\0\0\0" + struct.pack(">I", len(text) + 1) + text + bytes(1 + 8 + 3 + 67)


def _profile(space: bytes, connection: bytes, tags: dict[bytes, bytes], kind: bytes) -> bytes:
    tags = {b"desc": _text(b"desc", b"test"), b"cprt": _text(b"text", b"none"), **tags}
    place = 128 + 4 + 12 * len(tags)
    table, body = struct.pack(">I", len(tags)), b""
    for name, data in tags.items():
        data += bytes(-len(data) % 4)
        table += name + struct.pack(">II", place + len(body), len(data))
        body += data
    header = bytearray(128)
    header[:4] = struct.pack(">I", place + len(body))
    header[8:12] = b"\x02\x40\0\0"
    header[12:24] = kind + space + connection
    header[24:36] = struct.pack(">6H", 2000, 1, 1, 0, 0, 0)
    header[36:40] = b"acsp"
    header[68:80] = _xyz(_WHITE)[8:]
    return bytes(header) + table + body


def swapped_rgb() -> bytes:
    """Red and green change places; the curve is a power of 2.2, close to sRGB's."""
    columns = {b"rXYZ": _GREEN, b"gXYZ": _RED, b"bXYZ": _BLUE, b"wtpt": _WHITE}
    tags = {name: _xyz(values) for name, values in columns.items()}
    tags |= dict.fromkeys((b"rTRC", b"gTRC", b"bTRC"), _gamma(2.2))
    return _profile(b"RGB ", b"XYZ ", tags, b"mntr")


def linear_grey() -> bytes:
    """Grey proportional to light: 55 (of 255) is about 128 in sRGB."""
    return _profile(b"GRAY", b"XYZ ", {b"wtpt": _xyz(_WHITE), b"kTRC": _gamma(1.0)}, b"mntr")


def one_ink_cmyk() -> bytes:
    """Only cyan counts, and it is black ink: C = 0 is white, C = 255 black."""
    identity = struct.pack(">9i", 65536, 0, 0, 0, 65536, 0, 0, 0, 65536)
    ramp = bytes(range(256))
    # The first channel varies slowest; CIELAB as lightness 0 to 255 and a, b around 128.
    corners = b"".join(bytes([0 if corner & 8 else 255, 128, 128]) for corner in range(16))
    lut = b"mft1\0\0\0\0" + bytes([4, 3, 2, 0]) + identity + ramp * 4 + corners + ramp * 3
    tags = {b"wtpt": _xyz(_WHITE), b"A2B0": lut}
    return _profile(b"CMYK", b"Lab ", tags, b"prtr")
