"""Files that are whole or absent, and their checksums."""

from __future__ import annotations

import hashlib

import pytest

from conceptmoe_vl.files import sha256_of, written_whole


def test_a_file_takes_its_name_at_the_end_of_the_block(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("old")
    with written_whole(path) as beside:
        beside.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert [each.name for each in tmp_path.iterdir()] == ["a.json"]


def test_an_error_leaves_what_was_there(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("old")

    def write():
        with written_whole(path) as beside:
            beside.write_text("half")
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        write()
    assert path.read_text() == "old"
    assert [each.name for each in tmp_path.iterdir()] == ["a.json"]


def test_two_that_write_at_once_leave_one_whole_file(tmp_path):
    path = tmp_path / "a.json"
    with written_whole(path) as first, first.open("w") as file:
        file.write("from the ")
        with written_whole(path) as second:
            second.write_text("second")
        assert path.read_text() == "second"
        file.write("first")
    assert path.read_text() == "from the first"
    assert [each.name for each in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize("size", [0, 1, 1 << 22, (1 << 22) + 1])
def test_checksums(tmp_path, size):
    content = bytes(size)
    (tmp_path / "a").write_bytes(content)
    assert sha256_of(tmp_path / "a") == hashlib.sha256(content).hexdigest()
    assert sha256_of(str(tmp_path / "a")) == sha256_of(tmp_path / "a")
