"""The data state of a run: dealing what is not delivered out to another number of ranks.

A rank's state is plain numbers, strings, lists and mappings:

| field | meaning |
| --- | --- |
| `format`, `seed`, `shuffle`, `held_out`, `split`, `split_at` | must be those of the run |
| `rank`, `world_size` | of the rank |
| `picks` | samples taken from the sources, delivered or at hand |
| `sources` | of each: `name`, `fingerprint`; not taken: `pending`, then `next`, `next` + W, ... |
| `ready` | documents at hand, in order: source, k, piece, number of pieces of that sample |
| `documents`, `delivered`, `skipped`, `over_length` | counts since the start |
| `epoch_skips`, `epoch_faults`, `unused_in_a_row`, `skips_in_a_row` | of the present epoch |
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

from conceptmoe_vl.errors import UserError

FORMAT = 2

_OF_THE_RUN = ("format", "seed", "shuffle", "held_out", "split", "split_at", "order")


def check_state(state: dict[str, Any], own: dict[str, Any]) -> None:
    """Whether a state continues in the stream that has the state `own`.

    Raises:
        UserError: it belongs to other data, another seed, rank or number of ranks.
    """
    for name, remedy in (
        ("format", "resume with the version that wrote it, or start a new run from its weights"),
        ("world_size", "give the states of all its processes"),
        ("rank", "give each process its own state"),
        ("seed", "set data.seed back, or start a new run"),
        ("shuffle", "set data.shuffle back, or start a new run"),
        ("held_out", "set data.held_out back, or start a new run"),
        ("split", "set data.split back, or start a new run"),
        ("split_at", "set data.over_length and tokens_per_batch back, or start a new run"),
        ("order", "install the numpy that it was written with, or start a new run"),
    ):
        if state.get(name) != own[name]:
            raise UserError(
                f"the data state of the checkpoint has {name} {state.get(name)!r}, this run has "
                f"{own[name]!r}; {remedy}"
            )
    for what in ("name", "fingerprint"):
        given = [source[what] for source in state["sources"]]
        present = [source[what] for source in own["sources"]]
        if given != present:
            raise UserError(
                f"the data state of the checkpoint has sources of the {what}s {given}, this run "
                f"has {present}; the shards have changed: restore them, or start a new run"
            )


def merge_states(states: Sequence[dict[str, Any]], world_size: int) -> list[dict[str, Any]]:
    """States of `world_size` ranks that have yet to deliver just what the given ranks have.

    Per source, the samples that no rank has delivered are dealt out anew, in their order. A sample
    that was delivered in part keeps its other pieces at hand. Counts are dealt out too: their sums
    stay.

    Args:
        states: of all ranks of a run, taken at the same step, in any order.

    Raises:
        UserError: a rank's state is missing, or the states are not of one run.
    """
    states = sorted(states, key=lambda state: state.get("rank", -1))
    _check_together(states)
    first, size = states[0], len(states)
    whole, parts = _split_ready(states)
    returned = sum(map(len, whole.values()))
    taken = _deal(sum(state["picks"] for state in states) - returned, world_size)
    counts = {
        name: _deal_counts([state[name] for state in states], world_size)
        for name in ("documents", "delivered", "skipped", "over_length", "epoch_skips")
    }
    sources = [
        _deal_source([state["sources"][number] for state in states], whole[number], world_size)
        for number in range(len(first["sources"]))
    ]
    return [
        {
            **{name: first[name] for name in (*_OF_THE_RUN, "weights")},
            "rank": rank,
            "world_size": world_size,
            "picks": taken[rank],
            "sources": [source[rank] for source in sources],
            "ready": [list(entry) for entry in parts[rank::world_size]],
            **{name: dealt[rank] for name, dealt in counts.items()},
            # Each process has its own limit; with fewer processes none is reached by adding up.
            "epoch_faults": sum(s["epoch_faults"] for s in states) // max(size, world_size),
            "skips_in_a_row": 0,
            "unused_in_a_row": 0,
        }
        for rank in range(world_size)
    ]


def _check_together(states: list[dict[str, Any]]) -> None:
    formats = sorted({str(state.get("format")) for state in states})
    if formats != [str(FORMAT)]:
        raise UserError(
            f"data states of the formats {formats}, this version reads {FORMAT}; resume with the "
            "version that wrote them, or start a new run from its weights (model.init_from)"
        )
    first = states[0]
    ranks = [state["rank"] for state in states]
    if ranks != list(range(first["world_size"])):
        raise UserError(
            f"data states of the ranks {ranks} of {first['world_size']}; all of them are needed"
        )
    for state in states:
        if any(state[name] != first[name] for name in (*_OF_THE_RUN, "world_size")):
            raise UserError("the data states are of different runs; give those of one checkpoint")


def _split_ready(
    states: list[dict[str, Any]],
) -> tuple[dict[int, list[int]], list[tuple[int, int, int, int]]]:
    """Samples at hand with all their pieces: k by source; and the pieces of all other samples."""
    entries = [tuple(entry) for state in states for entry in state["ready"]]
    pieces = collections.Counter((source, k) for source, k, _, _ in entries)
    whole: dict[int, set[int]] = collections.defaultdict(set)
    parts = []
    for source, k, piece, of in entries:
        if pieces[source, k] == of:
            whole[source].add(k)
        else:
            parts.append((source, k, piece, of))
    return collections.defaultdict(list, {key: sorted(ks) for key, ks in whole.items()}), parts


def _deal_source(
    positions: list[dict[str, Any]], at_hand: list[int], world_size: int
) -> list[dict[str, Any]]:
    """A source's part of the new states: holes first, then all that no rank has come to."""
    following = max(position["next"] for position in positions)
    holes = set(at_hand)
    for position in positions:
        holes.update(position["pending"])
        holes.update(range(position["next"], following, len(positions)))
    ordered = sorted(holes)
    same = {name: positions[0][name] for name in ("name", "fingerprint")}
    return [
        {
            **same,
            "pending": ordered[rank::world_size],
            "next": following + (rank - len(ordered)) % world_size,
        }
        for rank in range(world_size)
    ]


def _deal(number: int, world_size: int) -> list[int]:
    """Whole parts with that sum, equal but for 1."""
    return [number // world_size + (rank < number % world_size) for rank in range(world_size)]


def _deal_counts(values: list[Any], world_size: int) -> list[Any]:
    """Numbers, or mappings of such values, summed and dealt out."""
    if not isinstance(values[0], dict):
        return _deal(sum(values), world_size)
    names = sorted({name for value in values for name in value})
    dealt = {
        name: _deal_counts([value[name] for value in values if name in value], world_size)
        for name in names
    }
    return [{name: parts[rank] for name, parts in dealt.items()} for rank in range(world_size)]
