"""One sample of a source to tokens and pixels; a pure function of seed, epoch and sample."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from conceptmoe_vl.images import ImageError, decode_image
from conceptmoe_vl.processing import ConceptMoEVLProcessor, EncodedSample
from conceptmoe_vl.prompts import Picture, Turn
from data_pipelines.augment import AUGMENTATIONS
from data_pipelines.config import DataConfig
from data_pipelines.records import Conversation, RecordError, pick_questions
from data_pipelines.sampling import Place, RawSample, generator, is_held_out
from data_pipelines.shards import IndexedSample, ShardReader, read_sample

_TOKEN_BYTES = 16  # a place in each of two lists; most numbers are shared


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

    @property
    def num_bytes(self) -> int:
        """Memory of its pixels and, roughly, of its tokens."""
        images = sum(image.pixels.nbytes for image in self.sample.images)
        return images + _TOKEN_BYTES * len(self)


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
        samples: of each source, those that are read by offset.
        names: of each source, the data set's name by shard (see `sampling.Source`).
        processor: the model's processor; its background and size policy are used.
    """

    def __init__(
        self,
        config: DataConfig,
        samples: Sequence[Sequence[IndexedSample] | None],
        names: Sequence[Mapping[str, str]],
        processor: ConceptMoEVLProcessor,
    ) -> None:
        self.config = config
        self.samples, self.names = samples, names
        self.processor = processor
        self._reader = ShardReader()

    def encode(self, place: Place) -> tuple[Document, ...] | Skipped:
        """The documents of a sample, as its epoch sees it; none where it is of the other split."""
        sample, reader = self._find(place)
        config = self.config
        held_out = config.held_out > 0 and is_held_out(sample.key, config.held_out)
        if held_out != (config.split == "held_out"):
            return ()
        where = f"shard '{sample.shard}', key '{sample.key}'"
        try:
            conversation = read_sample(reader, sample)
            rng = generator(config.seed, place.epoch, place.number, source=place.source)
            turns = self._choose_questions(conversation, rng)
            filled = with_pictures(
                turns, lambda member: self._pixels(reader.read(sample, member), member, rng)
            )
            encoded = self.processor.encode_turns(filled)
        except (RecordError, ImageError) as error:
            return Skipped(error.reason, f"{where}: {error}", fault=True)
        source = self.names[place.source].get(sample.shard, conversation.source)
        return self._documents(encoded, sample.name, source, where)

    def _find(self, place: Place) -> tuple[Any, Any]:
        """A sample and what reads its members: by offset, or those that came with the place."""
        if place.raw is not None:
            return place.raw, _RawReader()
        samples = self.samples[place.source]
        assert samples is not None
        return samples[place.number], self._reader

    def _documents(
        self, sample: EncodedSample, key: str, source: str, where: str
    ) -> tuple[Document, ...] | Skipped:
        length, limit = len(sample.input_ids), self.config.tokens_per_batch
        if length > limit:
            return Skipped(
                "too_long",
                f"{where}: {length} tokens with its images, data.tokens_per_batch is {limit}",
                fault=False,
            )
        if sample.num_supervised == 0:
            return Skipped("no_supervised", f"{where}: no supervised token", fault=False)
        return (Document(sample, key, source),)

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

    def _pixels(self, data: bytes, member: str, rng: np.random.Generator) -> Any:
        background = self.processor.image_processor.background
        image = decode_image(data, background, self.config.max_image_pixels, name=member)
        array = np.asarray(image)
        if self.config.augment != "none":
            array = AUGMENTATIONS[self.config.augment](array, rng, self.config.max_shift)
        return array

    def close(self) -> None:
        self._reader.close()


class _RawReader:
    """Reads the members of samples whose files are at hand, as `ShardReader` those of shards."""

    def read(self, sample: RawSample, name: str) -> bytes:
        """A member's bytes.

        Raises:
            RecordError: the sample has no such member, or could not be read.
        """
        if sample.reason:
            raise RecordError(sample.reason, sample.message, name)
        if name not in sample.members:
            raise RecordError("missing_field", f"the member '{name}' is missing", name)
        return sample.members[name]
