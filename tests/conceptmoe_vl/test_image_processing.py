"""Size policies, normalisation and patches of the image processor."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from timm.data.naflex_transforms import patchify_image

from conceptmoe_vl.configuration import VisionConfig
from conceptmoe_vl.image_processing import (
    ConceptMoEVLImageProcessor,
    DecodedImage,
    collate_images,
)
from conceptmoe_vl.images import ImageError
from conceptmoe_vl.tiling import choose_tiles


def picture(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)


def test_fixed_pixels_are_normalised_and_placed_channels_first():
    processor = ConceptMoEVLImageProcessor(
        image_size=16, patch_size=8, image_mean=(0.1, 0.2, 0.3), image_std=(0.5, 0.6, 0.7)
    )
    array = picture(16, 16)
    processed = processor.process(array)
    expected = (array / 255 - np.array([0.1, 0.2, 0.3])) / np.array([0.5, 0.6, 0.7])
    torch.testing.assert_close(
        processed.pixels, torch.from_numpy(expected.transpose(2, 0, 1)).float()
    )
    assert processed.grid == (2, 2)
    assert processed.pixels.is_contiguous()


def test_a_decoded_picture_is_taken_as_it_is():
    """Also where the processor's own limit is below that of whoever decoded it."""
    processor = ConceptMoEVLImageProcessor(image_size=16, patch_size=8, max_pixels=100)
    array = picture(20, 30)
    decoded = processor.process(DecodedImage(Image.fromarray(array)))
    assert torch.equal(decoded.pixels, processor.process(array).pixels)
    with pytest.raises(ImageError, match="too large"):
        processor.process(Image.fromarray(array))


def test_fixed_pictures_of_any_size_give_one_square():
    processor = ConceptMoEVLImageProcessor(image_size=32, patch_size=8, downsample=2)
    batch = processor([Image.fromarray(picture(*size)) for size in ((10, 50), (64, 3))])
    assert batch["pixel_values"].shape == (2, 3, 32, 32)
    assert batch["image_grid_hw"].tolist() == [[2, 2], [2, 2]]
    assert "patch_coord" not in batch


