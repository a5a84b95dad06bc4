"""`validate`: every fault that training would meet, before it does, and what there is.

Notable:
- records are read by the functions of the stream: `read_sample`, `read_record` and `decode_image`;
  nothing is parsed here;
- faults are handed on as they are found; of the samples only a hash is kept.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from conceptmoe_vl.images import ImageError
from conceptmoe_vl.prompts import Picture, Turn
from data_pipelines.checking import ShardChecks
from data_pipelines.encoding import with_pictures
from data_pipelines.importing import image_folder
from data_pipelines.layouts import LAYOUTS, EncodedImage, ImageFolder, check_row
from data_pipelines.layouts.rows import JSON_SUFFIXES, FileError, folder_entries
from data_pipelines.records import RecordError, content_hash
from data_pipelines.shards import (
    IndexedSample,
    ShardReader,
    expand_patterns,
    read_sample,
    scan_shard,
)

REMEDIES = {
    "bad_json": "write one JSON object a record, in UTF-8",
    "missing_field": "add it",
    "bad_field": "correct its value",
    "bad_role": "use the roles of docs/data.md",
    "bad_order": "put at most one system turn first, then user and assistant in turn",
    "bad_content": "give text, or a list of text and image parts, in UTF-8",
    "no_answer": "add an answer, or leave the record out",
    "empty_answer": "write the answer; training would teach the model to say nothing",
    "image_count": "give as many images as placeholders, numbered from 0",
    "repeated_member": "keep one of the two",
    "truncated_shard": "copy the shard again",
    "bad_index": "write it again by python -m data_pipelines index",
    "bad_manifest": "copy the shards again, or write it again by index --manifest",
    "outside_folder": "use paths inside the folder, or name the images' folder with --images",
    "missing": "put the file there, or name the images' folder with --images",
    "empty": "write the file again",
    "not_an_image": "write it as JPEG, PNG or WebP",
    "truncated": "copy or download the picture again",
    "damaged": "write the picture again",
    "too_large": "make the picture smaller",
    "unsupported": "convert the picture to PNG",
}
"""What to do, by the reason of a fault."""


class Fault(NamedTuple):
    """One fault.

    Fields:
        row: from 1; None in shards, where `key` names the sample. Both None: the whole file.
        field: field of the record or member of the sample; empty: the record as a whole.
    """

    file: str
    row: int | None
    key: str | None
    field: str
    reason: str
    message: str
    remedy: str

    def line(self) -> str:
        place = "" if self.row is None else f", row {self.row}"
        place += "" if self.key is None else f", key '{self.key}'"
        field = f", field '{self.field}'" if self.field else ""
        return f"{self.file}{place}{field}: {self.reason}: {self.message}. Remedy: {self.remedy}"


@dataclasses.dataclass
class Counts:
    """What was found.

    Fields:
        samples: all, faulty ones too.
        tokens: of the sound samples; None without a tokenizer. So is `over_length`.
        over_length: sound samples of more than `max_tokens` tokens, which training drops.
        duplicates: sound samples whose turns and images were there before.
        faults: by reason.
    """

    samples: int = 0
    images: int = 0
    tokens: int | None = None
    over_length: int | None = None
    duplicates: int = 0
    faults: Counter[str] = dataclasses.field(default_factory=Counter)

    def as_mapping(self) -> dict[str, int]:
        """The counts by name; without tokens where there was no tokenizer."""
        named = {
            "samples": self.samples,
            "images": self.images,
            "tokens": self.tokens,
            "over_length": self.over_length,
            "duplicates": self.duplicates,
            "fault_count": self.faults.total(),
        }
        return {name: value for name, value in named.items() if value is not None}


class _Sample(NamedTuple):
    """Fields: `load` gives the turns, and encoded images and pixels by member; raises the errors
    that count as faults."""

    file: str
    row: int | None
    key: str | None
    load: Callable[[], tuple[list[Turn], dict[str, bytes], dict[str, Any]]]


def validate(
    paths: Sequence[str],
    on_fault: Callable[[Fault], None],
    *,
    layout: str = "messages",
    images: Path | None = None,
    count_tokens: Callable[[list[Turn]], int] | None = None,
    max_tokens: int = 4096,
) -> Counts:
    """Reads every record and decodes every image of shards and of files of a layout.

    Args:
        paths: tar files, folders of them and patterns; or files of `layout` (JSON, JSONL, parquet).
        images: the folder that paths in records are relative to; None: the folder of each file.
        count_tokens: tokens of turns whose pictures are `[H, W, 3]` uint8 arrays.

    Raises:
        UserError: a path matches nothing or cannot be read.
    """
    counts = Counts()
    if count_tokens is not None:
        counts.tokens = counts.over_length = 0
    seen: set[bytes] = set()

    def fault(file: str, row: int | None, key: str | None, error: Any) -> None:
        counts.faults[error.reason] += 1
        field = getattr(error, "field", "")
        remedy = REMEDIES[error.reason]
        on_fault(Fault(file, row, key, field, error.reason, str(error), remedy))

    for path in paths:
        before = counts.samples + counts.faults.total()
        try:
            for sample in _samples(path, layout, images, fault):
                counts.samples += 1
                try:
                    turns, encoded, pixels = sample.load()
                    _check_answers(turns)
                    length = 0
                    if count_tokens is not None:
                        length = count_tokens(with_pictures(turns, pixels.__getitem__))
                except (RecordError, ImageError) as error:
                    fault(sample.file, sample.row, sample.key, error)
                else:
                    _count(counts, seen, turns, encoded, length, max_tokens)
        except FileError as error:
            fault(error.file, None, None, error)
        if counts.samples + counts.faults.total() == before:
            fault(path, None, None, RecordError("empty", "there is no sample"))
    return counts


def _check_answers(turns: list[Turn]) -> None:
    """Training takes an answer without text for what it is; a data set that holds one is at fault.

    Raises:
        RecordError: empty_answer, with the message's number.
    """
    for number, turn in enumerate(turns):
        if turn.role == "assistant" and not any(
            isinstance(part, Picture) or part.strip() for part in turn.parts
        ):
            raise RecordError(
                "empty_answer",
                f"'messages': the answer in message {number} is empty",
                f"messages[{number}].content",
            )


def _count(
    counts: Counts,
    seen: set[bytes],
    turns: list[Turn],
    encoded: dict[str, bytes],
    length: int,
    max_tokens: int,
) -> None:
    counts.images += len(encoded)
    if counts.tokens is not None and counts.over_length is not None:
        counts.tokens += length
        counts.over_length += length > max_tokens
    digest = content_hash(turns, encoded)
    counts.duplicates += digest in seen
    seen.add(digest)


def _samples(
    path: str, layout: str, images: Path | None, fault: Callable[..., None]
) -> Iterator[_Sample]:
    if layout == "img2dataset" or _holds_rows(Path(path)):
        folder = ImageFolder(image_folder(Path(path), images))
        for row in LAYOUTS[layout].rows(Path(path)):
            yield _Sample(row.file, row.number, row.key, partial(_load_row, layout, row, folder))
        return
    yield from _shard_samples(path, fault)


def _shard_samples(path: str, fault: Callable[..., None]) -> Iterator[_Sample]:
    """By the headers of the shards: their indexes and manifests are what is checked."""
    checks = ShardChecks(lambda file, error: fault(file, None, None, error))
    with contextlib.closing(ShardReader()) as reader:
        for shard in expand_patterns([path]):
            samples, damage = scan_shard(shard)
            for indexed in samples:
                load = partial(_load_shard_sample, reader, indexed)
                yield _Sample(shard, None, indexed.key, load)
            if damage is None:
                checks.add(shard, samples)
            else:
                fault(shard, None, None, RecordError("truncated_shard", damage))
    checks.finish(whole=Path(path).is_dir())


def _holds_rows(path: Path) -> bool:
    suffixes = (*JSON_SUFFIXES, ".parquet", ".txt")
    if path.is_dir():
        found = {entry.suffix.lower() for entry in folder_entries(path)}
        return ".tar" not in found and not found.isdisjoint(suffixes)
    return path.suffix.lower() in suffixes


def _load_row(layout: str, row: Any, folder: ImageFolder) -> Any:
    checked = check_row(LAYOUTS[layout], row, folder, "validate")
    encoded = dict(zip(checked.pixels, (data for _, data in checked.images), strict=True))
    pixels = {member: np.asarray(image) for member, image in checked.pixels.items()}
    return checked.conversation.turns, encoded, pixels


def _load_shard_sample(reader: ShardReader, indexed: IndexedSample) -> Any:
    conversation = read_sample(reader, indexed)
    encoded = {name: reader.read(indexed, name) for name in conversation.image_members}
    pixels = {
        name: np.asarray(EncodedImage(name, data, name).decode()) for name, data in encoded.items()
    }
    return conversation.turns, encoded, pixels
