"""Checkpoints resumed by another number of processes, engine and ZeRO stage; and consolidated.

Two gloo processes go on from what plain torch wrote in one, and the other way round; the whole
matrix, four processes too, is marked slow.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from conceptmoe_vl import ConceptMoEVLConfig, ConceptMoEVLForConditionalGeneration
from conceptmoe_vl.errors import UserError
from conceptmoe_vl.training import TrainingConfig, World
from conceptmoe_vl.training.consolidate import adapted_model, merged_state, write_model
from conceptmoe_vl.training.lora import LoraSection
from conceptmoe_vl.training.resuming import batch_of_run
from conceptmoe_vl.training.run_files import read_manifest
from conceptmoe_vl.training.saved_state import SavedTensor, read_state
from tests.tiny import tiny_config
from tests.training.test_distributed import launch
from tests.training.worker import run

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.distributed

WORLD = World(0, 1, 0, torch.device("cpu"))
STOP, END = 3, 8
# The auxiliary losses aggregate over the ranks of a micro-batch, which another cut changes.
_COMMON = {"auxiliary": False, "checkpoint_every": STOP}
_PROJECTOR = ["vision", "chunk", "experts", "embedding", "rest"]
KINDS = {
    "whole": {},
    "tower-frozen": {"freeze": ["vision"]},
    "projector-only": {"freeze": _PROJECTOR, "tied": True},
    "adapters": {"lora": {"rank": 2, "train_whole": ["embedding"]}, "tied": True},
}
if importlib.util.find_spec("peft") is None:
    del KINDS["adapters"]
CELLS = tuple(
    (stage, kind)
    for stage, kind in (
        *((0, "tower-frozen"), (1, "projector-only"), (2, "whole"), (3, "projector-only")),
        *((2, "adapters"), (3, "adapters")),
    )
    if kind in KINDS
)


def spec(kind: str, stage: int | None, **more) -> dict:
    """One specification of `worker.run`; stage None is plain torch."""
    engine = {"engine": "torch"} if stage is None else {"stage": stage}
    return {**_COMMON, **KINDS[kind], **engine, **more}


def here(folder: Path, name: str, **values) -> dict:
    return run({"name": name, **values}, folder, WORLD)


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> dict[str, tuple[Path, list[dict]]]:
    """Of each kind: a run of one process with two micro-batches a step, its metrics, and its
    checkpoint alone in a folder to copy.
    """
    folder = tmp_path_factory.mktemp("straight")
    found = {}
    for kind in KINDS:
        metrics = here(folder, kind, **spec(kind, None, accumulation=2, steps=END))["metrics"]
        shutil.rmtree(folder / kind / "checkpoints" / f"step-{2 * STOP}")
        found[kind] = (folder / kind, metrics)
    return found


def assert_goes_on(result: dict, expected: list[dict]) -> None:
    assert result["resumed"]
    found = result["metrics"]
    assert [line["step"] for line in found] == [line["step"] for line in expected[STOP:]]
    for name in ("loss", "lm_loss", "grad_norm"):
        values = [line[name] for line in expected[STOP:]]
        assert [line[name] for line in found] == pytest.approx(values, rel=1e-4), name
    assert [line["lr"] for line in found] == [line["lr"] for line in expected[STOP:]]
    assert [line["samples"] for line in found] == [line["samples"] for line in expected[STOP:]]


@pytest.fixture(scope="module")
def two(straight, tmp_path_factory) -> tuple[Path, list[dict]]:
    """Two processes: what they write in each stage, and how they go on from plain torch."""
    out = tmp_path_factory.mktemp("two")
    specs = []
    for stage, kind in CELLS:
        shutil.copytree(straight[kind][0], out / f"resumed-{stage}-{kind}")
        specs += [
            spec(kind, stage, name=f"written-{stage}-{kind}", steps=STOP, export=True),
            spec(kind, stage, name=f"resumed-{stage}-{kind}", steps=END - STOP),
        ]
    return out, launch(specs, out, processes=2)


@pytest.mark.parametrize(("stage", "kind"), CELLS)
def test_two_processes_go_on_from_one(two, straight, stage, kind):
    for results in two[1]:
        assert_goes_on(results[f"resumed-{stage}-{kind}"], straight[kind][1])


@pytest.mark.parametrize(("stage", "kind"), CELLS)
def test_one_process_goes_on_from_two(two, straight, tmp_path, capsys, stage, kind):
    """By the same command: the micro-batches of a step come from the checkpoint."""
    shutil.copytree(two[0] / f"written-{stage}-{kind}", tmp_path / "run")
    values = spec(kind, None, accumulation=2, steps=END - STOP)
    assert_goes_on(here(tmp_path, "run", **values), straight[kind][1])


def states(two, stage: int, kind: str):
    path = two[0] / f"written-{stage}-{kind}" / "checkpoints" / f"step-{STOP}"
    return read_state(path / "engine", read_manifest(path))


@pytest.mark.parametrize(("stage", "kind"), CELLS)
def test_a_consolidated_checkpoint_is_the_live_model(two, tmp_path, stage, kind):
    live, found = two[0] / f"written-{stage}-{kind}" / "model", tmp_path / "model"
    config, saved = ConceptMoEVLConfig.from_pretrained(live), states(two, stage, kind)
    if kind == "adapters":
        lora = LoraSection(**KINDS[kind]["lora"])
        saved = merged_state(*adapted_model(saved, config, lora), lora)
    write_model(saved, config, found)
    weights, expected = (load_file(path / "model.safetensors") for path in (found, live))
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    for name in ("config.json", "generation_config.json"):
        assert json.loads((found / name).read_text()) == json.loads((live / name).read_text())
    ids = torch.arange(5, 25)[None]
    logits = [
        ConceptMoEVLForConditionalGeneration.from_pretrained(path)(input_ids=ids).logits
        for path in (found, live)
    ]
    assert torch.equal(*logits)


def test_a_consolidation_that_cannot_be_right_leaves_nothing(two, tmp_path, monkeypatch):
    other = tiny_config(text={"num_experts": 8})
    with pytest.raises(UserError, match=r"is \(4, .* in the checkpoint and \(8, .* in the model"):
        write_model(states(two, 3, "projector-only"), other, tmp_path / "a")
    saved = states(two, 2, "whole")
    part = SavedTensor.part
    calls = iter(range(10**6))

    def once_wrong(self, kind, start, numel):
        found = part(self, kind, start, numel)
        return found + 1 if next(calls) == 3 else found

    monkeypatch.setattr(SavedTensor, "part", once_wrong)
    with pytest.raises(RuntimeError, match="is not loaded as the checkpoint has it"):
        write_model(saved, tiny_config(image_mode="grid"), tmp_path / "b")
    assert list(tmp_path.iterdir()) == []


def test_another_freezing_is_refused(two, tmp_path):
    shutil.copytree(two[0] / "written-2-whole", tmp_path / "run")
    with pytest.raises(UserError, match=r"this run has .* set training\.freeze back"):
        here(tmp_path, "run", **spec("tower-frozen", None, accumulation=2))


def test_a_part_of_a_tensor_is_read_across_pieces():
    values = torch.arange(10.0)
    saved = SavedTensor((2, 5), {"weight": [values[:3], values[3:3], values[3:4], values[4:]]})
    for start in range(10):
        for numel in range(10 - start + 1):
            found = saved.part("weight", start, numel)
            assert torch.equal(found, values[start : start + numel])
    assert torch.equal(saved.whole(), values.view(2, 5))
    assert torch.equal(saved.part("exp_avg", 2, 3), torch.zeros(3))


def test_a_batch_that_cannot_be_shared_is_refused_before_training(two, capsys):
    folder = two[0] / "written-0-tower-frozen" / "checkpoints"
    config = TrainingConfig(max_steps=9)

    def resumed(processes: int, **changed) -> int:
        world = World(0, processes, 0, torch.device("cpu"))
        settings = dataclasses.replace(config, **changed)
        return batch_of_run(settings, folder, world, print).gradient_accumulation_steps

    assert resumed(2) == 1
    assert capsys.readouterr().out == ""
    assert resumed(1) == 2
    assert "steps is 2 instead of 1: 1 processes go on" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"by 2 processes with 1 micro-batches .* has 4 processes"):
        resumed(4)
    assert resumed(4, keep_batch=False) == 1
    assert resumed(4, resume="never") == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_stage_goes_on_from_every_other_at_another_number_of_processes(tmp_path, kind):
    """1 to 2, 2 to 1 and 2 to 4 processes. Each launch holds all the stages that it can."""
    expected = here(tmp_path, "straight", **spec(kind, None, accumulation=4, steps=END))["metrics"]
    shutil.rmtree(tmp_path / "straight" / "checkpoints" / f"step-{2 * STOP}")
    written = {}
    for processes in (1, 2):
        out = tmp_path / f"written-{processes}"
        out.mkdir()
        specs = [
            spec(kind, stage, name=f"{stage}", accumulation=4 // processes, steps=STOP)
            for stage in range(4)
        ]
        launch(specs, out, processes)
        written[processes] = {str(stage): out / str(stage) for stage in range(4)}
    written[1]["torch"] = tmp_path / "straight"
    for before, after in ((1, 2), (2, 1), (2, 4)):
        out = tmp_path / f"{before}-to-{after}"
        out.mkdir()
        specs = []
        for source, folder in written[before].items():
            for stage in range(4):
                name = f"{source}-to-{stage}"
                shutil.copytree(folder, out / name)
                specs.append(
                    spec(kind, stage, name=name, accumulation=4 // after, steps=END - STOP)
                )
        (results, *_) = launch(specs, out, after)
        for each in specs:
            assert_goes_on(results[each["name"]], expected)
