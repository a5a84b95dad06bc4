"""Augmentation on `[H, W, 3]` uint8 arrays that keeps answers about shape and colour true.

Never for questions about left and right, text, or anything that a mirror changes.
"""

from __future__ import annotations

import numpy as np


def flip_shift(image: np.ndarray, rng: np.random.Generator, max_shift: int) -> np.ndarray:
    """One of the eight mirrors and quarter turns, then a shift (see `shift`)."""
    turns, mirror = int(rng.integers(4)), bool(rng.integers(2))
    image = np.rot90(image, turns)
    return shift(np.ascontiguousarray(image[:, ::-1] if mirror else image), rng, max_shift)


def mirror_shift(image: np.ndarray, rng: np.random.Generator, max_shift: int) -> np.ndarray:
    """Left and right swapped in half of all cases, then a shift: what is up stays up."""
    mirror = bool(rng.integers(2))
    return shift(np.ascontiguousarray(image[:, ::-1]) if mirror else image, rng, max_shift)


AUGMENTATIONS = {"flip_shift": flip_shift, "mirror_shift": mirror_shift}


def shift(image: np.ndarray, rng: np.random.Generator, max_shift: int) -> np.ndarray:
    """Moves only plain borders out of the frame, so nothing in the picture is ever cut.

    What comes in has the border's colour. A picture without plain borders is not shifted.
    """
    down, right = rng.random(2)
    if max_shift == 0:
        return image
    border = image[0, 0]
    top, bottom, left, wide = (min(side, max_shift) for side in plain_borders(image))
    rows, columns = _drawn(down, top, bottom), _drawn(right, left, wide)
    return image if rows == columns == 0 else _shifted(image, rows, columns, border)


def plain_borders(image: np.ndarray) -> tuple[int, int, int, int]:
    """Rows and columns (top, bottom, left, right) that hold the top left pixel's colour alone."""
    height, width = image.shape[:2]
    differs = image.reshape(height, width * 3) != np.tile(image[0, 0], width)
    rows = np.flatnonzero(differs.any(axis=1))
    columns = np.flatnonzero(differs.any(axis=0)) // 3
    if rows.size == 0:
        return 0, 0, 0, 0
    return (
        int(rows[0]),
        height - 1 - int(rows[-1]),
        int(columns[0]),
        width - 1 - int(columns[-1]),
    )


def _drawn(uniform: float, before: int, behind: int) -> int:
    """A whole shift, uniform over -before .. behind."""
    return int(uniform * (before + behind + 1)) - before


def _shifted(image: np.ndarray, down: int, right: int, border: np.ndarray) -> np.ndarray:
    """Moved by whole pixels; what becomes free has the border's colour."""
    height, width = image.shape[:2]
    moved = np.empty(image.shape, image.dtype)
    moved[:] = border
    to_rows, from_rows = _overlap(down, height)
    to_columns, from_columns = _overlap(right, width)
    moved[to_rows, to_columns] = image[from_rows, from_columns]
    return moved


def _overlap(shift: int, size: int) -> tuple[slice, slice]:
    """Where the kept part lies after and before a shift."""
    kept = size - abs(shift)
    after, before = max(shift, 0), max(-shift, 0)
    return slice(after, after + kept), slice(before, before + kept)
