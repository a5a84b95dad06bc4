"""`--help` and a wrong call are answered before anything that takes seconds to import."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SLOW = ("torch", "torchvision", "transformers", "timm", "webdataset", "deepspeed", "matplotlib")
PROBE = f"""
import runpy, sys
_, kind, name, *words = sys.argv
sys.argv = [name, *words]
try:
    if kind == "function":
        module, _, function = name.partition(":")
        sys.exit(getattr(__import__(module), function)())
    getattr(runpy, kind)(name, run_name="__main__")
except SystemExit as ended:
    print(ended.code, *sorted(set({SLOW}) & set(sys.modules)), file=sys.stderr)
"""
COMMAND = ("function", "conceptmoe_vl_runtime:command_line")
PROGRAMS = [
    (*COMMAND, "--help"),
    *((*COMMAND, name, "--help") for name in ("ask", "chunks", "consolidate", "convert", "export")),
    *((*COMMAND, name, "--help") for name in ("flops", "losslessness", "plan", "calibrate")),
    ("run_path", "demo.py", "--help"),
    ("run_path", "train.py", "--help"),
    ("run_module", "eval", "--help"),
    *(("run_module", "eval", name, "--help") for name in ("chunks", "compare", "long")),
    ("run_module", "eval", "perplexity", "--help"),
    ("run_module", "eval.adaptors", "--help"),
    ("run_module", "data_pipelines", "--help"),
    *(("run_module", "data_pipelines", name, "--help") for name in ("validate", "show", "build")),
    ("run_module", "data_pipelines", "build", "easy_vqa", "--help"),
    ("run_module", "data_pipelines", "build", "llava", "--help"),
    ("run_module", "conceptmoe_vl.report", "--help"),
]


def probe(*words: str) -> tuple[str, str]:
    """What a program writes, and last on standard error its status with what it imported."""
    run = subprocess.run(
        [sys.executable, "-c", PROBE, *words], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    return run.stdout, run.stderr.splitlines()[-1]


@pytest.mark.parametrize("words", PROGRAMS, ids=" ".join)
def test_help_imports_nothing_slow(words):
    if "calibrate" in words and not entry_points(group="conceptmoe_vl.commands"):
        pytest.skip("the package is not installed: its entry points are not there")
    written, ended = probe(*words)
    assert written.startswith("usage: ")
    assert ended == "0"


def test_a_wrong_call_of_the_training_program_imports_nothing_slow():
    assert probe("run_path", "train.py", "run_dir=x")[1] == "2"


def test_the_probe_sees_what_is_imported(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import torch\nraise SystemExit(3)\n")
    assert probe("run_path", str(program)) == ("", "3 torch")
