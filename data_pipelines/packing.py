"""Which of the ready documents go into the next batch.

Notable:
- the oldest always goes, so none waits longer than as many batches as are ready;
- the rest is the combination that leaves the least room, found exactly: which sums the ready
  documents can reach is one large integer, a bit a sum, and a document shifts it by its length;
- of equal combinations the one of the oldest documents, which also keeps the mixture at hand as it
  came: preferring long ones leaves gaps later that nothing fits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TypeVar

Item = TypeVar("Item")

_MOST_SUMS = 1 << 18  # a larger room is measured in coarser units: 32 kB a ready item at most


def next_pack(
    ready: list[Item], length: Callable[[Item], int], budget: int, refill: Callable[[], None]
) -> list[Item]:
    """Takes the oldest item, and the combination of the others that leaves the least room.

    While everything at hand fits, the oldest is taken and refilled: the combination is sought among
    what does not fit any more as a whole. No item is ever cut.

    Args:
        ready: items of at most `budget`, oldest first; the chosen ones are removed.
        length: tokens of an item, at least 1.
        budget: tokens of a batch.
        refill: may append to `ready`; called before the first choice and behind each that leaves
            room for all the others.

    Returns:
        The chosen items, oldest first; none if there is none.
    """
    chosen: list[Item] = []
    room = budget
    refill()
    total = sum(map(length, ready))
    while ready and (not chosen or total <= room):
        item = ready.pop(0)
        chosen.append(item)
        room -= length(item)
        total -= length(item)
        before = len(ready)
        refill()
        total += sum(map(length, itertools.islice(ready, before, None)))
    places = best_fit([length(item) for item in ready], room)
    chosen += [ready[place] for place in places]
    for place in reversed(places):
        del ready[place]
    return chosen


def best_fit(lengths: Sequence[int], room: int) -> list[int]:
    """Places of the lengths whose sum is nearest to `room` without exceeding it, ascending.

    Exact up to 262,144 of room, beyond that up to a 262,144th of it a length.
    """
    unit = max(1, -(-room // _MOST_SUMS))
    room //= unit
    sizes = [-(-length // unit) for length in lengths]
    order = [place for place, size in enumerate(sizes) if size <= room]
    mask = (1 << (room + 1)) - 1
    reached = [1]  # bit s: the first documents of `order` have a part of sum s
    for place in order:
        reached.append((reached[-1] | reached[-1] << sizes[place]) & mask)
        if reached[-1] >> room:
            break
    left = reached[-1].bit_length() - 1
    chosen = []
    for step in range(len(reached) - 2, -1, -1):
        if not reached[step] >> left & 1:  # only with this one is the sum reached
            chosen.append(order[step])
            left -= sizes[order[step]]
    return chosen[::-1]
