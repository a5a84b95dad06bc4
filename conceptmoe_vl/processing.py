"""The processor: conversations with pictures to what the model takes, and back."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoProcessor, BatchFeature
from transformers.processing_utils import ProcessorMixin

from conceptmoe_vl.configuration import ConceptMoEVLConfig
from conceptmoe_vl.errors import UserError
from conceptmoe_vl.image_processing import (
    ConceptMoEVLImageProcessor,
    ProcessedImage,
    collate_images,
)
from conceptmoe_vl.prompts import (
    CHAT_TEMPLATE,
    IGNORED,
    MessageError,
    Picture,
    PromptBuilder,
    Turn,
    read_messages,
)
from conceptmoe_vl.tokenizing import (
    IMAGE,
    add_special_tokens,
    train_tokenizer,
)

__all__ = [
    "CHAT_TEMPLATE",
    "IGNORED",
    "ConceptMoEVLProcessor",
    "EncodedSample",
    "MessageError",
    "add_special_tokens",
    "build_processor",
    "register",
    "train_tokenizer",
]


@dataclass(frozen=True)
class EncodedSample:
    """One conversation as tokens.

    Fields:
        input_ids: with each picture's placeholders.
        labels: the token's own id where it is supervised, else -100; as long as `input_ids`.
        images: the pictures in reading order.
    """

    input_ids: list[int]
    labels: list[int]
    images: list[ProcessedImage] = field(default_factory=list)

    @property
    def num_supervised(self) -> int:
        """Supervised tokens that the model counts: a document's first token has no predecessor."""
        return sum(label != IGNORED for label in self.labels[1:])


