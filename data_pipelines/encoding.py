"""One sample of a shard to tokens and pixels; a pure function of seed, epoch and sample."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from conceptmoe_vl.images import ImageError, decode_image
from conceptmoe_vl.processing import ConceptMoEVLProcessor, EncodedSample
from conceptmoe_vl.prompts import Picture, Turn
from data_pipelines.augment import AUGMENTATIONS
from data_pipelines.config import DataConfig
from data_pipelines.records import Conversation, RecordError, pick_questions, read_record
from data_pipelines.shards import IndexedSample, ShardReader


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


class SampleEncoder:
    """Reads, decodes, augments and tokenises samples.

    Args:
        samples: all samples of the data set.
        processor: the model's processor; its background and size policy are used.
    """

    def __init__(
        self, config: DataConfig, samples: list[IndexedSample], processor: ConceptMoEVLProcessor
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
            conversation = self._read(indexed)
            rng = np.random.Generator(np.random.PCG64([self.config.seed, epoch, index]))
            turns = self._choose_questions(conversation, rng)
            sample = self.processor.encode_turns(self._with_pictures(indexed, turns, rng))
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

    def _read(self, indexed: IndexedSample) -> Conversation:
        if indexed.repeated:
            raise RecordError(
                "repeated_member", f"the member '{indexed.repeated[0]}' stands there twice"
            )
        text = self._reader.read(indexed, "json")
        default_source = indexed.shard.rpartition("/")[2].partition("-")[0]
        return read_record(text, indexed.members, default_source)

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

    def _with_pictures(
        self, indexed: IndexedSample, turns: list[Turn], rng: np.random.Generator
    ) -> list[Turn]:
        return [
            Turn(
                turn.role,
                tuple(
                    Picture(self._pixels(indexed, part.image, rng))
                    if isinstance(part, Picture)
                    else part
                    for part in turn.parts
                ),
            )
            for turn in turns
        ]

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
