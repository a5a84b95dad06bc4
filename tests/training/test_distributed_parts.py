"""Frozen parts and layers, and adapters, on two gloo processes in every ZeRO stage."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from conceptmoe_vl.training.parts import layer_of, part_of
from tests.tiny import tiny_model
from tests.training.test_distributed import assert_same, launch, reference

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.distributed

RESUMED = (0, 3)  # the two ends, with noise in the model
KINDS: dict[str, dict] = {
    # Only one rank has pictures, and the other nothing else to train.
    "projector": {
        "images": "first_half",
        "freeze": ["vision", "chunk", "experts", "embedding", "rest"],
    },
    "layers": {"freeze": ["embedding"], "freeze_layers": {"vision": 1, "concept": [0, 0]}},
    "lora": {"images": "first_half", "lora": {"rank": 2}, "activation_checkpointing": True},
}
STAGES = {"projector": (0, 1, 2, 3), "layers": (0, 2, 3), "lora": (0, 1, 2, 3)}
if importlib.util.find_spec("peft") is None:
    del KINDS["lora"]
CASES = [(kind, stage) for kind in KINDS for stage in STAGES[kind]]
RESUMES = [(kind, stage) for kind, stage in CASES if stage in RESUMED]


def spec(kind: str, stage: int, **fields) -> dict:
    noise = "bernoulli" if stage in RESUMED else "none"
    names = {"name": f"{kind}-{stage}", "run_dir": f"{kind}-{stage}", "stage": stage}
    return {**names, "noise": noise, "export": True, **KINDS[kind], **fields}


SPECS = [
    *[
        spec(kind, stage, steps=3, checkpoint_every=2 if stage in RESUMED else 0)
        for kind, stage in CASES
    ],
    *[spec(kind, stage, name=f"{kind}-resumed-{stage}", steps=1) for kind, stage in RESUMES],
]


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> tuple[Path, list[dict]]:
    """Folder and results of all specifications on two ranks."""
    out = tmp_path_factory.mktemp("two")
    return out, launch(SPECS, out, processes=2, timeout=900)


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_give_one_rank_with_the_whole_batch(two, tmp_path, kind):
    _, (rank_0, rank_1) = two
    expected = reference(tmp_path, **KINDS[kind])
    for stage in set(STAGES[kind]).difference(RESUMED):  # of noise every rank has its own
        assert_same(rank_0[f"{kind}-{stage}"]["metrics"], expected)
        assert_same(rank_1[f"{kind}-{stage}"]["metrics"], expected)


@pytest.mark.parametrize(("kind", "stage"), RESUMES)
def test_resume_is_exact(two, kind, stage):
    _, ranks = two
    for results in ranks:
        unbroken = results[f"{kind}-{stage}"]["metrics"][2]
        resumed = results[f"{kind}-resumed-{stage}"]
        assert resumed["resumed"]
        for name in ("step", "loss", "lm_loss", "grad_norm", "ratio"):
            assert resumed["metrics"][0][name] == unbroken[name], name


@pytest.mark.parametrize(("kind", "stage"), CASES)
def test_exported_weights_are_whole_and_frozen_ones_as_before(two, kind, stage):
    out, _ = two
    saved = load_file(out / f"{kind}-{stage}" / "model" / "model.safetensors")
    start = tiny_model(image_mode="grid").state_dict()
    assert {name: tensor.shape for name, tensor in saved.items()} == {
        name: tensor.shape for name, tensor in start.items()
    }
    changed = {name for name, tensor in saved.items() if not torch.equal(tensor, start[name])}

    def is_trained(name: str) -> bool:
        if kind == "projector":
            return part_of(name) == "projector"
        if kind == "layers":
            frozen = layer_of(name) in {("vision", -1), ("vision", 0), ("concept", 0)}
            return not frozen and part_of(name) != "embedding"
        adapted = ".experts." in name or (".self_attn." in name and "_proj." in name)
        return adapted or part_of(name) in ("projector", "chunk")

    assert changed == {name for name in start if is_trained(name)}


@pytest.mark.skipif("lora" not in KINDS, reason="peft is not installed")
@pytest.mark.parametrize("stage", STAGES["lora"])
def test_adapters_are_saved_beside_the_model(two, stage):
    out, _ = two
    saved = load_file(out / f"lora-{stage}" / "adapter" / "adapter_model.safetensors")
    matrices = {name for name in saved if "lora_" in name}
    assert len(matrices) == 2 * 6 * 3  # A and B of four projections and two experts' matrices
    assert all(saved[name].abs().max() > 0 for name in matrices)
    assert "base_model.model.projector.weight" in saved