class ConceptMoEVLProcessor(ProcessorMixin):
    """Processor of ConceptMoE-VL.

    Args:
        image_processor: a [`ConceptMoEVLImageProcessor`].
        tokenizer: a transformers tokenizer with the special tokens of `conceptmoe_vl.tokenizing`.
        chat_template: Jinja; None takes the tokenizer's own, or this package's shortest one.
    """

    def __init__(
        self, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None
    ) -> None:
        if chat_template is None:
            own = getattr(tokenizer, "chat_template", None)
            chat_template = own if isinstance(own, str) else CHAT_TEMPLATE
        super().__init__(image_processor, tokenizer, chat_template=chat_template)
        self._builder: PromptBuilder | None = None
        self.image_token = IMAGE
        self.image_token_id = self._prompts().image_ids[1]

    def to_dict(self) -> dict[str, Any]:
        values = super().to_dict()
        for name in ("_builder", "image_token", "image_token_id"):
            values.pop(name, None)
        return values

    def _prompts(self) -> PromptBuilder:
        """The builder of the present tokenizer and template (both may be replaced by a caller)."""
        builder = self._builder
        if (
            builder is None
            or builder.tokenizer is not self.tokenizer
            or builder.chat_template != self.chat_template
        ):
            builder = self._builder = PromptBuilder(self.tokenizer, self.chat_template)
        return builder

    @property
    def model_input_names(self) -> list[str]:
        return ["input_ids", "attention_mask", *self.image_processor.model_input_names]

    @property
    def special_token_ids(self) -> dict[str, int]:
        """The token ids that a [`ConceptMoEVLConfig`] needs, by the names of its fields."""
        start, placeholder, end = self._prompts().image_ids
        ids = {
            "image_token_id": placeholder,
            "vision_start_token_id": start,
            "vision_end_token_id": end,
            "pad_token_id": self.tokenizer.pad_token_id,
            "bos_token_id": self.tokenizer.bos_token_id,
            "eos_token_id": self.tokenizer.eos_token_id,
        }
        return {name: value for name, value in ids.items() if value is not None}

    def encode(self, messages: Any, add_generation_prompt: bool = False) -> EncodedSample:
        """One conversation: the prompt builder that every program uses.

        Args:
            messages: `[{"role": "system" | "user" | "assistant", "content": text or parts}]`;
                parts are `{"type": "text", "text": ...}` and `{"type": "image", "image": ...}`
                with a path, bytes, PIL image or `[H, W, 3]` uint8 array.
            add_generation_prompt: end where the answer begins; the last turn is then the user's.

        Raises:
            MessageError: the messages are no conversation.
            ImageError: a picture cannot be decoded.
        """
        turns = read_messages(messages, add_generation_prompt)
        return self.encode_turns(turns, add_generation_prompt)

    def encode_turns(
        self, turns: Sequence[Turn], add_generation_prompt: bool = False
    ) -> EncodedSample:
        """`encode` for messages that `read_messages` has checked already."""
        images = [
            self._process(part)
            for turn in turns
            for part in turn.parts
            if isinstance(part, Picture)
        ]
        counts = [image.num_tokens for image in images]
        ids, labels = self._prompts().build(turns, counts, add_generation_prompt)
        return EncodedSample(ids, labels, images)

    def encode_text(self, text: str, images: Sequence[Any] = ()) -> EncodedSample:
        """A text that a chat template has already rendered: special tokens count.

        Args:
            images: one for each `<|image_pad|>` of the text; processed ones are taken as they are.

        Raises:
            ValueError: image marks and images differ in number.
            ImageError: a picture cannot be decoded.
        """
        processed = [
            image if isinstance(image, ProcessedImage) else self.image_processor.process(image)
            for image in images
        ]
        ids = self._prompts().from_text(text, [image.num_tokens for image in processed])
        return EncodedSample(ids, [IGNORED] * len(ids), processed)

    def text_ids(self, text: str) -> list[int]:
        """Ids of text in which nothing has a special meaning, as answers are tokenised."""
        return list(self._prompts().stretch_ids(text))

    def count_tokens(self, messages: Any, image_tokens: Sequence[int]) -> int:
        """Tokens of the prompt that these messages become, without looking at a picture.

        Args:
            messages: as in `encode`; the last turn is the user's.
            image_tokens: tokens of each picture, in reading order.
        """
        turns = read_messages(messages, add_generation_prompt=True)
        return len(self._prompts().build(turns, image_tokens, add_generation_prompt=True)[0])

    def _process(self, picture: Picture) -> ProcessedImage:
        if picture.image is None:
            raise MessageError(
                "missing_field",
                "an image part names no image; give path, bytes or PIL image at 'image'",
            )
        return self.image_processor.process(picture.image)

    def apply_chat_template(  # type: ignore[override]
        self,
        conversation: Any,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        return_dict: bool = True,
        return_tensors: str | None = "pt",
        padding: bool = True,
        max_length: int | None = None,
        **unsupported: Any,
    ) -> Any:
        """One conversation, or a list of them as one left-padded batch.

        Args:
            chat_template: must be None or the processor's own.
            tokenize: False returns the rendered text, one `<|image_pad|>` an image.
            return_dict: False returns `input_ids` alone.
            return_tensors: "pt"; None leaves ids and mask as lists.
            padding: False refuses conversations of different lengths with "pt".
            max_length: most tokens a conversation may have; a longer one is refused, never cut.

        Returns:
            BatchFeature of input_ids and attention_mask `[B, N]`, and with pictures pixel_values,
            image_grid_hw (and patch_coord, patch_valid), all pictures in reading order, row by row.
        """
        self._refuse_unsupported(chat_template, unsupported)
        several = bool(conversation) and isinstance(conversation[0], (list, tuple))
        conversations = conversation if several else [conversation]
        if not tokenize:
            texts = [self._render(messages, add_generation_prompt) for messages in conversations]
            return texts if several else texts[0]
        samples = [self.encode(messages, add_generation_prompt) for messages in conversations]
        for row, sample in enumerate(samples):
            if max_length is not None and len(sample.input_ids) > max_length:
                raise UserError(
                    f"conversation {row} needs {len(sample.input_ids)} tokens with its images, the "
                    f"limit is {max_length}; shorten it, or raise max_length"
                )
        images = [image for sample in samples for image in sample.images]
        batch = self._to_batch(
            [sample.input_ids for sample in samples], images, return_tensors, padding
        )
        return batch if return_dict else batch["input_ids"]

    def _refuse_unsupported(self, chat_template: str | None, unsupported: dict[str, Any]) -> None:
        if chat_template is not None and chat_template != self.chat_template:
            raise ValueError("set processor.chat_template instead of passing another chat_template")
        for name, value in unsupported.items():
            if value not in (None, False, {}, "auto"):
                raise ValueError(
                    f"apply_chat_template takes no {name}={value!r} here; leave it out"
                )

    def _render(self, messages: Any, add_generation_prompt: bool) -> str:
        turns = read_messages(messages, add_generation_prompt)
        return self._prompts().render(turns, add_generation_prompt)

    def __call__(  # type: ignore[override]
        self,
        images: Any = None,
        text: str | Sequence[str] | None = None,
        return_tensors: str | None = None,
        padding: bool = True,
        add_special_tokens: bool = False,
        **unsupported: Any,
    ) -> BatchFeature:
        """Texts that a chat template has already rendered, with one `<|image_pad|>` an image.

        Args:
            images: an image, a flat list in reading order, or a list per text.
            text: a text or a list of texts, in which special tokens count.
            add_special_tokens: no effect: the template has written all special tokens.

        Raises:
            ValueError: image marks and images differ in number.
        """
        if text is None:
            return self.image_processor(images if images is not None else [])
        texts = [text] if isinstance(text, str) else list(text)
        shown = _flat(images)
        marks = [entry.count(IMAGE) for entry in texts]
        if sum(marks) != len(shown):
            raise ValueError(
                f"the texts hold {sum(marks)} {IMAGE}, but {len(shown)} images are given; "
                "use one each"
            )
        starts = itertools.accumulate(marks, initial=0)
        samples = [
            self.encode_text(entry, shown[start : start + count])
            for entry, start, count in zip(texts, starts, marks, strict=False)
        ]
        ids = [sample.input_ids for sample in samples]
        processed = [image for sample in samples for image in sample.images]
        return self._to_batch(ids, processed, return_tensors, padding)

    def _to_batch(
        self,
        ids: list[list[int]],
        images: Sequence[ProcessedImage],
        return_tensors: str | None,
        padding: bool,
    ) -> BatchFeature:
        if return_tensors not in (None, "pt"):
            raise ValueError(f"return_tensors is {return_tensors!r}; only 'pt' and None exist")
        length = max(map(len, ids))
        if not padding and return_tensors == "pt" and any(len(row) != length for row in ids):
            raise ValueError("the rows differ in length; pass padding=True")
        gaps = [length - len(row) if padding else 0 for row in ids]
        pad = self.tokenizer.pad_token_id
        # Left: generation continues every row at its right end.
        batch: dict[str, Any] = {
            "input_ids": [[pad] * gap + row for gap, row in zip(gaps, ids, strict=True)],
            "attention_mask": [
                [0] * gap + [1] * len(row) for gap, row in zip(gaps, ids, strict=True)
            ],
        }
        if return_tensors == "pt":
            batch = {name: torch.tensor(rows, dtype=torch.int64) for name, rows in batch.items()}
        return BatchFeature({**batch, **collate_images(images)})


