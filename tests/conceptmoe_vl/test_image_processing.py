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
from conceptmoe_vl.image_processing import ConceptMoEVLImageProcessor, collate_images


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
        ({"size_policy": "tiles"}, "'tiles' does not exist yet; choose fixed or native"),
        ({"size_policy": "square"}, "'square'"),
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
