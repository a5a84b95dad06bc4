"""Order, mixing and dealing out anew, without a byte of data: the stream's arithmetic."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conceptmoe_vl.errors import UserError
from data_pipelines.mixing import BLOCK, Mixture, Weight, parse_sources
from data_pipelines.order import RankOrder
from data_pipelines.sampling import LocalSource, generator, is_held_out
from data_pipelines.shards import ShardIndex
from data_pipelines.state import FORMAT, merge_states


class Rank:
    """A stream of k alone: picks go through a buffer from which any may be delivered.

    Every third k of a source is two pieces. Its state has the form of `PackedStream`'s.
    """

    def __init__(self, sizes, weights, rank, world_size, epochs=None):
        mixture = Mixture(weights, 0, rank, world_size) if weights else None
        self.order = RankOrder(sizes, mixture, rank, world_size, epochs)
        self.rank, self.world_size = rank, world_size
        self.ready: list[tuple[int, int, int, int]] = []
        self.documents = 0

    def deliver(self, choice: int, lookahead: int) -> tuple[int, int, int] | None:
        """One piece of those at hand: source, k, piece; None at the end."""
        while len(self.ready) < lookahead and (pick := self.order.take()) is not None:
            pieces = 1 + (pick.k % 3 == 0)
            self.ready += [(*pick, piece, pieces) for piece in range(pieces)]
        if not self.ready:
            return None
        self.documents += 1
        return self.ready.pop(choice % len(self.ready))[:3]

    def state(self) -> dict:
        positions = self.order.positions
        state = {
            **{"format": FORMAT, "rank": self.rank, "world_size": self.world_size, "seed": 0},
            **{"shuffle": True, "held_out": 0.0, "split": "train", "split_at": 0, "order": ""},
            **{"weights": [], "picks": self.order.picks, "ready": self.ready},
            "sources": [
                {"name": str(n), "fingerprint": "", "pending": list(p.pending), "next": p.next}
                for n, p in enumerate(positions)
            ],
            "documents": self.documents,
            "delivered": {"a": {"samples": self.documents}},
            **{"skipped": {"too_long": self.rank}, "over_length": {}, "epoch_skips": {}},
            **{"epoch_faults": 2, "skips_in_a_row": 1, "unused_in_a_row": 1},
        }
        return json.loads(json.dumps(state))

    def load(self, state: dict) -> None:
        self.order.picks, self.ready = state["picks"], [tuple(entry) for entry in state["ready"]]
        for position, stored in zip(self.order.positions, state["sources"], strict=True):
            position.pending.extend(stored["pending"])
            position.next = stored["next"]
        self.documents = state["documents"]


def resized(ranks: list[Rank], world_size: int, *arguments) -> list[Rank]:
    states = merge_states([rank.state() for rank in reversed(ranks)], world_size)
    new = [Rank(*arguments[:2], rank, world_size, *arguments[2:]) for rank in range(world_size)]
    for rank, state in zip(new, states, strict=True):
        assert state["rank"] == rank.rank
        assert state["world_size"] == world_size
        rank.load(state)
    return new


def deliver_some(ranks: list[Rank], number: int, lookahead: int, random) -> Counter:
    """Pieces of ranks drawn at random, so that one may be far ahead of another."""
    rank = [random.choice(ranks) for _ in range(number)]
    found = [each.deliver(random.randrange(99), lookahead) for each in rank]
    return Counter(piece for piece in found if piece is not None)


def pieces_of(source: int, ks: range) -> set[tuple[int, int, int]]:
    return {(source, k, piece) for k in ks for piece in range(1 + (k % 3 == 0))}


CHAINS = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@settings(max_examples=200, deadline=None)
@given(st.integers(5, 40), CHAINS, st.integers(1, 3), st.integers(1, 6), st.randoms())
def test_any_chain_of_world_sizes_delivers_each_sample_once_an_epoch(
    size, chain, epochs, lookahead, random
):
    ranks = [Rank([size], None, rank, chain[0], epochs) for rank in range(chain[0])]
    seen: Counter[tuple[int, int, int]] = Counter()
    for world_size in chain[1:]:
        seen += deliver_some(ranks, random.randrange(2 * size), lookahead, random)
        ranks = resized(ranks, world_size, [size], None, epochs)
    for rank in ranks:
        while (found := rank.deliver(0, lookahead)) is not None:
            seen[found] += 1
    assert seen == Counter(pieces_of(0, range(epochs * size)))
    assert all(rank.order.epoch == epochs for rank in ranks)


WEIGHTS = [Weight.parse(value, "") for value in (1, 0.25, {0: 0.0, 60: 2.0})]


@settings(max_examples=100, deadline=None)
@given(CHAINS, st.integers(1, 6), st.randoms())
def test_mixed_sources_go_on_without_gaps_at_any_chain_of_world_sizes(chain, lookahead, random):
    """Sources of 7, 1 and 30 samples: of each what is delivered and what is left is everything."""
    sizes = [7, 1, 30]
    ranks = [Rank(sizes, WEIGHTS, rank, chain[0]) for rank in range(chain[0])]
    seen: Counter[tuple[int, int, int]] = Counter()
    for world_size in [*chain[1:], 1]:
        seen += deliver_some(ranks, random.randrange(90), lookahead, random)
        ranks = resized(ranks, world_size, sizes, WEIGHTS)
    (last,) = ranks
    whole = seen + Counter(entry[:3] for entry in last.ready)
    for source, position in enumerate(last.order.positions):
        taken = pieces_of(source, range(position.next))
        waiting = pieces_of(source, position.pending)
        assert not waiting & set(whole)
        assert {piece for piece in whole if piece[0] == source} | waiting == taken
    assert max(whole.values(), default=1) == 1
    at_hand = len({entry[:2] for entry in last.ready})
    # A sample that is delivered in part was picked, and stays so.
    assert last.order.picks >= len({piece[:2] for piece in seen} - {e[:2] for e in last.ready})
    assert last.order.picks <= len({piece[:2] for piece in seen}) + at_hand


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.randoms())
def test_counts_are_dealt_out_and_not_multiplied(before, after, random):
    ranks = [Rank([40], None, rank, before) for rank in range(before)]
    deliver_some(ranks, 60, 3, random)
    old = [rank.state() for rank in ranks]
    new = merge_states(old, after)
    for read in (
        lambda state: state["documents"],
        lambda state: state["delivered"].get("a", {}).get("samples", 0),
        lambda state: state["skipped"].get("too_long", 0),
    ):
        assert sum(map(read, new)) == sum(map(read, old))
        assert max(map(read, new)) - min(map(read, new)) <= 1
    assert {state["skips_in_a_row"] for state in new} == {0}
    assert max(state["epoch_faults"] for state in new) <= 2


def test_only_the_states_of_one_whole_run_are_dealt_out():
    states = [Rank([40], None, rank, 3).state() for rank in range(3)]
    with pytest.raises(UserError, match=r"ranks \[0, 2\] of 3; all of them"):
        merge_states([states[0], states[2]], 2)
    with pytest.raises(UserError, match=r"formats \['1', '2'\], this version reads 2; resume with"):
        merge_states([*states[:2], {"format": 1, "rank": 2}], 2)
    with pytest.raises(UserError, match="of different runs"):
        merge_states([*states[:2], {**states[2], "seed": 1}], 2)


@pytest.mark.parametrize("weights", [[1, 1], [0.7, 0.2, 0.1], [5, 0.01], [3]])
@pytest.mark.parametrize("world_size", [1, 5])
def test_every_block_holds_every_share(weights, world_size):
    total: Counter[int] = Counter()
    for rank in range(world_size):
        mixture = Mixture([Weight.parse(w, "") for w in weights], 7, rank, world_size)
        for block in range(40):
            counts = Counter(mixture.source(BLOCK * block + place) for place in range(BLOCK))
            total.update(counts)
            for source, weight in enumerate(weights):
                assert abs(counts[source] - BLOCK * weight / sum(weights)) < 1
    for source, weight in enumerate(weights):  # and the remainders do not add up
        assert abs(total[source] - world_size * 40 * BLOCK * weight / sum(weights)) < 3


def test_picks_of_a_block_are_mixed_and_differ_by_rank_and_seed():
    def picks(seed, rank):
        mixture = Mixture([Weight.parse(1, "")] * 2, seed, rank, 2)
        return [mixture.source(pick) for pick in range(2 * BLOCK)]

    first = picks(0, 0)
    assert first == picks(0, 0)
    assert picks(0, 1) != first != picks(1, 0)
    assert first[:BLOCK] != first[BLOCK:]
    assert max(len(run) for run in "".join(map(str, first)).split("0")) < 16


def test_weights_follow_their_schedule_over_the_samples_of_all_ranks():
    weight = Weight.parse({0: 1.0, 1000: 0.0, 3000: 4}, "")
    assert [weight.at(samples) for samples in (0, 250, 1000, 2000, 3000, 9999)] == [
        *(1.0, 0.75, 0.0, 2.0, 4.0, 4.0)
    ]
    late = Weight.parse({2048: 0.0, 4096: 1.0}, "")
    for world_size in (1, 4):
        mixture = Mixture([Weight.parse({2048: 1.0, 4096: 0.0}, ""), late], 0, 0, world_size)
        shares = []
        for start in (0, 2048, 3072, 4096):
            picks = range(start // world_size, (start + 1024) // world_size)
            shares.append(sum(map(mixture.source, picks)) / len(picks))
        assert shares[0] == 0
        assert shares[3] == 1
        assert shares[1:3] == pytest.approx([0.25, 0.75], abs=0.02)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([], "data.sources is"),
        ({"a": "x"}, "data.sources is"),
        (["x"], r"data.sources\[0\] is 'x'; give a mapping"),
        ([{"name": "a"}], r"data.sources\[0\].shards is None"),
        ([{"shards": "x"}], r"data.sources\[0\].name is None"),
        ([{"name": "a", "shard": "x"}], r"data.sources\[0\].shard'; the nearest .* 'shards'"),
        ([{"name": "a", "shards": "x", "weight": 0}], r"data.sources\[0\].weight is 0; give"),
        ([{"name": "a", "shards": "x", "weight": {"0": 1}}], "weight is {'0': 1}; give"),
        ([{"name": "a", "shards": "x", "weight": {0: -1}}], "weight is {0: -1}; give"),
        ([{"name": "a", "shards": "x", "weight": True}], "weight is True"),
        ([{"name": "a", "shards": "x"}] * 2, "names 'a' twice"),
        (
            [{"name": "a", "shards": "x"}, {"name": "b", "shards": "y", "weight": 1}],
            "'a' has no weight and others have",
        ),
        (
            [
                {"name": "a", "shards": "x", "weight": {0: 1, 5: 0}},
                {"name": "b", "shards": "x", "weight": {0: 1, 5: 0, 7: 1}},
            ],
            "all weights are 0 after 5 samples",
        ),
    ],
)
def test_wrong_sources_are_refused(values, message):
    with pytest.raises(UserError, match=message):
        parse_sources(values)


def test_an_order_is_a_permutation_of_seed_source_and_epoch():
    def order(seed=0, source=0, epoch=0, shuffle=True):
        index = ShardIndex([None] * 500, [], {})  # type: ignore[list-item]
        return LocalSource(index, source, seed, shuffle).order(epoch).tolist()

    orders = [order(), order(seed=1), order(source=1), order(source=2), order(epoch=1)]
    assert all(sorted(each) == list(range(500)) for each in orders)
    assert len({tuple(each) for each in orders}) == len(orders)
    assert order() == orders[0]
    assert order(shuffle=False) == order(shuffle=False, epoch=3) == list(range(500))
    # The first source has the order that a stream without named sources always had.
    old = np.random.Generator(np.random.PCG64([3, 2])).permutation(500)
    assert order(seed=3, epoch=2) == old.tolist()
    assert generator(3, 2, source=1).random() != generator(3, 2, 1).random()


def test_held_out_samples_are_a_share_by_key():
    keys = [f"{number:09d}" for number in range(20_000)]
    small = {key for key in keys if is_held_out(key, 0.01)}
    large = {key for key in keys if is_held_out(key, 0.05)}
    assert len(small) == pytest.approx(200, abs=60)
    assert len(large) == pytest.approx(1000, abs=130)
    assert small < large
    assert is_held_out("ключ", 0.9999999)
    assert sorted(small)[:3] == ["000000044", "000000115", "000000293"]  # the same for ever
