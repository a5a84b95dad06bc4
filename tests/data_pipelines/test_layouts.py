"""Layouts in circulation, made here as their authors write them: built, validated, and packed."""

from __future__ import annotations

import io
import itertools
import json
import os
import re
import tarfile
from collections import Counter
from pathlib import Path

import pytest
from PIL import Image, features

from conceptmoe_vl.prompts import IGNORED
from data_pipelines import DataConfig, build_stream
from data_pipelines.__main__ import main
from data_pipelines.layouts.images import suffix_of
from data_pipelines.layouts.rows import table_rows
from data_pipelines.records import parse_record
from data_pipelines.shards import ShardReader, index_shards
from tests.data_pipelines.conftest import encoded_image


def picture_folder(folder: Path, names: tuple[str, ...]) -> None:
    """Each picture has the grey value of its place, from 1."""
    for value, name in enumerate(names, start=1):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        kind = "JPEG" if name.endswith("jpg") else "PNG"
        (folder / name).write_bytes(encoded_image(value, kind))


def jsonl(path: Path, rows: list) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def messages(folder: Path) -> tuple[list[str], list[str]]:
    picture_folder(folder, ("pics/a.png", "b.jpg"))
    system = {"role": "system", "content": "be brief"}
    answer = {"role": "assistant", "content": "yes"}
    parts = [{"type": "text", "text": "is"}, {"type": "image", "image": "b.jpg"}]
    rows = [
        {"messages": [system, {"role": "user", "content": "2?"}, answer]},
        {
            "messages": [
                {"role": "user", "content": [*parts, {"type": "text", "text": "it?"}]},
                answer,
            ]
        },
        {
            "messages": [
                {"role": "user", "content": "<image>\n<image>\nsame?"},
                answer,
                {"role": "user", "content": "sure?"},
                answer,
            ],
            "images": ["pics/a.png", "b.jpg"],
        },
    ]
    jsonl(folder / "rows.jsonl", rows)
    return ["rows.jsonl"], ["[be brief][2?](yes)", "[is#2it?](yes)", "[#1#2same?](yes)[sure?](yes)"]


def llava(folder: Path) -> tuple[list[str], list[str]]:
    picture_folder(folder / "pics", ("coco/1.jpg", "2.png"))

    def row(number, *texts, **more):
        turns = [
            {"from": ("human", "gpt")[place % 2], "value": text} for place, text in enumerate(texts)
        ]
        return {"id": f"{number:012d}", **more, "conversations": turns}

    rows = [
        row(1, "<image>\nWhat?", "A cat.", "Big?", "No.", image="coco/1.jpg"),
        row(2, "Compare <image> and <image>", "Same.", image=["coco/1.jpg", "2.png"]),
        row(3, "The SVG tag <image>?", "Draws."),
    ]
    (folder / "chat.json").write_text(json.dumps(rows, indent=2))
    return ["chat.json", "--images", "pics"], [
        "[#1What?](A cat.)[Big?](No.)",
        "[Compare #1 and #2](Same.)",
        "[The SVG tag <image>?](Draws.)",
    ]


def img2dataset(folder: Path) -> tuple[list[str], list[str]]:
    for shard in range(2):
        with tarfile.open(folder / f"{shard:05d}.tar", "w") as tar:
            for place, kind in enumerate(("jpg", "png", "webp")):
                key, value = f"{shard:05d}{place:04d}", 1 + place
                encoder = {"jpg": "JPEG", "png": "PNG", "webp": "WEBP"}[kind]
                caption = f"grey {value}"
                about = {"caption": caption, "url": "x", "key": key, "status": "success"}
                files = {
                    kind: encoded_image(value, encoder),
                    "txt": caption.encode(),
                    "json": json.dumps(about).encode(),
                }
                for name, data in files.items():
                    info = tarfile.TarInfo(f"{key}.{name}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
        (folder / f"{shard:05d}_stats.json").write_text('{"count": 3}')
    return ["."], [f"[#{value}](grey {value})" for value in (1, 2, 3)] * 2


def text_lines(folder: Path) -> tuple[list[str], list[str]]:
    jsonl(folder / "a.jsonl", [{"text": "one"}, {"text": "two\n\nlines", "meta": {"url": "x"}}])
    return ["a.jsonl"], ["[](one)", "[](two\n\nlines)"]


def text_paragraphs(folder: Path) -> tuple[list[str], list[str]]:
    (folder / "b.txt").write_bytes("\ufeff\none\nstill one\n \n\n\ntwo ä".encode())
    return ["."], ["[](one\nstill one)", "[](two ä)"]


def cauldron(folder: Path) -> tuple[list[str], list[str]]:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    images = [{"bytes": encoded_image(value), "path": f"{value}.png"} for value in (1, 2)]
    rows = [
        {
            "images": images,
            "texts": [
                {"user": "Which?", "assistant": "B.", "source": "ai2d"},
                {"user": "And?", "assistant": "A.", "source": "ai2d"},
            ],
            "relevance_ratings": [5, 4],
        },
        {
            "images": [],
            "texts": [{"user": "2?", "assistant": "4", "source": "text"}],
            "relevance_ratings": [1],
        },
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows * 20), folder / "train-00000.parquet")
    return ["."], ["[#1#2Which?](B.)[And?](A.)", "[2?](4)"] * 20


