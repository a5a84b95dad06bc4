"""What `inspect`, `stats` and `show` print."""

from __future__ import annotations

from collections import Counter
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from conceptmoe_vl.errors import UserError
from conceptmoe_vl.images import ImageError, decode_image
from conceptmoe_vl.processing import IGNORED, ConceptMoEVLProcessor
from conceptmoe_vl.prompts import Picture
from data_pipelines.config import DataConfig
from data_pipelines.encoding import SampleEncoder, Skipped
from data_pipelines.records import Conversation, RecordError
from data_pipelines.sampling import Place
from data_pipelines.shards import IndexedSample, ShardIndex, ShardReader, index_shards, read_sample

_SHOWN_CHARACTERS = 60


def _sizes(reader: ShardReader, sample: IndexedSample, conversation: Conversation) -> list[str]:
    images = (
        decode_image(reader.read(sample, name), name=name) for name in conversation.image_members
    )
    return [f"{image.width}x{image.height}" for image in images]


def _first_words(conversation: Conversation) -> str:
    texts = (part for turn in conversation.turns for part in turn.parts if isinstance(part, str))
    return "  ".join(texts)[:_SHOWN_CHARACTERS]


def inspect(patterns: list[str], limit: int, console: Console) -> int:
    """A table of the first samples; returns how many of them are damaged."""
    index = index_shards(patterns)
    reader = ShardReader()
    table = Table("sample", "source", "images", "turns", "text", title=_title(index))
    faults = 0
    for sample in index.samples[:limit]:
        try:
            conversation = read_sample(reader, sample)
            sizes = " ".join(_sizes(reader, sample, conversation)) or "-"
            turns, words = str(len(conversation.turns)), Text(_first_words(conversation))
            table.add_row(Text(sample.name), Text(conversation.source), sizes, turns, words)
        except (RecordError, ImageError) as error:
            faults += 1
            fault = Text(f"{error.reason}: {error}", style="red")
            table.add_row(Text(sample.name), "", "", "", fault)
    console.print(table)
    return faults + _print_damage(index, console)


def stats(patterns: list[str], console: Console) -> int:
    """Counts over all samples; every image is decoded. Returns how many samples are damaged."""
    index = index_shards(patterns)
    reader = ShardReader()
    counts: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    sources: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for sample in index.samples:
        try:
            conversation = read_sample(reader, sample)
            found = _sizes(reader, sample, conversation)
        except (RecordError, ImageError) as error:
            faults[error.reason] += 1
            continue
        parts = [part for turn in conversation.turns for part in turn.parts]
        counts["images"] += len(found)
        counts["turns"] += len(conversation.turns)
        counts["answers"] += sum(turn.role == "assistant" for turn in conversation.turns)
        counts["characters"] += sum(len(part) for part in parts if not isinstance(part, Picture))
        counts["without images"] += not found
        sources[conversation.source] += 1
        sizes.update(found)
    table = Table("what", "count", title=_title(index))
    for name, number in [("shards", len(index.shards)), ("samples", len(index.samples))]:
        table.add_row(name, f"{number:,}")
    for group, label in ((counts, ""), (sources, "source "), (faults, "damaged: ")):
        for name, number in sorted(group.items()):
            table.add_row(Text(label + name), f"{number:,}")
    for name, number in sizes.most_common(5):
        table.add_row(f"images of {name} pixels", f"{number:,}")
    console.print(table)
    return sum(faults.values()) + _print_damage(index, console)


def _title(index: ShardIndex) -> str:
    return f"{len(index.samples):,} samples in {len(index.shards)} shards"


def _print_damage(index: ShardIndex, console: Console) -> int:
    for shard, fault in index.damaged.items():
        console.print(Text(f"shard '{shard}': {fault}", style="red"))
    return len(index.damaged)


def show(patterns: list[str], key: str | None, processor: Any, console: Console) -> None:
    """One sample's tokens; supervised ones are marked, runs of image tokens are shortened.

    Args:
        key: the sample's key; None takes the first one.

    Raises:
        UserError: there is no such sample, or it is damaged.
    """
    index = index_shards(patterns)
    found = [sample for sample in index.samples if key in (None, sample.key, sample.name)]
    if not found:
        raise UserError(f"no sample has the key '{key}'; `inspect` lists the keys")
    config = DataConfig(shards=patterns, tokens_per_batch=2**31)
    result = SampleEncoder(config, [found[:1]], [{}], processor).encode(Place(0, 0, 0))
    if isinstance(result, Skipped):
        raise UserError(f"{result.message} (reason {result.reason})")
    (document,) = result
    sample = document.sample
    console.print(Text(f"{document.key}, source {document.source}", style="bold"))
    console.print(_colored(processor, sample.input_ids, sample.labels))
    grids = " ".join(
        f"{rows}x{columns}" for image in sample.images for rows, columns in image.planes
    )
    console.print(
        f"{len(sample.input_ids)} tokens, {sample.num_supervised} supervised, "
        f"{len(sample.images)} images{f' of {grids} tokens' if grids else ''}"
    )


def _colored(processor: ConceptMoEVLProcessor, ids: list[int], labels: list[int]) -> Text:
    """Each token in brackets; supervised ones in green with double brackets."""
    text, placeholders = Text(), 0
    for place, (token, label) in enumerate(zip(ids, labels, strict=True)):
        placeholders = placeholders + 1 if token == processor.image_token_id else 0
        if placeholders and ids[place + 1 : place + 2] == [token]:
            continue
        word = processor.tokenizer.decode([token]) + (f"*{placeholders}" if placeholders else "")
        kept = label != IGNORED
        text.append(f"[[{word}]]" if kept else f"[{word}]", style="green bold" if kept else "dim")
    return text
