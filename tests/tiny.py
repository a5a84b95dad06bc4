"""Tiny models with random weights, documents with images, and batches: what the tests are made of.

Token ids: 0 pad, 1 end, 2 and 3 the marks around an image, 4 the image placeholder, 5 to 63 text.
"""

from __future__ import annotations

import dataclasses
import functools
import random

import pytest
import torch
from torch import Tensor

from conceptmoe_vl import ConceptMoEVLConfig, ConceptMoEVLForConditionalGeneration

PAD, END, VISION_START, VISION_END, IMAGE, FIRST_TEXT, VOCAB = 0, 1, 2, 3, 4, 5, 64
IMAGE_SIZE, PATCH = 24, 8
SIDE = IMAGE_SIZE // PATCH

PLAIN_VISION = {
    "model": "vit_tiny_patch16_224",
    "model_args": {"patch_size": PATCH, "embed_dim": 16, "depth": 1, "num_heads": 2},
    "image_size": IMAGE_SIZE,
    "projector": "linear",
}
TILES_VISION = {**PLAIN_VISION, "size_policy": "tiles", "max_tiles": 4}
NATIVE_VISION = {
    "model": "naflexvit_base_patch16_gap",
    "model_args": {"patch_size": PATCH, "embed_dim": 16, "depth": 1, "num_heads": 2},
    "size_policy": "native",
    "max_patches": 16,
    "projector": "mlp",
}


@dataclasses.dataclass(frozen=True)
class Document:
    """Token ids, and for each image its pixels and the (first token, rows, columns) of its grid.

    A picture in tiles is two images, the thumbnail and behind it the tiles.
    """

    ids: tuple
    pixels: tuple = ()
    grids: tuple = ()

    @functools.cached_property
    def kinds(self) -> list[str]:
        names = {VISION_START: "mark", VISION_END: "mark", IMAGE: "patch"}
        return [names.get(i, "text") for i in self.ids]

    def changed(self, ids) -> Document:
        return dataclasses.replace(self, ids=tuple(ids))


def tiny_config(
    *, text: dict | None = None, vision: dict | str | None = "plain", **chunk
) -> ConceptMoEVLConfig:
    """A configuration of width 32; `chunk` keywords go to that section."""
    if isinstance(vision, str):
        vision = {"plain": PLAIN_VISION, "tiles": TILES_VISION, "native": NATIVE_VISION}[vision]
    fields = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "encoder_layers": 1,
        "concept_layers": 1,
        "decoder_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        **(text or {}),
    }
    chunk = {"joint_decoding_layers": 1, **chunk}
    return ConceptMoEVLConfig(
        text=fields,
        chunk=chunk,
        vision=vision,
        image_token_id=IMAGE,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
        pad_token_id=PAD,
        eos_token_id=END,
    )


