"""`stats`: counts, lengths and sizes, and the picture of them."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
from PIL import Image

from conceptmoe_vl.processing import register
from data_pipelines.__main__ import main
from data_pipelines.statistics import gather
from data_pipelines.writing import write_shards
from tests.data_pipelines.conftest import encoded_image, failure, record, toy_shards


def mixed_shards(folder, sources: int = 1) -> str:
    """Samples of 0 to 3 images, the last one damaged."""
    folder.mkdir()
    samples = []
    for number in range(8):
        pictures = [("png", encoded_image(9, size=8 * (1 + number)))] * (number % 4)
        fields = {"source": f"$mixed_{number % sources}"}
        samples.append((f"k{number}", record(number, number % 4) | fields, pictures))
    samples.append(("bad", {"messages": []}, []))
    write_shards(folder, "toy", samples, size=5)
    return str(folder)


def test_lengths_and_sizes_of_every_sound_sample(tmp_path):
    seen = []
    found = gather([mixed_shards(tmp_path / "data")], on_sample=seen.append)
    assert seen == [9] * 9
    assert found.faults == {"missing_field": 1}
    assert found.unit == "characters"
    # `s0 q0`, `a0`, `s0 q1`, `a1`
    assert list(found.lengths) == [14] * 8
    assert found.counts["images"] == len(found.widths) == 2 * (0 + 1 + 2 + 3)
    assert found.counts["without images"] == 2
    assert found.sizes == {f"{8 * (1 + n)}x{8 * (1 + n)}": n % 4 for n in range(8) if n % 4}
    assert found.sources == {"$mixed_0": 8}


def test_tokens_are_counted_as_training_will(tmp_path, processor):
    shards = mixed_shards(tmp_path / "data")
    register()
    processor.save_pretrained(tmp_path / "model")
    found = gather([shards], lambda turns: len(processor.encode_turns(turns).input_ids))
    assert found.unit == "tokens"
    texts = {length - 6 * (number % 4) for number, length in enumerate(found.lengths)}
    assert len(texts) == 1  # a picture is four tokens and its two marks
    assert found.counts["tokens"] == sum(found.lengths)
    assert main(["stats", shards, "--model", str(tmp_path / "model")]) == 1


@pytest.mark.parametrize("sources", [1, 30])
def test_the_picture_is_drawn_whole(tmp_path, capsys, sources):
    pytest.importorskip("matplotlib")
    png = tmp_path / "stats.png"
    shards = mixed_shards(tmp_path / "data", sources)
    assert main(["stats", shards, "--png", str(png)]) == 1
    assert str(png) in capsys.readouterr().out.replace("\n", "")
    with Image.open(png) as image:
        assert image.size == (1440, 960)
        colors = np.unique(np.asarray(image.convert("RGB")).reshape(-1, 3), axis=0)
    assert len(colors) > 50
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "stats.png"]


def test_text_alone_and_nothing_sound_are_drawn_too(tmp_path):
    pytest.importorskip("matplotlib")
    for name, messages in (("text", record(0, 0)["messages"]), ("none", [])):
        folder = tmp_path / name
        folder.mkdir()
        write_shards(folder, "toy", [("k", {"messages": messages}, [])], size=1)
        png = tmp_path / f"{name}.png"
        assert main(["stats", str(folder), "--png", str(png)]) == int(name == "none")
        assert png.stat().st_size > 1000


def test_mistakes_are_said_before_anything_is_read(tmp_path, capsys, monkeypatch):
    shards = toy_shards(tmp_path / "data", [1])
    for path in (tmp_path, tmp_path / "none" / "x.png"):
        assert "cannot be written" in failure(capsys, "stats", shards, "--png", str(path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    message = failure(capsys, "stats", shards, "--png", str(tmp_path / "x.png"))
    assert "pip install conceptmoe-vl[figures]" in message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data"]
