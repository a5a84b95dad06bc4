"""Prefill and decoding against a plain MoE of equal parameters and FLOPs: the paper's Figure 5.

    python -m bench.inference --out runs/inference [--lengths 1024 4096 ...] [--batch 1 16]
        [--what prefill decode profile] [--repeats 3] [--threads 2] [--device cpu]

Contestants: our plain MoE (router none), the paper's five matched configurations scaled down
(bench.inference_models), and transformers' Qwen3-MoE with the baseline's weights. Boundaries follow
a pattern of the exact ratio. Every time is taken in alternation with the baseline's. A cell shows
milliseconds (of a prefill, of a decoding step), the speed-up over the baseline, the speed-up that
FLOPs and bytes predict (bench.roofline), measured over predicted, and what the cache holds.

Before anything is timed, the invariants are checked on these very models; while one is red the
program stops with exit status 1. `results.json` is written after every cell, `figure5.png` at the
end.
"""

from __future__ import annotations

import conceptmoe_vl_runtime

conceptmoe_vl_runtime.setup()

# ruff: noqa: E402  (the lines above must run before torch is imported)
import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.inference_cells import Bench
from bench.inference_invariants import check_invariants
from bench.inference_models import BASELINE, PEER, SHAPES, VARIANTS, make_contestants, matching
from bench.inference_report import Report
from bench.inference_runs import to_device
from bench.timing import CLOCKS, Clock

LENGTHS = [1024, 2048, 4096, 8192, 16384, 32768, 65536]
WHAT = ("prefill", "decode", "profile")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--out", required=True, metavar="FOLDER", help="for results.json and figure5.png")
    add("--what", nargs="+", default=list(WHAT), choices=WHAT)
    add("--lengths", nargs="+", type=int, default=LENGTHS, help="tokens of prefill and context")
    add("--batch", nargs="+", type=int, help="rows in decoding (default: 1 and 16; CUDA: 1, 256)")
    add("--models", nargs="+", choices=[*VARIANTS, PEER], help="default: all")
    add("--repeats", type=int, default=3, help="rounds of runs (default: 3)")
    add("--cell-seconds", type=float, default=300, help="begin no further round after that many")
    add("--steps", type=int, default=12, help="decoding steps of one run; a multiple of 6")
    add("--threads", type=int, default=2)
    add("--clock", choices=sorted(CLOCKS), default="wall", help="cpu: time of the process")
    add("--shape", choices=sorted(SHAPES), default="small", help="tiny: to try the program")
    add("--device", default="cpu")
    add("--dtype", choices=["float32", "bfloat16"], help="default: float32; CUDA: bfloat16")
    add("--check-tokens", type=int, default=48, help="tokens of the invariants' check")
    options = parser.parse_args(argv)
    cuda = options.device.startswith("cuda")
    options.batch = options.batch or ([1, 256] if cuda else [1, 16])
    options.dtype = options.dtype or ("bfloat16" if cuda else "float32")
    options.lengths = sorted(set(options.lengths))
    # R = 2 and R = 1.5 have patterns of 2 and 3 steps: whole ones, so that a step's mean is exact.
    if options.steps < 6 or options.steps % 6:
        parser.error(f"--steps is {options.steps}; give a multiple of 6")
    if options.lengths[0] < 2 or min(*options.batch, options.repeats, options.threads) < 1:
        parser.error("--lengths must be 2 or more; --batch, --repeats and --threads 1 or more")
    if options.check_tokens < 8:
        parser.error(f"--check-tokens is {options.check_tokens}; give 8 or more")
    if cuda and not torch.cuda.is_available():
        parser.error(f"--device is {options.device}, but torch sees no CUDA device")
    if importlib.util.find_spec("matplotlib") is None:
        parser.error("the figure needs matplotlib; install the extra: pip install -e '.[bench]'")
    return options


def machine_of(options: argparse.Namespace) -> str:
    if options.device.startswith("cuda"):
        where = torch.cuda.get_device_name(options.device)
    else:
        where = f"CPU, {options.threads} threads"
    return f"{where}, {options.dtype}, torch {torch.__version__}"


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    report = Report(Path(options.out), machine_of(options), vars(options))
    contestants = make_contestants(SHAPES[options.shape], options.models)
    report.matching(matching(contestants))
    faults = check_invariants(contestants, options.check_tokens)
    report.results["invariants"] = faults or "green"
    if faults:
        for fault in faults:
            print(f"error: {fault}", file=sys.stderr)
        print("error: no timing means anything while these are red", file=sys.stderr)
        return 1
    to_device(contestants, options.device, getattr(torch, options.dtype))
    bench = Bench(contestants, options, Clock(options.device, options.clock), report)
    actions: dict[str, Any] = {
        "prefill": bench.prefills,
        "decode": bench.decodings,
        "profile": bench.profiles,
    }
    with report.progress(bench.count()):
        for what in options.what:
            actions[what]()
    report.finish([name for name in contestants if name not in (BASELINE, PEER)])
    return 0


if __name__ == "__main__":
    sys.exit(main())
