"""Loss and ratio on held-out data, without touching the training's data or random state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from conceptmoe_vl.errors import NothingUsableError, UserError

from .distributed import World, sum_over_ranks
from .engine import Engine
from .metrics import StepStatistics
from .random_states import random_state, set_random_state


@torch.no_grad()
def evaluate_held_out(
    engine: Engine,
    held_out: Callable[[], Iterable[Any]],
    filler: Callable[[], Any],
    image_token_id: int | None,
    world: World,
) -> dict[str, Any]:
    """Means over the batches of all ranks. Collective.

    Args:
        held_out: makes the batches of this rank.
        filler: makes what a rank gives whose batches have ended before those of others.

    Returns:
        lm_loss (mean over supervised tokens), supervised_tokens, ratio, ratio_image, ratio_text.

    Raises:
        UserError: no rank has a batch.
    """
    before = random_state(world.device)
    engine.module.eval()
    statistics, supervised, number = StepStatistics(image_token_id, detailed=False), 0, 0
    for batch in _in_step(iter(held_out()), filler, world):
        batch = batch.to(world.device)
        statistics.add(batch, engine.forward(**batch.model_inputs(), num_items_in_batch=1.0))
        supervised, number = supervised + batch.num_supervised, number + 1
    engine.module.train()
    set_random_state(before, world.device)
    if not number:
        raise UserError(
            "the held-out data gave no batch on any process; add data to evaluation.data, or raise "
            "data.held_out"
        )
    reduced = statistics.reduce_losses(world.size, world.device)
    total, count = sum_over_ranks([reduced["lm_loss"] * number, float(supervised)], world.device)
    result = {"lm_loss": total / max(count, 1), "supervised_tokens": int(count)}
    return result | {key: reduced[key] for key in ("ratio", "ratio_image", "ratio_text")}


def _in_step(batches: Iterator[Any], filler: Callable[[], Any], world: World) -> Iterator[Any]:
    """The batches, and fillers until those of all ranks have ended.

    A rank none of whose samples is usable has none, as in training.
    """
    while True:
        try:
            batch = next(batches, None)
        except NothingUsableError:
            batch = None
        if not sum_over_ranks([float(batch is not None)], world.device)[0]:
            return
        yield filler() if batch is None else batch
