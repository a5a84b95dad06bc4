"""Loss and ratio on held-out data, without touching the training's data or random state."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from .distributed import World, sum_over_ranks
from .engine import Engine
from .metrics import StepStatistics
from .run_files import random_state, set_random_state


@torch.no_grad()
def evaluate_held_out(
    engine: Engine, batches: Iterable[Any], image_token_id: int | None, world: World
) -> dict[str, Any]:
    """Means over the batches of all ranks, which have the same number of them. Collective.

    Returns:
        lm_loss (mean over supervised tokens), supervised_tokens, ratio, ratio_image, ratio_text.
    """
    before = random_state(world.device)
    engine.module.eval()
    statistics, supervised, number = StepStatistics(image_token_id, detailed=False), 0, 0
    for batch in batches:
        batch = batch.to(world.device)
        statistics.add(batch, engine.forward(**batch.model_inputs(), num_items_in_batch=1.0))
        supervised, number = supervised + batch.num_supervised, number + 1
    engine.module.train()
    set_random_state(before, world.device)
    reduced = statistics.reduce_losses(world.size, world.device)
    total, count = sum_over_ranks([reduced["lm_loss"] * number, float(supervised)], world.device)
    result = {"lm_loss": total / max(count, 1), "supervised_tokens": int(count)}
    return result | {key: reduced[key] for key in ("ratio", "ratio_image", "ratio_text")}
