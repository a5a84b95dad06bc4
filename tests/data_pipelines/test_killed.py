"""Two ranks of two workers each, killed by SIGKILL at random steps: nothing lost or repeated."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.data_pipelines.conftest import toy_shards
from tests.data_pipelines.delivering import PHASES, fingerprint, open_stream, run

pytestmark = pytest.mark.distributed

ROOT = Path(__file__).resolve().parents[2]
WORLD_SIZE = 2
MOST_STEPS = 5  # between two kills
HANGS = 1200  # seconds; only a hang takes so long


def run_ranks(settings: dict, folder: Path, *kills: tuple) -> list[int | None]:
    """Forks a process for each rank, and gives what they end with."""
    fork = multiprocessing.get_context("fork")
    processes = []
    for rank in range(WORLD_SIZE):
        arguments = (settings, folder / f"rank-{rank}.json", rank, *(kills[rank] if kills else ()))
        processes.append(fork.Process(target=run, args=arguments))
        processes[-1].start()
    for process in processes:
        process.join(HANGS)
    return [process.exitcode for process in processes]


def run_in_new_interpreters(settings: dict, folder: Path) -> list[int]:
    """As `run_ranks` without kills; nothing is inherited."""
    (folder / "settings.yaml").write_text(yaml.safe_dump(settings))
    command = [sys.executable, "-m", "tests.data_pipelines.delivering", folder / "settings.yaml"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return [
        subprocess.run(
            [*map(str, command), str(folder / f"rank-{rank}.json"), str(rank)],
            **{"cwd": ROOT, "env": environment, "timeout": HANGS},
        ).returncode
        for rank in range(WORLD_SIZE)
    ]


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_ranks_deliver_what_unbroken_ones_do(tmp_path, kills):
    shards = [toy_shards(tmp_path / name, [9, 4, 12]) for name in ("a", "b")]
    sources = [
        {"name": name, "shards": pattern, "weight": weight}
        for name, pattern, weight in zip("ab", shards, (1, {0: 2, 200: 0.5}), strict=True)
    ]
    data = {"sources": sources, "tokens_per_batch": 120, "num_workers": 2, "pack_lookahead": 5}
    data |= {"augment": "flip_shift", "held_out": 0.1}
    settings = {"data": data, "world_size": WORLD_SIZE, "batches": MOST_STEPS * kills + 20}
    drawn = random.Random(kills)
    phases = [drawn.choice(PHASES) for _ in range(WORLD_SIZE * kills - 1)] + ["any"]
    for _ in range(kills):
        steps = [drawn.randrange(MOST_STEPS) for _ in range(WORLD_SIZE)]
        ends = [(step, phases.pop(), drawn.random() / 50) for step in steps]
        assert run_ranks(settings, tmp_path, *ends) == [-signal.SIGKILL] * WORLD_SIZE
    finish = run_ranks if kills < 20 else run_in_new_interpreters
    assert finish(settings, tmp_path) == [0] * WORLD_SIZE
    for rank in range(WORLD_SIZE):
        stream = open_stream({**settings, "data": {**data, "num_workers": 0}}, rank)
        unbroken = [next(stream) for _ in range(settings["batches"])]
        found = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        assert found["delivered"] == [[batch.keys, fingerprint(batch)] for batch in unbroken]
        assert found["state"] == json.loads(json.dumps(stream.state_dict()))


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux ends them")
def test_workers_end_with_a_killed_process(tmp_path):
    """They hold more than the pipe to it takes, so they would wait to hand it over for ever."""
    data = {"shards": toy_shards(tmp_path / "a", [40]), "tokens_per_batch": 120, "num_workers": 2}
    settings = {"data": data, "world_size": 1, "batches": 99}
    receiver, sender = multiprocessing.Pipe(duplex=False)

    def one_batch():
        next(stream := open_stream(settings, 0))
        sender.send([child.pid for child in multiprocessing.active_children()])
        time.sleep(HANGS)
        stream.close()

    process = multiprocessing.get_context("fork").Process(target=one_batch)
    process.start()
    workers = receiver.recv()
    assert len(workers) == 2
    process.kill()
    process.join()
    end = time.monotonic() + 60  # they end at once; torch's own look at their parent is each 5 s
    while any(map(is_running, workers)) and time.monotonic() < end:
        time.sleep(0.01)
    assert not any(map(is_running, workers))


def is_running(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
