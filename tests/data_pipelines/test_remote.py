"""Remote shards: the samples of local ones, and every fault named or counted."""

from __future__ import annotations

import itertools
import json
import logging
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conceptmoe_vl.errors import UserError
from data_pipelines import DataConfig, build_stream, iter_texts
from data_pipelines.indexing import write_indexes
from data_pipelines.opening import iter_source_texts
from data_pipelines.remote import LaneOrder, RemoteShardError
from data_pipelines.remote_opening import file_name, shown
from data_pipelines.shards import index_shards
from data_pipelines.stream import SampleError
from tests.data_pipelines.conftest import toy_shards
from tests.data_pipelines.http_server import Server
from tests.data_pipelines.test_stream import same

COUNTS = [7, 3, 11, 1, 6]
TOTAL = sum(COUNTS)
QUICK = {"remote_retries": 1, "remote_timeout": 20}


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    monkeypatch.setattr("data_pipelines.remote_streams._LONGEST_PAUSE", 0.0)


@pytest.fixture
def folder(tmp_path) -> Path:
    toy_shards(tmp_path / "data", COUNTS)
    write_indexes([str(tmp_path / "data")], pytest.fail, manifest=True)
    return tmp_path / "data"


@pytest.fixture
def server(folder):
    server = Server(folder)
    yield server
    server.close()


def stream_of(processor, shards, rank=0, world_size=1, manifest=None, **options):
    values = {"tokens_per_batch": 120, **QUICK, **options}
    if manifest is None:
        values["shards"] = shards
    else:
        values["sources"] = [{"name": "toy", "shards": shards, "manifest": str(manifest)}]
    return build_stream(DataConfig(**values), processor, rank, world_size)


def keys_of(stream) -> Counter:
    counts = Counter(key for batch in stream for key in batch.keys)
    stream.close()
    return counts


def pipes(folder: Path, command: str = "cat {}") -> list[str]:
    return [f"pipe:{command.format(path)}" for path in sorted(folder.glob("*.tar"))]


def first_shard(folder: Path) -> Path:
    return sorted(folder.glob("*.tar"))[0]


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    lanes=st.integers(1, 20),
    seed=st.integers(0, 99),
)
def test_an_order_holds_every_sample_once_and_lanes_read_shards_forward(sizes, lanes, seed):
    permutation = np.random.default_rng(seed).permutation(len(sizes))
    order = LaneOrder(np.array(sizes), permutation, lanes)
    numbers = [order[position] for position in range(sum(sizes))]
    assert sorted(numbers) == list(range(sum(sizes)))
    for lane in range(lanes):
        found = [order.find(number) for number in numbers[lane::lanes]]
        assert all(place[0] == lane for place in found)
        for (_, shard, index), (_, after, then) in itertools.pairwise(found):
            if after == shard:
                assert then == index + 1
            else:
                assert (index, then) == (sizes[shard] - 1, 0)


@pytest.mark.parametrize("way", ["http", "pipe", "memory", "file"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_all_ranks_together_read_the_samples_of_local_shards(
    processor, folder, server, way, world_size
):
    import fsspec

    manifest = folder / "manifest.json" if way == "pipe" else None
    shards: str | list[str] = f"{server.url}/*.tar"
    if way == "pipe":
        shards = pipes(folder)
    elif way == "file":
        shards = f"file://{folder}/"
    elif way == "memory":
        memory = fsspec.filesystem("memory")
        memory.put(str(folder), f"/{folder.parent.name}", recursive=True)
        shards = f"memory://{folder.parent.name}/toy*.tar"
    local = keys_of(stream_of(processor, str(folder / "*.tar"), epochs=2))
    found: Counter = Counter()
    for rank in range(world_size):
        options = {"epochs": 2, "interleave": 2, "num_workers": 1 if way == "pipe" else 0}
        stream = stream_of(processor, shards, rank, world_size, manifest, **options)
        found += keys_of(stream)
        assert not stream.skipped
    assert found == local
    assert len(local) == TOTAL


@settings(max_examples=6, deadline=None)
@given(world=st.integers(1, 6), interleave=st.integers(1, 6), seed=st.integers(0, 9))
def test_any_world_and_interleave_reads_every_sample_once(
    processor, shared_folder, world, interleave, seed
):
    options = {"epochs": 1, "interleave": interleave, "seed": seed}
    found: Counter = Counter()
    for rank in range(world):
        found += keys_of(stream_of(processor, f"file://{shared_folder}/", rank, world, **options))
    assert len(found) == TOTAL
    assert set(found.values()) == {1}


@pytest.fixture(scope="module")
def shared_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("shared")
    toy_shards(folder, COUNTS)
    write_indexes([str(folder)], pytest.fail, manifest=True)
    return folder


def test_a_rank_opens_its_own_lanes_alone(processor, folder, server):
    """Two lanes, two ranks: together all shards, and again the one that the cut goes through."""
    for rank in range(2):
        keys_of(stream_of(processor, f"{server.url}/", rank, 2, epochs=1, interleave=2))
    opened = [name for name, _ in server.requests if name.endswith(".tar")]
    assert len(opened) <= len(COUNTS) + 1


@pytest.mark.parametrize("steps", [1, 4, 9])
def test_resuming_in_the_middle_of_shards_gives_the_unbroken_stream(
    processor, folder, server, steps, caplog
):
    shards, options = f"{server.url}/", {"interleave": 3, "pack_lookahead": 4}
    unbroken = list(itertools.islice(stream_of(processor, shards, **options), 14))
    stream = stream_of(processor, shards, **options)
    for _ in range(steps):
        next(stream)
    state = json.loads(json.dumps(stream.state_dict()))
    stream.close()
    resumed = stream_of(processor, shards, **options)
    with caplog.at_level(logging.INFO):
        resumed.load_state_dict(state)
        rest = [next(resumed) for _ in range(14 - steps)]
    resumed.close()
    assert all(same(one, two) for one, two in zip(unbroken[steps:], rest, strict=True))
    assert "passing over" in caplog.text


def test_interleave_belongs_to_the_state(processor, folder, server):
    state = stream_of(processor, f"{server.url}/", interleave=2).state_dict()
    with pytest.raises(UserError, match=r"interleave-2.*interleave-3"):
        stream_of(processor, f"{server.url}/", interleave=3).load_state_dict(state)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:4000])


