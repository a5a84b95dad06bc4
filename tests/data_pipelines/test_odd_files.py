"""Record files and tars as people have them: what cannot be read is counted or refused, never
lost and never read as something else."""

from __future__ import annotations

import errno
import io
import json
import re
import shutil
import sys
import tarfile

import pytest

from conceptmoe_vl.errors import UserError
from conceptmoe_vl.processing import train_tokenizer
from data_pipelines.__main__ import main
from data_pipelines.building import build
from data_pipelines.layouts.rows import FileError, table_rows
from data_pipelines.records import RecordError, parse_record
from data_pipelines.shards import ShardReader, index_shards, scan_shard
from data_pipelines.writing import write_shards
from tests.data_pipelines import test_building as building
from tests.data_pipelines.conftest import failure, toy_shards

ARRAY = json.dumps([{"text": "one"}, {"text": "two"}])


@pytest.mark.parametrize("behind", [ARRAY, '{"text": "three"}\n', ",", "]"])
@pytest.mark.parametrize("chunk", [4, 1 << 20])
@pytest.mark.parametrize(("array", "count"), [(ARRAY, 2), ("[]", 0)])
def test_what_stands_behind_an_array_is_not_lost(
    tmp_path, monkeypatch, capsys, behind, chunk, array, count
):
    monkeypatch.setattr("data_pipelines.layouts.rows._CHUNK", chunk)
    file = tmp_path / "rows.json"
    file.write_text(f"{array}\n   \n{behind}")
    with pytest.raises(FileError, match=f"goes on behind its JSON array of {count} records"):
        list(table_rows(file, ("text",)))
    failure(capsys, "build", "text", str(file), str(tmp_path / "out"), "--workers", "1")
    assert main(["validate", str(file), "--layout", "text"]) == 1
    file.write_text(f"{array}\n   \r\n")
    assert len(list(table_rows(file, ("text",)))) == count


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_lines_of_utf_16_are_never_read_as_other_text(tmp_path, encoding):
    """Cut at the byte of a line break, each line has the other byte order: other characters."""
    file = tmp_path / "rows.jsonl"
    lines = [json.dumps({"text": "日本"}, ensure_ascii=False)] * 3
    file.write_bytes("\n".join(lines).encode(encoding))
    rows = list(table_rows(file, ("text",)))
    assert len(rows) >= 3
    for row in rows:
        with pytest.raises(RecordError, match="no JSON"):
            row.load()


def test_half_a_surrogate_pair_in_bytes_is_no_utf_8():
    """`json` takes it, and tokenizers do not."""
    with pytest.raises(RecordError, match="no JSON"):
        parse_record(b'{"text": "\xed\xa0\x80"}')
    assert parse_record('\ufeff{"text": "ä"}'.encode()) == {"text": "ä"}


def test_rows_of_parquet_without_a_value_in_python_are_alone(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    texts = pyarrow.array([b"ok", b"\xff\xfe", b"fine", *[b"more"] * 30], pyarrow.binary())
    texts = pyarrow.Array.from_buffers(pyarrow.string(), len(texts), texts.buffers())
    file = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table({"text": texts}), file)
    rows = list(table_rows(file, ("text",)))
    assert [row.number for row in rows] == list(range(1, 34))
    with pytest.raises(RecordError, match=r"cannot be read.*utf-8"):
        rows[1].load()
    assert [rows[place].load()["text"] for place in (0, 2, 32)] == ["ok", "fine", "more"]
    out = str(tmp_path / "out")
    assert main(["build", "text", str(file), out, "--workers", "2"]) == 0
    assert len(index_shards([out]).samples) == 32


def test_a_hole_in_a_shard_is_no_end(tmp_path):
    toy_shards(tmp_path, [6])
    shard = next(tmp_path.glob("*.tar"))
    with tarfile.open(shard) as tar:
        header = [info.offset for info in tar][6]
    data = bytearray(shard.read_bytes())
    data[header : header + 1024] = bytes(1024)
    shard.write_bytes(data)
    samples, fault = scan_shard(str(shard))
    assert [found.key for found in samples] == ["k000", "k001"]
    assert fault is not None


def test_two_tars_in_one_file_are_damage(tmp_path, capsys):
    toy_shards(tmp_path, [3])
    shard = next(tmp_path.glob("*.tar"))
    shard.write_bytes(shard.read_bytes() * 2)
    assert main(["validate", str(tmp_path)]) == 1
    assert "truncated_shard: it ends early or is damaged at byte" in capsys.readouterr().out


def test_more_zeros_than_an_end_mark_are_no_damage(tmp_path):
    toy_shards(tmp_path, [3])
    shard = next(tmp_path.glob("*.tar"))
    shard.write_bytes(shard.read_bytes() + bytes(3 << 20))
    samples, fault = scan_shard(str(shard))
    assert (len(samples), fault) == (3, None)


def test_what_appears_in_the_place_of_a_data_set_is_not_replaced(tmp_path):
    """The target is looked at again when the shards are ready: a build takes hours."""
    out = tmp_path / "out"

    def appears(_) -> None:
        out.mkdir(exist_ok=True)
        (out / "thesis.txt").touch()

    with pytest.raises(UserError, match=r"not empty.*the same command goes on"):
        build(building.recipe(), out, building.options(), appears)
    assert [path.name for path in out.iterdir()] == ["thesis.txt"]
    shutil.rmtree(out)
    build(building.recipe(), out, building.options())
    assert len(index_shards([str(out)]).samples) > 0


def _changed(lines: list[bytes], change: str) -> list[bytes]:
    if change == "no object":
        return [lines[0], b"1", *lines[1:]]
    if change == "no fields":
        return [*lines[:2], b"{}", *lines[2:]]
    if change == "first line":
        return [b"[]", *lines[1:]]
    if change == "another shard":
        return [*lines[:2], lines[2].replace(b"train-000001.tar", b"train-000000.tar"), *lines[3:]]
    return [line.replace(b'"name"', b'"nme"') for line in lines]


