"""Two gloo processes, ZeRO 0 to 3, against one process with the whole batch (invariants 6, 7,
9).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from conceptmoe_vl import ConceptMoEVLForConditionalGeneration
from conceptmoe_vl.training import World
from conceptmoe_vl.training.run_files import read_manifest
from conceptmoe_vl.training.saved_state import read_state
from tests.training.worker import run

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.distributed

ROOT = Path(__file__).resolve().parents[2]
STAGES = (0, 1, 2, 3)
RESUMED = (0, 3)  # the two ends; each costs three runs
ENDS_FIRST = [[2, 0], [2, 1]]  # of step 3 rank 0 has nothing
ONE_OF_FOUR = [[0, 1], [0, 2], [0, 3], *([1, number] for number in range(4))]
# Held-out documents that there are not: rank 1 has one batch to rank 0's two, or none at all.
UNEVEN = ([[1, 2], [1, 3]], [[0, 2], [0, 3], [1, 2], [1, 3]])
OFFLOADED = {stage: f"configs/deepspeed/zero{stage}_offload.json" for stage in (1, 2, 3)}
LOW = {"precision": "bfloat16", "auxiliary": False, "accumulation": 2, "steps": 4}
TIMEOUT = 900  # seconds: only a hang takes so long


def zero_section(path: str) -> dict:
    return json.loads((ROOT / path).read_text())["zero_optimization"]


_RESUMABLE = {"noise": "bernoulli", "accumulation": 2}
SPECS = [
    # First, and stage 3 last: it replaces `linear` in the whole process, for good.
    *[{"name": f"low-{stage}", "stage": stage, "checkpoint_every": 4, **LOW} for stage in STAGES],
    *[{"name": f"images-{stage}", "stage": stage, "export": True} for stage in STAGES],
    *[{"name": f"mixed-{stage}", "stage": stage, "images": "first_half"} for stage in STAGES],
    *[
        {"name": f"ended-{stage}", "stage": stage, "missing": ENDS_FIRST, "steps": 3}
        for stage in STAGES
    ],
    *[
        {
            "name": f"incomplete-{stage}",
            "stage": stage,
            "accumulation": 2,
            "missing": ONE_OF_FOUR,
            "steps": 2,
        }
        for stage in STAGES
    ],
    {"name": "unusable", "stage": 2, "unusable": [1], "steps": 2},
    *[
        {"name": f"idle-{stage}", "stage": stage, "experts": 64, "images": "first_half"}
        for stage in (2, 3)
    ],
    *[
        {
            "name": f"recomputed-{stage}-{how}",
            "stage": stage,
            "activation_checkpointing": how,
            "evaluate_every": 1,
        }
        for stage in (2, 3)
        for how in (True, "selective")
    ],
    *[
        {"name": f"offloaded-{stage}", "zero": zero_section(path), "export": True}
        for stage, path in OFFLOADED.items()
    ],
    {"name": "accumulated", "stage": 2, "accumulation": 2, "auxiliary": False},
    {"name": "poisoned-2", "stage": 2, "poisoned": [[1, 3]], "steps": 4},
    *[
        spec
        for stage in RESUMED
        for spec in (
            {"name": f"straight-{stage}", "stage": stage, "steps": 4, **_RESUMABLE},
            {
                "name": f"stopped-{stage}",
                "run_dir": f"stopped-{stage}",
                "stage": stage,
                "steps": 3,
                "checkpoint_every": 2,
                **_RESUMABLE,
            },
            {
                "name": f"resumed-{stage}",
                "run_dir": f"stopped-{stage}",
                "stage": stage,
                "steps": 2,
                **_RESUMABLE,
            },
        )
    ],
    {"name": "tied-3", "stage": 3, "tied": True, "steps": 2, "export": True, "evaluate": True},
    *[
        {"name": f"evaluated-{number}", "steps": 1, "evaluate": True, "held_out_missing": missing}
        for number, missing in enumerate(UNEVEN)
    ],
    {"name": "evaluated-unusable", "steps": 1, "evaluate": True, "held_out_unusable": [1]},
]


def launch(specs: list[dict], out: Path, processes: int, timeout: int = TIMEOUT) -> list[dict]:
    """Results of every rank. What was written counts, not how gloo processes end."""
    (out / "specs.json").write_text(json.dumps(specs))
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone"]
        launcher += ["--nproc_per_node", str(processes)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [*launcher, "-m", "tests.training.worker", str(out / "specs.json"), str(out)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, timeout=timeout, capture_output=True, text=True
    )
    written = [out / f"rank-{rank}.json" for rank in range(processes)]
    assert all(path.exists() for path in written), done.stderr[-5000:]
    return [json.loads(path.read_text()) for path in written]


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> tuple[Path, list[dict]]:
    """Folder and results of all specifications on two ranks."""
    out = tmp_path_factory.mktemp("two")
    return out, launch(SPECS, out, processes=2)


def reference(tmp_path: Path, **spec) -> list[dict]:
    """Metrics of the same training in this process, by plain torch, with the whole batch at
    once.
    """
    world = World(0, 1, 0, torch.device("cpu"))
    return run({"name": "reference", "engine": "torch", **spec}, tmp_path, world)["metrics"]


def assert_same(
    found: list[dict], expected: list[dict], names=("loss", "lm_loss", "grad_norm"), rel=2e-5
):
    assert [line["step"] for line in found] == [line["step"] for line in expected]
    for name in names:
        values = [line[name] for line in found]
        assert values == pytest.approx([line[name] for line in expected], rel=rel), name


@pytest.mark.parametrize("stage", STAGES)
def test_two_ranks_with_half_the_batch_give_one_rank_with_the_whole(two, tmp_path, stage):
    _, (rank_0, rank_1) = two
    expected = reference(tmp_path)
    names = ("loss", "lm_loss", "ratio_loss", "balance_loss", "router_z_loss", "grad_norm", "ratio")
    assert_same(rank_0[f"images-{stage}"]["metrics"], expected, names)
    assert_same(rank_1[f"images-{stage}"]["metrics"], expected, names)
    last = rank_0[f"images-{stage}"]["metrics"][-1]
    assert last["lm_loss_by_source"] == pytest.approx(expected[-1]["lm_loss_by_source"], rel=2e-5)
    assert last["samples"] == 12
    assert last["skipped"] == {"too_long": 3}
    assert last["over_length"] == {"split": 3}
    assert last["delivered_by_source"] == {
        "even": {"samples": 5},
        "only-0": {"samples": 1},
        "only-1": {"samples": 1},
    }


@pytest.mark.parametrize("stage", STAGES)
def test_text_on_one_rank_and_images_on_the_other(two, tmp_path, stage):
    _, (rank_0, rank_1) = two
    expected = reference(tmp_path, images="first_half")
    assert_same(rank_0[f"mixed-{stage}"]["metrics"], expected)
    last = rank_1[f"mixed-{stage}"]["metrics"][-1]
    assert last["lm_loss_text"] == pytest.approx(expected[-1]["lm_loss_text"], rel=2e-5)
    assert last["lm_loss_image"] == pytest.approx(expected[-1]["lm_loss_image"], rel=2e-5)


@pytest.mark.parametrize("stage", STAGES)
def test_bfloat16_keeps_weights_moments_and_gradients_in_float32(two, tmp_path, stage):
    """Four micro-batches that compute the same on one process and on two: their gradients' sum
    would differ by some 1e-3 if it were kept or exchanged in bfloat16.
    """
    out, (rank_0, _) = two
    expected = reference(tmp_path, **{**LOW, "accumulation": 4})
    found = rank_0[f"low-{stage}"]["metrics"]
    if stage < 3:
        assert_same(found, expected)
    else:  # its `linear` rounds elsewhere than torch's
        assert_same(found, expected, ("loss", "lm_loss"), rel=5e-3)
        assert_same(found, expected, ("grad_norm",), rel=5e-2)
    path = out / f"low-{stage}" / "checkpoints" / "step-4"
    saved = read_state(path / "engine", read_manifest(path))
    for tensor in saved.trained.values():
        assert {p.dtype for each in tensor.pieces.values() for p in each} == {torch.float32}
        assert tensor.pieces.keys() == {"weight", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize("how", [True, "selective"])
@pytest.mark.parametrize("stage", [2, 3])
def test_recomputed_layers_between_evaluations(two, tmp_path, stage, how):
    """An evaluation changes where ZeRO-3 gathers and frees weights in the next forward pass."""
    expected = reference(tmp_path)
    for results in two[1]:
        assert_same(results[f"recomputed-{stage}-{how}"]["metrics"], expected)


@pytest.mark.parametrize("stage", [2, 3])
def test_experts_without_a_token_on_a_rank(two, tmp_path, stage):
    """64 experts, some 40 tokens a rank with two each: many are idle on one rank alone."""
    expected = reference(tmp_path, experts=64, images="first_half")
    for results in two[1]:
        assert_same(results[f"idle-{stage}"]["metrics"], expected)


@pytest.mark.parametrize("stage", OFFLOADED)
def test_offloading_changes_nothing(two, stage):
    """The files of configs/deepspeed, on CPUs: all paths but the copies between devices."""
    out, (rank_0, _) = two
    assert_same(rank_0[f"offloaded-{stage}"]["metrics"], rank_0[f"images-{stage}"]["metrics"])
    found, expected = (
        load_file(out / f"{name}-{stage}" / "model" / "model.safetensors")
        for name in ("offloaded", "images")
    )
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5)


_COUNTED = ("loss", "lm_loss", "ratio_loss", "balance_loss", "router_z_loss", "grad_norm")
_COUNTED += ("ratio", "ratio_image", "ratio_text", "boundary_confidence")


def assert_filler_counts_nowhere(found: list[dict], expected: list[dict]):
    assert_same(found, expected, _COUNTED)
    for line, other in zip(found, expected, strict=True):
        for name in ("samples", "tokens", "supervised_tokens"):
            assert line[name] == other[name], name
        assert line["lm_loss_by_source"] == pytest.approx(other["lm_loss_by_source"], rel=2e-5)
        for stage, load in other["expert_load"].items():
            assert line["expert_load"][stage] == pytest.approx(load, abs=2e-4), stage


@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_whose_stream_has_ended_changes_nothing(two, tmp_path, stage):
    """Of the last step rank 1 alone has documents: as one process that has those alone."""
    _, ranks = two
    expected = reference(tmp_path, missing=ENDS_FIRST)
    for results in ranks:
        assert_filler_counts_nowhere(results[f"ended-{stage}"]["metrics"], expected)
    assert expected[2]["samples"] == expected[1]["samples"] + 2


@pytest.mark.parametrize("stage", STAGES)
def test_an_incomplete_step_is_taken_and_all_ranks_end_together(two, tmp_path, stage):
    """One document in four micro-batches, of which one rank has none: as that document alone."""
    _, ranks = two
    expected = reference(tmp_path, missing=ONE_OF_FOUR, steps=2)
    for results in ranks:
        found = results[f"incomplete-{stage}"]["metrics"]
        assert found[1:] == expected[1:] == [None]
        assert_filler_counts_nowhere(found[:1], expected[:1])


def test_a_rank_without_a_usable_sample_changes_nothing(two, tmp_path):
    """Its own documents are the third and fourth of each step."""
    _, ranks = two
    without = [[step, number] for step in range(2) for number in (2, 3)]
    expected = reference(tmp_path, missing=without, steps=2)
    for results in ranks:
        assert_filler_counts_nowhere(results["unusable"]["metrics"], expected)


def test_micro_batches_on_two_ranks_give_one_batch(two, tmp_path):
    _, (rank_0, _) = two
    expected = reference(tmp_path, auxiliary=False)
    assert_same(rank_0["accumulated"]["metrics"], expected)


def test_nonfinite_loss_of_one_rank_skips_the_step_everywhere(two, tmp_path):
    out, (rank_0, _) = two
    found = rank_0["poisoned-2"]["metrics"]
    expected = reference(tmp_path, poisoned=[[1, 3]], steps=4)
    assert [line["nonfinite_steps"] for line in found] == [0, 1, 1, 1]
    for step in (0, 2, 3):
        assert found[step]["loss"] == pytest.approx(expected[step]["loss"], rel=2e-5)
    line = json.loads((out / "poisoned-2" / "nonfinite.jsonl").read_text())
    assert line["step"] == 2
    assert line["keys_by_rank"] == [["doc-4", "doc-5"], ["doc-6", "doc-7"]]


@pytest.mark.parametrize("stage", RESUMED)
def test_resume_is_exact(two, stage):
    """Stopped after step 3, resumed from the checkpoint of step 2, with sampled boundaries."""
    _, ranks = two
    for results in ranks:
        straight, resumed = results[f"straight-{stage}"], results[f"resumed-{stage}"]
        assert resumed["resumed"]
        for name in ("step", "loss", "lm_loss", "grad_norm", "samples", "tokens", "lr"):
            expected = [line[name] for line in straight["metrics"][2:]]
            assert [line[name] for line in resumed["metrics"]] == expected, name
        assert resumed["keys"] == straight["keys"][len(straight["keys"]) // 2 :]


def test_resumed_run_writes_each_step_once(two):
    out, _ = two
    lines = [json.loads(line) for line in (out / "stopped-0" / "metrics.jsonl").open()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]


def test_exports_are_whole_and_equal_in_every_stage(two):
    out, _ = two
    weights = [
        load_file(out / f"images-{stage}" / "model" / "model.safetensors") for stage in STAGES
    ]
    for stage in STAGES[1:]:
        assert weights[stage].keys() == weights[0].keys()
        for name, tensor in weights[0].items():
            torch.testing.assert_close(weights[stage][name], tensor, rtol=1e-4, atol=1e-5)


def test_tied_head_survives_zero_3(two):
    out, (rank_0, _) = two
    path = out / "tied-3" / "model"
    assert "lm_head.weight" not in load_file(path / "model.safetensors")
    model = ConceptMoEVLForConditionalGeneration.from_pretrained(path)
    assert model.lm_head.weight.data_ptr() == model.embed_tokens.weight.data_ptr()
    assert rank_0["tied-3"]["evaluation"]["supervised_tokens"] > 0


@pytest.mark.parametrize("number", range(len(UNEVEN)))
def test_held_out_batches_need_not_be_equal_in_number(two, tmp_path, number):
    _, ranks = two
    spec = {"steps": 1, "evaluate": True, "held_out_missing": UNEVEN[number]}
    world = World(0, 1, 0, torch.device("cpu"))
    expected = run({"name": "reference", "engine": "torch", **spec}, tmp_path, world)["evaluation"]
    for results in ranks:
        assert results[f"evaluated-{number}"]["evaluation"] == pytest.approx(expected, rel=2e-5)


def test_a_rank_without_a_usable_held_out_sample_takes_part(two, tmp_path):
    missing = [[step, number] for step in range(2) for number in (2, 3)]  # those of rank 1
    spec = {"steps": 1, "evaluate": True, "held_out_missing": missing}
    world = World(0, 1, 0, torch.device("cpu"))
    expected = run({"name": "reference", "engine": "torch", **spec}, tmp_path, world)["evaluation"]
    for results in two[1]:
        assert results["evaluated-unusable"]["evaluation"] == pytest.approx(expected, rel=2e-5)


def test_one_process_under_deepspeed_gives_plain_torch(tmp_path):
    specs = [{"name": f"one-{stage}", "stage": stage} for stage in (0, 2)]
    specs.append({"name": "low", "precision": "bfloat16"})
    (rank_0,) = launch(specs, tmp_path, processes=1)
    expected = reference(tmp_path)
    for name in ("one-0", "one-2"):
        assert_same(rank_0[name]["metrics"], expected, rel=1e-6)
    low = reference(tmp_path, name="reference-low", precision="bfloat16")
    # A last bit of float32 decides how a bfloat16 rounds, so that paths part after the first step.
    assert_same(rank_0["low"]["metrics"], low, rel=5e-3)
