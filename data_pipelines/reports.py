"""What `inspect`, `stats` and `show` print."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Column, Table
from rich.text import Text

from conceptmoe_vl.errors import UserError
from conceptmoe_vl.images import ImageError, decode_image
from conceptmoe_vl.processing import EncodedSample
from data_pipelines.pieces import Piece, encode_whole, token_pieces
from data_pipelines.records import Conversation, RecordError
from data_pipelines.shards import IndexedSample, ShardIndex, ShardReader, index_shards, read_sample
from data_pipelines.statistics import CountTokens, Statistics, gather
from data_pipelines.visible import visible

_SHOWN_CHARACTERS = 60


def _sizes(reader: ShardReader, sample: IndexedSample, conversation: Conversation) -> list[str]:
    images = (
        decode_image(reader.read(sample, name), name=name) for name in conversation.image_members
    )
    return [f"{image.width}x{image.height}" for image in images]


def _first_words(conversation: Conversation) -> str:
    texts = (part for turn in conversation.turns for part in turn.parts if isinstance(part, str))
    return visible("  ".join(texts)[:_SHOWN_CHARACTERS])


def inspect(patterns: list[str], limit: int, console: Console) -> int:
    """A table of the first samples; returns how many of them are damaged."""
    index = index_shards(patterns)
    reader = ShardReader()
    # The name is what `show --key` takes: in a narrow terminal it goes on in the next line.
    name = Column("sample", overflow="fold")
    table = Table(name, "source", "images", "turns", "text", title=_title(index))
    faults = 0
    for sample in index.samples[:limit]:
        try:
            conversation = read_sample(reader, sample)
            sizes = " ".join(_sizes(reader, sample, conversation)) or "-"
            turns, words = str(len(conversation.turns)), Text(_first_words(conversation))
            source = Text(visible(conversation.source))
            table.add_row(Text(visible(sample.name)), source, sizes, turns, words)
        except (RecordError, ImageError) as error:
            faults += 1
            fault = Text(visible(f"{error.reason}: {error}"), style="red")
            table.add_row(Text(visible(sample.name)), "", "", "", fault)
    console.print(table)
    return faults + _print_damage(index, console)


def stats(
    patterns: list[str],
    console: Console,
    count_tokens: CountTokens | None = None,
    png: Path | None = None,
) -> int:
    """Counts over all samples; every image is decoded. Returns how many samples are damaged.

    Args:
        count_tokens: tokens of turns with decoded images; None counts characters alone.
        png: where a picture of the distributions goes.

    Raises:
        UserError: the picture cannot be drawn.
    """
    if png is not None:
        from data_pipelines.figures import check_figures, draw_statistics

        check_figures(png)
    errors = Console(stderr=True)
    with Progress(transient=True, console=errors, disable=not errors.is_terminal) as progress:
        bar = progress.add_task("reading", total=None)
        found = gather(
            patterns,
            count_tokens,
            lambda total: progress.update(bar, total=total, advance=1),
        )
    console.print(_stats_table(found))
    if png is not None:
        draw_statistics(found, png)
        console.print(Text(str(png)))
    return found.faults.total() + _print_damage(found.index, console)


def _stats_table(found: Statistics) -> Table:
    index = found.index
    table = Table("what", "count", title=_title(index))
    for name, number in [("shards", len(index.shards)), ("samples", len(index.samples))]:
        table.add_row(name, f"{number:,}")
    for group, label in (
        (found.counts, ""),
        (found.sources, "source "),
        (found.faults, "damaged: "),
    ):
        for name, number in sorted(group.items()):
            table.add_row(Text(label + visible(name)), f"{number:,}")
    for name, number in found.sizes.most_common(5):
        table.add_row(f"images of {name} pixels", f"{number:,}")
    return table


def _title(index: ShardIndex) -> str:
    return f"{len(index.samples):,} samples in {len(index.shards)} shards"


def _print_damage(index: ShardIndex, console: Console) -> int:
    for shard, fault in index.damaged.items():
        console.print(Text(f"shard '{shard}': {fault}", style="red"))
    return len(index.damaged)


def show(
    patterns: list[str], key: str | None, limit: int, processor: Any, console: Console
) -> None:
    """Samples' tokens; supervised ones are marked, a picture's are counted.

    Args:
        key: a sample's key; None takes the first ones.
        limit: samples at most; with a key one.

    Raises:
        UserError: there is no such sample, or the one asked for is damaged.
    """
    index = index_shards(patterns)
    if key is None:
        found = list(index.samples[:limit])
    else:
        found = [sample for sample in index.samples if key in (sample.key, sample.name)][:1]
    if not found:
        raise UserError(f"no sample has the key '{key}'; `inspect` lists the keys")
    reader = ShardReader()
    for sample in found:
        try:
            conversation, encoded = encode_whole(reader, sample, processor)
        except (RecordError, ImageError) as error:
            message = f"{sample.name}: {error} (reason {error.reason})"
            if len(found) == 1:
                raise UserError(message) from error
            console.print(Text(visible(message), style="red"))
            continue
        title = visible(f"{sample.name}, source {conversation.source}")
        console.print(Text(title, style="bold"))
        pieces = token_pieces(processor, encoded.input_ids, encoded.labels)
        console.print(_colored(pieces))
        console.print(_summary(encoded))


def _summary(sample: EncodedSample) -> str:
    grids = " ".join(
        f"{rows}x{columns}" for image in sample.images for rows, columns in image.planes
    )
    return (
        f"{len(sample.input_ids)} tokens, {sample.num_supervised} supervised, "
        f"{len(sample.images)} images{f' of {grids} tokens' if grids else ''}"
    )


def _colored(pieces: Iterable[Piece]) -> Text:
    """Tokens in brackets, supervised ones in double brackets.

    The colours are the terminal's own, which it keeps readable on its background: green for what is
    supervised, yellow for special tokens and pictures, its text colour for the rest.
    """
    text = Text()
    for piece in pieces:
        word = visible(piece.text) + (f"*{len(piece.ids)}" if piece.kind == "image" else "")
        color = "" if piece.kind == "text" else "yellow"
        if piece.supervised:
            text.append(f"[[{word}]]", style="bold green")
        else:
            text.append(f"[{word}]", style=color)
    return text
