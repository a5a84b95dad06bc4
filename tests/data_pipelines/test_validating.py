"""`validate`: every fault is named with file, row or key, field and remedy."""

from __future__ import annotations

import json
import pickle
import re
import tarfile
from pathlib import Path

import pytest

from conceptmoe_vl.images import ImageError
from conceptmoe_vl.processing import register
from conceptmoe_vl.prompts import MessageError, Picture, Turn
from data_pipelines.__main__ import main
from data_pipelines.records import RecordError, read_record
from data_pipelines.shard_index import index_path
from data_pipelines.validating import REMEDIES, content_hash
from data_pipelines.writing import write_shards
from tests.data_pipelines.conftest import encoded_image, sample, toy_shards

QUESTION = {"role": "user", "content": "q"}
ANSWER = {"role": "assistant", "content": "a"}


def found(capsys, *arguments) -> tuple[int, dict]:
    status = main(["validate", "--json", *map(str, arguments)])
    return status, json.loads(capsys.readouterr().out)


def write_lines(path, rows):
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def test_sound_shards_are_counted(tmp_path, capsys, processor):
    samples = [sample(0), sample(1, images=2), sample(2, images=0), ("copy", *sample(0)[1:])]
    write_shards(tmp_path, "toy", samples, 2)
    status, report = found(capsys, tmp_path)
    assert status == 0
    assert report == {
        "samples": 4,
        "images": 4,
        "duplicates": 1,
        "fault_count": 0,
        "faults": [],
    }
    register()
    processor.save_pretrained(tmp_path / "model")
    status, report = found(capsys, tmp_path, "--model", tmp_path / "model", "--max-tokens", "26")
    lengths = []
    for _, record, images in samples:
        pictures = iter(data for _, data in images)
        for message in record["messages"]:
            if isinstance(message["content"], list):
                message["content"] = [
                    {"type": "image", "image": next(pictures)} if part["type"] == "image" else part
                    for part in message["content"]
                ]
        lengths.append(len(processor.encode(record["messages"]).input_ids))
    assert min(lengths) <= 26 < max(lengths)
    assert report["tokens"] == sum(lengths)
    assert report["over_length"] == sum(length > 26 for length in lengths)
    assert status == 0  # what is too long is left out, not damaged
    processor.tokenizer.save_pretrained(tmp_path / "words")
    _, report = found(capsys, tmp_path, "--tokenizer", tmp_path / "words")
    # Of each picture its marks are left out too.
    assert report["tokens"] == sum(lengths) - 4 * (4 + 2)


ROWS = [
    ({"messages": [QUESTION, ANSWER]}, None, None),
    ("{broken", "bad_json", "json"),
    ('{"messages": %s}' % ("[" * 100_000), "bad_json", "json"),
    ("[]", "bad_json", "json"),
    ({"text": "a"}, "missing_field", "messages"),
    ({"messages": [QUESTION, {"role": "bot", "content": "a"}]}, "bad_role", "messages[1].role"),
    ({"messages": [ANSWER]}, "bad_order", "messages[0].role"),
    ({"messages": [QUESTION, {"role": "assistant"}]}, "missing_field", "messages[1].content"),
    ({"messages": [QUESTION, {**ANSWER, "content": 3}]}, "bad_content", "messages[1].content"),
    ({"messages": [QUESTION, {**ANSWER, "content": "\ud800"}]}, "bad_content", "messages"),
    ({"messages": [QUESTION]}, "no_answer", "messages"),
    ({"messages": [QUESTION, {**ANSWER, "content": " "}]}, "empty_answer", "messages[1].content"),
    ({"messages": [QUESTION, {**ANSWER, "content": []}]}, "empty_answer", "messages[1].content"),
    ({"messages": [QUESTION, ANSWER], "source": 3}, "bad_field", "source"),
    ({"messages": [QUESTION, ANSWER], "images": ["a.png"]}, "image_count", "messages"),
    ({"messages": [QUESTION, ANSWER], "images": ["no.png"]}, "missing", "images[0]"),
    ({"messages": [QUESTION, ANSWER], "images": ["../x.png"]}, "outside_folder", "images[0]"),
    ({"messages": [QUESTION, ANSWER], "images": ["http://x/y.png"]}, "missing", "images[0]"),
    (
        {"messages": [{**QUESTION, "content": [{"type": "image", "path": "x" * 5000}]}, ANSWER]},
        "missing",
        "messages[0].content",
    ),
    ({"messages": [QUESTION, ANSWER], "images": [7]}, "bad_field", "images[0]"),
    (
        {"messages": [{**QUESTION, "content": "<image>"}, ANSWER], "image": "b.png"},
        "empty",
        "image",
    ),
]


