"""What a step measured: sums over micro-batches and ranks first, ratios of sums afterwards.

Nothing here is a mean of means: losses by source and modality, ratios and confidences are divided
once, after their sums over all ranks are known.
"""

from __future__ import annotations

import collections
from typing import Any

import torch

from conceptmoe_vl.resident_memory import peak_resident_bytes

from .distributed import gather_objects, sum_over_ranks

_LOSSES = ("loss", "lm_loss", "ratio_loss", "balance_loss", "router_z_loss")
# Of one modality: tokens, boundaries, and of the tokens whose boundary is not forced their number,
# their boundaries, and the sum of |p - 1/2|.
_COUNTS = ("tokens", "boundaries", "free", "free_boundaries", "confidence")
_MODALITIES = ("text", "image")


def _float(value: Any) -> torch.Tensor:
    return torch.as_tensor(0.0 if value is None else value).detach().double().reshape(())


def document_of(positions: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Document index of packed positions: `positions` [S], `cu_seqlens` [G+1] -> [S] int64."""
    return torch.searchsorted(cu_seqlens[1:].long(), positions.long(), right=True)


class StepStatistics:
    """Collects the micro-batches of one optimiser step on this rank.

    Args:
        image_token_id: the placeholder of image tokens; None in text-only models.
        detailed: also collect losses by source and modality and the experts' load.

    Attributes:
        relative_load: by stage, `[layers][E]` loads over their fair share; empty before details are
            reduced.
    """

    def __init__(self, image_token_id: int | None, detailed: bool = True) -> None:
        self._image_token_id, self._detailed = image_token_id, detailed
        self._losses: list[list[torch.Tensor]] = []
        self._counts: list[torch.Tensor] = []
        self._documents = torch.zeros(len(_MODALITIES), 3, dtype=torch.float64)
        self._by_group: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0.0])
        self._load: dict[str, list[torch.Tensor]] = collections.defaultdict(list)
        self._entropy: dict[str, list[torch.Tensor]] = collections.defaultdict(list)
        self.relative_load: dict[str, list[list[float]]] = {}
        self._by_target: dict[float, torch.Tensor] = {}

    def add(self, batch: Any, out: Any) -> None:
        """Takes one micro-batch and the model's output for it (`loss` before any division by
        their number). Of a filler batch only what all ranks have in common counts.
        """
        self._losses.append([_float(getattr(out, name, None)) for name in _LOSSES])
        chunks = getattr(out, "chunks", None)
        if chunks is not None and not batch.is_filler:
            self._counts.append(self._count_chunks(batch, chunks))
        if not self._detailed:
            return
        self._add_losses_by_group(batch, out)
        self._by_target = getattr(chunks, "ratio_by_target", None) or {}
        for stage, load in (getattr(out, "expert_load", None) or {}).items():
            self._load[stage].append(load.detach().double().cpu())
        for stage, entropy in (getattr(out, "router_entropy", None) or {}).items():
            self._entropy[stage].append(entropy.double().cpu())

    def _count_chunks(self, batch: Any, chunks: Any) -> torch.Tensor:
        """`[2, counts]` of one micro-batch, by modality."""
        is_image = torch.zeros_like(batch.input_ids, dtype=torch.bool)
        if self._image_token_id is not None:
            is_image = batch.input_ids == self._image_token_id
        boundary, probability = chunks.boundary_mask, chunks.boundary_prob.detach().double()
        free, ones = ~chunks.boundary_forced, torch.ones_like(probability)
        rows = (ones, boundary, free, free & boundary, (probability - 0.5).abs() * free)
        of_modality = torch.stack((~is_image, is_image)).double()
        if self._detailed:
            self._count_documents(batch.cu_seqlens, is_image, free, free & boundary)
        return of_modality @ torch.stack([row.double() for row in rows], dim=1)

    def _count_documents(
        self,
        cu_seqlens: torch.Tensor,
        is_image: torch.Tensor,
        free: torch.Tensor,
        fired: torch.Tensor,
    ) -> None:
        """Counts, by modality, documents with free tokens, and those where none and all fired."""
        places = torch.arange(is_image.numel(), device=is_image.device)
        group = 2 * document_of(places, cu_seqlens) + is_image
        number = 2 * (cu_seqlens.numel() - 1)
        tokens, boundaries = (
            torch.bincount(group, weights=each.double(), minlength=number).view(-1, 2)
            for each in (free, fired)
        )
        present = tokens > 0
        kinds = (present, present & (boundaries == 0), present & (boundaries == tokens))
        self._documents += torch.stack([kind.sum(0) for kind in kinds], dim=1).cpu()

    def _add_losses_by_group(self, batch: Any, out: Any) -> None:
        losses, positions = (
            getattr(out, "lm_loss_per_token", None),
            getattr(out, "supervised_positions", None),
        )
        if losses is None or positions is None or losses.numel() == 0:
            return
        documents = document_of(positions, batch.cu_seqlens)
        number = batch.cu_seqlens.numel() - 1
        zeros = torch.zeros(number, dtype=torch.float64, device=losses.device)
        sums = zeros.index_add(0, documents, losses.detach().double()).tolist()
        counts = torch.bincount(documents, minlength=number).tolist()
        images = [0] * number
        if self._image_token_id is not None:
            at = (batch.input_ids == self._image_token_id).nonzero()[:, 0]
            images = torch.bincount(document_of(at, batch.cu_seqlens), minlength=number).tolist()
        for index, (total, count) in enumerate(zip(sums, counts, strict=True)):
            for group in ("image" if images[index] else "text", f"source:{batch.sources[index]}"):
                self._by_group[group][0] += total
                self._by_group[group][1] += count

    def reduce_losses(self, world_size: int, device: torch.device) -> dict[str, Any]:
        """Losses and chunk statistics of the step over all ranks. Collective.

        The language loss of a micro-batch is already divided by the step's supervised tokens /
        (ranks * micro-batches), so the mean over ranks and micro-batches is sum of token losses /
        supervised tokens.
        """
        number = len(self._losses)
        losses = torch.stack([torch.stack(row) for row in self._losses]).sum(0) / (
            number * world_size
        )
        counts = torch.zeros(len(_MODALITIES), len(_COUNTS), dtype=torch.float64)
        if self._counts:
            counts = torch.stack(self._counts).sum(0)
        packed = torch.cat([losses, counts.flatten().to(losses.device)]).tolist()
        packed = sum_over_ranks([*packed, *self._documents.flatten().tolist()], device)
        result: dict[str, Any] = dict(zip(_LOSSES, packed[: len(_LOSSES)], strict=True))
        at = len(_LOSSES) + counts.numel()
        result.update(_chunk_metrics(packed[len(_LOSSES) : at]))
        if self._detailed:
            result.update(_document_metrics(packed[at:]))
        return result

    def reduce_details(self, stream: Any) -> dict[str, Any]:
        """Losses by source and modality, experts' load, skipped and shortened samples, and samples,
        tokens and images delivered by source, over all ranks. Collective.

        Args:
            stream: of this rank, with the counts `skipped`, `over_length` and `delivered`.
        """
        load = {stage: torch.stack(values).mean(0).tolist() for stage, values in self._load.items()}
        totals: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0.0])
        skips: collections.Counter[str] = collections.Counter()
        shortened: collections.Counter[str] = collections.Counter()
        counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        loads: dict[str, list] = collections.defaultdict(list)
        own = (dict(self._by_group), dict(stream.skipped), dict(stream.over_length))
        for by_group, rank_skips, rank_shortened, rank_delivered, rank_load in gather_objects(
            (*own, stream.delivered, load)
        ):
            for group, (total, count) in by_group.items():
                totals[group][0] += total
                totals[group][1] += count
            skips.update(rank_skips)
            shortened.update(rank_shortened)
            for source, numbers in rank_delivered.items():
                counts[source].update(numbers)
            for stage, values in rank_load.items():
                loads[stage].append(values)
        self.relative_load = {stage: _over_fair_share(values) for stage, values in loads.items()}
        means = {group: total / count for group, (total, count) in sorted(totals.items()) if count}
        details: dict[str, Any] = {
            "lm_loss_text": means.get("text"),
            "lm_loss_image": means.get("image"),
            "lm_loss_by_source": {
                group.removeprefix("source:"): mean
                for group, mean in means.items()
                if group.startswith("source:")
            },
            "expert_load": {
                stage: _load_extremes(values) for stage, values in self.relative_load.items()
            },
            # The model has summed it over ranks.
            "router_entropy": {
                stage: round(float(torch.stack(values).mean()), 6)
                for stage, values in self._entropy.items()
            },
            "skipped": dict(sorted(skips.items())),
            "over_length": dict(sorted(shortened.items())),
            "delivered_by_source": {source: dict(counts[source]) for source in sorted(counts)},
        }
        if self._by_target:  # the model has summed it over ranks; of the last micro-batch
            details["ratio_by_target"] = {
                f"{target:g}": float(ratio) for target, ratio in self._by_target.items()
            }
        return details


def _over_fair_share(loads: list) -> list[list[float]]:
    """`[layers, E]` loads over their fair share (1 is balanced) from `[ranks, layers, E]` ones."""
    mean = torch.tensor(loads, dtype=torch.float64).mean(0)
    return (mean * mean.shape[-1]).tolist()


def _load_extremes(relative: list[list[float]]) -> dict[str, float]:
    """Largest and smallest load of any expert in any layer."""
    every = [load for layer in relative for load in layer]
    return {"max": round(max(every), 4), "min": round(min(every), 4)}


def _share(total: float, count: float) -> float | None:
    return total / count if count else None


def _chunk_metrics(values: list[float]) -> dict[str, float | None]:
    """Ratios and confidences from the counts of text, then of images."""
    text, image = (
        dict(zip(_COUNTS, values[start : start + len(_COUNTS)], strict=True))
        for start in (0, len(_COUNTS))
    )
    groups = (("", {name: text[name] + image[name] for name in _COUNTS}),)
    result: dict[str, float | None] = {}
    for suffix, counts in (*groups, ("_image", image), ("_text", text)):
        result[f"ratio{suffix}"] = _share(counts["tokens"], counts["boundaries"])
        result[f"boundary_confidence{suffix}"] = _share(counts["confidence"], counts["free"])
        if suffix:
            result[f"boundary_share{suffix}"] = _share(counts["free_boundaries"], counts["free"])
    return result


def _document_metrics(values: list[float]) -> dict[str, float | None]:
    """Shares of documents without and with every boundary, from counts of text, then of images."""
    result = {}
    for modality, start in zip(_MODALITIES, (0, 3), strict=True):
        present, none, every = values[start : start + 3]
        result[f"documents_without_boundary_{modality}"] = _share(none, present)
        result[f"documents_all_boundary_{modality}"] = _share(every, present)
    return result


def peak_memory_bytes(device: torch.device) -> int:
    """Largest memory of this process so far: allocated on the GPU, or resident in main memory on
    CPU.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return peak_resident_bytes()
