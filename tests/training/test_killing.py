"""Runs that are killed at an operation on files, whichever it is, and started again.

The same command must end with the unbroken run's losses, weights and files: no more and no fewer.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.training.test_train_program import write_config

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 7200  # seconds: only a hang takes so long


def plan_of(folder: Path, *overrides: str, **plan: Any) -> dict[str, Any]:
    """A run of two steps that writes two checkpoints, keeps one, evaluates and exports."""
    arguments = ["--config", str(write_config(folder)), "training.max_steps=2"]
    arguments += ["training.checkpoint_every=1", "training.keep_checkpoints=1"]
    arguments += ["training.precision=float32", "training.peak_flops=1e9"]
    arguments += [f"evaluation.data.shards={folder / 'train-*.tar'}", "evaluation.batches=1"]
    arguments += overrides
    return {"program": "train", "arguments": arguments, "folder": str(folder / "run"), **plan}


def carry_out(folder: Path, plan: dict[str, Any]) -> list[dict[str, Any]]:
    """What `killing` found: of the unbroken run, then of every try."""
    (folder / "plan.json").write_text(json.dumps(plan))
    command = [sys.executable, "-m", "tests.training.killing", str(folder / "plan.json")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(folder / "found.json")],
        **{"cwd": ROOT, "env": environment, "timeout": LIMIT, "capture_output": True, "text": True},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "found.json").read_text())


def assert_unbroken(found: list[dict[str, Any]]) -> None:
    """Every try was killed where it was to be, and ended as the unbroken run."""
    straight, *tries = found
    assert tries
    assert not any(straight["statuses"])
    for each in tries:
        name = each["kills"]
        for (rank, _), statuses in zip(each["kills"], each["killed"], strict=True):
            assert statuses[rank] == -9, f"{name} was not reached"
        assert not any(each["latest"]), f"latest after {name}: {each['latest']}"
        assert not any(each["statuses"]), f"the last start after {name}: {each['statuses']}"
        for what in ("metrics", "evaluation", "rollbacks", "weights", "files"):
            assert each.get(what) == straight.get(what), f"{what} after {name}"


def test_a_run_that_is_killed_again_and_again(tmp_path):
    """In every phase once: the same run is killed eight times."""
    names = [
        "open /.config.yaml.tmp",
        "half of /checkpoints/.writing-step-1/engine/state.pt",
        "open /checkpoints/.latest.tmp",
        "half of /checkpoints/.writing-step-2/rank-0.pt",
        "os.rename /checkpoints/.latest.tmp",
        "os.remove /checkpoints/.removed-step-1/manifest.json",
        "half of /.model.writing/model.safetensors",
        "os.rename /.model.writing",
    ]
    plan = plan_of(tmp_path, tries=[[[0, name] for name in names]])
    assert_unbroken(carry_out(tmp_path, plan))


@pytest.mark.slow
def test_a_run_that_is_killed_at_any_operation(tmp_path):
    assert_unbroken(carry_out(tmp_path, plan_of(tmp_path, every=[[0, 1, 1]])))


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("alone", [False, True])
def test_one_of_two_ranks_is_killed_at_any_operation(tmp_path, stage, alone):
    """Every third of both ranks; every 20th where the other is left alone, which takes long."""
    pytest.importorskip("deepspeed")
    step = 20 if alone else 3
    overrides = (
        "training.engine=deepspeed",
        f"training.deepspeed=configs/deepspeed/zero{stage}.json",
    )
    every = [[0, 1, step], [1, 1, step]]
    plan = plan_of(tmp_path, *overrides, every=every, ranks=2, alone=alone)
    found = carry_out(tmp_path, plan)
    assert_unbroken(found)
    if alone:
        for each in found[1:]:
            ((rank, _),), (statuses,) = each["kills"], each["killed"]
            assert statuses[1 - rank] in (0, 1), f"the other rank after {each['kills']}"


@pytest.mark.slow
def test_a_run_that_is_killed_while_it_goes_back_from_a_spike(tmp_path):
    folder = str(tmp_path / "run")
    plan = {"program": "spiking", "arguments": [folder], "folder": folder, "every": [[0, 1, 1]]}
    found = carry_out(tmp_path, plan)
    assert [event["to_step"] for event in found[0]["rollbacks"]] == [6]
    assert_unbroken(found)


@pytest.mark.slow
def test_a_consolidation_that_is_killed_at_any_operation(tmp_path):
    assert carry_out(tmp_path, plan_of(tmp_path))[0]["statuses"] == [0]
    (tmp_path / "empty").mkdir()
    checkpoint, out = tmp_path / "run" / "checkpoints" / "step-2", tmp_path / "out" / "model"
    plan = {
        **{"program": "conceptmoe-vl", "arguments": ["consolidate", str(checkpoint), str(out)]},
        **{"folder": str(out.parent), "start": str(tmp_path / "empty"), "every": [[0, 1, 1]]},
    }
    assert_unbroken(carry_out(tmp_path, plan))
