"""Augmentation moves and mirrors a picture, and never loses a part of it."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipelines.augment import flip_shift, mirror_shift, plain_borders

BACKGROUND, INK = 200, 50


def drawing(top: int, left: int, shape: np.ndarray, size: int = 24) -> np.ndarray:
    image = np.full((size, size, 3), BACKGROUND, np.uint8)
    height, width = shape.shape
    image[top : top + height, left : left + width][shape] = INK
    return image


def crop(image: np.ndarray) -> np.ndarray:
    mask = (image != BACKGROUND).any(2)
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    return mask[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]


SHAPE = np.array([[1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 0, 0]], bool)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 21), st.integers(0, 20), st.integers(0, 10_000), st.integers(0, 30))
def test_the_shape_survives_whole(top, left, seed, max_shift):
    image = drawing(top, left, SHAPE)
    before = image.copy()
    moved = flip_shift(image, np.random.default_rng(seed), max_shift)
    assert np.array_equal(image, before)
    assert moved.shape == image.shape
    mirrors = [np.rot90(side, turns) for side in (SHAPE, SHAPE[:, ::-1]) for turns in range(4)]
    assert any(np.array_equal(crop(moved), mirror) for mirror in mirrors)
    assert (moved == INK).sum() == (image == INK).sum()
    assert ((moved == INK) | (moved == BACKGROUND)).all()


def test_all_mirrors_and_places_occur():
    image = drawing(10, 10, SHAPE)
    rng = np.random.default_rng(0)
    moved = [flip_shift(image, rng, 4) for _ in range(400)]
    assert len({crop(picture).tobytes() + bytes(crop(picture).shape) for picture in moved}) == 8
    tops = {plain_borders(picture)[0] for picture in moved}
    assert tops >= {6, 7, 8, 9, 10, 11, 12, 13, 14}
    assert min(tops) >= 6


def test_mirroring_keeps_what_is_up_up():
    image = drawing(10, 10, SHAPE)
    rng = np.random.default_rng(0)
    moved = [mirror_shift(image, rng, 4) for _ in range(400)]
    seen = {crop(picture).tobytes() for picture in moved}
    assert seen == {SHAPE.tobytes(), SHAPE[:, ::-1].tobytes()}
    assert {plain_borders(picture)[0] for picture in moved} == set(range(6, 15))


def test_photographs_are_mirrored_but_not_shifted():
    photo = np.random.default_rng(0).integers(0, 256, (12, 20, 3), dtype=np.uint8)
    for seed in range(20):
        moved = flip_shift(photo, np.random.default_rng(seed), 8)
        assert sorted(moved.shape) == sorted(photo.shape)
        assert np.array_equal(np.sort(moved, axis=None), np.sort(photo, axis=None))


def test_borders():
    assert plain_borders(drawing(5, 7, SHAPE)) == (5, 16, 7, 13)
    assert plain_borders(np.zeros((4, 4, 3), np.uint8)) == (0, 0, 0, 0)