def test_native_patches_are_timms():
    processor = ConceptMoEVLImageProcessor("native", patch_size=8, max_patches=64)
    processed = processor.process(picture(32, 48))
    pixels = torch.from_numpy(picture(32, 48)).permute(2, 0, 1) / 255 * 2 - 1
    patches, coord, _ = patchify_image(pixels, (8, 8))
    torch.testing.assert_close(processed.pixels, patches)
    assert torch.equal(processed.coord, coord)
    assert processed.grid == (4, 6)


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 5000),
    st.integers(1, 5000),
    st.sampled_from([(16, 1), (16, 2), (14, 3)]),
    st.integers(9, 1024),
)
def test_native_sizes_keep_to_the_budget(height, width, cells, max_patches):
    patch, downsample = cells
    processor = ConceptMoEVLImageProcessor(
        "native", patch_size=patch, downsample=downsample, max_patches=max_patches
    )
    tall, wide = processor.target_size(height, width)
    cell = patch * downsample
    assert tall % cell == wide % cell == 0
    assert tall >= cell
    assert wide >= cell
    assert (tall // patch) * (wide // patch) <= max_patches
    assert tall <= max(height + cell / 2, cell)  # never enlarged, but for rounding
    assert wide <= max(width + cell / 2, cell)


def test_native_pictures_are_padded_to_the_largest():
    processor = ConceptMoEVLImageProcessor("native", patch_size=8, downsample=2, max_patches=64)
    small, large = processor.process(picture(16, 16)), processor.process(picture(32, 64))
    batch = collate_images([small, large])
    assert batch["pixel_values"].shape == (2, 32, 8 * 8 * 3)
    assert batch["patch_valid"].sum(1).tolist() == [4, 32]
    assert batch["image_grid_hw"].tolist() == [[1, 1], [2, 4]]
    assert torch.equal(batch["patch_coord"][1], large.coord)
    assert not batch["pixel_values"][0, 4:].any()


@pytest.mark.parametrize(
    ("size", "most", "grid"),
    [
        ((50, 50), 12, (1, 1)),  # small: one tile, whatever the shape
        ((40, 90), 12, (1, 1)),
        ((120, 120), 12, (1, 1)),
        ((200, 200), 12, (2, 2)),
        ((200, 200), 3, (1, 1)),
        ((300, 300), 6, (2, 2)),
        ((45, 450), 12, (1, 5)),  # not (1, 10): no pixels are made up
        ((100, 300), 12, (1, 3)),
        ((310, 100), 12, (3, 1)),
        ((100, 140), 12, (1, 1)),
        ((100, 150), 12, (1, 2)),
        ((1000, 1400), 12, (3, 4)),
        ((1000, 1400), 6, (2, 3)),
        ((100, 5000), 6, (1, 6)),
        ((500, 2000), 12, (2, 6)),  # not (1, 4): all tiles are needed
    ],
)
def test_the_grid_of_tiles_changes_the_sides_least(size, most, grid):
    assert choose_tiles(*size, 100, most) == grid
    assert choose_tiles(*size[::-1], 100, most) == grid[::-1]


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 12))
def test_no_grid_of_tiles_fits_better(height, width, most):
    rows, columns = choose_tiles(height, width, 224, most)

    def factor(r, c):
        scales = (r * 224 / height, c * 224 / width)
        return max(max(scale, 1 / scale) for scale in scales)

    assert rows * columns <= most
    for r in range(1, most + 1):
        for c in range(1, most // r + 1):
            assert factor(rows, columns) <= factor(r, c) * (1 + 1e-8)


def test_tiles_are_the_picture_and_a_thumbnail_stands_before_them():
    processor = ConceptMoEVLImageProcessor("tiles", 16, patch_size=8, max_tiles=6)
    fixed = ConceptMoEVLImageProcessor("fixed", 16, patch_size=8)
    array = picture(32, 48)
    processed = processor.process(array)
    assert processed.planes == ((2, 2), (4, 6))
    assert processed.num_tokens == 4 + 24
    assert processed.pixels.shape == (7, 3, 16, 16)
    torch.testing.assert_close(processed.pixels[0], fixed.process(array).pixels)
    whole = torch.from_numpy(array).permute(2, 0, 1) / 255 * 2 - 1
    for row in range(2):
        for column in range(3):
            tile = whole[:, 16 * row : 16 * (row + 1), 16 * column : 16 * (column + 1)]
            torch.testing.assert_close(processed.pixels[1 + 3 * row + column], tile)


def test_pictures_of_one_tile_have_no_thumbnail():
    processor = ConceptMoEVLImageProcessor("tiles", 16, patch_size=8, max_tiles=6)
    small, large = picture(10, 14), picture(16, 33)
    batch = processor([small, Image.fromarray(large), small])
    assert batch["image_grid_hw"].tolist() == [[2, 2], [2, 2], [2, 4], [2, 2]]
    assert batch["pixel_values"].shape == (1 + 3 + 1, 3, 16, 16)
    assert torch.equal(batch["pixel_values"][0], batch["pixel_values"][4])
    assert processor.process(small).planes == ((2, 2),)


def test_no_pictures_give_no_arguments():
    assert collate_images([]) == {}


def test_geometry_comes_from_the_tower():
    vision = VisionConfig(
        model="vit_tiny_patch16_224", image_size=64, downsample=2, mean=[0.1] * 3, std=[0.2] * 3
    )
    processor = ConceptMoEVLImageProcessor.from_vision_config(vision)
    assert (processor.patch_size, processor.downsample, processor.image_size) == (16, 2, 64)
    assert processor.image_mean == [0.1] * 3


def test_a_text_only_model_refuses_pictures():
    processor = ConceptMoEVLImageProcessor.from_vision_config(None)
    with pytest.raises(ValueError, match="takes no images"):
        processor.process(picture(8, 8))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size_policy": "square"}, "'square'; choose fixed, tiles or native"),
        ({"size_policy": "tiles", "image_size": 100}, "image_size 100 .* take 96"),
        ({"size_policy": "tiles", "max_tiles": 0}, "max_tiles is 0"),
        ({"image_size": 100, "patch_size": 16}, "image_size 100 .* 16 x 1 = 16; take 96"),
        ({"size_policy": "native", "downsample": 4, "max_patches": 15}, "max_patches 15"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ConceptMoEVLImageProcessor(**options)


def test_arrays_of_another_kind_are_refused():
    with pytest.raises(ValueError, match=r"\[3, 8, 8\] float64"):
        ConceptMoEVLImageProcessor().process(np.zeros((3, 8, 8)))
