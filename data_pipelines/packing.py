"""Which of the ready documents go into the next batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Item = TypeVar("Item")


def next_pack(
    ready: list[Item], length: Callable[[Item], int], budget: int, refill: Callable[[], None]
) -> list[Item]:
    """Takes the oldest item, then, again and again, the oldest that still fits.

    The oldest always goes into the next batch, so none waits longer than `len(ready)` batches. No
    item is ever cut.

    Args:
        ready: items of at most `budget`, oldest first; the chosen ones are removed.
        length: tokens of an item.
        budget: tokens of a batch.
        refill: called after each removal; may append to `ready`.
    """
    chosen: list[Item] = []
    room = budget
    refill()
    while True:
        fitting = (place for place, item in enumerate(ready) if length(item) <= room)
        place = next(fitting, None)
        if place is None:
            return chosen
        item = ready.pop(place)
        chosen.append(item)
        room -= length(item)
        refill()
