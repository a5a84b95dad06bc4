"""One sample of a source to tokens and pixels; a pure function of seed, epoch and sample."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from conceptmoe_vl.image_processing import DecodedImage
from conceptmoe_vl.images import ImageError, decode_image
from conceptmoe_vl.processing import ConceptMoEVLProcessor, EncodedSample
from conceptmoe_vl.prompts import Picture, Turn
from data_pipelines.augment import AUGMENTATIONS
from data_pipelines.config import DataConfig
from data_pipelines.over_length import is_document, split, truncated
from data_pipelines.records import Conversation, RecordError, pick_questions
from data_pipelines.sampling import Place, RawSample, generator, is_held_out
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


_TOKEN_BYTES = 80  # id and label: two pointers in lists and two integers


@dataclasses.dataclass(frozen=True)
class Document:
    """An encoded sample, or a piece of one, with the sample's name and source.

    Fields:
        over_length: what was done to make it fit: truncated | split; empty: nothing.
    """

    sample: EncodedSample
    key: str
    source: str
    over_length: str = ""

    def __len__(self) -> int:
        return len(self.sample.input_ids)

    @property
    def num_bytes(self) -> int:
        """Memory that it takes, about; depends on the sample alone."""
        images = self.sample.images
        coords = sum(image.coord.nbytes for image in images if image.coord is not None)
        return _TOKEN_BYTES * len(self) + coords + sum(image.pixels.nbytes for image in images)


def with_pictures(turns: list[Turn], pixels: Callable[[str], Any]) -> list[Turn]:
    """The turns with `pixels(member)` in place of the members' names, in reading order."""
    return [_with_pictures(turn, pixels) for turn in turns]


def _with_pictures(turn: Turn, pixels: Callable[[str], Any]) -> Turn:
    if not any(isinstance(part, Picture) for part in turn.parts):
        return turn
    parts = [
        Picture(pixels(part.image)) if isinstance(part, Picture) else part for part in turn.parts
    ]
    return Turn(turn.role, tuple(parts))


def without_pictures(turns: list[Turn]) -> list[Turn]:
    """The texts of the turns alone."""
    return [
        Turn(turn.role, tuple(part for part in turn.parts if not isinstance(part, Picture)))
        for turn in turns
    ]


Encoded = tuple[Document, ...] | Skipped


@dataclasses.dataclass(frozen=True)
class _Begun:
    """A sample whose record and files have been read.

    Fields:
        found: its shard, key and name. files: encoded pictures by member.
    """

    found: Any
    turns: list[Turn]
    files: dict[str, bytes]
    rng: _Random
    source: str


def _where(found: Any) -> str:
    return f"shard '{found.shard}', key '{found.key}'"


