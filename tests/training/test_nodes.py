"""A run on two machines (network namespaces) of which one dies, or the network between them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.training.nodes import (
    ADDRESSES,
    LIMIT,
    ROOT,
    Node,
    two_nodes,
    wait_for,
    why_no_namespaces,
)
from tests.training.test_train_program import write_config

pytest.importorskip("deepspeed")
pytestmark = [pytest.mark.distributed, pytest.mark.slow]

EVERY = 3  # steps between checkpoints


@pytest.fixture
def nodes():
    reason = why_no_namespaces()
    if reason:
        pytest.skip(f"no network namespaces here: {reason}")
    with two_nodes() as both:
        yield both


def options(out: Path, stage: int, steps: int, timeout: float = 5.0) -> list[str]:
    """Losses do not depend on the number of steps: the rate is constant."""
    return [
        *("--config", str(out / "run.yaml"), "training.engine=deepspeed"),
        f"training.deepspeed=configs/deepspeed/zero{stage}.json",
        *("training.precision=float32", "training.threads=1", "training.schedule=wsd"),
        *("training.warmup_fraction=0", "training.decay_fraction=0"),
        *(f"training.max_steps={steps}", f"training.checkpoint_every={EVERY}"),
        f"training.timeout_minutes={timeout}",
    ]


def errors(node: Node) -> list[str]:
    return [line for line in node.text.splitlines() if line.startswith("error: ")]


def losses(run: Path) -> list[tuple]:
    names = ("step", "loss", "lm_loss", "grad_norm", "samples")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    return [tuple(line[name] for name in names) for line in lines]


def unbroken(out: Path, arguments: list[str]) -> list[tuple]:
    """The same run on one machine, with as many processes."""
    command = [sys.executable, "-m", "conceptmoe_vl_launch", "--standalone", "--nproc_per_node"]
    command += ["2", "train.py", *arguments, f"run_dir={out / 'unbroken'}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=ROOT, env=environment, timeout=LIMIT, check=False)
    return losses(out / "unbroken")


@pytest.mark.parametrize(("stage", "killed"), [(2, 1), (3, 0)])
def test_a_machine_dies_and_both_go_on_with_the_unbroken_losses(nodes, tmp_path, stage, killed):
    write_config(tmp_path)
    run = tmp_path / "run"
    for node in nodes:
        node.start(tmp_path, *options(tmp_path, stage, 100000))
    wait_for(run / "metrics.jsonl", 2 * EVERY + 1, nodes)
    nodes[killed].kill()
    left = nodes[1 - killed]
    assert left.wait() == 1
    (line,) = [line for line in errors(left) if "is gone" in line]
    assert f"rank {killed} (" in line
    assert ADDRESSES[killed] in line
    assert "Traceback" not in left.text
    newest = max(int(path.name[5:]) for path in (run / "checkpoints").glob("step-*"))
    arguments = options(tmp_path, stage, newest + 4)
    for node in nodes:
        node.start(tmp_path, *arguments)
    for node in nodes:
        assert node.wait() == 0, node.text[-4000:]
    assert f"after step {newest}" in nodes[0].text
    assert losses(run) == unbroken(tmp_path, arguments)


def test_the_network_goes_and_both_end_in_time(nodes, tmp_path):
    """No process dies: only the collective's timeout tells."""
    write_config(tmp_path)
    for node in nodes:
        node.start(tmp_path, *options(tmp_path, 2, 100000, timeout=0.5))
    wait_for(tmp_path / "run" / "metrics.jsonl", 2, nodes)
    nodes[1].pull_cable()
    for number, node in enumerate(nodes):
        assert node.wait() == 1, node.text[-4000:]
        (line,) = [line for line in errors(node) if "is gone" in line]
        assert re.search(rf"rank {1 - number} \(.*{ADDRESSES[1 - number]}\)", line)
        assert "Timed out waiting 30000ms" in line


def test_deepspeeds_launcher_with_a_list_of_hosts(nodes, tmp_path):
    write_config(tmp_path)
    for node in nodes:
        node.start_by_deepspeed(tmp_path, *options(tmp_path, 1, 2))
    for node in nodes:
        assert node.wait() == 0, node.text[-4000:]
    assert [line[0] for line in losses(tmp_path / "run")] == [1, 2]
