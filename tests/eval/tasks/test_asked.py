"""All public data sets in one folder, asked by the program with a tiny model, read and scored."""

from __future__ import annotations

import json
import shutil

import pytest

from eval.__main__ import main
from tests.eval.tasks import files
from tests.model_folder import save_model_folder


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    folder = tmp_path_factory.mktemp("all")
    for make in files.MAKERS.values():
        make(folder / "data")
    model = save_model_folder(folder / "model")
    arguments = ["--model", str(model), "--tasks", ",".join(files.MAKERS), "--device", "cpu"]
    arguments += ["--data", str(folder / "data"), "--limit", "3", "--batch-size", "2"]
    assert main([*arguments, "--output", str(folder / "out")]) == 0
    yield folder / "out"
    shutil.rmtree(folder)


@pytest.mark.parametrize("name", files.MAKERS)
def test_every_question_is_asked_with_its_images_and_scored(name, output):
    lines = (output / name / "samples.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert 1 <= len(rows) <= 3
    for row in rows:
        # One mark for each picture, and the whole question after it.
        assert "<|image_pad|>*" in row["prompt"] or name == "scienceqa"
        assert row["question"].splitlines()[-1] in row["prompt"]
        assert 0 <= row["score"] <= 1
    results = json.loads((output / name / "results.json").read_text())
    assert results["count"] == len(rows)
    headline = next(iter(results["figures"].values()))
    assert headline["value"] >= 0
    assert headline["interval_95"][0] <= headline["value"] <= headline["interval_95"][1]
    # Three questions are not the official set.
    assert results["official_size"] > len(rows)


def test_pictures_of_one_question_stand_where_its_text_mentions_them(output):
    rows = [json.loads(line) for line in (output / "mmmu/samples.jsonl").read_text().splitlines()]
    prompt = next(row["prompt"] for row in rows if row["key"] == "validation_Accounting_1")
    assert prompt.count("<|image_pad|>*") == 3
    assert prompt.index("See ") < prompt.index("<|image_pad|>*") < prompt.index(". What is in ")
