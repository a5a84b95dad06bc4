"""Routers x merges x residuals x image modes: the combinations over which every invariant is
tested.
"""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from torch import Tensor

from tests.tiny import Document, image_inputs, make_document, padded, tiny_model

ROUTERS = ("cosine", "linear", "fixed", "none")
MERGES = ("sum", "boundary", "mean")
RESIDUALS = ("add", "delta")
# Text only, reading order, the image plane with either neighbourhood, and pictures in tiles there.
IMAGE_MODES = ("text", "sequential", "grid4", "grid8", "tiles")

ALL = list(itertools.product(ROUTERS, MERGES, RESIDUALS, IMAGE_MODES))
every_combination = pytest.mark.parametrize("combo", ALL, ids=["-".join(c) for c in ALL])


@functools.cache
def model_of(combo: tuple):
    """The tiny model of a combination, in evaluation mode; shared by all tests, which must not
    change it.
    """
    router, merge, residual, mode = combo
    return tiny_model(
        vision={"text": None, "tiles": "tiles"}.get(mode, "plain"),
        router=router,
        merge=merge,
        concept_residual=residual,
        image_mode="sequential" if mode in ("text", "sequential") else "grid",
        neighborhood=8 if mode == "grid8" else 4,
    )


@functools.cache
def documents_of(mode: str) -> tuple[Document, ...]:
    """Four documents of different kinds and lengths, one of them a single token."""
    parts: tuple = ([3, "image", 5], [7], ["image", "image", 2], [1])
    if mode == "text":
        parts = ([9], [14], [1], [5])
    elif mode == "tiles":
        parts = ([3, ("tiles", 2, 1), 5], [7], ["image", 2], [1])
    return tuple(make_document(p, seed) for seed, p in enumerate(parts))


def documents_for(combo: tuple) -> tuple[Document, ...]:
    return documents_of(combo[3])


def cut_is_allowed(document: Document, position: int) -> bool:
    """An image is given as a whole: no cut between two of its placeholders."""
    return not any(
        first < position < first + rows * columns for first, rows, columns in document.grids
    )


def piece_of(document: Document, start: int, stop: int) -> Document:
    """Tokens start to stop with the images among them."""
    held = [i for i, grid in enumerate(document.grids) if start <= grid[0] < stop]
    grids = tuple((document.grids[i][0] - start, *document.grids[i][1:]) for i in held)
    return Document(document.ids[start:stop], tuple(document.pixels[i] for i in held), grids)


@torch.no_grad()
def decode(
    model, documents, cuts: list[list[int]], native: bool = False
) -> tuple[list[Tensor], list[Tensor]]:
    """Logits and boundaries of every document, given to a cache in pieces.

    `cuts` holds for each document the offsets of its pieces, from 0 to its length; rows that have
    no piece left in a call are masked out of it, so rows hit boundaries in different calls.
    """
    logits: list = [[] for _ in documents]
    boundaries: list = [[] for _ in documents]
    cache = None
    for call in range(max(map(len, cuts)) - 1):
        pieces = []
        for document, own in zip(documents, cuts, strict=True):
            span = own[call : call + 2]
            pieces.append(piece_of(document, *span) if len(span) == 2 else Document(()))
        inputs = padded(pieces, native=native)
        out = model(**inputs, cache=cache, use_cache=True)
        cache = out.cache
        mask = inputs["attention_mask"].bool()
        fired = list(out.chunks.boundary_mask.split([len(piece.ids) for piece in pieces]))
        for row in range(len(documents)):
            logits[row].append(out.logits[row][mask[row]])
            boundaries[row].append(fired[row])
    return [torch.cat(x) for x in logits], [torch.cat(x) for x in boundaries]


@torch.no_grad()
def embeddings_of_images(model, document: Document, native: bool = False) -> list[Tensor]:
    """Projected image tokens of a document's images, float64 `[patches, D]` each."""
    if not document.pixels:
        return []
    inputs = image_inputs([document], native)
    grids = inputs["image_grid_hw"].tolist()
    features = model.vision(
        inputs["pixel_values"], grids, inputs.get("patch_coord"), inputs.get("patch_valid")
    )
    return list(
        model.projector(features).double().split([rows * columns for rows, columns in grids])
    )
