"""The compute dial: which boundary threshold reaches which ratio, learned or calibrated.

A threshold t other than one half moves the odds of every p by (1 - t) / t, so that a boundary still
means p >= 1/2: smoothing (eq. 5), noise and the ratio loss go on unchanged, and t = 0 makes every
token a boundary with p = 1.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import torch
from torch import Tensor, nn

from conceptmoe_vl.configuration import ChunkConfig
from conceptmoe_vl.layout import PackedLayout

# Adam moves a parameter by about the learning rate a step; thresholds are to settle in hundreds.
_SHIFT_SCALE = 10.0
MODALITIES = ("text", "image")


def recentre(p_T: Tensor, threshold: Tensor) -> Tensor:
    """p with its odds divided by those of the threshold: t becomes 1/2; 0 and 1 stay.

    Args:
        p_T: `[T]` probabilities. threshold: `[T]` or scalar in [0, 1); 0 gives p = 1 everywhere.
    """
    kept, dropped = p_T * (1 - threshold), (1 - p_T) * threshold
    everything = (threshold == 0).expand_as(p_T)
    return (kept / (kept + dropped).masked_fill(everything, 1.0)).masked_fill(everything, 1.0)


@dataclasses.dataclass(frozen=True)
class Budget:
    """What the tokens of one call are chunked for.

    Attributes:
        threshold_T: `[T]` or scalar threshold of p; None means one half.
        ratio: R of the call, for the router `fixed`.
        target_G: `[G]` index of each document's drawn ratio in `chunk.target_ratios`; None outside
            training with several.
    """

    threshold_T: Tensor | None
    ratio: float
    target_G: Tensor | None = None


class Dial(nn.Module):
    """Turns a wanted ratio into thresholds.

    Args:
        config: the `chunk` section. With `target_ratios` every ratio but 1 has a learned shift
            (one for each modality when `ratio_scope` is modality); the ratio loss moves it.
    """

    def __init__(self, config: ChunkConfig) -> None:
        super().__init__()
        self.config = config
        self.ratios = [float(ratio) for ratio in config.target_ratios or ()]
        if self.ratios:
            columns = 2 if config.ratio_scope == "modality" else 1
            self.shift = nn.Parameter(torch.zeros(len(self.ratios) * columns))

    def budget(
        self, compression: float | None, image_T: Tensor, layout: PackedLayout, training: bool
    ) -> Budget:
        """The thresholds of one call.

        Args:
            compression: wanted tokens per concept; None means what the model was trained for, in
                training with several ratios one drawn per document.
            image_T: `[T]` bool, image tokens. layout: documents.

        Raises:
            ValueError: the model cannot reach this ratio, or was never calibrated for it.
        """
        config = self.config
        if compression is None and training and self.ratios:
            target_G = torch.randint(len(self.ratios), (len(layout.lengths),)).to(image_T.device)
            learned_RX = self._learned()
            column_T = (image_T & (learned_RX.shape[1] == 2)).long()
            threshold_T = learned_RX[target_G[layout.document_T], column_T]
            return Budget(threshold_T, config.target_ratio, target_G)
        ratio = check_compression(config, compression)
        if config.router in ("none", "fixed"):
            return Budget(None, ratio)
        thresholds = self._thresholds(compression)
        if thresholds is None:
            return Budget(None, ratio)
        text, image = thresholds
        if text == image:
            return Budget(torch.as_tensor(text, device=image_T.device), ratio)
        return Budget(torch.where(image_T, image, text), ratio)

    def start_at_calibration(self) -> None:
        """Sets the learned thresholds to those of `chunk.calibration`, which is then used up.

        Raises:
            ValueError: a ratio lies outside the table, or its threshold cannot be learned.
        """
        rows = []
        for ratio in self.ratios:
            pair = (0.5, 0.5) if ratio == 1 else calibrated(self.config, ratio)
            rows.append(pair[: self.shift.numel() // len(self.ratios)])
        threshold = torch.tensor(rows).flatten()
        if not ((threshold > 0) & (threshold < 1)).all():
            raise ValueError(
                f"thresholds {threshold.tolist()} of the calibration cannot be learned"
            )
        with torch.no_grad():
            self.shift.copy_(-torch.logit(threshold) / _SHIFT_SCALE)
        self.config.calibration = None

    def check(self, compression: float | None) -> None:
        """Raises `ValueError` unless `budget` would take this compression in evaluation."""
        check_compression(self.config, compression)
        if self.config.router not in ("none", "fixed"):
            self._thresholds(compression)

    def _learned(self) -> Tensor:
        """`[ratios, 1 or 2]` thresholds in (0, 1); 0 for ratio 1."""
        learned = torch.sigmoid(-_SHIFT_SCALE * self.shift).view(len(self.ratios), -1)
        every = torch.tensor(self.ratios, device=learned.device) == 1.0
        return learned.masked_fill(every[:, None], 0.0)

    def _thresholds(self, compression: float | None) -> tuple[float, float] | None:
        """Thresholds of text and image tokens; None means one half for both."""
        config = self.config
        if compression is None and not self.ratios:
            return None
        if compression is None:
            compression = config.target_ratio
        elif compression == 1:
            return 0.0, 0.0
        elif config.calibration is not None:
            return calibrated(config, compression)
        if compression in self.ratios:
            row = self._learned()[self.ratios.index(compression)].tolist()
            return row[0], row[-1]
        if compression == config.target_ratio and not self.ratios:
            return None
        raise ValueError(
            f"compression={compression:g}, but this model was never calibrated for it; run "
            "'conceptmoe-vl calibrate MODEL DATA' once, or leave compression out"
        )


def check_compression(config: ChunkConfig, compression: Any) -> float:
    """The ratio as a number; None gives the configured one.

    Raises:
        ValueError: it is no number of 1 or more, or the router makes it impossible.
    """
    if config.router == "none":
        if compression not in (None, 1):
            raise ValueError(
                f"compression={compression!r}, but chunk.router is none: every token is a concept "
                "of its own"
            )
        return 1.0
    if compression is None:
        return float(config.target_ratio)
    number = isinstance(compression, (int, float)) and not isinstance(compression, bool)
    if not number or not 1 <= compression < float("inf"):
        raise ValueError(
            f"compression={compression!r}; give tokens per concept, a number of 1 or more"
        )
    return float(compression)


def calibrated(config: ChunkConfig, compression: float) -> tuple[float, float]:
    """Thresholds of text and image tokens from the stored table, linear in 1/R between its rows.

    A model trained with a target for each modality is asked for the ratio in each; any other has
    one threshold, and the ratio holds over all tokens together.

    Raises:
        ValueError: the ratio lies outside the table.
    """
    table = config.calibration
    assert table is not None
    names = MODALITIES if config.ratio_scope == "modality" else ("all", "all")
    text, image = (_interpolated(table["ratios"], table[name], compression) for name in names)
    return text, image


def _interpolated(ratios: list, thresholds: list, wanted: float) -> float:
    known = [
        (1.0, 0.0),
        *((r, t) for r, t in zip(ratios, thresholds, strict=True) if t is not None),
    ]
    for (low, below), (high, above) in itertools.pairwise(known):
        if low <= wanted <= high:
            share = (1 / low - 1 / wanted) / (1 / low - 1 / high)
            return below + share * (above - below)
    raise ValueError(
        f"compression={wanted:g} lies outside what this model was calibrated for (1 to "
        f"{known[-1][0]:g}); run 'conceptmoe-vl calibrate' with more ratios, or ask for less"
    )
