"""Pictures of coloured noise."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image


def png(seed: int = 0) -> bytes:
    """A PNG of 16 to 48 pixels a side; the seed says which."""
    rng = np.random.default_rng(seed)
    height, width = rng.integers(16, 49, size=2)
    pixels = rng.integers(0, 256, size=(height, width, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "png")
    return buffer.getvalue()
