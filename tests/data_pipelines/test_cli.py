"""`python -m data_pipelines`: output, exit status, and one line for a mistake."""

from __future__ import annotations

import io
import json
import re

import pytest
from rich.console import Console

from conceptmoe_vl.processing import register
from data_pipelines.__main__ import main
from data_pipelines.reports import inspect
from data_pipelines.shards import ShardReader, index_shards
from data_pipelines.writing import write_shards
from tests.data_pipelines.conftest import failure, toy_shards


def test_easy_vqa_is_built_whole(tmp_path, capsys):
    package = pytest.importorskip("easy_vqa")
    out = tmp_path / "easy_vqa"
    assert main(["build", "easy_vqa", str(out), "--shard-size", "1500"]) == 0
    assert "4,000 samples, 4,000 images, 38,575 questions, 3 shards" in capsys.readouterr().out
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["splits"]["test"]["questions"] == 9673
    for split, questions, paths in (
        ("train", package.get_train_questions(), package.get_train_image_paths()),
        ("test", package.get_test_questions(), package.get_test_image_paths()),
    ):
        index = index_shards([str(out / f"{split}-*.tar")])
        reader = ShardReader()
        found = []
        for sample in index.samples:
            record = json.loads(reader.read(sample, "json"))
            number = int(sample.key.removeprefix(split))
            with open(paths[number], "rb") as file:
                assert reader.read(sample, "img0.png") == file.read()
            turns = [turn["content"] for turn in record["messages"]]
            assert turns[0][0] == {"type": "image"}
            turns[0] = turns[0][1]["text"]
            found += [(*pair, number) for pair in zip(turns[::2], turns[1::2], strict=True)]
        assert sorted(found) == sorted(zip(*questions, strict=True))
    assert "not empty" in failure(capsys, "build", "easy_vqa", str(out))


def test_unknown_sources_and_missing_shards(tmp_path, capsys):
    assert "nearest is 'easy_vqa'" in failure(capsys, "build", "easyvqa", str(tmp_path / "x"))
    assert not (tmp_path / "x").exists()
    for command in ("inspect", "stats", "show"):
        assert "no file matches" in failure(capsys, command, str(tmp_path / "none.tar"))
    with pytest.raises(SystemExit) as caught:
        main(["build", "easy_vqa", str(tmp_path / "x"), "--shard-size", "0"])
    assert caught.value.code == 2


def test_inspect_and_stats(tmp_path, capsys):
    shards = toy_shards(tmp_path, [3, 2], images=2)
    assert main(["inspect", shards, "--limit", "2"]) == 0
    table = capsys.readouterr().out
    assert "5 samples in 2 shards" in table
    assert "16x16" in table
    assert main(["stats", shards]) == 0
    table = capsys.readouterr().out
    for row in (("samples", "5"), ("images", "10"), ("answers", "10"), ("source toy", "5")):
        assert any(all(cell in line for cell in row) for line in table.splitlines())


def test_a_narrow_table_shows_the_whole_name_of_a_sample(tmp_path):
    shards = toy_shards(tmp_path, [1])
    console = Console(width=60, file=io.StringIO())
    inspect([shards], 1, console)
    table = console.file.getvalue()
    cells = [line.split("│")[1].strip() for line in table.splitlines() if "│" in line]
    assert "".join(cells) == index_shards([shards]).samples[0].name
    assert len(cells) > 1  # it did not fit one line


def test_damage_is_shown_and_ends_with_status_1(tmp_path, capsys):
    shards = toy_shards(tmp_path, [4])
    shard = next(tmp_path.glob("*.tar"))
    shard.write_bytes(shard.read_bytes()[:3000])
    for command in ("inspect", "stats"):
        assert main([command, shards]) == 1
        assert "ends early" in capsys.readouterr().out.replace("\n", " ")


def test_show_marks_supervised_tokens(tmp_path, capsys, processor):
    shards = toy_shards(tmp_path / "data", [2])
    register()
    processor.save_pretrained(tmp_path / "model")
    command = ["show", shards, "--key", "k001", "--model", str(tmp_path / "model")]
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert "[<|vision_start|>][<|image_pad|>*4][<|vision_end|>]" in shown
    assert "[[a]][[1]][[<|im_end|>]]" in shown
    assert "6 supervised, 1 images of 2x2 tokens" in shown
    assert main(["show", shards]) == 0
    assert "toy0-000000.tar/k000" in capsys.readouterr().out
    assert main([*command[:2], "--limit", "5"]) == 0
    assert re.findall(r"k\d+, source toy", capsys.readouterr().out) == [
        "k000, source toy",
        "k001, source toy",
    ]
    assert "no sample has the key 'k9'" in failure(capsys, "show", shards, "--key", "k9")
    assert "no folder" in failure(capsys, "show", shards, "--model", "nowhere")


def test_records_cannot_steer_the_terminal(tmp_path, capsys):
    text = "\x1b]0;title\x07\x1b[2J\u202e"
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": text}]
    samples = [
        ("good", {"messages": messages, "source": text}, []),
        ("bad", {"messages": [{"role": text, "content": ""}]}, []),
    ]
    write_shards(tmp_path, "toy", samples, size=10)
    for command, status in (("inspect", 1), ("stats", 1), ("show", 0)):
        assert main([command, str(tmp_path), *(["--limit", "2"] * (command == "show"))]) == status
        shown = capsys.readouterr().out
        assert not set("\x1b\x07\u202e") & set(shown)
        assert "U+001B" in shown.replace("\n", "")
