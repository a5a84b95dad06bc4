"""Speeds of a run: tokens, pictures, concepts and model FLOPs per second, the share of the peak.

Model FLOPs are those of `conceptmoe_vl.flops` for what the batches really held: the lengths of the
documents (attention maps grow with their squares), the concepts that the router made of them, the
supervised positions that the head is computed for, and the sizes of the pictures. Neither what is
recomputed to save memory counts, nor a filler batch. What a backward pass costs is in `passes`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from conceptmoe_vl.configuration import ConceptMoEVLConfig
from conceptmoe_vl.flops import COMPONENTS, Flops, forward_flops
from conceptmoe_vl.vision_cost import vision_work

from .config import TrainingConfig
from .distributed import World, sum_over_ranks
from .passes import passes
from .peak_speed import find_peak


@dataclasses.dataclass(frozen=True)
class Work:
    """What batches hold: sums over their documents, and over their pictures.

    `squares` are sums of squared lengths, which the attention maps cost.
    """

    tokens: float = 0.0
    token_squares: float = 0.0
    concepts: float = 0.0
    concept_squares: float = 0.0
    supervised: float = 0.0
    pictures: float = 0.0
    patches: float = 0.0
    patch_squares: float = 0.0


def model_flops(config: ConceptMoEVLConfig, work: Work) -> dict[str, Flops]:
    """FLOPs of the forward passes over all that `work` sums up, by component."""
    if not work.tokens:
        return dict.fromkeys(COMPONENTS, Flops())
    concepts = max(int(work.concepts), 1)
    flops = forward_flops(config, int(work.tokens), concepts=concepts, logits=int(work.supervised))
    seen = dict.fromkeys(("encoder", "decoder"), work.token_squares / int(work.tokens) ** 2)
    seen["concept"] = work.concept_squares / concepts**2
    for stage, share in seen.items():
        flops[stage] = Flops(flops[stage].rest, flops[stage].maps * share)
    if config.vision is not None and work.patches:
        tower, maps, projector = vision_work(
            config.vision, config.text.hidden_size, work.patches, work.patch_squares
        )
        flops["vision"], flops["projector"] = Flops(tower, maps), Flops(projector)
    return flops


class Speed:
    """Work and time since the last logged step, of this rank.

    Args:
        model: before the engine has taken it. FLOPs are counted for the project's own alone.
        training: that section of the configuration.

    Attributes:
        peak: what this process's device could do.
    """

    def __init__(self, model: Any, world: World, training: TrainingConfig) -> None:
        config = getattr(model, "config", None)
        self._config = config if isinstance(config, ConceptMoEVLConfig) else None
        self._passes = {} if self._config is None else passes(model)
        self._world = world
        self.peak = find_peak(world.device, training.precision, training.peak_flops)
        self._start_again()

    def _start_again(self) -> None:
        self._seconds = self._waited = 0.0
        self._counts = torch.zeros(len(dataclasses.fields(Work)), dtype=torch.float64)
        self._concepts = torch.zeros(2, dtype=torch.float64, device=self._world.device)

    def look(self, batch: Any, out: Any) -> None:
        """Takes a micro-batch, on any device, and the model's output for it."""
        if batch.is_filler:
            return
        ends = batch.cu_seqlens
        lengths = ends.diff().double()
        chunks = getattr(out, "chunks", None)
        if chunks is not None:
            closed = torch.nn.functional.pad(chunks.boundary_mask.long().cumsum(0), (1, 0))
            concepts = closed[ends.long()].diff().double()
            self._concepts += torch.stack((concepts.sum(), concepts.square().sum()))
        counts = [float(batch.input_ids.numel()), float(lengths.square().sum()), 0.0, 0.0]
        positions = getattr(out, "supervised_positions", None)
        counts.append(0.0 if positions is None else float(positions.numel()))
        self._counts += torch.tensor([*counts, *self._pictures(batch)], dtype=torch.float64)

    def _pictures(self, batch: Any) -> tuple[float, float, float]:
        """Pictures, their patches, and sums of squares of the patches that see each other."""
        grid = getattr(batch, "image_grid_hw", None)
        if grid is None or self._config is None or self._config.vision is None:
            return 0.0, 0.0, 0.0
        merged = self._config.vision.downsample**2
        patches = grid.double().prod(1) * merged
        pictures = (batch.input_ids == self._config.vision_start_token_id).sum()
        return float(pictures), float(patches.sum()), float(patches.square().sum())

    def add(self, seconds: float, waited: float) -> None:
        """Takes a step's duration, and the part of it spent waiting for data."""
        self._seconds += seconds
        self._waited += waited

    def take(self) -> dict[str, float]:
        """Speeds of all ranks since the last call; starts anew. Collective."""
        self._counts[2:4] = self._concepts.cpu()
        seconds, waited = max(self._seconds, 1e-9), self._waited
        sums = sum_over_ranks([*self._counts.tolist(), self.peak.flops], self._world.device)
        work, peak = Work(*sums[:-1]), sums[-1]
        self._start_again()
        speed = {
            "tokens_per_second": work.tokens / seconds,
            "concepts_per_second": work.concepts / seconds,
            "images_per_second": work.pictures / seconds,
            "data_wait_share": waited / seconds,
        }
        if self._config is None:
            return speed
        flops = model_flops(self._config, work)
        total = sum(
            each.rest * self._passes[name].rest + each.maps * self._passes[name].maps
            for name, each in flops.items()
        )
        speed["model_flops_per_second"] = total / seconds
        return {**speed, "model_flops_utilization": total / seconds / peak}
