"""One sample of a shard to tokens and pixels; a pure function of seed, epoch and sample."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from conceptmoe_vl.images import ImageError, decode_image
from conceptmoe_vl.processing import ConceptMoEVLProcessor, EncodedSample
from conceptmoe_vl.prompts import Picture, Turn
from data_pipelines.augment import AUGMENTATIONS
from data_pipelines.config import DataConfig
from data_pipelines.records import Conversation, RecordError, pick_questions
from data_pipelines.shards import IndexedSample, ShardReader, read_sample


@dataclasses.dataclass(frozen=True)
class Skipped:
    """A sample that gives no tokens.

    Fields:
        reason: short and stable, for counting.
        message: one line that names shard, key and fault.
        fault: the sample is damaged; False where the configuration leaves it out (too_long,
            no_supervised).
    """

    reason: str
    message: str
    fault: bool


@dataclasses.dataclass(frozen=True)
class Document:
    """An encoded sample with its name and source."""

    sample: EncodedSample
    key: str
    source: str

    def __len__(self) -> int:
        return len(self.sample.input_ids)


def with_pictures(turns: list[Turn], pixels: Callable[[str], Any]) -> list[Turn]:
    """The turns with `pixels(member)` in place of the members' names, in reading order."""
    return [
        Turn(
            turn.role,
            tuple(
                Picture(pixels(part.image)) if isinstance(part, Picture) else part
                for part in turn.parts
            ),
        )
        for turn in turns
    ]


def without_pictures(turns: list[Turn]) -> list[Turn]:
    """The texts of the turns alone."""
    return [
        Turn(turn.role, tuple(part for part in turn.parts if not isinstance(part, Picture)))
        for turn in turns
    ]


class SampleEncoder:
    """Reads, decodes, augments and tokenises samples.

    Args:
        samples: all samples of the data set.
        processor: the model's processor; its background and size policy are used.
    """

    def __init__(
        self,
        config: DataConfig,
        samples: Sequence[IndexedSample],
        processor: ConceptMoEVLProcessor,
    ) -> None:
        self.config = config
        self.samples = samples
        self.processor = processor
        self._reader = ShardReader()

    def encode(self, epoch: int, index: int) -> Document | Skipped:
        """The sample with this number, as this epoch sees it."""
        indexed = self.samples[index]
        where = f"shard '{indexed.shard}', key '{indexed.key}'"
        try:
            conversation = read_sample(self._reader, indexed)
            rng = np.random.Generator(np.random.PCG64([self.config.seed, epoch, index]))
            turns = self._choose_questions(conversation, rng)
            filled = with_pictures(turns, lambda member: self._pixels(indexed, member, rng))
            sample = self.processor.encode_turns(filled)
        except (RecordError, ImageError) as error:
            return Skipped(error.reason, f"{where}: {error}", fault=True)
        length, limit = len(sample.input_ids), self.config.tokens_per_batch
        if length > limit:
            return Skipped(
                "too_long",
                f"{where}: {length} tokens with its images, data.tokens_per_batch is {limit}",
                fault=False,
            )
        if sample.num_supervised == 0:
            return Skipped("no_supervised", f"{where}: no supervised token", fault=False)
        return Document(sample, indexed.name, conversation.source)

    def _choose_questions(self, conversation: Conversation, rng: np.random.Generator) -> list[Turn]:
        limit, shuffle = self.config.questions_per_conversation, self.config.shuffle_questions
        if not conversation.independent or not (shuffle or limit):
            return conversation.turns
        questions = len(conversation.turns) // 2  # a system turn makes the number odd
        kept = min(limit or questions, questions)
        if not shuffle and kept == questions:
            return conversation.turns
        order = rng.permutation(questions)[:kept].tolist()
        return pick_questions(conversation, order if shuffle else sorted(order))

    def _pixels(self, indexed: IndexedSample, member: str, rng: np.random.Generator) -> Any:
        background = self.processor.image_processor.background
        data = self._reader.read(indexed, member)
        image = decode_image(data, background, self.config.max_image_pixels, name=member)
        array = np.asarray(image)
        if self.config.augment != "none":
            array = AUGMENTATIONS[self.config.augment](array, rng, self.config.max_shift)
        return array

    def close(self) -> None:
        self._reader.close()