def obelics(folder: Path) -> tuple[list[str], list[str]]:
    picture_folder(folder, ("1.png", "2.png"))
    rows = [
        {
            "images": ["1.png", None, None, "2.png", None],
            "texts": [None, "first", "second", None, "third"],
            "metadata": "[]",
            "general_metadata": "{}",
        },
        {"images": [None, "2.png"], "texts": ["before", None]},
    ]
    jsonl(folder / "docs.jsonl", rows)
    return ["docs.jsonl"], ["[](#1first\n\nsecond#2third)", "[](before#2)"]


def mmc4(folder: Path) -> tuple[list[str], list[str]]:
    picture_folder(folder, ("1.png", "2.png"))
    row = {
        "url": "x",
        "text_list": ["One.", "Two.", "Three."],
        "image_info": [
            {"image_name": "2.png", "raw_url": "x", "matched_text_index": 2, "matched_sim": 0.3},
            {"image_name": "1.png", "raw_url": "x", "matched_text_index": 0, "matched_sim": 0.2},
        ],
        "similarity_matrix": [[0.1, 0.2, 0.3], [0.2, 0.1, 0.0]],
    }
    jsonl(folder / "docs_shard_0_v2.jsonl", [row])
    return ["docs_shard_0_v2.jsonl"], ["[](#1One. Two.#2Three.)"]


LAYOUTS = {
    "messages": ("messages", messages),
    "llava": ("llava", llava),
    "img2dataset": ("img2dataset", img2dataset),
    "text": ("text", text_lines),
    "text as .txt": ("text", text_paragraphs),
    "cauldron": ("cauldron", cauldron),
    "obelics": ("obelics", obelics),
    "mmc4": ("mmc4", mmc4),
}


def packed(batch, processor) -> list[tuple[str, str]]:
    """Of each document the texts that are not supervised and those that are; `#2` is a picture of
    the grey value 2."""
    tokenizer, picture = processor.tokenizer, processor.special_token_ids["vision_start_token_id"]
    pixels = [] if batch.pixel_values is None else batch.pixel_values[:, 0, 3, 3].tolist()
    values = iter(round((value + 1) * 127.5) for value in pixels)
    documents = []
    for first, last in itertools.pairwise(batch.cu_seqlens.tolist()):
        ids: dict[bool, list[int]] = {False: [], True: []}
        labels = batch.labels[first:last].tolist()
        for token, label in zip(batch.input_ids[first:last].tolist(), labels, strict=True):
            assert label in (token, IGNORED)
            if token == picture:
                ids[False] += tokenizer(f"#{next(values)}", add_special_tokens=False)["input_ids"]
            elif token not in tokenizer.all_special_ids:
                ids[label != IGNORED].append(token)
        documents.append((tokenizer.decode(ids[False]), tokenizer.decode(ids[True])))
    assert next(values, None) is None
    return documents


def expected_packed(sample: str) -> tuple[str, str]:
    """The same of `[question](answer)`; pictures are never supervised."""
    questions = "".join(re.findall(r"\[([^]]*)\]", sample))
    answers = "".join(re.findall(r"\(([^)]*)\)", sample))
    return questions + "".join(re.findall("#[123]", answers)), re.sub("#[123]", "", answers)