def break_header(path: Path) -> None:
    """In the last sample: its count would still be right."""
    data = bytearray(path.read_bytes())
    place = data.rindex(b"ustar") - 257
    data[place : place + 8] = b"\xff" * 8
    path.write_bytes(data)


def drop_end(path: Path) -> None:
    path.write_bytes(path.read_bytes().rstrip(b"\0").ljust(512, b"\0"))


def remanifest(folder: Path, **changes) -> None:
    """Changes the first shard's entry."""
    manifest = json.loads((folder / "manifest.json").read_text())
    split = next(iter(manifest["splits"].values()))
    next(s for s in split["shards"] if s["name"] == first_shard(folder).name).update(changes)
    (folder / "manifest.json").write_text(json.dumps(manifest))


FAULTS = {
    "absent": (lambda folder: first_shard(folder).unlink(), "answers 404", 7),
    "cut": (lambda folder: cut(first_shard(folder)), "4000 bytes, its manifest says", 7),
    "header": (lambda folder: break_header(first_shard(folder)), "a header is broken", 1),
    "fewer": (lambda folder: remanifest(folder, samples=9), "behind its first 7", 2),
    "more": (lambda folder: remanifest(folder, samples=5), "holds 7 samples", 1),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_shard_names_it_or_is_counted(processor, folder, server, fault):
    damage, message, lost = FAULTS[fault]
    name = first_shard(folder).name
    damage(folder)
    with pytest.raises(RemoteShardError, match=rf"shard 'http://.*/{name}'.*{message}"):
        keys_of(stream_of(processor, f"{server.url}/", epochs=1))
    options = {"on_truncated_shard": "skip", "on_error": "skip", "interleave": 2}
    stream = stream_of(processor, f"{server.url}/", epochs=1, **options)
    found = keys_of(stream)
    assert sum(found.values()) == stream.num_samples - lost
    assert sum(stream.skipped.values()) == lost
    assert set(stream.skipped) <= {"truncated_shard", "unreadable_shard"}


@pytest.mark.parametrize(
    ("command", "message", "lost"),
    [
        ("false {}", "status 1", 7),
        ("cat {}; exit 3", "status 3", 1),
        ("head -c 4000 {}", "ends early", 7),
        ("no-such-program {}", "status 127", 7),
    ],
)
def test_a_command_that_fails_is_a_fault(processor, folder, command, message, lost):
    shards = [f"pipe:{command.format(first_shard(folder))}", *pipes(folder)[1:]]
    manifest = folder / "manifest.json"
    if "head" in command:  # as a command of unknown length
        remanifest(folder, bytes=None)
        lost = 7
    with pytest.raises(RemoteShardError, match=message):
        keys_of(stream_of(processor, shards, manifest=manifest, epochs=1))
    options = {"on_truncated_shard": "skip", "on_error": "skip", "epochs": 1}
    stream = stream_of(processor, shards, manifest=manifest, **options)
    assert sum(keys_of(stream).values()) + sum(stream.skipped.values()) == TOTAL
    assert 0 < sum(stream.skipped.values()) <= lost


def test_lost_samples_count_against_the_limit(processor, folder, server):
    first_shard(folder).unlink()
    options = {"on_truncated_shard": "skip", "max_skips": 5, "epochs": 1}
    with pytest.raises(SampleError, match="the limit is 5"):
        keys_of(stream_of(processor, f"{server.url}/", **options))


@pytest.mark.parametrize("ranges", [True, False])
def test_a_connection_that_breaks_is_continued_where_it_broke(processor, folder, ranges, caplog):
    server = Server(folder, ranges)
    name = first_shard(folder).name
    server.plans[name] = ["503", 3000, 1000]
    options = {"epochs": 1, "remote_retries": 2}
    found = keys_of(stream_of(processor, f"{server.url}/", **options))
    server.close()
    assert len(found) == TOTAL
    assert "answers 503" in caplog.text
    assert "closed early, at byte 3000" in caplog.text
    asked = [wanted for shard, wanted in server.requests if shard == name]
    assert asked[2] == "bytes=3000-"


SECRET = "geheim"


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        (f"https://user:{SECRET}@host/a/b-0.tar?sig={SECRET}#x", "https://host/a/b-0.tar"),
        (f"simplecache::s3://key:{SECRET}@bucket/b-0.tar", "simplecache::s3://bucket/b-0.tar"),
        (f"pipe:curl -H 'Token: {SECRET}' https://host/b-0.tar?sig={SECRET}", "pipe:.../b-0.tar"),
        ("pipe:fetch 17 # b-0.tar", "pipe:.../b-0.tar"),
    ],
)
def test_addresses_are_shown_without_secrets(address, expected):
    assert shown(address) == expected
    assert file_name(address) == "b-0.tar"


