"""What `stats` counts over all samples of some shards."""

from __future__ import annotations

import dataclasses
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from conceptmoe_vl.images import ImageError, decode_image
from conceptmoe_vl.prompts import Picture, Turn
from data_pipelines.encoding import with_pictures
from data_pipelines.records import Conversation, RecordError
from data_pipelines.shards import ShardIndex, ShardReader, index_shards, read_sample

CountTokens = Callable[[list[Turn]], int]


@dataclasses.dataclass
class Statistics:
    """Counts over the sound samples.

    Fields:
        counts: images, turns, answers, characters, samples without images, and tokens where a
            processor counts them.
        sources: samples by source.
        faults: damaged samples by reason.
        lengths: of each sample, in `unit`s.
        widths, heights: of each image, in pixels.
        unit: tokens | characters.
    """

    index: ShardIndex
    unit: str
    counts: Counter[str] = dataclasses.field(default_factory=Counter)
    sources: Counter[str] = dataclasses.field(default_factory=Counter)
    faults: Counter[str] = dataclasses.field(default_factory=Counter)
    lengths: array = dataclasses.field(default_factory=lambda: array("q"))
    widths: array = dataclasses.field(default_factory=lambda: array("l"))
    heights: array = dataclasses.field(default_factory=lambda: array("l"))

    @property
    def sizes(self) -> Counter[str]:
        """Images by `WIDTHxHEIGHT`."""
        pairs = Counter(zip(self.widths, self.heights, strict=True))
        return Counter({f"{width}x{height}": count for (width, height), count in pairs.items()})

    def add(self, conversation: Conversation, images: Sequence[Any], tokens: int | None) -> None:
        """Counts a sound sample, of these decoded images and so many tokens."""
        parts = [part for turn in conversation.turns for part in turn.parts]
        characters = sum(len(part) for part in parts if not isinstance(part, Picture))
        self.counts["images"] += len(images)
        self.counts["turns"] += len(conversation.turns)
        self.counts["answers"] += sum(turn.role == "assistant" for turn in conversation.turns)
        self.counts["characters"] += characters
        self.counts["without images"] += not images
        if tokens is not None:
            self.counts["tokens"] += tokens
        self.sources[conversation.source] += 1
        self.lengths.append(characters if tokens is None else tokens)
        for image in images:
            self.widths.append(image.width)
            self.heights.append(image.height)


def gather(
    patterns: list[str],
    count_tokens: CountTokens | None = None,
    on_sample: Callable[[int], None] = lambda total: None,
) -> Statistics:
    """Reads every sample and decodes every image.

    Args:
        count_tokens: tokens of turns with decoded images; None counts characters.
        on_sample: called after each sample with the number of all samples.
    """
    index = index_shards(patterns)
    reader = ShardReader()
    found = Statistics(index, "characters" if count_tokens is None else "tokens")
    for sample in index.samples:
        try:
            conversation = read_sample(reader, sample)
            images = {
                name: decode_image(reader.read(sample, name), name=name)
                for name in conversation.image_members
            }
            tokens = None
            if count_tokens is not None:
                tokens = count_tokens(with_pictures(conversation.turns, images.__getitem__))
        except (RecordError, ImageError) as error:
            found.faults[error.reason] += 1
        else:
            found.add(conversation, list(images.values()), tokens)
        on_sample(len(index.samples))
    reader.close()
    return found