def randomize(model: torch.nn.Module, seed: int = 0) -> None:
    """Random weights with every path alive: W^c is not zero, q and k are no identity, norms
    vary.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name and parameter.dim() == 1 and name.endswith("weight"):
                parameter.copy_(1 + 0.2 * noise)
            elif parameter.dim() < 2:
                parameter.copy_(0.1 * noise)
            else:
                parameter.copy_(noise * (1.0 if "embed_tokens" in name else 0.2))


def tiny_model(
    *, text: dict | None = None, vision: dict | str | None = "plain", seed: int = 0, **chunk
) -> ConceptMoEVLForConditionalGeneration:
    """A model in evaluation mode with random weights."""
    model = ConceptMoEVLForConditionalGeneration(tiny_config(text=text, vision=vision, **chunk))
    randomize(model, seed)
    return model.eval()


def make_document(parts: list, seed: int = 0, native: bool = False) -> Document:
    """A document of parts: an integer is that many text tokens, "image" a fixed square one, a
    triple ("tiles", rows, columns) a thumbnail and so many tiles, and with `native` a pair
    (rows, columns) is an image of that many patches.
    """
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = []
    pixels, grids = [], []
    for part in parts:
        if isinstance(part, int):
            ids += [rng.randrange(FIRST_TEXT, VOCAB) for _ in range(part)]
            continue
        if part[0] == "tiles":
            grids.append((len(ids) + 1, SIDE, SIDE))
            grids.append((len(ids) + 1 + SIDE * SIDE, SIDE * part[1], SIDE * part[2]))
            count = 1 + part[1] * part[2]
            ids += [VISION_START] + [IMAGE] * (SIDE * SIDE * count) + [VISION_END]
            squares = torch.randn((count, 3, IMAGE_SIZE, IMAGE_SIZE), generator=generator)
            pixels += [squares[:1], squares[1:]]
            continue
        rows, columns = (SIDE, SIDE) if part == "image" else part
        grids.append((len(ids) + 1, rows, columns))
        ids += [VISION_START] + [IMAGE] * (rows * columns) + [VISION_END]
        shape = (rows * columns, PATCH * PATCH * 3) if native else (3, IMAGE_SIZE, IMAGE_SIZE)
        pixels.append(torch.randn(shape, generator=generator))
    return Document(tuple(ids), tuple(pixels), tuple(grids))


def image_inputs(documents: list[Document], native: bool = False) -> dict[str, Tensor]:
    """`pixel_values`, `image_grid_hw` and, for native sizes, `patch_coord` and `patch_valid`."""
    pixels = [p for document in documents for p in document.pixels]
    grids = [g[1:] for document in documents for g in document.grids]
    if not pixels:
        return {}
    inputs = {"image_grid_hw": torch.tensor(grids)}
    if not native:
        squares = [p.view(-1, 3, IMAGE_SIZE, IMAGE_SIZE) for p in pixels]
        return {"pixel_values": torch.cat(squares), **inputs}
    most = max(len(p) for p in pixels)
    values = torch.zeros(len(pixels), most, PATCH * PATCH * 3)
    coord = torch.zeros(len(pixels), most, 2, dtype=torch.long)
    valid = torch.zeros(len(pixels), most, dtype=torch.bool)
    for i, (p, (rows, columns)) in enumerate(zip(pixels, grids, strict=True)):
        values[i, : len(p)], valid[i, : len(p)] = p, True
        coord[i, : len(p)] = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))
    return {"pixel_values": values, "patch_coord": coord, "patch_valid": valid, **inputs}


def packed(
    documents: list[Document], labels: bool = False, native: bool = False
) -> dict[str, Tensor]:
    """Keyword arguments of one packed batch; with `labels` every text token is supervised."""
    ids = torch.tensor([i for document in documents for i in document.ids], dtype=torch.long)
    offsets = [0]
    for document in documents:
        offsets.append(offsets[-1] + len(document.ids))
    inputs = {
        "input_ids": ids,
        "cu_seqlens": torch.tensor(offsets, dtype=torch.int32),
        **image_inputs(documents, native),
    }
    if labels:
        inputs["labels"] = torch.where(ids >= FIRST_TEXT, ids, -100)
    return inputs


def padded(
    documents: list[Document], side: str = "left", extra: int = 0, native: bool = False
) -> dict[str, Tensor]:
    """Keyword arguments of one padded batch, `extra` more columns than its longest row needs."""
    width = max(len(document.ids) for document in documents) + extra
    ids = torch.full((len(documents), width), PAD)
    mask = torch.zeros(len(documents), width, dtype=torch.long)
    for row, document in enumerate(documents):
        n = len(document.ids)
        where = slice(width - n, width) if side == "left" else slice(0, n)
        ids[row, where] = torch.tensor(document.ids, dtype=torch.long)
        mask[row, where] = 1
    return {"input_ids": ids, "attention_mask": mask, **image_inputs(documents, native)}


@torch.no_grad()
def logits_of(model, documents: list[Document], native: bool = False) -> list[Tensor]:
    """Packed logits, cut into documents `[N, V]`."""
    out = model(**packed(documents, native=native))
    return list(out.logits.split([len(document.ids) for document in documents]))


def tokens_of_calls(model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that gets the number of input tokens of every call of the model from here on."""
    seen: list[int] = []
    forward = type(model).forward

    def watched(self, *args, **inputs):
        seen.append(inputs["input_ids"].numel())
        return forward(self, *args, **inputs)

    monkeypatch.setattr(type(model), "forward", watched)
    return seen
