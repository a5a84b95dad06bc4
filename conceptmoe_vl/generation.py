"""How transformers' `generate` drives the two-level cache and hands over images."""

from __future__ import annotations

import itertools
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin
from transformers.generation.logits_process import (
    LogitsProcessorList,
    SuppressTokensLogitsProcessor,
)

from conceptmoe_vl.cache import ConceptCache, check_cache

# The keyword under which this transformers hands the cache around.
_CACHE_NAME = (
    "cache"
    if "cache" in signature(GenerationMixin.prepare_inputs_for_generation).parameters
    else "past_key_values"
)
_IMAGE_INPUTS = ("pixel_values", "image_grid_hw", "patch_coord", "patch_valid")


class ConceptMoEGenerationMixin(GenerationMixin):
    """Overrides of `GenerationMixin` for models with a [`ConceptCache`]."""

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict, *args: Any
    ) -> None:
        name = "cache" if model_kwargs.get("cache") is not None else "past_key_values"
        given = model_kwargs.pop(name, None)
        if generation_config.cache_implementation not in (None, "dynamic"):
            raise ValueError(
                f"cache_implementation='{generation_config.cache_implementation}' is not "
                "supported: this model has its own two-level cache; leave the option out"
            )
        check_cache(given)
        if generation_config.use_cache is False:
            return
        model_kwargs[_CACHE_NAME] = given if given is not None else ConceptCache(self.config)

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        cache: ConceptCache | None = None,
        past_key_values: ConceptCache | None = None,
        attention_mask: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | None = None,
        compression: float | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Inputs of one step: the tokens that the cache does not hold, and the images among them.

        Raises:
            ValueError: the padding is on the right, or stored tokens end inside an image.
        """
        cache = cache if cache is not None else past_key_values
        if attention_mask is not None and not attention_mask[:, -1].all():
            raise ValueError(
                "generation needs padding on the left: the last column of attention_mask has zeros"
            )
        done = 0 if cache is None else cache.get_seq_length()
        inputs: dict[str, Any] = {
            "input_ids": input_ids[:, done:],
            "attention_mask": attention_mask,
            "use_cache": use_cache,
            "logits_to_keep": 1 if logits_to_keep is None else logits_to_keep,
            "compression": compression,
        }
        if cache is not None:
            inputs[_CACHE_NAME] = cache
        grids = kwargs.get("image_grid_hw")
        if grids is not None:
            inputs |= self._images_of_call(input_ids, done, kwargs)
        return inputs

    def _get_logits_processor(self, *args: Any, **kwargs: Any) -> LogitsProcessorList:
        """As transformers', and no image placeholder is ever generated.

        No image would stand behind it.
        """
        processors = super()._get_logits_processor(*args, **kwargs)
        if self.config.image_token_id is not None:
            processors.append(
                SuppressTokensLogitsProcessor([self.config.image_token_id], self.device)
            )
        return processors

    def _images_of_call(
        self, input_ids: Tensor, done: int, kwargs: dict[str, Any]
    ) -> dict[str, Tensor]:
        """The images whose placeholders stand in this call's tokens."""
        if not (input_ids[:, done:] == self.config.image_token_id).any():
            return {}
        rows = self._images_by_row(input_ids, kwargs["image_grid_hw"])
        sizes = kwargs["image_grid_hw"].prod(1).tolist()
        cached = (input_ids[:, :done] == self.config.image_token_id).sum(1).tolist()
        keep = []
        for images, stored in zip(rows, cached, strict=True):
            for image in images:
                if stored <= 0:
                    keep.append(image)
                stored -= sizes[image]
                if -sizes[image] < stored < 0:
                    raise ValueError(
                        "the cached tokens end inside an image; give an image as a whole"
                    )
        return self._chosen_images(kwargs, keep)

    def _chosen_images(self, images: dict[str, Any], chosen: list[int]) -> dict[str, Tensor]:
        """The image inputs of some images, in this order; under tiles with all of their tiles."""
        grids = images["image_grid_hw"]
        entries = self.vision.entries_of(grids.tolist())
        starts = list(itertools.accumulate(entries, initial=0))
        rows = [entry for image in chosen for entry in range(starts[image], starts[image + 1])]
        index = {"image_grid_hw": torch.tensor(chosen, device=grids.device)}
        other = torch.tensor(rows, device=grids.device)
        return {
            name: images[name][index.get(name, other)]
            for name in _IMAGE_INPUTS
            if images.get(name) is not None
        }

    def _images_by_row(self, input_ids: Tensor, image_grid_hw: Tensor) -> list[list[int]]:
        """Which images belong to each row, by counting placeholders.

        Raises:
            ValueError: placeholders and image tokens differ.
        """
        counts = (input_ids == self.config.image_token_id).sum(1).tolist()
        sizes = image_grid_hw.prod(1).tolist()
        rows, image = [], 0
        for row, count in enumerate(counts):
            images = []
            while count > 0 and image < len(sizes):
                count -= sizes[image]
                images.append(image)
                image += 1
            if count:
                raise ValueError(
                    f"row {row} has {counts[row]} image placeholders, "
                    f"which the image grids {sizes} do not add up to"
                )
            rows.append(images)
        return rows

    def _expand_inputs_for_generation(
        self,
        expand_size: int = 1,
        is_encoder_decoder: bool = False,
        input_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Repeats rows for beams and samples; images belong to rows and are repeated with them."""
        images = {name: kwargs.pop(name) for name in _IMAGE_INPUTS if kwargs.get(name) is not None}
        if expand_size > 1 and images:
            assert input_ids is not None  # images come with the ids of their placeholders
            by_row = self._images_by_row(input_ids, images["image_grid_hw"])
            order = [image for row in by_row for _ in range(expand_size) for image in row]
            images = self._chosen_images(images, order)
        ids, kwargs = super()._expand_inputs_for_generation(
            expand_size=expand_size,
            is_encoder_decoder=is_encoder_decoder,
            input_ids=input_ids,
            **kwargs,
        )
        return ids, kwargs | images