def shown(reader: ShardReader, sample) -> str:
    """A sample of a shard as `[question](answer)`, `#value` for a picture of that grey value."""
    record = parse_record(reader.read(sample, "json"))
    pictures = sorted(name for name in sample.members if name.startswith("img"))
    values = iter(
        Image.open(io.BytesIO(reader.read(sample, name))).convert("L").getpixel((3, 3))
        for name in pictures
    )
    text = ""
    for message in record["messages"]:
        content = message["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        inner = "".join(
            part["text"] if part["type"] == "text" else f"#{next(values)}" for part in parts
        )
        text += f"({inner})" if message["role"] == "assistant" else f"[{inner}]"
    return text


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_becomes_shards_and_packed_batches(name, tmp_path, monkeypatch, capsys, processor):
    source, make = LAYOUTS[name]
    (tmp_path / "given").mkdir()
    monkeypatch.chdir(tmp_path / "given")
    (path, *options), expected = make(tmp_path / "given")

    # As it is given: every row is sound.
    assert main(["validate", path, *options, "--layout", source, "--json"]) == 0
    before = json.loads(capsys.readouterr().out)
    assert before["samples"] == len(expected)

    # As shards: the same samples and images, nothing rejected.
    out = tmp_path / "out"
    assert main(["build", source, path, str(out), *options, "--shard-size", "2"]) == 0
    assert "rejected 0 of" in capsys.readouterr().out
    assert main(["validate", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == before
    index = index_shards([str(out)])
    reader = ShardReader()
    assert [shown(reader, sample) for sample in index.samples] == expected
    manifest = json.loads((out / "manifest.json").read_text())
    counts = manifest["splits"]["train"]
    assert (counts["samples"], counts["images"]) == (len(expected), before["images"])
    assert len(counts["shards"]) == -(-len(expected) // 2)

    # As a batch: all tokens in place, answers supervised.
    config = DataConfig([str(out)], shuffle=False, epochs=1, pack_lookahead=100)
    stream = build_stream(config, processor)
    batch = next(stream)
    assert not stream.skipped
    assert len(batch.keys) == len(expected)
    assert set(batch.sources) == {source}
    assert packed(batch, processor) == [expected_packed(sample) for sample in expected]


def reject_rows(folder: Path) -> Path:
    """One sound record and one of each kind that cannot be used."""
    picture_folder(folder / "pics", ("1.png",))
    (folder / "secret.png").write_bytes(encoded_image(9))
    (folder / "pics" / "link.png").symlink_to(folder / "secret.png")
    (folder / "pics" / "broken.png").write_bytes(encoded_image(1)[:50])
    os.mkfifo(folder / "pics" / "pipe.png")
    turns = [{"from": "human", "value": "<image>?"}, {"from": "gpt", "value": "a"}]
    images = ["1.png", "../secret.png", "/etc/hosts", "link.png", "none.png", "a\0b", "pipe.png"]
    images += ["broken.png", ".", "http://x/1.png", {"path": "1.png"}, 3]
    rows = [{"image": image, "conversations": turns} for image in images]
    rows += [
        {"image": "1.png", "conversations": [turns[1], turns[0]]},
        {"image": ["1.png", "1.png"], "conversations": turns},
        {"image": "1.png", "conversations": [{"from": "bot", "value": "a"}]},
        {"image": "1.png", "conversations": "a"},
        {"conversations": [turns[0], {"from": "gpt", "value": None}]},
        {"conversations": [{"from": "human", "value": "\ud800"}, turns[1]]},
        7,
    ]
    file = folder / "chat.json"
    file.write_text(json.dumps(rows))
    return file


REASONS = {
    **{"outside_folder": 3, "missing": 5, "truncated": 1, "bad_field": 1, "bad_order": 1},
    **{"image_count": 1, "bad_role": 1, "missing_field": 1, "bad_content": 2, "bad_json": 1},
}


def test_rejects_are_counted_named_and_limited(tmp_path, capsys):
    (tmp_path / "given").mkdir()
    file = reject_rows(tmp_path / "given")
    command = ["build", "llava", str(file), str(tmp_path / "out"), "--images"]
    command.append(str(tmp_path / "given" / "pics"))
    assert main(command) == 2
    captured = capsys.readouterr()
    assert "rejected 17 of 19 records" in captured.err
    assert f"first {file}, row 2: '../secret.png' leads out of the folder" in captured.err
    assert captured.err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["given"]

    assert main([*command, "--max-rejects", "0.9"]) == 0
    printed = capsys.readouterr().out
    assert "2 samples, 2 images, 1 shards" in printed
    assert "rejected 17 of 19 records: outside_folder 3, missing 5" in printed
    report = json.loads((tmp_path / "out" / "rejects.json").read_text())
    assert (report["records"], report["rejected"]) == (19, 17)
    assert report["by_reason"] == REASONS
    assert [entry["record"] for entry in report["first"]] == [
        f"{file}, row {row}" for row in range(2, 20) if row != 11
    ]
    assert main([*command, "--max-rejects", "0.9", "--force"]) == 0  # the report counts as ours

    # `validate` finds the same before a build.
    arguments = ["validate", str(file), "--layout", "llava", "--json", "--images", command[-1]]
    capsys.readouterr()
    assert main(arguments) == 1
    found = Counter(fault["reason"] for fault in json.loads(capsys.readouterr().out)["faults"])
    assert found == REASONS


def test_too_many_rejects_stop_a_long_build_early(tmp_path, capsys):
    sound = ['{"text": "a"}']
    rows = [*sound * 949, *["{"] * 51, *sound * 1000]
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    assert main(["build", "text", str(tmp_path / "a.jsonl"), str(tmp_path / "out")]) == 2
    assert "rejected 51 of 1,000 records: bad_json 51" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_builds_that_cannot_start_name_the_remedy(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text("{}\n")
    (tmp_path / "a.doc").touch()
    (tmp_path / "cut.tar").write_bytes(b"x" * 3000)
    for arguments, message in (
        (["text", "none.jsonl"], "is no file and no folder"),
        (["text", "a.doc"], "is of no known kind; give one of .jsonl"),
        (["img2dataset", "cut.tar"], "ends early or is damaged"),
        (["messages", "a.jsonl", "--images", "none"], "--images: there is no folder"),
        (["messages", "a.jsonl", "--max-rejects", "1"], "gives no sample"),
    ):
        source, path, *options = arguments
        out = str(tmp_path / "out")
        assert main(["build", source, str(tmp_path / path), out, *options]) == 2
        captured = capsys.readouterr()
        assert message in captured.err
        assert captured.err.count("\n") == 1
        assert not (tmp_path / "out").exists()


def test_parquet_without_the_columns_or_cut_is_refused(tmp_path, capsys):
    cauldron(tmp_path)
    file = tmp_path / "train-00000.parquet"
    out = str(tmp_path / "out")
    assert main(["build", "llava", str(file), out]) == 2
    assert "has no column 'conversations', only images, texts" in capsys.readouterr().err
    file.write_bytes(file.read_bytes()[:-20])
    assert main(["build", "cauldron", str(file), out]) == 2
    assert "is damaged behind row 0" in capsys.readouterr().err


@pytest.mark.parametrize("chunk", [1, 2, 7, 64, 1 << 20])
def test_arrays_are_read_in_pieces_of_any_size(tmp_path, monkeypatch, chunk):
    rows = [{"text": 'a"]},{[\\'}, {"n": [1, {"m": "ä"}]}, {}, {"text": "x" * 300}]
    file = tmp_path / "a.json"
    monkeypatch.setattr("data_pipelines.layouts.rows._CHUNK", chunk)
    for indent in (None, 2):
        file.write_text("\ufeff " + json.dumps(rows, indent=indent, ensure_ascii=False) + "\n")
        found = list(table_rows(file, ("text",)))
        assert [row.load() for row in found] == rows
        assert [row.number for row in found] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("kind", "suffix"),
    [("PNG", "png"), ("JPEG", "jpg"), ("WEBP", "webp"), ("GIF", "gif"), ("BMP", "bmp"),
     ("TIFF", "tif"), ("AVIF", "avif"), ("PPM", None)],
)  # fmt: skip
def test_images_are_named_by_their_bytes(kind, suffix, tmp_path, capsys):
    if kind == "AVIF" and not features.check("avif"):
        pytest.skip("this Pillow has no AVIF")
    data = encoded_image(5, kind)
    assert suffix_of(data) == suffix
    (tmp_path / "odd.name").write_bytes(data)
    turns = [{"role": "user", "content": "<image>"}, {"role": "assistant", "content": "a"}]
    jsonl(tmp_path / "a.jsonl", [{"messages": turns, "image": "odd.name"}])
    assert main(["build", "messages", str(tmp_path / "a.jsonl"), str(tmp_path / "out")]) == 0
    index = index_shards([str(tmp_path / "out")])
    (member,) = set(index.samples[0].members) - {"json"}
    assert member == f"img0.{suffix or 'png'}"
    kept = ShardReader().read(index.samples[0], member)
    assert (kept == data) == (suffix is not None)
