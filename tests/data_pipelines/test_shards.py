"""Indexing, patterns and writing of shards."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from conceptmoe_vl.errors import UserError
from data_pipelines import iter_texts
from data_pipelines.shards import ShardReader, expand_patterns, index_shards, scan_shard
from data_pipelines.writing import write_shards
from tests.data_pipelines.conftest import sample, toy_shards


def test_members_are_read_by_offset(tmp_path):
    index = index_shards([toy_shards(tmp_path, [3, 2], images=2)])
    reader = ShardReader()
    assert [found.name for found in index.samples] == [
        *[f"toy0-000000.tar/k00{number}" for number in range(3)],
        *[f"toy1-000000.tar/k00{number}" for number in (3, 4)],
    ]
    for number, found in enumerate(index.samples):
        _, _, pictures = sample(number, images=2)
        for place in range(2):
            assert reader.read(found, f"img{place}.png") == pictures[place][1]
    reader.close()
    assert index.damaged == {}


@pytest.mark.parametrize("share", [0.001, 0.1, 0.33, 0.5, 0.77, 0.999])
def test_a_cut_shard_is_noticed_wherever_it_is_cut(tmp_path, share):
    pattern = toy_shards(tmp_path, [12])
    shard = next(tmp_path.glob("*.tar"))
    data = shard.read_bytes()
    content = data.rstrip(b"\0")  # behind it stand the end mark and padding
    shard.write_bytes(data[: int(share * len(content))])
    index = index_shards([pattern])
    assert list(index.damaged) == [str(shard)]
    reader = ShardReader()
    for number, found in enumerate(index.samples):
        assert reader.read(found, "img0.png") == sample(number)[2][0][1]


def test_a_shard_cut_between_members_is_noticed(tmp_path):
    pattern = toy_shards(tmp_path, [4])
    shard = next(tmp_path.glob("*.tar"))
    with tarfile.open(shard) as tar:
        third = [info.offset for info in tar][4]
    shard.write_bytes(shard.read_bytes()[:third])
    samples, fault = scan_shard(str(shard))
    assert [found.key for found in samples] == ["k000"]  # k001 may have lost members
    assert f"at byte {third} of {third}" in fault
    assert index_shards([pattern]).damaged


def test_a_broken_header_is_no_end(tmp_path):
    toy_shards(tmp_path, [6])
    shard = next(tmp_path.glob("*.tar"))
    with tarfile.open(shard) as tar:
        header = [info.offset for info in tar][6]
    data = bytearray(shard.read_bytes())
    data[header : header + 512] = b"x" * 512
    shard.write_bytes(data)
    samples, fault = scan_shard(str(shard))
    assert [found.key for found in samples] == ["k000", "k001"]
    assert fault is not None


@pytest.mark.parametrize("content", [b"", b"no tar", b"x" * 2000])
def test_files_that_are_no_tar_are_damaged(tmp_path, content):
    (tmp_path / "a.tar").write_bytes(content)
    samples, fault = scan_shard(str(tmp_path / "a.tar"))
    assert samples == []
    assert fault is not None


def test_patterns(tmp_path):
    for number in range(12):
        (tmp_path / f"s-{number:03d}.tar").touch()

    def names(*patterns):
        found = expand_patterns([str(tmp_path / pattern) for pattern in patterns])
        return [int(Path(path).stem[2:]) for path in found]

    assert names("s-{003..005}.tar") == [3, 4, 5]
    assert names("s-00*.tar", "s-{008..011}.tar") == list(range(12))
    assert names("") == list(range(12))
    for pattern, message in (
        ("nothing-*.tar", "no file matches"),
        ("s-{010..013}.tar", r"s-012\.tar' \(of"),
    ):
        with pytest.raises(UserError, match=message):
            names(pattern)
    (tmp_path / "a.tar.gz").touch()
    with pytest.raises(UserError, match="unpack compressed"):
        names("a.tar.gz")
    with pytest.raises(UserError, match="is remote"):
        expand_patterns(["pipe:false"])


def test_the_same_samples_give_the_same_bytes(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write_shards(tmp_path / name, "s", (sample(number) for number in range(5)), 2)
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    numbers = ("000000", "000001", "000002")
    assert files == [f"s-{number}.{kind}" for number in numbers for kind in ("index.json", "tar")]
    for name in files:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_texts_for_a_tokenizer(tmp_path):
    pattern = toy_shards(tmp_path, [3])
    assert list(iter_texts(pattern, max_samples=1)) == ["s0 q0", "a0", "s0 q1", "a1"]
    assert len(list(iter_texts([pattern]))) == 12
