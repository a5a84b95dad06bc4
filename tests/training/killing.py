"""Kills processes at a chosen operation on files, in forks of one process that has imported all.

    python -m tests.training.killing PLAN.json OUT.json

Python says what it is about to do to a file (`sys.addaudithook`); what torch and safetensors write
themselves is counted before, and again when half of it is written. A process that is killed at
operation N has done N - 1 of them.

A plan: `program` (of `PROGRAMS`), `arguments`, `folder` (operations below it count), `start` (what
stands there before a try; none: nothing), `ranks`, `alone` (ranks whose neighbour was killed end by
themselves, not by a launcher), and `tries`. A try is a list of starts that are killed, as `[rank,
operation]` each, and a last start that is not; an operation is its number or its name. `every`, a
rank, first and step, adds tries with one kill at every so many operations of that rank.
"""

from __future__ import annotations

import conceptmoe_vl_runtime

conceptmoe_vl_runtime.setup(quiet=True)

# ruff: noqa: E402  (the lines above must run before torch is imported)
import functools
import json
import os
import re
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

import train
from conceptmoe_vl import cli
from conceptmoe_vl.files import sha256_of
from conceptmoe_vl.training import World
from conceptmoe_vl.training.distributed import require_deepspeed
from conceptmoe_vl.training.run_files import LINES, checkpoints_in, recover_folders
from conceptmoe_vl.training.verification import damage_of
from tests.training.test_spikes import make


def spiking(arguments: list[str]) -> int:
    """A run that goes back from a spike of the loss, as `train.py` starts and resumes it."""
    run_dir = Path(arguments[0])
    recover_folders(run_dir)
    if not checkpoints_in(run_dir / "checkpoints"):
        for name in LINES:
            (run_dir / name).unlink(missing_ok=True)
    run = make(run_dir, bad_data=[7, 8], checkpoint_every=2, keep_checkpoints=3)
    run.resume()
    run.train()
    return 0


PROGRAMS: dict[str, Callable[[list[str]], int]] = {
    "train": train.main,
    "conceptmoe-vl": cli.main,
    "spiking": spiking,
}
_LIMIT = 300  # seconds: only a hang takes so long
_LAUNCHER = 1.0  # seconds after which a launcher ends the others, when one was killed
_METRICS = ("step", "loss", "lm_loss", "grad_norm", "lr", "samples", "tokens")


