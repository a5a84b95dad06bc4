"""Which threshold of p reaches which ratio on a user's data, measured in one pass.

p does not depend on the threshold (the encoder runs before the chunk module), so the share of
tokens above a threshold is the share of boundaries that it would give.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from conceptmoe_vl.compression import MODALITIES
from conceptmoe_vl.configuration import ChunkConfig
from conceptmoe_vl.errors import UserError
from conceptmoe_vl.files import written_whole

HISTOGRAM_BINS = 20


@dataclasses.dataclass(frozen=True)
class Distribution:
    """p of one modality (or of all tokens).

    Attributes:
        sorted_N: `[N]` float32 p in falling order, forced boundaries 1. closed: boundaries that the
            model makes of them now.
    """

    sorted_N: Tensor
    closed: int

    @property
    def tokens(self) -> int:
        return self.sorted_N.numel()

    @property
    def ratio(self) -> float | None:
        """Tokens per concept now; None without tokens."""
        return self.tokens / self.closed if self.closed else None

    @property
    def forced(self) -> int:
        return int((self.sorted_N == 1.0).sum())

    def threshold(self, ratio: float) -> float | None:
        """The threshold that gives tokens / ratio boundaries; None where forced ones are more."""
        wanted = round(self.tokens / ratio)
        if not 0 < wanted < self.tokens or wanted < self.forced:
            return None
        above, below = self.sorted_N[wanted - 1].item(), self.sorted_N[wanted].item()
        return (above + below) / 2 if above > below else above

    def reached(self, threshold: float) -> float:
        """Tokens per concept that a threshold gives on these tokens."""
        return self.tokens / max(int((self.sorted_N >= threshold).sum()), 1)

    def histogram(self) -> list[int]:
        """Counts of p in equal bins from 0 to 1."""
        return torch.histc(self.sorted_N, bins=HISTOGRAM_BINS, min=0.0, max=1.0).int().tolist()


class ProbabilityMeter:
    """Collects p of every token that a model reads within `watch`, by modality."""

    def __init__(self) -> None:
        self._found: list[tuple[Tensor, Tensor, Tensor]] = []

    @contextmanager
    def watch(self, model: Any) -> Iterator[ProbabilityMeter]:
        """Watches the model's chunk module.

        Raises:
            UserError: the model's router has no thresholds.
        """
        router = model.config.chunk.router
        if router in ("none", "fixed"):
            raise UserError(
                f"chunk.router of this model is {router}: it has no thresholds to calibrate"
            )
        handle = model.language_model.chunk.register_forward_hook(self._add)
        try:
            yield self
        finally:
            handle.remove()

    def _add(self, module: Any, arguments: tuple, boundaries: Any) -> None:
        image_T = arguments[1].image_T
        self._found.append(
            tuple(x.detach().cpu() for x in (boundaries.raw_T, boundaries.mask_T, image_T))
        )

    @property
    def tokens(self) -> int:
        return sum(p.numel() for p, _, _ in self._found)

    def distributions(self) -> dict[str, Distribution]:
        """By `all`, `text` and `image`.

        Raises:
            UserError: nothing was read.
        """
        if not self.tokens:
            raise UserError("the data held no token to calibrate on; name other shards")
        p, closed, image = (torch.cat(parts) for parts in zip(*self._found, strict=True))
        chosen = {"all": torch.ones_like(image), "text": ~image, "image": image}
        return {
            name: Distribution(p[mask].sort(descending=True).values, int(closed[mask].sum()))
            for name, mask in chosen.items()
        }


def calibration_table(
    distributions: dict[str, Distribution], ratios: tuple[float, ...]
) -> dict[str, list]:
    """What `chunk.calibration` holds: a threshold for every ratio, None where it is out of reach.

    A modality without tokens takes the thresholds of all tokens.
    """
    whole = distributions["all"]
    table: dict[str, list] = {"ratios": list(ratios)}
    for name, own in distributions.items():
        source = own if own.tokens else whole
        table[name] = [source.threshold(ratio) for ratio in ratios]
    return table


def target_of(config: ChunkConfig, name: str) -> float | None:
    """The ratio that training asked of `all`, `text` or `image`; None where it asked for none."""
    if name == "all":
        return None if config.ratio_scope == "modality" else config.target_ratio
    if config.ratio_scope != "modality":
        return None
    own = config.text_target_ratio if name == MODALITIES[0] else config.image_target_ratio
    return own or config.target_ratio


def store_calibration(folder: Path, table: dict[str, list], report: dict[str, Any]) -> None:
    """Writes the table into the folder's config.json and the report into calibration.json.

    Both are written beside and renamed.
    """
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["chunk"]["calibration"] = table
    for target, content in ((path, config), (folder / "calibration.json", report)):
        with written_whole(target) as beside:
            beside.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
