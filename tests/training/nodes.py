"""Two machines on one: network namespaces with their own addresses, joined by a cable."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ADDRESSES = ("10.77.0.1", "10.77.0.2")
PORT = 29511
LIMIT = 400  # seconds: only a hang takes so long


def _ip(*arguments: str, check: bool = True) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=check)
    return done.stdout


def why_no_namespaces() -> str:
    """Why this machine cannot have network namespaces; empty where it can."""
    if shutil.which("ip") is None:
        return "the program ip (iproute2) is not installed"
    name = f"probe-{os.getpid()}"
    done = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if done.returncode:
        return f"ip netns add is refused (root is needed): {done.stderr.strip()}"
    _ip("netns", "delete", name)
    return ""


class Node:
    """One of the two machines.

    Args:
        number: 0 or 1. name: of its namespace.
    """

    def __init__(self, number: int, name: str) -> None:
        self.number, self.address = number, ADDRESSES[number]
        self._name, self._cable = name, f"cable{number}"
        self._process: subprocess.Popen | None = None
        self._written: Path | None = None

    def start(self, out: Path, *arguments: str) -> None:
        """Starts one process of train.py by torchrun, which meets the other node's at node 0."""
        launcher = [sys.executable, "-m", "conceptmoe_vl_launch", "--nnodes", "2"]
        launcher += ["--nproc_per_node", "1", "--rdzv_backend", "c10d", "--rdzv_id", out.name]
        launcher += ["--rdzv_endpoint", f"{ADDRESSES[0]}:{PORT}", "--local_addr", self.address]
        # both machines have the same name, so torchrun cannot tell which of them is node 0
        launcher += ["--rdzv_conf", f"is_host={int(self.number == 0)}"]
        self._run(out, [*launcher, "train.py", *arguments])

    def start_by_deepspeed(self, out: Path, *arguments: str) -> None:
        """The same by DeepSpeed's launcher and its list of hosts, started on each of them."""
        hosts = out / "hostfile"
        hosts.write_text("".join(f"{address} slots=1\n" for address in ADDRESSES))
        launcher = [str(Path(sys.executable).with_name("deepspeed")), "--hostfile", str(hosts)]
        launcher += ["--no_ssh", "--node_rank", str(self.number), "--master_addr", ADDRESSES[0]]
        self._run(out, [*launcher, "train.py", *arguments])

    def _run(self, out: Path, command: list[str]) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        self._written = out / f"{self._name}.txt"
        with self._written.open("w") as file:
            self._process = subprocess.Popen(
                ["ip", "netns", "exec", self._name, *command],
                **{"cwd": ROOT, "env": environment, "stdout": file, "stderr": file, "text": True},
            )

    @property
    def text(self) -> str:
        assert self._written is not None
        return self._written.read_text()

    def wait(self) -> int:
        """The launcher's exit status, when it has ended by itself."""
        assert self._process is not None
        return self._process.wait(LIMIT)

    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        """Ends every process of this machine at once, as a power failure does."""
        for process in _ip("netns", "pids", self._name).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)
        if self._process is not None:
            self._process.wait(LIMIT)

    def pull_cable(self) -> None:
        """Takes the network away; no process notices but by waiting."""
        _ip("-n", self._name, "link", "set", self._cable, "down")


@contextlib.contextmanager
def two_nodes() -> Iterator[tuple[Node, Node]]:
    """Two machines with a cable between them; what runs there is killed at the end."""
    names = [f"node{number}-{os.getpid()}" for number in range(2)]
    nodes = (Node(0, names[0]), Node(1, names[1]))
    try:
        for name in names:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip(
            *("-n", names[0], "link", "add", "cable0", "type", "veth"),
            *("peer", "name", "cable1", "netns", names[1]),
        )
        for number, (name, address) in enumerate(zip(names, ADDRESSES, strict=True)):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", f"cable{number}")
            _ip("-n", name, "link", "set", f"cable{number}", "up")
        yield nodes
    finally:
        for node, name in zip(nodes, names, strict=True):
            node.kill()
            _ip("netns", "delete", name, check=False)


def wait_for(path: Path, lines: int, nodes: tuple[Node, ...]) -> None:
    """Returns when a file has so many lines; fails when a node ends before."""
    deadline = time.monotonic() + LIMIT
    while not path.exists() or len(path.read_text().splitlines()) < lines:
        assert time.monotonic() < deadline, f"{path} has not {lines} lines"
        for node in nodes:
            assert node.is_running(), node.text[-4000:]
        time.sleep(0.1)