def test_every_fault_of_jsonl_is_named(tmp_path, capsys):
    (tmp_path / "a.png").write_bytes(encoded_image(1))
    (tmp_path / "b.png").touch()
    file = write_lines(tmp_path / "rows.jsonl", [row for row, _, _ in ROWS])
    status, report = found(capsys, file)
    assert status == 1
    assert (report["samples"], report["fault_count"]) == (len(ROWS), len(ROWS) - 1)
    expected = [
        (number, reason, field)
        for number, (_, reason, field) in enumerate(ROWS, start=1)
        if reason is not None
    ]
    assert [
        (fault["row"], fault["reason"], fault["field"]) for fault in report["faults"]
    ] == expected
    for fault in report["faults"]:
        assert fault["file"] == str(file)
        assert len(fault["message"]) < 300
        assert fault["remedy"] == REMEDIES[fault["reason"]]
    assert main(["validate", str(file)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(ROWS)
    assert f"{file}, row 6, field 'messages[1].role': bad_role: " in lines[4]
    assert lines[4].endswith("Remedy: use the roles of docs/data.md")
    assert lines[-1] == f"samples {len(ROWS)}, images 0, duplicates 0, fault-count {len(ROWS) - 1}"


def test_every_fault_of_shards_is_named(tmp_path, capsys):
    key, record, images = sample(0)
    write_shards(
        tmp_path,
        "toy",
        [
            (key, record, images),
            ("lone", record, []),
            ("broken", record, [("png", encoded_image(1)[:60])]),
            ("twice", record, images),
            ("twice", record, images),
        ],
        9,
    )
    shard = tmp_path / "toy-000000.tar"
    with tarfile.open(shard, "a") as tar:
        tar.addfile(tarfile.TarInfo("bare.img0.png"))
    index_path(shard).unlink()
    status, report = found(capsys, shard)
    assert status == 1
    assert [(fault["key"], fault["reason"], fault["field"]) for fault in report["faults"]] == [
        ("lone", "image_count", "messages"),
        ("broken", "truncated", "img0.png"),
        ("twice", "repeated_member", "json"),
        ("bare", "missing_field", "json"),
    ]
    shard.write_bytes(shard.read_bytes()[:3000])
    _, report = found(capsys, shard)
    assert [(fault["key"], fault["reason"]) for fault in report["faults"]] == [
        (None, "truncated_shard")
    ]


def test_damaged_and_empty_files_are_faults(tmp_path, capsys):
    good = {"messages": [QUESTION, ANSWER]}
    for content, reason in (
        (f"[{json.dumps(good)}, {{", "bad_json"),
        (f"[{json.dumps(good)} {json.dumps(good)}]", "bad_json"),
        ("", "empty"),
        ("[]", "empty"),
    ):
        (tmp_path / "rows.json").write_text(content)
        status, report = found(capsys, tmp_path / "rows.json")
        assert status == 1
        assert [fault["reason"] for fault in report["faults"]] == [reason]


def test_mistakes_end_with_status_2(tmp_path, capsys):
    shards = toy_shards(tmp_path / "data", [1])
    for arguments, message in (
        ([str(tmp_path / "none.tar")], "no file matches"),
        ([str(tmp_path / "none.jsonl")], "no file and no folder"),
        ([shards, "--model", "nowhere"], "--model: there is no folder"),
        ([shards, "--tokenizer", "nowhere"], "--tokenizer: there is no folder"),
        ([shards, "--tokenizer", str(tmp_path)], "holds no tokenizer"),
        ([shards, "--model", "a", "--tokenizer", "b"], "both given"),
    ):
        assert main(["validate", *arguments]) == 2
        captured = capsys.readouterr()
        assert message in captured.err
        assert captured.err.count("\n") == 1


def test_the_records_of_the_documentation_are_valid():
    text = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
    records = re.findall(r"```json\n(.*?)```", text, re.DOTALL)
    assert len(records) == 5
    for record in records:
        members = [f"img{number}.png" for number in range(record.count('"type": "image"'))]
        assert read_record(record.encode(), members, "docs").turns


def test_duplicates_are_equal_in_roles_texts_and_pictures():
    def digest(content, data=b"x", role="user"):
        return content_hash([Turn(role, content)], {"img0.png": data})

    picture = Picture("img0.png")
    same = digest((picture, "a"))
    assert digest((picture, "a", "")) == same
    others = [
        digest(("a", picture)),
        digest((picture, "a"), b"y"),
        digest(("a",)),
        digest((picture,)),
    ]
    others.append(digest((picture, "a"), role="system"))
    assert len({same, *others}) == 6


@pytest.mark.parametrize("kind", [RecordError, ImageError, MessageError])
def test_errors_keep_their_field_between_processes(kind):
    error = pickle.loads(pickle.dumps(kind("empty", "text", "field")))
    assert (error.reason, str(error), error.field) == ("empty", "text", "field")


def damage_index(folder: Path) -> str:
    path = folder / "s-000000.index.json"
    content = json.loads(path.read_text())
    content["samples"][1][1]["json"][0] += 512
    path.write_text(json.dumps(content))
    return "'k001' differs. Remedy: write it again by python -m data_pipelines index"


def damage_bytes(folder: Path) -> str:
    shard = folder / "s-000001.tar"
    data = shard.read_bytes()
    shard.write_bytes(data.replace(b"a0", b"a9"))
    return "s-000001.tar': the checksum differs"


def damage_format(folder: Path) -> str:
    (folder / "s-000002.index.json").write_text("[]")
    return "s-000002.tar': it is not of format 1"


def lose_a_sample_in_the_index(folder: Path) -> str:
    path = folder / "s-000000.index.json"
    content = json.loads(path.read_text())
    del content["samples"][0]
    path.write_text(json.dumps(content))
    return "s-000000.tar': the sample 'k001' differs"


def lose_a_shard(folder: Path) -> str:
    (folder / "s-000001.tar").unlink()
    return "manifest.json: bad_manifest: it lists the shard 's-000001.tar', which is not there"


def add_a_shard(folder: Path) -> str:
    write_shards(folder, "t", [sample(9)], 2)
    return "manifest.json: bad_manifest: it does not list the shard 't-000000.tar'"


def replace_a_shard(folder: Path) -> str:
    write_shards(folder, "s", [sample(0)], 2)
    return (
        "manifest.json: bad_manifest: of the shard 's-000000.tar' it states 2 samples, there are 1"
    )


def change_the_sum(folder: Path) -> str:
    content = json.loads((folder / "manifest.json").read_text())
    content["splits"]["s"]["samples"] = 6
    (folder / "manifest.json").write_text(json.dumps(content))
    return "manifest.json: bad_manifest: of 's' it states 6 samples, its shards 5"


def change_the_checksum(folder: Path) -> str:
    content = json.loads((folder / "manifest.json").read_text())
    content["splits"]["s"]["shards"][2]["sha256"] = "0" * 64
    (folder / "manifest.json").write_text(json.dumps(content))
    return "manifest.json: bad_manifest: the checksum of the shard 's-000002.tar' differs"


def break_the_manifest(folder: Path) -> str:
    (folder / "manifest.json").write_text('{"splits": {"s": {"shards": [{"name": 3}]}}}')
    return "manifest.json: bad_manifest: it is no manifest"


@pytest.mark.parametrize(
    "change",
    [
        *(damage_index, damage_bytes, damage_format, lose_a_sample_in_the_index, lose_a_shard),
        *(add_a_shard, replace_a_shard, change_the_sum, change_the_checksum, break_the_manifest),
    ],
)
def test_indexes_and_manifest_are_checked(tmp_path, capsys, change):
    write_shards(tmp_path, "s", [sample(number) for number in range(5)], 2)
    assert main(["index", str(tmp_path), "--manifest"]) == 0
    assert main(["validate", str(tmp_path)]) == 0
    capsys.readouterr()
    expected = change(tmp_path)
    assert main(["validate", str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(expected in line for line in lines)
    assert all("Remedy: " in line for line in lines[:-1])


def test_one_shard_of_a_data_set_is_checked_alone(tmp_path):
    write_shards(tmp_path, "s", [sample(number) for number in range(5)], 2)
    assert main(["index", str(tmp_path), "--manifest"]) == 0
    for path in tmp_path.glob("s-000001*"):
        path.unlink()
    assert main(["validate", str(tmp_path / "s-000000.tar")]) == 0
    assert main(["validate", str(tmp_path)]) == 1