class Operations:
    """Counts this process's operations on files below a folder, and kills it at one of them.

    Args:
        last: the operation before which the process ends: its number from 1 on, or its name.
    """

    def __init__(self, folder: str, last: int | str) -> None:
        self._folder, self._last, self.names = folder, last, list[str]()

    def watch(self) -> None:
        """From now on, and for good: an audit hook cannot be taken off."""
        sys.addaudithook(self._look)
        torch.save = functools.partial(self._halved, torch.save)
        write = safetensors.torch.serialize_file
        safetensors.torch.serialize_file = functools.partial(self._halved, write)

    def _halved(self, write: Callable, values: Any, path: Any, *rest: Any, **named: Any) -> None:
        self._count("write", path)
        write(values, path, *rest, **named)
        whole = Path(path).read_bytes()
        Path(path).write_bytes(whole[: len(whole) // 2])
        self._count("half of", path)
        Path(path).write_bytes(whole)

    def _look(self, event: str, arguments: tuple) -> None:
        if event == "open":
            if isinstance(arguments[0], (str, Path)) and arguments[2] & (os.O_WRONLY | os.O_RDWR):
                self._count(event, arguments[0])
        elif event in ("os.remove", "os.rmdir") and arguments[1] >= 0:
            # `shutil.rmtree` names what it removes from the folder around it
            self._count(event, os.readlink(f"/proc/self/fd/{arguments[1]}"), arguments[0])
        elif event in ("os.rename", "os.remove", "os.rmdir", "os.mkdir"):
            self._count(event, arguments[0])

    def _count(self, what: str, path: Any, below: str = "") -> None:
        path = os.path.join(os.path.abspath(path), below)
        if not path.startswith(self._folder):
            return
        name = f"{what} {path.removeprefix(self._folder)}".rstrip("/")
        self.names.append(re.sub(r"\.[0-9a-f]{8}\.tmp", ".tmp", name))
        if self._last in (len(self.names), self.names[-1]):
            os.kill(os.getpid(), signal.SIGKILL)


class Killer:
    """Starts the program of a plan, as often as it is told to."""

    def __init__(self, plan: dict[str, Any], out: Path) -> None:
        self._plan, self._out, self._ranks = plan, out, plan.get("ranks", 1)
        self._folder = Path(plan["folder"])

    def try_out(self, kills: list[list]) -> dict[str, Any]:
        """Kills one start after the other, and lets the last one end.

        Returns:
            killed (the statuses of all ranks in each of these starts), latest (what is wrong with
            it after each), statuses of the last start, operations in it by rank, and what is left.
        """
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._plan.get("start"):
            shutil.copytree(self._plan["start"], self._folder)
        killed, latest = [], []
        for rank, operation in kills:
            killed.append(self._start(rank, operation))
            latest.append(self._latest())
        statuses = self._start(0, 0)
        files = (self._out / f"operations-{rank}.json" for rank in range(self._ranks))
        names = [json.loads(file.read_text()) for file in files]
        found = {"kills": kills, "killed": killed, "latest": latest, "statuses": statuses}
        return {**found, "operations": names, **self._left()}

    def _start(self, rank: int, operation: int | str) -> list[int]:
        """Statuses of all ranks, of which one is to be killed."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        children = {}
        for each in range(self._ranks):
            child = os.fork()
            if not child:
                self._run(each, port, operation if each == rank else 0)
            children[child] = each
        statuses = [0] * self._ranks
        deadline = time.monotonic() + _LIMIT
        while children:
            child, status = os.waitpid(-1, os.WNOHANG)
            if child:
                statuses[children.pop(child)] = os.waitstatus_to_exitcode(status)
                if os.WIFSIGNALED(status) and not self._plan.get("alone"):
                    deadline = time.monotonic() + _LAUNCHER
            elif time.monotonic() > deadline:
                for left in children:
                    os.kill(left, signal.SIGKILL)
            time.sleep(0.01)
        return statuses

    def _run(self, rank: int, port: int, operation: int | str) -> None:
        """In a fork: the program, from whose end there is no way back."""
        log = os.open(self._out / f"rank-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank)}
        os.environ |= {"WORLD_SIZE": str(self._ranks), "LOCAL_RANK": str(rank)}
        operations = Operations(str(self._folder), operation)
        operations.watch()
        status = 99
        try:
            status = PROGRAMS[self._plan["program"]](self._plan["arguments"])
        except BaseException:
            traceback.print_exc()
        finally:
            (self._out / f"operations-{rank}.json").write_text(json.dumps(operations.names))
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def _latest(self) -> str | None:
        """What is wrong with the checkpoint that `latest` names."""
        path = self._folder / "checkpoints" / "latest"
        if not path.exists():
            return None
        named = path.with_name(path.read_text().strip())
        if not named.exists():  # between two renames; the next start puts it back
            named = named.with_name(f".{named.name}.old")
        return damage_of(named, World(0, 1, 0, torch.device("cpu")))

    def _left(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name in ("metrics", "evaluation", "rollbacks"):
            path = self._folder / f"{name}.jsonl"
            if path.exists():
                lines = [json.loads(line) for line in path.read_text().splitlines()]
                chosen = _METRICS if name == "metrics" else lines[0]
                found[name] = [{key: line[key] for key in chosen} for line in lines]
        files = sorted(path for path in self._folder.rglob("*") if path.is_file())
        found["files"] = [str(path.relative_to(self._folder)) for path in files]
        found["weights"] = [sha256_of(path) for path in files if path.suffix == ".safetensors"]
        return found


def main() -> None:
    torch.set_num_threads(1)
    plan, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    if plan.get("ranks", 1) > 1:
        require_deepspeed(torch.device("cpu"))
    killer = Killer(plan, out.parent)
    found, tries = [killer.try_out([])], list(plan.get("tries", ()))
    for rank, first, step in plan.get("every", ()):
        tries += [[[rank, n]] for n in range(first, len(found[0]["operations"][rank]) + 1, step)]
    out.write_text(json.dumps(found))
    for kills in tries:
        found.append(killer.try_out(kills))
        out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