def test_secrets_appear_in_no_log_and_no_error(processor, folder, server, caplog):
    host = server.url.removeprefix("http://")
    name = first_shard(folder).name
    server.plans[name] = ["503", "403", "403"]
    shards = [f"http://user:{SECRET}@{host}/{name}?sig={SECRET}"]
    with caplog.at_level(logging.DEBUG), pytest.raises(RemoteShardError) as error:
        keys_of(stream_of(processor, shards, epochs=1))
    assert SECRET not in caplog.text + str(error.value)
    assert "answers 403" in str(error.value)
    assert all(headers["Authorization"].startswith("Basic ") for headers in server.headers[-2:])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda url: [f"{url}/none.tar"], "is not in the manifest"),
        (lambda url: [f"{url}/none-*.tar"], "no shard of the manifest matches"),
        (lambda url: [f"{url}/none/toy0-000000.tar"], "cannot be read .the server answers 404"),
        (lambda url: [f"{url}/", "/data/toy.tar"], "is local and other shards are remote"),
        (lambda url: ["pipe:cat toy0-000000.tar"], "its manifest must be named"),
        (lambda url: ["nosuch://bucket/toy0-000000.tar"], "fsspec knows no such address"),
        (lambda url: [f"{url}/toy0-000000.tar", f"{url}/toy0-000000.tar?a"], "two shards"),
    ],
)
def test_patterns_that_cannot_be_used_name_field_and_remedy(processor, server, change, message):
    with pytest.raises(UserError, match=rf"data\.shards.*{message}"):
        stream_of(processor, change(server.url))


@pytest.mark.parametrize("content", ["{", "[]", '{"splits": {"a": {"shards": [{"name": "b"}]}}}'])
def test_a_broken_manifest_is_named(processor, folder, server, content):
    (folder / "manifest.json").write_text(content)
    with pytest.raises(UserError, match="is no manifest of shards"):
        stream_of(processor, f"{server.url}/")


def test_a_manifest_cannot_start_a_command(processor, folder, server):
    remanifest(folder, name="pipe:touch owned # a.tar")
    with pytest.raises(UserError, match="is not in the manifest"):
        stream_of(processor, f"{server.url}/{first_shard(folder).name}")
    with pytest.raises(UserError, match="a command gives no manifest"):
        stream_of(processor, pipes(folder), manifest="pipe:cat manifest.json")


def test_local_and_remote_sources_mix_by_weight(processor, folder, server):
    sources = [
        {"name": "near", "shards": str(folder / "toy0*.tar"), "weight": 1},
        {"name": "far", "shards": f"{server.url}/toy2*.tar", "weight": 1},
    ]
    config = DataConfig(sources=sources, tokens_per_batch=120, **QUICK)
    stream = build_stream(config, processor)
    for _ in range(8):
        next(stream)
    stream.close()
    assert set(stream.delivered) == {"near", "far"}
    plain = [{**source, "weight": None} for source in sources]
    with pytest.raises(UserError, match="local and remote shards make no epoch together"):
        build_stream(DataConfig(sources=plain, **QUICK), processor)


def test_a_held_out_split_counts_what_is_lost(processor, folder, server):
    first_shard(folder).unlink()
    options = {"on_truncated_shard": "skip", "on_error": "skip", "epochs": 1, "held_out": 0.3}
    for split in ("train", "held_out"):
        stream = stream_of(processor, f"{server.url}/", split=split, **options)
        keys_of(stream)
        assert stream.skipped == {"unreadable_shard": 7}


def test_a_tokenizer_reads_the_texts_of_remote_shards(folder, server):
    near = DataConfig(shards=str(folder / "*.tar"))
    far = DataConfig(shards=f"{server.url}/", **QUICK)
    for limit in (None, 9):
        assert list(iter_source_texts(far, limit)) == list(iter_source_texts(near, limit))
        assert list(iter_source_texts(far, limit)) == list(iter_texts(near.shards, limit))


def test_commands_that_read_local_shards_alone_say_so(server):
    with pytest.raises(UserError, match=f"'{server.url}/a.tar' is remote"):
        index_shards([f"{server.url}/a.tar?sig={SECRET}"])
