"""Training steps: against transformers' Qwen3-MoE, chunked against plain, packed against padded.

    python -m bench.training [--what throughput length packing memory overhead] [--threads N]

Everything runs in one process, in alternation, in bfloat16 autocast with AdamW, with the same
allocator and thread settings for all; ratios are medians of pairs. `memory` starts a process for
each of its rows, because a peak cannot be taken back.
"""

from __future__ import annotations

import conceptmoe_vl_runtime

conceptmoe_vl_runtime.setup()

# ruff: noqa: E402  (the lines above must run before torch is imported)
import argparse
import copy
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.inference_models import BASELINE, SHAPES, VARIANTS, Shape, make_contestants, matching
from bench.plain_moe import SHAPE, check_equal, make_pair, training_step
from bench.timing import Clock, alternate
from bench.training_overhead import overhead

# `batched_mm` copies the experts of every token: 15 GB for a step of 4 x 1,024.
EXPERT_KERNELS = ("grouped_mm", "eager")
# Chunked against plain: the shape of bench.inference with a third of its concept layers, so that a
# row of 16,384 tokens trains in 8 GB.
LENGTH_SHAPE = Shape(SHAPES["small"].fields, encoder=1, concept=4, decoder=1)
# A packed row, and slots of a padded micro-batch, whose full logits must fit the memory.
PACKING_ROW, PADDED_SLOTS = 16384, 8192


def throughput(clock: Clock, repeats: int, rows: int = 4, length: int = 1024) -> dict[str, float]:
    """Speed-up over the peer with each of its expert kernels; the least one is the figure."""
    ours, peer = make_pair()
    check_equal(ours, peer)
    ids = torch.randint(0, SHAPE["vocab_size"], (rows, length))
    batch = {"input_ids": ids, "labels": ids}
    steps = {}
    for kernel in EXPERT_KERNELS:
        twin = copy.deepcopy(peer)
        twin.config._experts_implementation = kernel
        steps[kernel] = training_step(twin, batch)
    mine = training_step(ours, batch)
    for step in (mine, *steps.values()):
        step()
    found, _ = alternate(clock, mine, steps, repeats)
    return {kernel: 1 / pairs.speedup for kernel, pairs in found.items()}


def by_length(
    clock: Clock, repeats: int, lengths: list[int], shape: Shape, variants: Sequence[str] = ()
) -> dict[str, Any]:
    """Speed-up of matched configurations (none named: all) over the plain MoE, one document."""
    contestants = make_contestants(shape, [*(variants or VARIANTS)])
    results: dict[str, Any] = {"matching": matching(contestants)}
    for length in lengths:
        ids = torch.randint(0, shape.fields["vocab_size"], (1, length))
        steps = {
            name: training_step(contestant.model, {"input_ids": ids, "labels": ids})
            for name, contestant in contestants.items()
        }
        baseline = steps.pop(BASELINE)
        for step in (baseline, *steps.values()):
            step()
        found, _ = alternate(clock, baseline, steps, repeats)
        results[str(length)] = {name: pairs.speedup for name, pairs in found.items()}
    return results


def conversation_lengths(tokens: int, seed: int = 0) -> list[int]:
    """Lengths of samples, log-normal about 400 and at most 4,096, that fill a row of `tokens`."""
    generator = torch.Generator().manual_seed(seed)
    lengths: list[int] = []
    while True:
        drawn = float(torch.randn((), generator=generator).mul(0.9).exp() * 400)
        length = min(max(int(drawn), 32), 4096)
        if sum(lengths) + length > tokens:
            return [*lengths, tokens - sum(lengths)] if tokens - sum(lengths) > 1 else lengths
        lengths.append(length)


def padded(
    lengths: list[int], vocabulary: int, answer_share: float = 0.4
) -> tuple[dict[str, Tensor], int]:
    """Samples as one right-padded batch, whose last `answer_share` of each is supervised."""
    longest = max(lengths)
    ids = torch.randint(0, vocabulary, (len(lengths), longest))
    mask = torch.zeros_like(ids)
    labels = torch.full_like(ids, -100)
    for row, length in enumerate(lengths):
        mask[row, :length] = 1
        start = length - max(int(length * answer_share), 1)
        labels[row, start:length] = ids[row, start:length]
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    return batch, int((labels[:, 1:] != -100).sum())


