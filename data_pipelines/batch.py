"""One packed micro-batch."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from conceptmoe_vl.image_processing import collate_images
from conceptmoe_vl.processing import IGNORED, EncodedSample


@dataclasses.dataclass(frozen=True)
class PackedBatch:
    """`G` documents end to end, `T` tokens, without padding.

    Fields:
        input_ids, labels: `[T]` int64; a label is the token's own id, or -100.
        cu_seqlens: `[G + 1]` int32, where documents start, and the end.
        pixel_values, image_grid_hw, patch_coord, patch_valid: of all `I` pictures in reading order
            (see `collate_images`); None without pictures.
        keys: of the documents, `shard/key`.
        sources: of the documents, by name.
        is_filler: the batch only keeps this process in step with others that have more data: it
            enters no loss, gradient, statistic or count.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    cu_seqlens: torch.Tensor
    keys: list[str]
    sources: list[str]
    pixel_values: torch.Tensor | None = None
    image_grid_hw: torch.Tensor | None = None
    patch_coord: torch.Tensor | None = None
    patch_valid: torch.Tensor | None = None
    is_filler: bool = False

    @classmethod
    def pack(cls, samples: list[EncodedSample], keys: list[str], sources: list[str]) -> PackedBatch:
        """Encoded samples end to end, in their order."""
        ends = [0]
        for sample in samples:
            ends.append(ends[-1] + len(sample.input_ids))
        ids = [token for sample in samples for token in sample.input_ids]
        labels = [label for sample in samples for label in sample.labels]
        return cls(
            input_ids=torch.tensor(ids, dtype=torch.int64),
            labels=torch.tensor(labels, dtype=torch.int64),
            cu_seqlens=torch.tensor(ends, dtype=torch.int32),
            keys=keys,
            sources=sources,
            **collate_images([image for sample in samples for image in sample.images]),
        )

    @classmethod
    def filler(cls, token_id: int) -> PackedBatch:
        """The smallest batch that a model can run: two tokens of text, none supervised.

        Args:
            token_id: a token that is no picture's placeholder.
        """
        return cls(
            input_ids=torch.full((2,), token_id, dtype=torch.int64),
            labels=torch.full((2,), IGNORED, dtype=torch.int64),
            cu_seqlens=torch.tensor([0, 2], dtype=torch.int32),
            keys=[],
            sources=[],
            is_filler=True,
        )

    def model_inputs(self) -> dict[str, Any]:
        """The keyword arguments of the model's forward; absent ones are left out."""
        inputs: dict[str, Any] = dict(self._tensors())
        return {**inputs, "filler": True} if self.is_filler else inputs

    def _tensors(self) -> dict[str, torch.Tensor]:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}

    @property
    def num_tokens(self) -> int:
        return self.input_ids.numel()

    @property
    def num_supervised(self) -> int:
        """Labels that the model counts: a document's first token has no predecessor."""
        counted = self.labels != IGNORED
        counted[self.cu_seqlens[:-1].long()] = False
        return int(counted.sum())

    @property
    def source_names(self) -> list[str]:
        """Distinct sources, sorted."""
        return sorted(set(self.sources))

    @property
    def document_sources(self) -> torch.Tensor:
        """`[G]` int64: each document's place in `source_names`."""
        place = {name: index for index, name in enumerate(self.source_names)}
        return torch.tensor([place[name] for name in self.sources], dtype=torch.int64)

    def to(self, device: Any, non_blocking: bool = False) -> PackedBatch:
        """The same batch with its tensors on `device`."""
        moved = {
            name: tensor.to(device, non_blocking=non_blocking)
            for name, tensor in self._tensors().items()
        }
        return dataclasses.replace(self, **moved)