@pytest.mark.parametrize(
    "change", ["no object", "no fields", "first line", "another shard", "names"]
)
def test_a_changed_journal_is_believed_up_to_the_change(tmp_path, change):
    building.interrupted(tmp_path / "out", building.options())
    journal = tmp_path / ".out.partial" / ".journal"
    lines = journal.read_bytes().split(b"\n")
    assert _changed(lines, change) != lines
    journal.write_bytes(b"\n".join(_changed(lines, change)))
    build(building.recipe(), tmp_path / "out", building.options())
    build(building.recipe(), tmp_path / "unbroken", building.options())
    assert building.files(tmp_path / "out") == building.files(tmp_path / "unbroken")


def test_a_disk_that_is_still_full_loses_no_finished_shard(tmp_path, monkeypatch):
    building.interrupted(tmp_path / "out", building.options())
    partial = tmp_path / ".out.partial"
    (partial / "train-000099.tar").write_bytes(b"half of a shard")
    finished = (partial / ".journal").read_bytes().count(b"\n") - 1

    def full(*_) -> None:
        assert not (partial / "train-000099.tar").exists()  # its room is needed
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("data_pipelines.partial_build._write", full)
        with pytest.raises(UserError, match=f"No space left.*; {finished} finished shards"):
            build(building.recipe(), tmp_path / "out", building.options())
    assert len(list(partial.glob("*.tar"))) == finished
    states = []
    build(building.recipe(), tmp_path / "out", building.options(), states.append)
    assert states[0].resumed == finished


def test_names_that_the_terminal_has_no_form_for(tmp_path, monkeypatch):
    """A key of bytes that are no UTF-8, and one that would clear the screen."""
    shard = tmp_path / "train-0.tar"
    with tarfile.open(shard, "w", errors="surrogateescape") as tar:
        for key in ("a\udcff", "b\x1b[2J", "日"):
            tar.addfile(tarfile.TarInfo(f"{key}.json"))
    for encoding in ("utf-8", "ascii"):
        written = io.BytesIO()
        monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding, errors="strict"))
        assert main(["validate", str(shard)]) == 1
        sys.stdout.flush()
        text = written.getvalue()
        assert text.count(b"bad_json") == 3
        assert b"b<U+001B>[2J" in text
        assert b"\x1b" not in text


@pytest.mark.parametrize("field", ["samples", "images"])
@pytest.mark.parametrize("value", ["3", None, [], {}])
def test_counts_of_a_manifest_that_are_no_numbers(tmp_path, capsys, field, value):
    toy_shards(tmp_path, [3])
    main(["index", str(tmp_path), "--manifest"])
    path = tmp_path / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["splits"]["toy0"]["shards"][0][field] = value
    path.write_text(json.dumps(manifest))
    assert main(["validate", str(tmp_path)]) == 1
    assert "bad_manifest: " in capsys.readouterr().out


@pytest.mark.parametrize(
    "keys", [("a/1", "b/1", "./c/1"), ("日", "本", "É"), ("a\udcff", "a\udcfe", "e\u0301")]
)
def test_members_of_equal_size_are_not_taken_for_each_other(tmp_path, keys):
    """An index that exchanges them gives errors, also in other folders and other scripts."""
    shard = tmp_path / "train-0.tar"
    with tarfile.open(shard, "w", format=tarfile.GNU_FORMAT, errors="surrogateescape") as tar:
        for key in keys:
            info = tarfile.TarInfo(f"{key}.json")
            info.size = 2
            tar.addfile(info, io.BytesIO(b"{}"))
    assert main(["index", str(tmp_path)]) == 0
    samples = index_shards([str(shard)]).samples
    reader = ShardReader()
    assert [reader.read(sample, "json") for sample in samples] == [b"{}"] * 3
    path = tmp_path / "train-0.index.json"
    content = json.loads(path.read_text())
    first, second, _ = content["samples"]
    first[1], second[1] = second[1], first[1]
    path.write_text(json.dumps(content))
    for sample in index_shards([str(shard)]).samples[:2]:
        with pytest.raises(RecordError, match="does not stand at byte"):
            reader.read(sample, "json")
    reader.close()


@pytest.mark.parametrize("out", ["shards", "shards/../shards", "link"])
def test_no_data_set_takes_the_place_of_its_source(tmp_path, capsys, out):
    folder = tmp_path / "shards"
    toy_shards(folder, [3])
    (tmp_path / "link").symlink_to(folder)
    before = building.files(folder)
    for source in (folder, next(folder.glob("*.tar"))):
        arguments = ["build", "img2dataset", str(source), str(tmp_path / out), "--force"]
        assert "name another folder" in failure(capsys, *arguments)
    assert building.files(folder) == before


def test_the_small_tokenizer_learns_from_the_start_of_each_text(tmp_path, monkeypatch, capsys):
    """Learning takes the square of a word's length."""
    word = "".join(map(str, range(20_000)))
    record = {"messages": [{"role": "user", "content": word}, {"role": "assistant", "content": ""}]}
    write_shards(tmp_path, "train", [("a", record, [])], 1)
    lengths = []

    def learn(texts, size):
        texts = list(texts)
        lengths.extend(map(len, texts))
        return train_tokenizer(texts, size)

    monkeypatch.setattr("conceptmoe_vl.processing.train_tokenizer", learn)
    assert main(["show", str(tmp_path)]) == 0
    assert lengths == [4096, 0]
    shown = "".join(capsys.readouterr().out.split())
    assert word[-100:] in re.sub(r"\]\[", "", shown)  # all of it is shown