def packing(
    clock: Clock, repeats: int, tokens: int = PACKING_ROW, slots: int = PADDED_SLOTS
) -> dict[str, float]:
    """One packed row of ours against the same samples in padded micro-batches of the peer.

    The peer takes them in their order, and once sorted by length, which no shuffled training does.
    """
    ours, peer = make_pair()
    lengths = conversation_lengths(tokens)
    whole, supervised = padded(lengths, SHAPE["vocab_size"])
    # `(B, N)` with a mask is packed on entry: this is the packed row.
    mine = training_step(ours, whole)
    steps, share = {}, {}
    for name, order in {"in order": lengths, "sorted by length": sorted(lengths)}.items():
        batches = [padded(part, SHAPE["vocab_size"])[0] for part in batches_of(order, slots)]
        share[name] = sum(batch["input_ids"].numel() for batch in batches) / sum(lengths)
        steps[name] = training_step(copy.deepcopy(peer), *batches)
    for step in (mine, *steps.values()):
        step()
    found, _ = alternate(clock, mine, steps, repeats)
    results = {f"speed-up, {name}": 1 / pairs.speedup for name, pairs in found.items()}
    results |= {f"slots per token, {name}": value for name, value in share.items()}
    seconds = next(iter(found.values())).baseline
    return results | {"samples": len(lengths), "supervised per second": supervised / seconds}


def batches_of(lengths: list[int], slots: int) -> list[list[int]]:
    """Consecutive samples whose count times the longest is at most `slots`."""
    batches: list[list[int]] = []
    for length in lengths:
        if batches and (len(batches[-1]) + 1) * max([*batches[-1], length]) <= slots:
            batches[-1].append(length)
        else:
            batches.append([length])
    return batches


def memory(length: int) -> dict[str, dict[str, Any]]:
    """Peak memory of a training step of one row, each in a process of its own."""
    results = {}
    for who in ("ours", "Qwen3-MoE"):
        for checkpointing in (False, True):
            command = [sys.executable, "-m", "bench.training_memory", who, str(length)]
            command += ["--checkpointing"] if checkpointing else []
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            key = f"{who}{', layers recomputed' if checkpointing else ''}"
            results[key] = json.loads(done.stdout.splitlines()[-1])
            print(key, json.dumps(results[key]), flush=True)
    return results


def trainer_overhead(clock: Clock, repeats: int) -> dict[str, float]:
    """See `bench.training_overhead`; the run's files go where they are not kept."""
    with tempfile.TemporaryDirectory() as folder:
        return overhead(clock, repeats, Path(folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    kinds = ["throughput", "length", "packing", "memory", "overhead"]
    parser.add_argument("--what", nargs="+", default=kinds[:3], choices=kinds)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--lengths", nargs="+", type=int, default=[4096, 16384])
    parser.add_argument("--variants", nargs="+", default=[], choices=[*VARIANTS])
    parser.add_argument("--memory-length", type=int, default=32768)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    clock = Clock("cpu", options.clock)
    runs: dict[str, Callable[[], Any]] = {
        "throughput": lambda: throughput(clock, options.repeats),
        "length": lambda: by_length(
            clock, options.repeats, options.lengths, LENGTH_SHAPE, options.variants
        ),
        "packing": lambda: packing(clock, options.repeats),
        "memory": lambda: memory(options.memory_length),
        "overhead": lambda: trainer_overhead(clock, options.repeats),
    }
    print(f"torch {torch.__version__}, {options.threads} threads, {options.clock} time")
    out = sys.stdout  # the trainer's live view takes its place
    for what in options.what:
        print(what, json.dumps(runs[what](), indent=2), file=out, flush=True)


if __name__ == "__main__":
    main()
