"""How well a model predicts text, by the position in a long document.

A document is cut into windows of equal length, so that every position sees the same text on
average; each window begins as a document does in training, behind an empty user turn. It is read in
pieces through the cache, and the losses are made in chunks: neither all logits nor the activations
of a whole window are ever in memory.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from conceptmoe_vl.cache import ConceptCache
from conceptmoe_vl.errors import UserError
from eval.long_context.haystack import SOURCES, file_texts, source_texts
from eval.statistics import Figure, estimate
from eval.tasks import Question, RatioOfSums, Scored

_PIECE = 4096  # tokens that go through the model at once
_FIRST_BUCKET = 16  # positions; each bucket behind the first is as long as all before it


@dataclasses.dataclass(frozen=True)
class Window:
    """Tokens of a document. Fields: document: its name; ids: as many as every other window's."""

    document: str
    ids: list[int]


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Positions `first` to `last`, counted from 1, and their mean loss in nats a token."""

    first: int
    last: int
    loss: Figure

    def to_json(self) -> dict[str, Any]:
        value = self.loss.value
        perplexity = None if value is None else math.exp(min(value, 700.0))
        return {
            "first": self.first,
            "last": self.last,
            "nats": self.loss.to_json(),
            "perplexity": perplexity,
        }


@dataclasses.dataclass(frozen=True)
class Curve:
    """Fields: buckets: by position; ratio: tokens per concept that were measured."""

    buckets: list[Bucket]
    ratio: float


def load_texts(name: str) -> dict[str, str]:
    """Documents by their names: a text file, a folder of `*.txt`, or the test split of a built-in
    source (shakespeare, wiki).

    Raises:
        UserError: there are none.
    """
    texts = source_texts(name, ["test"]) if name in SOURCES else file_texts(Path(name))
    return {document: text for document, text in texts.items() if text.strip()}


def cut_windows(
    texts: Mapping[str, str], processor: Any, length: int, most: int
) -> tuple[list[Window], int]:
    """Windows of `length` tokens, document by document, and how many documents are shorter.

    Args:
        most: windows of one document at most.

    Raises:
        UserError: no document is long enough; names the longest.
    """
    windows: list[Window] = []
    lengths = []
    for document, text in texts.items():
        ids = processor.text_ids(text)
        lengths.append(len(ids))
        count = min(len(ids) // length, most)
        starts = range(0, count * length, length)
        windows += [Window(document, ids[start : start + length]) for start in starts]
    if not windows:
        raise UserError(
            f"--texts: none of {len(lengths)} documents has {length} tokens, the longest has "
            f"{max(lengths, default=0)}; name longer ones, or lower --length"
        )
    return windows, sum(count < length for count in lengths)


def document_prefix(processor: Any) -> list[int]:
    """The tokens that stand before a document's text in training."""
    empty = [{"role": "user", "content": ""}]
    return processor.encode(empty, add_generation_prompt=True).input_ids


@torch.inference_mode()
def window_losses(
    model: Any,
    prefix: Sequence[int],
    windows: Sequence[Window],
    compression: float | None = None,
    piece: int = _PIECE,
) -> tuple[Tensor, int]:
    """Losses of every token of the windows, and how many concepts they and their prefixes became.

    Args:
        prefix: tokens before each window, which are not scored.
        compression: wanted tokens per concept; None: what the model was trained for.
        piece: tokens of a window that go through the model at once; it changes no loss.

    Returns:
        `[windows, length]` float32 nats; NaN for the first token of a window without a prefix.
    """
    rows = torch.tensor([[*prefix, *window.ids] for window in windows], device=model.device)
    cache = ConceptCache(model.config)
    losses = torch.full(rows.shape, math.nan, dtype=torch.float32, device=model.device)
    concepts, before = 0, None
    for start in range(0, rows.shape[1], piece):
        ids = rows[:, start : start + piece]
        output = model(
            input_ids=ids,
            labels=ids,
            cache=cache,
            use_cache=True,
            logits_to_keep=1,
            return_logits=True,
            compression=compression,
        )
        part = torch.full((ids.numel(),), math.nan, device=model.device)
        part[output.supervised_positions] = output.lm_loss_per_token
        part = part.view(ids.shape)
        if before is not None:  # the piece's first token is predicted by the last one before it
            part[:, 0] = torch.nn.functional.cross_entropy(before, ids[:, 0], reduction="none")
        losses[:, start : start + piece] = part
        before = output.logits[:, -1].float()
        concepts += int(output.chunks.boundary_mask.sum())
    return losses[:, len(prefix) :], concepts


