"""The values of the `chunk` section that training moves along a run: ratio, threshold, tau, lambda.

The configuration says where a run ends; these say where it is now. A model without a schedule has
the configured ones throughout.
"""

from __future__ import annotations

import dataclasses

import torch

from conceptmoe_vl.compression import Budget
from conceptmoe_vl.configuration import ChunkConfig

# The ratio loss pulls on G with about R^2 / (R - 1) times the distance from its target: 4 at R = 2,
# 23 at 1.05, 102 at 1.01, where one noisy step would move the router further than a whole run.
_LEAST_LOSS_TARGET = 1.05
_MIDDLE = 0.5  # of p: the threshold without a schedule


@dataclasses.dataclass(frozen=True)
class ChunkValues:
    """What holds in the present step.

    Attributes:
        tau: of the Bernoulli noise. ratio_loss_weight: lambda.
        share: how far the warm-up of the ratio has come, 0 to 1 (1: the configured ratio).
        start: tokens per concept at share 0.
        threshold: p from which a token is a boundary, before learned thresholds; 0: every token is.
    """

    tau: float
    ratio_loss_weight: float
    share: float = 1.0
    start: float = 1.0
    threshold: float = _MIDDLE

    @classmethod
    def of(cls, config: ChunkConfig) -> ChunkValues:
        """The configured values."""
        return cls(config.tau, config.ratio_loss_weight)

    def target(self, ratio: float) -> float:
        """Tokens per concept that a configured ratio means now.

        The share of tokens that are concepts, 1/R, moves linearly. In a converted model
        (SmolLM2-135M, no training) log-perplexity rose by 5.2 to 5.7 per share of tokens taken away
        between R = 1 and 2, so that this is a steady load. Ratios below the start do not move.
        """
        if self.share >= 1 or ratio <= self.start:
            return ratio
        return 1 / ((1 - self.share) / self.start + self.share / ratio)

    def loss_target(self, ratio: float) -> float:
        """R of eq. 4: the target, but not nearer to 1 than the loss can bear."""
        return max(self.target(ratio), min(ratio, _LEAST_LOSS_TARGET))

    def move(self, budget: Budget, router: str) -> Budget:
        """The budget of a call that asks for no ratio of its own, with the moved threshold.

        Odds of thresholds multiply, as those of p do: one half leaves the other one as it is.
        """
        if router == "fixed":
            return dataclasses.replace(budget, ratio=self.target(budget.ratio))
        if router == "none" or self.threshold == _MIDDLE:
            return budget
        own = torch.tensor(self.threshold)
        if budget.threshold_T is None:
            return dataclasses.replace(budget, threshold_T=own)
        own = own.to(budget.threshold_T)
        kept = own * budget.threshold_T
        return dataclasses.replace(
            budget, threshold_T=kept / (kept + (1 - own) * (1 - budget.threshold_T))
        )
