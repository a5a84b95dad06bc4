"""Held-out log-perplexity of a model at exact ratios, for `bench.conversion_training`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from conceptmoe_vl.calibration import ProbabilityMeter, calibration_table


@torch.inference_mode()
def log_perplexities(
    model: Any, batches: Sequence[Any], ratios: Sequence[float]
) -> dict[float, tuple[float, float]]:
    """By ratio: tokens per concept that were reached, and mean loss of the supervised tokens.

    Thresholds are exact quantiles of p on these very batches.

    Args:
        model: in evaluation mode. batches: packed ones, as training reads. ratios: 1 or more.
    """
    chunk = model.config.chunk
    found = {}
    if chunk.router == "none":
        return {1.0: _at(model, batches, 1.0)}
    meter = ProbabilityMeter()
    with meter.watch(model):
        found[1.0] = _at(model, batches, 1.0)
    above = tuple(ratio for ratio in sorted(ratios) if ratio > 1)
    chunk.calibration = calibration_table(meter.distributions(), above)
    return found | {ratio: _at(model, batches, ratio) for ratio in above}


def _at(model: Any, batches: Sequence[Any], ratio: float) -> tuple[float, float]:
    loss, supervised, tokens, boundaries = 0.0, 0, 0, 0
    for batch in batches:
        inputs = {**batch.model_inputs(), "num_items_in_batch": 1.0, "compression": ratio}
        out = model(**inputs, return_logits=False)
        loss += out.lm_loss.item()
        supervised += batch.num_supervised
        tokens += batch.num_tokens
        boundaries += int(out.chunks.boundary_mask.sum())
    return tokens / boundaries, loss / supervised


@contextlib.contextmanager
def random_boundaries(model: Any, seed: int = 0) -> Iterator[None]:
    """Within the block p is random instead of learned: what choosing boundaries by p is worth.

    A stream of the same length has the same p each time, so that thresholds measured on it hold.
    """
    module = model.language_model.chunk

    def draw(states: Tensor, *_: Any) -> Tensor:
        return torch.rand(len(states), generator=torch.Generator().manual_seed(seed))

    before = module._sequential_probability
    module._sequential_probability = draw
    try:
        yield
    finally:
        module._sequential_probability = before
