"""Indexes beside shards: the same as a scan, or not used."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import tarfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data_pipelines.__main__ import main
from data_pipelines.records import RecordError
from data_pipelines.shard_index import (
    IndexedSample,
    Member,
    ShardSamples,
    ShardTable,
    StaleIndexError,
    index_path,
    load_index,
)
from data_pipelines.shards import ShardReader, index_shards, scan_shard
from tests.data_pipelines.conftest import failure, toy_shards

ROOMY = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
KEYS = st.text("ab/Aä\udcff", min_size=1, max_size=4)
PATHS = st.tuples(KEYS, st.sampled_from([".json", ".img0.png", ".IMG0.PNG", ".txt", ""]))


def write_tar(path: Path, files: list[tuple[str, bytes]], kind: int = tarfile.PAX_FORMAT) -> None:
    with tarfile.open(path, "w", format=kind, errors="surrogateescape") as tar:
        for name, data in files:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def contents(samples, reader: ShardReader) -> list[dict[str, bytes]]:
    return [{name: reader.read(sample, name) for name in sample.members} for sample in samples]


@ROOMY
@given(
    st.lists(st.tuples(PATHS, st.binary(max_size=1500)), max_size=12),
    st.sampled_from([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT]),
)
def test_an_index_tells_what_a_scan_tells(tmp_path, files, kind):
    shard = tmp_path / "a-0.tar"
    index_path(shard).unlink(missing_ok=True)
    write_tar(shard, [("".join(path).strip("/") or "x", data) for path, data in files], kind)
    scanned = index_shards([str(shard)])
    before = contents(scanned.samples, ShardReader())
    assert main(["index", str(shard)]) == 0
    stated, sha256 = load_index(str(shard))
    assert len(sha256) == 64
    assert stated == scan_shard(str(shard))[0]
    indexed = index_shards([str(shard)])
    assert list(indexed.samples) == list(scanned.samples) == stated
    assert indexed.fingerprint() == scanned.fingerprint()
    assert contents(indexed.samples, ShardReader()) == before


def test_the_index_of_our_shards_is_the_scan(tmp_path):
    toy_shards(tmp_path, [4, 1], images=2)
    for shard in sorted(tmp_path.glob("*.tar")):
        stated, _ = load_index(str(shard))
        assert (stated, None) == scan_shard(str(shard))


NUMBERS = st.sampled_from([-1, 0, 1, 511, 512, 1024, 1536, 2048, 10240, 2**40, 2**70, 1.5, "1"])
CHANGES = st.one_of(
    st.tuples(st.just("offset"), st.integers(0, 5), NUMBERS),
    st.tuples(st.just("size"), st.integers(0, 5), NUMBERS),
    st.tuples(st.just("key"), st.integers(0, 5), st.sampled_from(["k000", "k001", "x", 1, None])),
    st.tuples(st.just("row"), st.integers(0, 5), st.sampled_from([None, [], ["k"], {}, "k"])),
    st.tuples(st.just("cut"), st.integers(1, 6), st.none()),
)


@ROOMY
@given(st.lists(CHANGES, min_size=1, max_size=3))
def test_a_false_index_never_gives_false_bytes(tmp_path, changes):
    """A member is what the tar holds under that name, or an error that is counted."""
    if not list(tmp_path.glob("*.tar")):
        toy_shards(tmp_path, [3])
    (shard,) = map(str, tmp_path.glob("*.tar"))
    original = index_path(shard).read_text()
    true = {
        sample.key: members
        for sample, members in zip(
            scan_shard(shard)[0], contents(scan_shard(shard)[0], ShardReader()), strict=True
        )
    }
    content = json.loads(original)
    for what, place, value in changes:
        rows = content["samples"]
        row, name = rows[place // 2 % len(rows)], ("json", "img0.png")[place % 2]
        if what == "cut":
            del rows[max(1, len(rows) - place) :]
        elif what == "row":
            rows[place // 2 % len(rows)] = value
        elif not isinstance(row, list) or len(row) != 3:
            continue
        elif what == "key":
            row[0] = value
        elif name in row[1]:
            row[1][name][what == "size"] = value
    try:
        index_path(shard).write_text(json.dumps(content))
        reader = ShardReader()
        for sample in index_shards([shard]).samples:
            for name in sample.members:
                with contextlib.suppress(RecordError):
                    assert reader.read(sample, name) == true[sample.key][name]
    finally:
        index_path(shard).write_text(original)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "7", "[" * 100_000, '{"format": 2}', '{"format": 1}', "\xff", '"' + "9" * 5000],
)
def test_what_is_no_index_is_passed_over(tmp_path, caplog, text):
    pattern = toy_shards(tmp_path, [2])
    (path,) = tmp_path.glob("*.index.json")
    path.write_bytes(text.encode("latin-1"))
    with caplog.at_level(logging.WARNING):
        assert [sample.key for sample in index_shards([pattern]).samples] == ["k000", "k001"]
    assert "is not used" in caplog.text


def test_an_index_of_another_shard_is_passed_over(tmp_path, caplog):
    toy_shards(tmp_path, [3, 2])
    first, second = sorted(tmp_path.glob("*.index.json"))
    first.write_bytes(second.read_bytes())  # of an equal number of bytes: tars are padded
    (shard, _) = sorted(map(str, tmp_path.glob("*.tar")))
    with pytest.raises(StaleIndexError, match="goes on behind byte"):
        load_index(shard)
    assert len(index_shards([shard]).samples) == 3
    content = json.loads(second.read_text())
    with open(shard, "ab") as file:
        file.write(bytes(10240))
    first.write_text(json.dumps(content))
    with pytest.raises(StaleIndexError, match="it is of 10240 bytes, the shard has 20480"):
        load_index(shard)


def test_a_shard_that_was_replaced_behind_an_open_reader_gives_no_wrong_bytes(tmp_path):
    write_tar(tmp_path / "s.tar", [("a.json", b"{}"), ("b.json", b"{1}")])
    samples = index_shards([str(tmp_path / "s.tar")]).samples
    write_tar(tmp_path / "s.tar", [("b.json", b"{1}"), ("a.json", b"{}")])
    for sample in samples:
        with pytest.raises(RecordError, match="does not stand at byte"):
            ShardReader().read(sample, "json")


def test_samples_are_made_when_asked_for_and_cost_few_bytes():
    def samples(count):
        members = {"json": Member(512, 300), "img0.jpg": Member(2048, 20_000)}
        return [IndexedSample("s.tar", f"{number:09d}", members) for number in range(count)]

    tables = [ShardTable("s.tar", samples(count)) for count in (0, 1000, 0, 1, 500)]
    held = ShardSamples(tables)
    assert sum(table.num_bytes for table in tables) < 60 * len(held)
    everything = [*samples(1000), *samples(1), *samples(500)]
    assert list(held) == everything
    assert list(held[990:1010:3]) == everything[990:1010:3]
    assert held[-1] == everything[-1]
    assert list(held[::-1][:2]) == everything[:-3:-1]
    assert len(held[:7][2:]) == 5
    with pytest.raises(IndexError):
        held[len(everything)]
    assert list(ShardSamples([])) == []


def test_index_command(tmp_path, capsys):
    toy_shards(tmp_path, [3, 2], images=2)
    for path in tmp_path.glob("*.json"):
        path.unlink()
    write_tar(tmp_path / "test-0.tar", [("a.json", b"{}")])
    assert main(["index", str(tmp_path), "--manifest"]) == 0
    assert "indexed 6 samples in 3 shards, damaged 0" in capsys.readouterr().out
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert {name: split["samples"] for name, split in manifest["splits"].items()} == {
        **{"toy0": 3, "toy1": 2},
        "test": 1,
    }
    (entry,) = manifest["splits"]["toy0"]["shards"]
    shard = tmp_path / "toy0-000000.tar"
    assert (entry["name"], entry["images"], entry["bytes"]) == (
        *(shard.name, 6),
        shard.stat().st_size,
    )
    assert load_index(str(shard))[1] == entry["sha256"]
    assert "is there already" in failure(capsys, "index", str(tmp_path), "--manifest")

    shard.write_bytes(shard.read_bytes()[:3000])
    index_path(shard).unlink()
    assert main(["index", str(tmp_path)]) == 1
    assert "ends early" in capsys.readouterr().err
    assert not index_path(shard).exists()
    (tmp_path / "manifest.json").unlink()
    assert main(["index", str(tmp_path), "--manifest"]) == 2
    assert "holds damaged shards" in capsys.readouterr().err
