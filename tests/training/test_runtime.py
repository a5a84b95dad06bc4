"""The process settings that are made before torch is imported."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ON_LINUX_CPU = sys.platform.startswith("linux") and not os.path.exists(
    "/proc/driver/nvidia/version"
)
pytestmark = pytest.mark.skipif(not ON_LINUX_CPU, reason="the settings are for Linux CPUs")

# Page faults of ten products of 16 MiB, after the heap has found its size.
_COUNT_FAULTS = """
import resource, torch
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
a = torch.ones(2**22)
for _ in range(40):
    b = a * 2
before = faults()
for _ in range(10):
    b = a * 2
print(faults() - before)
"""


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess:
    unset = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "CONCEPTMOE_VL_RUNTIME", "RANK")
    clean = {name: value for name, value in os.environ.items() if name not in unset}
    clean |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=clean, capture_output=True, text=True, check=True)


def test_imports_no_torch():
    code = "import sys, conceptmoe_vl_runtime as r; r.setup(); print('torch' in sys.modules)"
    assert run_python(code).stdout == "False\n"


def test_says_so_in_one_line_once_and_sets_threads_to_sleep():
    code = (
        "import os, conceptmoe_vl_runtime as r; r.setup(); r.setup();"
        "print(os.environ['OMP_WAIT_POLICY'], os.environ['GOMP_SPINCOUNT'])"
    )
    done = run_python(code)
    assert done.stdout == "PASSIVE 20000\n"
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("runtime: ")


def test_keeps_the_users_settings_and_is_silent_on_other_ranks():
    code = "import os, conceptmoe_vl_runtime as r; r.setup(); print(os.environ['OMP_WAIT_POLICY'])"
    assert run_python(code, OMP_WAIT_POLICY="ACTIVE").stdout == "ACTIVE\n"
    assert run_python(code, RANK="1").stderr == ""


def test_can_be_switched_off():
    code = "import conceptmoe_vl_runtime as r; print(r.setup())"
    done = run_python(code, CONCEPTMOE_VL_RUNTIME="off")
    assert (done.stdout, done.stderr) == ("None\n", "")


def test_freed_memory_is_not_faulted_in_again():
    setup = "import conceptmoe_vl_runtime as r; r.setup()\n"
    with_it = int(run_python(setup + _COUNT_FAULTS).stdout)
    without = int(run_python(_COUNT_FAULTS).stdout)
    # Where memory is short the kernel takes some pages back meanwhile.
    assert with_it < max(without // 3, 200)


def test_the_console_script_sets_up_before_torch_is_imported():
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="conceptmoe-vl")
    code = (
        f"import sys, {script.module} as module\n"
        "module.setup = lambda quiet: print('torch' in sys.modules)\n"
        f"sys.argv = ['conceptmoe-vl', '--help']\nmodule.{script.attr}()"
    )
    out = run_python(code).stdout
    assert out.startswith("False\n")
    assert "usage: conceptmoe-vl" in out
