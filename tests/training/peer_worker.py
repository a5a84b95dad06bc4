"""Three ranks for each of several failures, forked from one process that has imported torch.

    python -m tests.training.peer_worker OUT CASE...

Every rank's output goes to OUT/CASE-RANK.txt; one line per case and rank on stdout has its status.
"""

from __future__ import annotations

import datetime
import os
import signal
import sys
import time
from pathlib import Path

import torch

from conceptmoe_vl.errors import UserError
from conceptmoe_vl.training import World, distributed, peers

RANKS = 3
FIRST_PORT = 23511
TIMEOUT = 5.0  # seconds of collectives
LATE = 60.0  # seconds that a stuck rank stays away


def fail(case: str, rank: int) -> None:
    """What goes wrong, on ranks that it goes wrong on."""
    if case == "killed" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if case == "host_killed" and rank == 0:
        time.sleep(1)  # the others wait by now
        os.kill(os.getpid(), signal.SIGKILL)
    if case == "mistake" and rank == 1:
        raise UserError("shard-7.tar is truncated; build it again")
    if case == "defect" and rank == 2:
        raise KeyError("no such name")
    if case == "together":
        raise UserError("the same on every rank")
    if case == "stuck" and rank == 2:
        time.sleep(LATE)


def run(case: str, rank: int, port: int) -> int:
    """As train.main does."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    world = World(rank, RANKS, rank, torch.device("cpu"))
    try:
        distributed._join(world, datetime.timedelta(seconds=TIMEOUT))
        distributed.wait_for_all()
        fail(case, rank)
        distributed.sum_over_ranks([1.0], world.device)
    except Exception as error:
        if not distributed.report_failure(error):
            raise
        return 2 if isinstance(error, UserError) else peers.LOST_STATUS
    finally:
        distributed.stop()
    return 0


def start(case: str, rank: int, port: int, out: Path) -> int:
    process = os.fork()
    if process:
        return process
    file = os.open(out / f"{case}-{rank}.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 2)
    status = 1
    try:
        status = run(case, rank, port)
    except Exception as error:
        print(f"traceback of {type(error).__name__}", file=sys.stderr, flush=True)
    finally:
        os._exit(status)


def main() -> None:
    peers.INTERVAL, peers._ENDING = 0.5, 5.0
    out, cases = Path(sys.argv[1]), sys.argv[2:]
    started = {
        start(case, rank, FIRST_PORT + number, out): (case, rank)
        for number, case in enumerate(cases)
        for rank in range(RANKS)
    }
    while started:
        process, status = os.wait()
        case, rank = started.pop(process)
        print(case, rank, os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
