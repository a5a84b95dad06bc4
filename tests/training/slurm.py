"""Stand-ins for SLURM's srun and scontrol, and a job's variables."""

from __future__ import annotations

import os
import sys
from pathlib import Path

# Starts the tasks of a step on this machine, hands SIGTERM on, ends with the highest status.
SRUN = """#!{python}
import os, signal, subprocess, sys
command = sys.argv[1:]
while command[0].startswith("-"):
    command.pop(0)
tasks = []
signal.signal(signal.SIGTERM, lambda *_: [task.terminate() for task in tasks])
number = int(os.environ["SLURM_NTASKS"])
for task in range(number):
    step = {{"SLURM_PROCID": str(task), "SLURM_LOCALID": str(task), "SLURM_STEP_ID": "0"}}
    step |= {{"SLURM_STEP_NUM_TASKS": str(number), "SLURM_STEP_NODELIST": "localhost"}}
    tasks.append(subprocess.Popen(command, env=os.environ | step))
sys.exit(max(task.wait() for task in tasks))
"""
SCONTROL = """#!/bin/sh
echo "$@" >> "$(dirname "$0")/scontrol.txt"
"""


def job(folder: Path, tasks: int) -> dict[str, str]:
    """The environment of a batch script; its commands are in `folder`."""
    for name, text in (("srun", SRUN.format(python=sys.executable)), ("scontrol", SCONTROL)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("SLURM_")},
        "PATH": f"{folder}:{os.environ['PATH']}",
        "PYTHON": sys.executable,
        "OMP_NUM_THREADS": "1",
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_NTASKS": str(tasks),
        # as in a batch script: its own place, which is no task's
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
    }


def requeued(folder: Path) -> list[str]:
    """What scontrol was asked for."""
    path = folder / "scontrol.txt"
    return path.read_text().splitlines() if path.exists() else []
