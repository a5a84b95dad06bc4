"""`conceptmoe-vl calibrate`: thresholds from shards into the model's folder, and their use."""

from __future__ import annotations

import importlib.metadata
import json

import pytest
import torch

from conceptmoe_vl import cli
from conceptmoe_vl.asking import load_pretrained
from conceptmoe_vl.calibration import Distribution, ProbabilityMeter, calibration_table
from conceptmoe_vl.errors import UserError
from eval.__main__ import main as evaluate
from tests.eval.shards import png, small_set
from tests.model_folder import save_model_folder


@pytest.fixture
def folder(tmp_path):
    return save_model_folder(tmp_path / "model")


@pytest.fixture
def data(tmp_path):
    return small_set(tmp_path / "data", pictures=12)


@pytest.fixture
def run(monkeypatch):
    """The command line with the entry point of pyproject.toml, installed or not."""
    entry = importlib.metadata.EntryPoint(
        "calibrate", "data_pipelines.calibrate:add_command", cli.COMMANDS
    )
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [entry])
    return lambda *words: cli.main([str(word) for word in words])


def distribution(values, closed=1):
    return Distribution(torch.tensor(sorted(values, reverse=True)), closed)


def test_thresholds_are_exact_quantiles():
    own = distribution([1.0, 1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2], closed=4)
    assert own.ratio == 2.5
    assert own.forced == 2
    for ratio, wanted in ((10 / 9, 9), (2.0, 5), (2.5, 4), (5.0, 2)):
        threshold = own.threshold(ratio)
        assert int((own.sorted_N >= threshold).sum()) == wanted
        assert own.reached(threshold) == pytest.approx(ratio)
    assert own.threshold(10.0) is None  # forced boundaries alone are two of ten
    assert sum(own.histogram()) == 10


def test_equal_probabilities_are_not_split():
    own = distribution([0.4] * 9 + [1.0])
    assert own.reached(own.threshold(2.0)) == 1.0


def test_a_modality_without_tokens_takes_the_thresholds_of_all():
    whole = distribution([1.0, 0.7, 0.5, 0.3])
    table = calibration_table({"all": whole, "text": whole, "image": distribution([])}, (2.0,))
    assert table["image"] == table["all"]


def test_the_command_stores_thresholds_that_reach_their_ratios(run, folder, data, capsys):
    before = json.loads((folder / "config.json").read_text())
    assert run("calibrate", folder, data, "--ratios", 1.5, 2, 3, 99, "--device", "cpu") == 0
    printed = capsys.readouterr().out
    assert "out of reach" in printed
    after = json.loads((folder / "config.json").read_text())
    table = after["chunk"].pop("calibration")
    before["chunk"].pop("calibration")
    assert after == before
    assert table["ratios"] == [1.5, 2, 3, 99]
    assert table["all"][-1] is None
    report = json.loads((folder / "calibration.json").read_text())
    whole = report["measured"]["all"]
    assert whole["tokens"] == sum(report["measured"][name]["tokens"] for name in ("text", "image"))
    assert whole["drift"] == pytest.approx(whole["ratio"] / 2 - 1)
    assert not list(folder.glob("*.partial"))
    assert not list(folder.glob(".*.tmp"))
    for ratio, reached in zip(table["ratios"][:2], whole["reached"], strict=False):
        assert reached == pytest.approx(ratio, rel=0.1)
    model, _ = load_pretrained(folder, "cpu")
    model.language_model.chunk.dial.check(2)
    with pytest.raises(ValueError, match="outside"):
        model.language_model.chunk.dial.check(99)


def test_demo_and_evaluation_take_the_calibrated_ratio(run, folder, data, tmp_path, capsys):
    picture = tmp_path / "picture.png"
    picture.write_bytes(png())
    ask = ("ask", picture, "what is it?", "--model", folder, "--device", "cpu")
    assert run(*ask, "--compression", 1.5) == 2
    assert "calibrate" in capsys.readouterr().err
    assert run(*ask, "--compression", 1) == 0
    run("calibrate", folder, data, "--device", "cpu")
    assert run(*ask, "--compression", 1.5) == 0
    ratios = {}
    for compression in ("1", "1.5", "3"):
        words = ["--model", str(folder), "--tasks", "easy_vqa", "--data", str(data)]
        words += ["--output", str(tmp_path / compression), "--compression", compression]
        assert evaluate([*words, "--device", "cpu"]) == 0
        path = tmp_path / compression / "easy_vqa" / "results.json"
        results = json.loads(path.read_text())
        assert results["settings"]["compression"] == float(compression)
        ratios[compression] = results["ratio"]
    assert ratios["1"] == 1
    assert 1 < ratios["1.5"] < ratios["3"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ratios", 1], "above 1"),
        (["--ratios", "nan"], "above 1"),
        (["--tokens", 0], "1 or more"),
    ],
)
def test_wrong_numbers_are_refused(run, folder, data, words, message, capsys):
    assert run("calibrate", folder, data, *words) == 2
    assert message in capsys.readouterr().err


def test_missing_folders_are_named(run, folder, data, tmp_path, capsys):
    assert run("calibrate", tmp_path / "none", data) == 2
    assert "no model folder" in capsys.readouterr().err
    assert run("calibrate", folder, tmp_path / "nothing") == 2
    assert "nothing" in capsys.readouterr().err


def test_a_router_without_thresholds_is_refused(folder):
    model, _ = load_pretrained(folder, "cpu")
    model.config.chunk.router = "fixed"
    with pytest.raises(UserError, match="no thresholds"), ProbabilityMeter().watch(model):
        pass
    with pytest.raises(UserError, match="no token"):
        ProbabilityMeter().distributions()
