"""Several processes: the same figures, and no process that outlives the others."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from eval.__main__ import main
from eval.processes import World
from tests.eval.shards import describe_tasks
from tests.model_folder import save_model_folder

ROOT = Path(__file__).parents[2]
WAIT = 280  # seconds; for machines with much else to do

# Rank 1 fails in the manner of the first argument while rank 0 is at work.
SCRIPT = """
import os, signal, sys, time
from conceptmoe_vl.cli import run_program
from conceptmoe_vl.errors import UserError
from eval.processes import joined

def program():
    with joined(silence=5) as world:
        assert world.gather(world.rank) == ([0, 1] if world.is_main else [])
        if sys.argv[1] == "all":
            raise UserError("the same everywhere")
        if world.rank == 1 and sys.argv[1] == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if world.rank == 1:
            raise UserError("picture 7 is broken")
        while True:
            time.sleep(1)

sys.exit(run_program(program))
"""


def environment(**names) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **names}


def start_ranks(manner: str) -> list[subprocess.Popen]:
    """Two processes without a launcher that would end the one for the other."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    names = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, manner],
            env=environment(RANK=str(rank), LOCAL_RANK=str(rank), **names),
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]


def ends(manner: str) -> tuple[list[int], list[str]]:
    """Exit status and standard error of each rank; none is left running."""
    ranks = start_ranks(manner)
    try:
        errors = [rank.communicate(timeout=WAIT)[1] for rank in ranks]
        return [rank.returncode for rank in ranks], errors
    finally:
        for rank in ranks:
            rank.kill()


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("manner", "status", "messages"),
    [
        ("killed", [1, -signal.SIGKILL], ["rank 1 has been silent", ""]),
        ("refuses", [1, 2], ["rank 1 has failed: picture 7 is broken", "error: picture 7"]),
    ],
)
def test_a_rank_that_ends_ends_all(manner, status, messages):
    statuses, errors = ends(manner)
    assert statuses == status
    for message, error in zip(messages, errors, strict=True):
        assert message in error


@pytest.mark.distributed
def test_a_fault_that_all_find_is_told_once():
    statuses, errors = ends("all")
    assert all(status in (1, 2) for status in statuses)
    assert "".join(errors).count("error: the same everywhere") == 1


@pytest.mark.distributed
def test_two_processes_find_what_one_finds(tmp_path):
    model = save_model_folder(tmp_path / "model")
    tasks = describe_tasks(tmp_path / "data")
    words = ["--model", str(model), "--tasks", tasks, "--device", "cpu"]
    assert main([*words, "--output", str(tmp_path / "one"), "--batch-size", "4"]) == 0
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    ended = subprocess.run(
        [*launcher, "--nproc_per_node", "2", "-m", "eval", *words, "--output", tmp_path / "two"],
        env=environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=WAIT,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("results:") == 2
    for task in ("generate", "choose"):
        one, two = (tmp_path / name / task for name in ("one", "two"))
        assert (one / "samples.jsonl").read_text() == (two / "samples.jsonl").read_text()
        results = [json.loads((folder / "results.json").read_text()) for folder in (one, two)]
        assert [part.pop("run")["processes"] for part in results] == [1, 2]
        assert [part.pop("speed")["asked"] for part in results] == [9, 9]
        assert results[0] == results[1]
    assert len(list((tmp_path / "two").rglob("replies/*/*.jsonl"))) == 2


def test_each_process_has_the_device_of_its_local_rank():
    world = World(rank=5, size=8, local_rank=1)
    assert (world.device("cuda"), world.device("cpu"), world.device(None)) == (
        "cuda:1",
        "cpu",
        None,
    )
    assert World().device("cuda") == "cuda"