def bucket_edges(length: int) -> list[tuple[int, int]]:
    """First and last positions, from 1: 1 to 16, 17 to 32, 33 to 64 and so on, up to `length`."""
    edges, first, last = [], 1, _FIRST_BUCKET
    while first <= length:
        edges.append((first, min(last, length)))
        first, last = last + 1, 2 * last
    return edges


def measure(
    model: Any,
    processor: Any,
    windows: Sequence[Window],
    batch_size: int,
    compression: float | None = None,
    on_batch: Callable[[int], None] = lambda count: None,
) -> Curve:
    """The loss by position over all windows, with intervals over documents.

    Args:
        windows: of one length.
        batch_size: windows that are read at once; it changes no loss.
        on_batch: called with the number of windows just read.
    """
    prefix = document_prefix(processor)
    edges = bucket_edges(len(windows[0].ids))
    samples: list[Scored] = []
    concepts = 0
    for start in range(0, len(windows), batch_size):
        batch = windows[start : start + batch_size]
        losses, found = window_losses(model, prefix, batch, compression)
        concepts += found
        for number, (window, row) in enumerate(zip(batch, losses.double().cpu(), strict=True)):
            samples.append(_to_sample(f"{start + number}", window, row, edges))
        on_batch(len(batch))
    figures = estimate(samples, RatioOfSums(lambda sample: sample.question.details["sums"]))
    if len({window.document for window in windows}) == 1:  # it says nothing about other documents
        figures = {name: Figure(figure.value, None) for name, figure in figures.items()}
    buckets = [Bucket(first, last, figures[f"{first}"]) for first, last in edges]
    tokens = sum(len(prefix) + len(window.ids) for window in windows)
    return Curve(buckets, tokens / max(concepts, 1))


def _to_sample(key: str, window: Window, losses: Tensor, edges: list[tuple[int, int]]) -> Scored:
    """A window's sums and counts by bucket; windows of one document are resampled together."""
    sums = {}
    for first, last in edges:
        part = losses[first - 1 : last]
        part = part[~part.isnan()]
        sums[f"{first}"] = (float(part.sum()), float(len(part)))
    return Scored(
        Question(key, [], [], details={"cluster": window.document, "sums": sums}), "", 0.0
    )


def points(curves: Mapping[str, Curve]) -> dict[str, list[tuple[float, float, float, float]]]:
    """By curve the points of a figure: position, mean, and the ends of its interval."""
    found: dict[str, list[tuple[float, float, float, float]]] = {}
    for name, curve in curves.items():
        found[name] = []
        for bucket in curve.buckets:
            value = bucket.loss.value
            if value is not None:
                low, high = bucket.loss.interval or (value, value)
                place = math.sqrt(bucket.first * bucket.last)
                found[name].append((place, value, low, high))
    return found


def print_curves(curves: Mapping[str, Curve], console: Console) -> None:
    """A row for each range of positions, a column for each compression."""
    table = Table(title="Loss by position, nats a token (95 % interval)", title_justify="left")
    table.add_column("positions", justify="right")
    for name, curve in curves.items():
        table.add_column(f"{name}, measured {curve.ratio:.2f}", justify="right")
    for row in zip(*(curve.buckets for curve in curves.values()), strict=True):
        table.add_row(f"{row[0].first}-{row[0].last}", *(_cell(bucket.loss) for bucket in row))
    console.print(table)


def _cell(loss: Figure) -> str:
    if loss.value is None:
        return "-"
    ends = "" if loss.interval is None else f" ({loss.interval[0]:.3f}-{loss.interval[1]:.3f})"
    return f"{loss.value:.3f}{ends}"
