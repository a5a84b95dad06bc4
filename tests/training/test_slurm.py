"""The batch script of configs/slurm: ranks from SLURM's variables, requeued when it has saved."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest

from tests.training.nodes import LIMIT, ROOT, wait_for
from tests.training.slurm import job, requeued
from tests.training.test_train_program import write_config

SCRIPT = ROOT / "configs" / "slurm" / "train.sbatch"
pytestmark = pytest.mark.distributed


def test_it_is_bash():
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)


@pytest.mark.parametrize(("status", "again"), [(0, False), (1, False), (2, False), (143, True)])
def test_a_run_that_has_saved_itself_is_queued_again(tmp_path, status, again):
    """`python` ends with a status, if it has got train.py and the script's arguments."""
    environment = job(tmp_path, tasks=2)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\n[ "$*" = "train.py --config a.yaml b=1" ] && exit {status}\n')
    python.chmod(0o755)
    environment["PYTHON"] = str(python)
    command = ["bash", str(SCRIPT), "--config", "a.yaml", "b=1"]
    done = subprocess.run(command, env=environment, cwd=ROOT, timeout=LIMIT, check=False)
    assert done.returncode == status
    expected = [f"requeue {environment['SLURM_JOB_ID']}"] if again else []
    assert requeued(tmp_path) == expected


def start(folder: Path, steps: int) -> subprocess.Popen:
    command = ["bash", str(SCRIPT), "--config", str(folder / "run.yaml"), "training.threads=1"]
    command += ["training.engine=deepspeed", f"training.max_steps={steps}"]
    return subprocess.Popen(
        command, env=job(folder, tasks=2), cwd=ROOT, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.slow
def test_two_tasks_train_are_preempted_and_go_on(tmp_path):
    pytest.importorskip("deepspeed")
    write_config(tmp_path)
    first = start(tmp_path, 100000)
    wait_for(tmp_path / "run" / "metrics.jsonl", 2, ())
    # as --signal does: to the tasks of the step, not to the script
    children = Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text().split()
    for child in children:
        subprocess.run(["kill", f"-{int(signal.SIGTERM)}", child], check=True)
    _, text = first.communicate(timeout=LIMIT)
    assert first.returncode == 143, text
    assert len(requeued(tmp_path)) == 1
    (saved,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    step = int(saved.name[5:])
    second = start(tmp_path, step + 2)
    _, text = second.communicate(timeout=LIMIT)
    assert second.returncode == 0, text
    assert f"after step {step}" in text
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    assert [line["step"] for line in lines] == list(range(1, step + 3))
    assert len(requeued(tmp_path)) == 1