def _flat(images: Any) -> list[Any]:
    """An image, a list of images or a list of lists of images as one list, in reading order."""
    if images is None:
        return []
    if isinstance(images, (str, bytes, os.PathLike, np.ndarray, Image.Image)):
        return [images]
    return [image for entry in images for image in _flat(entry)]


def build_processor(
    config: ConceptMoEVLConfig | None,
    tokenizer: Any,
    chat_template: str | None = None,
    **image_options: Any,
) -> ConceptMoEVLProcessor:
    """The processor of a model.

    Args:
        config: whose vision section the pictures are prepared for; None or `vision: null` gives a
            processor that refuses pictures.
        tokenizer: lacking special tokens are added to it.
        image_options: fields of [`ConceptMoEVLImageProcessor`] that differ from the configuration.
    """
    add_special_tokens(tokenizer)
    vision = None if config is None else config.vision
    image_processor = ConceptMoEVLImageProcessor.from_vision_config(vision, **image_options)
    return ConceptMoEVLProcessor(image_processor, tokenizer, chat_template)


def register() -> None:
    """Lets `AutoProcessor` and `AutoImageProcessor` load this package's classes. Repeatable."""
    AutoImageProcessor.register(
        ConceptMoEVLConfig,
        image_processor_classes={
            "pil": ConceptMoEVLImageProcessor,
            "torchvision": ConceptMoEVLImageProcessor,
        },
        exist_ok=True,
    )
    AutoProcessor.register(ConceptMoEVLConfig, ConceptMoEVLProcessor, exist_ok=True)
