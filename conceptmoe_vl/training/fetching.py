"""The micro-batches of a step from a rank's stream, and filler ones where it has none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from conceptmoe_vl.errors import NothingUsableError

from .config import TrainingConfig


def fetch(
    batches: Iterator[Any], stream: Any, config: TrainingConfig
) -> tuple[list[Any], str | None]:
    """The micro-batches of an optimiser step; filler ones behind the end of the stream.

    A data loader that starts its workers draws from torch's generator, which happens at another
    step in a resumed run. Put back here, reading data never changes what the model samples.

    Returns:
        The micro-batches, and what the stream said when it found nothing usable: that is no error
        while other ranks find something.
    """
    number = config.gradient_accumulation_steps
    before = torch.get_rng_state()
    found: list[Any] = []
    nothing = None
    try:
        while len(found) < number:
            batch = next(batches, None)
            if batch is None:
                break
            found.append(batch)
    except NothingUsableError as error:
        nothing = str(error)
    found += [stream.filler() for _ in range(number - len(found))]
    torch.set_rng_state(before)
    return found, nothing