def _damaged(found: Any, error: RecordError | ImageError) -> Skipped:
    return Skipped(error.reason, f"{_where(found)}: {error}", fault=True)


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

    def encode(self, place: Place) -> Encoded:
        """The sample at this place, as its epoch sees it.

        Returns:
            One document, or the pieces of a split one; each of at most `tokens_per_batch` tokens.
            None of them where the sample is of the other split.
        """
        return self._finished(self._begun(place))

    def encode_all(self, places: Sequence[Place]) -> list[Encoded]:
        """The samples at these places: all records are read before the first picture is decoded.

        A decoded picture empties the processor's caches, and reading a record behind it takes twice
        its time.
        """
        return [self._finished(begun) for begun in [self._begun(place) for place in places]]

    def _begun(self, place: Place) -> _Begun | Encoded:
        found, reader = self._find(place)
        config = self.config
        held_out = config.held_out > 0 and is_held_out(found.key, config.held_out)
        is_lost = place.raw is not None and place.raw.reason  # its key is not known
        if held_out != (config.split == "held_out") and not is_lost:
            return ()
        try:
            conversation = read_sample(reader, found)
            rng = _Random(config.seed, place)
            turns = self._choose_questions(conversation, rng)
            files = {name: reader.read(found, name) for name in conversation.image_members}
        except RecordError as error:
            return _damaged(found, error)
        source = self.names[place.source].get(found.shard, conversation.source)
        return _Begun(found, turns, files, rng, source)

    def _finished(self, begun: _Begun | Encoded) -> Encoded:
        if not isinstance(begun, _Begun):
            return begun
        found, turns = begun.found, begun.turns
        try:
            filled = with_pictures(
                turns, lambda member: self._pixels(begun.files[member], member, begun.rng)
            )
            sample = self.processor.encode_turns(filled)
        except (RecordError, ImageError) as error:
            return _damaged(found, error)
        return self._documents(sample, turns, _where(found), found.name, begun.source)

    def _find(self, place: Place) -> tuple[Any, Any]:
        """A sample and what reads its members: by offset, or those that came with the place."""
        if place.raw is not None:
            return place.raw, RawReader()
        samples = self.samples[place.source]
        assert samples is not None
        return samples[place.number], self._reader

    def _documents(
        self, sample: EncodedSample, turns: list[Turn], where: str, key: str, source: str
    ) -> Encoded:
        """A sample that fits, or what `over_length` makes of it."""
        if sample.num_supervised == 0:
            return Skipped("no_supervised", f"{where}: no supervised token", fault=False)
        if len(sample.input_ids) <= self.config.tokens_per_batch:
            return (Document(sample, key, source),)
        pieces, done = self._shortened(sample, turns)
        if not pieces:
            length, limit = len(sample.input_ids), self.config.tokens_per_batch
            return Skipped(
                "too_long",
                f"{where}: {length} tokens with its images, data.tokens_per_batch is {limit}",
                fault=False,
            )
        return tuple(Document(piece, key, source, done) for piece in pieces)

    def _shortened(self, sample: EncodedSample, turns: list[Turn]) -> tuple[list, str]:
        """What `over_length` makes of a sample that is too long: pieces, none to drop it."""
        policy, limit = self.config.over_length, self.config.tokens_per_batch
        if policy == "truncate":
            kept = truncated(sample, limit, self.processor)
            return [] if kept is None else [kept], "truncated"
        if policy == "split" and is_document(turns):
            return split(sample, limit, self.processor) or [], "split"
        return [], ""

    def _choose_questions(self, conversation: Conversation, rng: _Random) -> list[Turn]:
        limit, shuffle = self.config.questions_per_conversation, self.config.shuffle_questions
        if not conversation.independent or not (shuffle or limit):
            return conversation.turns
        questions = len(conversation.turns) // 2  # a system turn makes the number odd
        kept = min(limit or questions, questions)
        if not shuffle and kept == questions:
            return conversation.turns
        order = rng().permutation(questions)[:kept].tolist()
        return pick_questions(conversation, order if shuffle else sorted(order))

    def _pixels(self, data: bytes, member: str, rng: _Random) -> Any:
        background = self.processor.image_processor.background
        image = decode_image(data, background, self.config.max_image_pixels, name=member)
        if self.config.augment == "none":
            return DecodedImage(image)
        augment = AUGMENTATIONS[self.config.augment]
        return augment(np.asarray(image), rng(), self.config.max_shift)

    def close(self) -> None:
        self._reader.close()


class _Random:
    """A sample's random numbers in its epoch: one generator, made at the first call.

    Making one takes 0.1 ms behind the decoding of a picture, and many samples need none.
    """

    __slots__ = ("_made", "_place", "_seed")

    def __init__(self, seed: int, place: Place) -> None:
        self._seed, self._place = seed, place
        self._made: np.random.Generator | None = None

    def __call__(self) -> np.random.Generator:
        if self._made is None:
            place = self._place
            self._made = generator(self._seed, place.epoch, place.number, source=place.source)
        return self._made


class RawReader:
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
