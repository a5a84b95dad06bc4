"""The launcher: statuses of processes, signals, and a network that does not answer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.distributed

PROGRAM = """
import os, signal, sys, time
from pathlib import Path
what, folder = sys.argv[1], Path(sys.argv[2])
rank = int(os.environ["RANK"])
if what == "fails" and rank == 1:
    sys.exit(143)
if what == "killed" and rank == 0:
    os.kill(os.getpid(), signal.SIGKILL)
if what == "fine":
    sys.exit(0)
signal.signal(signal.SIGINT, lambda *_: ((folder / f"saved-{rank}").touch(), sys.exit(130)))
signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
(folder / f"ready-{rank}").touch()
time.sleep(300)
"""


def launch(*arguments: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "conceptmoe_vl_launch", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)


def start(folder: Path, what: str) -> subprocess.Popen:
    program = folder / "program.py"
    program.write_text(PROGRAM)
    return launch("--standalone", "--nproc_per_node", "2", str(program), what, str(folder))


@pytest.mark.parametrize(
    ("what", "status", "text"),
    [("fine", 0, ""), ("fails", 143, ""), ("killed", 137, "error: rank 0 was killed by SIGKILL\n")],
)
def test_it_ends_as_the_first_process_that_failed(tmp_path, what, status, text):
    launcher = start(tmp_path, what)
    _, found = launcher.communicate(timeout=300)
    assert (launcher.returncode, found) == (status, text)


def test_ctrl_c_reaches_the_processes_and_leaves_no_traceback(tmp_path):
    launcher = start(tmp_path, "waits")
    ready, saved = ([tmp_path / f"{name}-{rank}" for rank in (0, 1)] for name in ("ready", "saved"))
    deadline = time.monotonic() + 300
    while not all(path.exists() for path in ready) and time.monotonic() < deadline:
        time.sleep(0.1)
    launcher.send_signal(signal.SIGINT)
    _, text = launcher.communicate(timeout=300)
    assert launcher.returncode == 130
    assert all(path.exists() for path in saved)
    assert "Traceback" not in text


def test_an_address_that_does_not_answer_is_one_line():
    arguments = ["--nnodes", "2", "--rdzv_backend", "c10d", "--rdzv_endpoint", "127.0.0.1:1"]
    launcher = launch(*arguments, "--rdzv_conf", "is_host=0,read_timeout=1", "program.py")
    _, text = launcher.communicate(timeout=300)
    assert launcher.returncode == 1
    line = text.splitlines()[-1]
    assert line.startswith("error: no meeting with the other machines at 127.0.0.1:1: ")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_it_ends_when_its_processes_have_and_it_waits_for_another_machine():
    """As the launcher: a child that nobody waits for, while the main thread hangs."""
    code = (
        "import conceptmoe_vl_launch, subprocess, sys, threading, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import sys; sys.exit(143)'])\n"
        "threading.Thread(target=conceptmoe_vl_launch.end_when_stuck, args=[1.0]).start()\n"
        "time.sleep(300)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=280, check=False)
    assert done.returncode == 143
