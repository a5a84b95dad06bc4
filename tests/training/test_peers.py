"""What each rank says and ends with when one of three fails, and how launchers are understood."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from conceptmoe_vl.training.launch_environment import (
    complete_environment,
    first_host,
    interface_of,
    own_address,
)
from conceptmoe_vl.training.peers import Answer, name_ranks, verdict

ROOT = Path(__file__).resolve().parents[2]
CASES = ("killed", "host_killed", "mistake", "defect", "together", "stuck")


@pytest.fixture(scope="module")
def failures(tmp_path_factory) -> dict[str, list[tuple[int, list[str]]]]:
    """By case: exit status and error lines of each rank."""
    out = tmp_path_factory.mktemp("peers")
    command = [sys.executable, "-m", "tests.training.peer_worker", str(out), *CASES]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, timeout=400, capture_output=True, text=True, check=True
    )
    found: dict[str, list] = {case: [None] * 3 for case in CASES}
    for line in done.stdout.splitlines():
        case, rank, status = line.split()
        text = (out / f"{case}-{rank}.txt").read_text()
        found[case][int(rank)] = (int(status), text.splitlines())
    return found


@pytest.mark.distributed
def test_a_killed_rank_is_named(failures):
    (first, lines), (killed, _), (last, others) = failures["killed"]
    assert (first, killed, last) == (1, -9, 1)
    (line,) = lines
    assert line.startswith("error: rank 1 (")
    assert "is gone: killed, or its machine" in line
    assert others == []  # one line a machine


@pytest.mark.distributed
def test_the_rank_that_keeps_the_store_is_named_too(failures):
    _, (status, lines), _ = failures["host_killed"]
    assert status == 1
    assert any(line.startswith("error: rank 0 (") and "is gone" in line for line in lines)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("case", "failing", "expected"),
    [
        ("mistake", 1, "failed: shard-7.tar is truncated; build it again"),
        ("defect", 2, "failed: KeyError: 'no such name'"),
    ],
)
def test_the_error_of_a_rank_is_told_by_another(failures, case, failing, expected):
    status, lines = failures[case][0]
    assert status == 1
    (line,) = lines
    assert line.startswith(f"error: rank {failing} (")
    assert line.endswith(expected)


@pytest.mark.distributed
def test_a_rank_says_its_own_error(failures):
    assert failures["mistake"][1] == (2, ["error: shard-7.tar is truncated; build it again"])
    assert failures["defect"][2] == (1, ["traceback of KeyError"])


@pytest.mark.distributed
def test_one_error_of_all_ranks_is_said_once(failures):
    assert [status for status, _ in failures["together"]] == [2, 2, 2]
    said = [line for _, lines in failures["together"] for line in lines]
    assert said == ["error: the same on every rank"]


@pytest.mark.distributed
def test_a_rank_that_does_not_come_is_a_timeout_and_ended_as_well(failures):
    assert [status for status, _ in failures["stuck"]] == [1, 1, 1]
    (line,) = failures["stuck"][0][1]
    assert "did not end within 5 s (training.timeout_minutes), although every rank answers" in line


def test_an_own_error_explains_more_than_a_rank_that_is_gone():
    places = ["a", "b", "b", "c"]
    answers = [Answer(0), Answer(2, "UserError"), Answer(3)]
    assert verdict(0, places, answers, "", 5.0) == "rank 2 (b) failed: UserError"
    assert verdict(0, places, [Answer(0), Answer(3)], "", 5.0).startswith("ranks 1, 2 (b) are gone")
    assert name_ranks([0, 1, 2], places) == "ranks 0 (a) and 1, 2 (b)"


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("gpu[007-010,12],cpu1", "gpu007"),
        ("rack[2,4]-n[01-02]", "rack2-n01"),
        ("a-b.example.org", "a-b.example.org"),
    ],
)
def test_first_host_of_a_slurm_list(nodes, first):
    assert first_host(nodes) == first


STEP = {
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
    "SLURM_JOB_ID": "4711",
}


def test_a_task_of_a_slurm_step_finds_its_place():
    environment = dict(STEP)
    complete_environment(environment)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    assert [environment[name] for name in names] == ["5", "8", "1", "gpu03", "19711"]


def test_what_a_launcher_or_a_user_set_stays():
    environment = {**STEP, "RANK": "0"}
    complete_environment(environment)
    assert environment == {**STEP, "RANK": "0"}
    environment = {**STEP, "MASTER_PORT": "999"}
    complete_environment(environment)
    assert environment["MASTER_PORT"] == "999"


def test_a_batch_script_itself_is_no_task():
    environment = {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"}
    complete_environment(environment)
    assert "RANK" not in environment


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="interfaces are found on Linux")
def test_the_interface_on_the_way_to_rank_0(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert own_address() == "127.0.0.1"
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.7") is None
