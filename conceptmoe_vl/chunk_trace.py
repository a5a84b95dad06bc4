"""What the chunking did with a prompt: every token's concept, read off the model itself."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from conceptmoe_vl.asking import check_reachable
from conceptmoe_vl.compression import MODALITIES
from conceptmoe_vl.concepts import map_concepts
from conceptmoe_vl.requests import encode_prompt, padded_inputs

TEXT, IMAGE = MODALITIES


@dataclasses.dataclass(frozen=True)
class Plane:
    """The patches of an image (or of one plane of an image in tiles) within a prompt.

    Attributes:
        first: place of the first patch's token. rows, columns: the grid.
    """

    first: int
    rows: int
    columns: int

    @property
    def tokens(self) -> slice:
        return slice(self.first, self.first + self.rows * self.columns)


@dataclasses.dataclass(frozen=True)
class ChunkTrace:
    """One document's chunking. All arrays are `[T]`.

    Attributes:
        ids: token ids. is_image, is_forced, is_boundary: bool. probability: p, float32.
        concept: the concept that each token was merged into, counted from 0 in the document; -1
            where the document ended before a boundary closed its chunk.
        planes: its images, in their order.
    """

    ids: np.ndarray
    is_image: np.ndarray
    is_forced: np.ndarray
    is_boundary: np.ndarray
    probability: np.ndarray
    concept: np.ndarray
    planes: Sequence[Plane]

    @property
    def concepts(self) -> int:
        return int(self.is_boundary.sum())

    def ratio(self, modality: str | None = None) -> float | None:
        """Tokens per concept of `text`, `image` or all; None without tokens or concepts."""
        chosen = self.of(modality)
        closed = int(self.is_boundary[chosen].sum())
        return int(chosen.sum()) / closed if closed else None

    def of(self, modality: str | None) -> np.ndarray:
        """`[T]` bool: the tokens of a modality, or all."""
        if modality is None:
            return np.ones_like(self.is_image)
        return self.is_image if modality == IMAGE else ~self.is_image

    def sizes(self) -> np.ndarray:
        """`[concepts]` tokens of each concept; the open chunk at the end is none."""
        return np.bincount(self.concept[self.concept >= 0], minlength=self.concepts)

    def size_of_token(self) -> np.ndarray:
        """`[T]` size of the concept that each token is part of; of an open chunk its tokens."""
        sizes = np.append(self.sizes(), (self.concept < 0).sum())
        return sizes[self.concept]

    def modality_of_concept(self) -> np.ndarray:
        """`[concepts]` bool: those of patches. No concept mixes text with patches."""
        return self.is_image[self.is_boundary]

    def images(self) -> list[list[Plane]]:
        """The planes of each image: two, thumbnail and tiles, stand directly behind one another."""
        found: list[list[Plane]] = []
        for plane in self.planes:
            if found and found[-1][-1].tokens.stop == plane.first:
                found[-1].append(plane)
            else:
                found.append([plane])
        return found

    def regions(self, plane: Plane) -> np.ndarray:
        """`[rows, columns]` concept of each patch of a plane."""
        return self.concept[plane.tokens].reshape(plane.rows, plane.columns)


class ChunkRecorder:
    """Collects the chunking of every document that a model reads whole within `watch`."""

    def __init__(self) -> None:
        self._found: list[ChunkTrace] = []
        self._ids: torch.Tensor | None = None

    @contextmanager
    def watch(self, model: Any) -> Iterator[ChunkRecorder]:
        """Watches a model; decoding steps are passed over."""
        handles = [
            model.register_forward_pre_hook(self._remember, with_kwargs=True),
            model.language_model.chunk.register_forward_hook(self._add),
        ]
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()

    def take(self) -> list[ChunkTrace]:
        """What was collected since the last call, in the order of the documents."""
        found, self._found = self._found, []
        return found

    def _remember(self, _model: Any, positional: tuple, inputs: dict[str, Any]) -> None:
        """The ids in the packed order, which the chunk module does not see."""
        ids = positional[0] if positional else inputs["input_ids"]
        mask = inputs.get("attention_mask")
        if ids.dim() == 2:
            ids = ids.flatten() if mask is None else ids[mask[:, -ids.shape[1] :].bool()]
        self._ids = ids.cpu()

    def _add(self, module: Any, arguments: tuple, boundaries: Any) -> None:
        _, kinds, layout = arguments[:3]
        if layout.max_length <= 1 or self._ids is None:
            return
        concepts = map_concepts(boundaries, kinds, layout, "index")
        closed = [0, *np.cumsum(concepts.layout.lengths).tolist()]
        offsets = layout.cu_seqlens.tolist()
        arrays = {
            "ids": self._ids,
            "is_image": kinds.image_T,
            "is_forced": kinds.forced_T,
            "is_boundary": boundaries.mask_T,
            "probability": boundaries.probability_T.float(),
        }
        whole = {name: array.detach().cpu().numpy() for name, array in arrays.items()}
        merged = concepts.merged_into_T.cpu().numpy()
        planes = _planes(kinds.patches)
        for document, (start, stop) in enumerate(itertools.pairwise(offsets)):
            if start == stop:
                continue
            part = slice(start, stop)
            own = merged[part] - closed[document]
            self._found.append(
                ChunkTrace(
                    **{name: array[part] for name, array in whole.items()},
                    concept=np.where(merged[part] < concepts.count, own, -1),
                    planes=[
                        dataclasses.replace(plane, first=plane.first - start)
                        for plane in planes
                        if start <= plane.first < stop
                    ],
                )
            )


def _planes(patches: Any) -> list[Plane]:
    """The grids of a packed stream, from the places of its patches."""
    if patches is None:
        return []
    token, row, column, columns = (
        x.cpu().numpy()
        for x in (patches.token_P, patches.row_P, patches.column_P, patches.columns_P)
    )
    starts = np.flatnonzero((row == 0) & (column == 0))
    ends = np.append(starts[1:], len(token))
    return [
        Plane(int(token[a]), int(row[b - 1]) + 1, int(columns[a]))
        for a, b in zip(starts, ends, strict=True)
    ]


@contextmanager
def image_mode(model: Any, mode: str | None) -> Iterator[None]:
    """The model with another image mode for a while; None changes nothing.

    The weights fit both, but were trained for one: the other shows what its router would do.
    """
    config = model.config.chunk
    before = config.image_mode
    try:
        config.image_mode = mode or before
        yield
    finally:
        config.image_mode = before


@torch.inference_mode()
def trace_conversation(
    model: Any,
    processor: Any,
    messages: list[dict],
    compression: float | None = None,
    mode: str | None = None,
) -> ChunkTrace:
    """The chunking of a prompt.

    Args:
        messages: a conversation, whose images may be functions that fetch them.
        compression: wanted tokens per concept; None: as trained.
        mode: `sequential` or `grid`; None: the model's own.

    Raises:
        UserError: an image cannot be decoded, the model takes none, or cannot compress so.
    """
    check_reachable(model, compression)
    inputs = padded_inputs(model, [encode_prompt(model, processor, messages)])
    recorder = ChunkRecorder()
    with recorder.watch(model), image_mode(model, mode):
        model(**inputs, compression=compression, logits_to_keep=1)
    (trace,) = recorder.take()
    return trace
