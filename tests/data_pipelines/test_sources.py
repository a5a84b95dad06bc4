"""Streams of named sources, with and without weights; held-out splits; any number of ranks."""

from __future__ import annotations

import itertools
import json
import logging
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conceptmoe_vl.errors import UserError
from data_pipelines import DataConfig, build_stream
from data_pipelines.mixing import BLOCK
from data_pipelines.sampling import is_held_out
from data_pipelines.stream import PackedStream, SampleError
from data_pipelines.writing import write_shards
from tests.data_pipelines.conftest import sample

NAMES = ("some", "few", "many")
COUNTS = (11, 3, 30)
WEIGHTS = (2, 0.5, {0: 1.0, 300: 3.0})


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Shards of three data sets; `few` has no pictures, `many` has samples of two lengths."""
    path = tmp_path_factory.mktemp("sources")
    for number, (name, count) in enumerate(zip(NAMES, COUNTS, strict=True)):
        samples = [
            sample(100 * number + step, images=int(name != "few"), questions=1 + 3 * (step % 2))
            for step in range(count)
        ]
        write_shards(path, name, samples, 8)
    return path


def named(folder: Path, weights=None, names=NAMES) -> list[dict]:
    sources = [{"name": f"set_{name}", "shards": str(folder / f"{name}-*.tar")} for name in names]
    for source, weight in zip(sources, weights or (), strict=False):
        source["weight"] = weight
    return sources


def stream_of(processor, sources, rank=0, world_size=1, **options) -> PackedStream:
    values = {"tokens_per_batch": 160, "pack_lookahead": 6, **options}
    return build_stream(DataConfig(sources=sources, **values), processor, rank, world_size)


def streams_of(processor, sources, world_size, **options) -> list[PackedStream]:
    return [stream_of(processor, sources, r, world_size, **options) for r in range(world_size)]


def keys_of(stream, batches=None) -> list[str]:
    found = []
    for number, batch in enumerate(stream, start=1):
        found += batch.keys
        if number == batches:
            break
    return found


def test_sources_without_weights_are_one_epoch_under_their_names(processor, folder):
    streams = streams_of(processor, named(folder), 2, epochs=2)
    seen = Counter(key for stream in streams for key in keys_of(stream))
    assert len(seen) == sum(COUNTS)
    assert set(seen.values()) == {2}
    plain = build_stream(
        DataConfig(
            shards=[str(folder / f"{name}-*.tar") for name in NAMES],
            **{"tokens_per_batch": 160, "pack_lookahead": 6, "epochs": 2},
        ),
        processor,
        *(0, 2),
    )
    again = stream_of(processor, named(folder), 0, 2, epochs=2)
    assert keys_of(again) == keys_of(plain)  # names change nothing but the counts
    assert set(plain.delivered) == {"toy"}
    for number, name in enumerate(NAMES):
        counts = [stream.delivered[f"set_{name}"] for stream in streams]
        assert sum(count["samples"] for count in counts) == 2 * COUNTS[number]
        images = 0 if name == "few" else 2 * COUNTS[number]
        assert sum(count["images"] for count in counts) == images


def test_counts_are_of_what_was_delivered(processor, folder):
    stream, again = (stream_of(processor, named(folder, WEIGHTS)) for _ in range(2))
    tokens = Counter()
    for _ in range(30):
        batch = next(stream)
        ends = batch.cu_seqlens.tolist()
        for source, start, end in zip(batch.sources, ends[:-1], ends[1:], strict=True):
            tokens[source] += end - start
    assert {name: counts["tokens"] for name, counts in stream.delivered.items()} == tokens
    assert stream.documents == sum(counts["samples"] for counts in stream.delivered.values())
    again.load_state_dict(json.loads(json.dumps(stream.state_dict())))
    assert again.delivered == stream.delivered
    assert again.delivered is not stream.delivered


def test_weights_are_kept_in_every_block_over_small_and_large_sources(processor, folder):
    stream = stream_of(
        processor, named(folder, (2, 0.5, 1.5)), pack_lookahead=1, tokens_per_batch=50
    )
    while stream.documents < BLOCK:
        next(stream)
    samples = [stream.delivered[f"set_{name}"]["samples"] for name in NAMES]
    assert samples == pytest.approx([BLOCK / 2, BLOCK / 8, BLOCK * 3 / 8], abs=2)
    assert stream.epoch == stream.documents // sum(COUNTS)


def test_each_source_goes_through_its_own_epochs(processor, folder):
    streams = streams_of(processor, named(folder, WEIGHTS), 2, pack_lookahead=1)
    seen: Counter[str] = Counter()
    for _ in range(60):
        for stream in streams:
            seen.update(next(stream).keys)
    for name in NAMES:
        times = [count for key, count in seen.items() if key.startswith(name)]
        # Two ranks, which may stand in neighbouring epochs.
        assert max(times) - min(times) <= 2
    assert sum(seen[key] for key in seen if key.startswith("few")) > 12


@pytest.mark.parametrize("weights", [None, WEIGHTS])
@pytest.mark.parametrize("cut", [1, 7])
def test_resumed_at_the_same_number_of_ranks_batches_are_the_same(processor, folder, weights, cut):
    unbroken = stream_of(processor, named(folder, weights), 1, 2)
    expected = [next(unbroken).keys for _ in range(14)]
    first = stream_of(processor, named(folder, weights), 1, 2, num_workers=1)
    found = [next(first).keys for _ in range(cut)]
    state = json.loads(json.dumps(first.state_dict()))
    first.close()
    second = stream_of(processor, named(folder, weights), 1, 2)
    second.load_state_dict(state)
    assert found + [next(second).keys for _ in range(14 - cut)] == expected
    assert second.state_dict() == unbroken.state_dict()


CHAINS = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 5)), min_size=2, max_size=4)


@settings(max_examples=15, deadline=None)
@given(CHAINS, st.integers(1, 12))
def test_an_epoch_is_whole_at_any_chain_of_world_sizes(processor, folder, chain, lookahead):
    """Each part of the chain: a number of ranks, and the batches that each of them takes."""
    options = {"epochs": 2, "pack_lookahead": lookahead}
    seen: Counter[str] = Counter()
    states: list[dict] = []
    for world_size, batches in [*chain, (2, None)]:
        streams = streams_of(processor, named(folder), world_size, **options)
        for stream in streams:
            if states:
                stream.load_state_dict(states)
            seen.update(key for batch in itertools.islice(stream, batches) for key in batch.keys)
        states = json.loads(json.dumps([stream.state_dict() for stream in streams]))
    assert len(seen) == sum(COUNTS)
    assert set(seen.values()) == {2}
    delivered = [counts for state in states for counts in state["delivered"].values()]
    assert sum(counts["samples"] for counts in delivered) == 2 * sum(COUNTS)


def test_a_state_fits_its_sources_alone(processor, folder, caplog):
    state = stream_of(processor, named(folder, WEIGHTS)).state_dict()
    with pytest.raises(UserError, match=r"names \['set_some', 'set_few', 'set_many'\], this run"):
        stream_of(processor, named(folder, WEIGHTS[:2], NAMES[:2])).load_state_dict(state)
    with pytest.raises(UserError, match=r"sources of the names .* has \['all'\]"):
        stream_of(processor, named(folder)).load_state_dict(state)
    with pytest.raises(UserError, match="format 1, this run has 2; resume with the version"):
        stream_of(processor, named(folder)).load_state_dict({"format": 1})
    with pytest.raises(UserError, match="the data state of the checkpoint has rank 0, this run"):
        stream_of(processor, named(folder, WEIGHTS), 1, 2).load_state_dict(
            {**state, "world_size": 2}
        )
    with pytest.raises(UserError, match=r"has held_out 0.0, this run has 0.5; set data.held_out"):
        stream_of(processor, named(folder, WEIGHTS), held_out=0.5).load_state_dict(state)
    with caplog.at_level(logging.WARNING):  # a new mixture is no other run
        stream_of(processor, named(folder, (1, 1, 1))).load_state_dict(state)
    assert "the weights of data.sources have changed" in caplog.text


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_splits_part_the_samples_by_key(processor, folder, num_workers):
    options = {"held_out": 0.3, "epochs": 1, "on_error": "raise", "num_workers": num_workers}
    training = stream_of(processor, named(folder), **options)
    held_out = stream_of(processor, named(folder), split="held_out", **options)
    one, other = keys_of(training), keys_of(held_out)
    assert len(set(one) | set(other)) == len(one) + len(other) == sum(COUNTS)
    assert len(other) > 3
    assert all(is_held_out(key.partition("/")[2], 0.3) for key in other)
    assert not training.skipped
    assert not held_out.skipped
    more = keys_of(stream_of(processor, named(folder), **{**options, "held_out": 0.4}))
    assert set(more) < set(one)


def test_a_split_without_a_sample_ends_with_one_message(processor, folder):
    stream = stream_of(processor, named(folder), held_out=1e-9, split="held_out")
    with pytest.raises(SampleError, match="no sample of the split 'held_out' is usable"):
        next(stream)


def test_documents_at_hand_are_bounded_by_their_bytes(processor, folder):
    def held(limit):
        stream = stream_of(
            processor, named(folder), pack_lookahead=30, pack_lookahead_bytes=limit, epochs=1
        )
        keys, most = [], 0
        for batch in stream:
            keys += batch.keys
            most = max(most, sum(entry.num_bytes for entry in stream._ready))
        return sorted(keys), most

    everything, unbounded = held(2**28)
    largest = 3 * 16 * 16 * 4 + 80 * 60  # a picture and its tokens
    keys, most = held(20_000)
    assert 20_000 - largest < most < 20_000 + largest < unbounded
    assert keys == everything
    assert held(1)[0] == everything  # one document at a time


def test_sources_need_no_weights_of_equal_kind_and_fit_the_ranks(processor, folder, tmp_path):
    with pytest.raises(UserError, match=r"epochs is 2, but sources with weights .* remove the"):
        stream_of(processor, named(folder, WEIGHTS), epochs=2)
    with pytest.raises(UserError, match="exclude each other"):
        stream_of(processor, named(folder), shards="x")
    twice = [*named(folder), {"name": "again", "shards": str(folder / "few-000000.tar")}]
    with pytest.raises(UserError, match=r"few-000000.tar' is in 'set_few' and in 'again'"):
        stream_of(processor, twice)
    assert next(stream_of(processor, [{**each, "weight": 1} for each in twice])).num_tokens
    with pytest.raises(UserError, match="shards hold 14 samples for 15 processes; each process"):
        stream_of(processor, named(folder, names=NAMES[:2]), 0, 15)
    with pytest.raises(UserError, match=r"split is held_out, but data\.held_out is 0"):
        stream_of(processor, named(folder), split="held_out")
    with pytest.raises(UserError, match="held_out is 1; give a share"):
        stream_of(processor, named(folder), held_out=1)
