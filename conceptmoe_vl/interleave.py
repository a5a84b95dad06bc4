"""Where images stand in a token stream, and which boundaries are forced (section 3.1)."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from conceptmoe_vl.chunk import ImagePatches, TokenKinds
from conceptmoe_vl.configuration import ConceptMoEVLConfig
from conceptmoe_vl.layout import PackedLayout


def token_kinds(
    ids_T: Tensor, layout: PackedLayout, config: ConceptMoEVLConfig, grids: list[list[int]]
) -> TokenKinds:
    """Modalities, forced boundaries and places in the plane of a packed stream.

    Args:
        ids_T: token ids. layout: documents. grids: rows and columns of every image's tokens, in
            order. A thumbnail and its picture are two images, the one directly behind the other.

    Raises:
        ValueError: placeholders and image tokens differ in number, or an image's run is broken.
    """
    forced_T = torch.zeros_like(ids_T, dtype=torch.bool)
    starts = itertools.accumulate(layout.lengths, initial=0)
    documents = zip(starts, layout.lengths, layout.past_lengths, strict=False)
    begins = [start for start, length, past in documents if length and not past]
    if begins:
        forced_T = forced_T.index_fill(0, torch.tensor(begins, device=ids_T.device), True)
    if config.image_token_id is None:
        return TokenKinds(torch.zeros_like(forced_T), forced_T, None)
    image_T = ids_T == config.image_token_id
    forced_T = (
        forced_T | (ids_T == config.vision_start_token_id) | (ids_T == config.vision_end_token_id)
    )
    patches = _patches(image_T, layout, grids)
    if patches is not None and config.chunk.image_mode == "grid":
        first_P = (patches.row_P == 0) & (patches.column_P == 0)
        forced_T = forced_T.index_put((patches.token_P,), forced_T[patches.token_P] | first_P)
        _check_marks(ids_T, patches.token_P[first_P], layout, config)
    return TokenKinds(image_T, forced_T, patches)


def _patches(image_T: Tensor, layout: PackedLayout, grids: list[list[int]]) -> ImagePatches | None:
    token_P = image_T.nonzero().squeeze(1)
    sizes = [rows * columns for rows, columns in grids]
    if sum(sizes) != token_P.numel():
        raise ValueError(
            f"the text has {token_P.numel()} image placeholders, but the {len(grids)} images "
            f"given have {sum(sizes)} tokens; build the inputs with the processor, and do not cut "
            "through an image"
        )
    if not grids:
        return None
    device = token_P.device
    size_I = torch.tensor(sizes, device=device)
    shape_I2 = torch.tensor(grids, device=device)
    image_P = torch.arange(len(sizes), device=device).repeat_interleave(
        size_I, output_size=sum(sizes)
    )
    start_I = size_I.cumsum(0) - size_I
    index_P = torch.arange(sum(sizes), device=device) - start_I[image_P]
    columns_P = shape_I2[image_P, 1]
    expected_P = token_P[start_I][image_P] + index_P
    document_P = layout.document_T[token_P]
    broken = (expected_P != token_P) | (document_P != document_P[start_I][image_P])
    if broken.any():
        image = int(image_P[broken][0])
        raise ValueError(
            f"the placeholders of image {image} ({grids[image][0]} x {grids[image][1]} tokens) do "
            "not stand in one run of one document; build the inputs with the processor"
        )
    return ImagePatches(token_P, index_P // columns_P, index_P % columns_P, columns_P, max(sizes))


def _check_marks(
    ids_T: Tensor, first_T: Tensor, layout: PackedLayout, config: ConceptMoEVLConfig
) -> None:
    """In the plane a region must not take text in: an image follows its mark or another image."""
    before = ids_T[(first_T - 1).clamp(min=0)]
    marked = (before == config.vision_start_token_id) | (before == config.image_token_id)
    past = torch.tensor(layout.past_lengths, device=ids_T.device)[layout.document_T[first_T]]
    continued = (first_T == layout.cu_seqlens[layout.document_T[first_T]]) & (past > 0)
    if not (marked | continued).all():
        raise ValueError(
            "an image must stand directly behind its vision start mark; "
            "build the inputs with the processor"
        )
