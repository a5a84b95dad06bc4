"""What reading costs: samples a second against Pillow alone, and how long a step waits for data.

    python -m bench.data [--what reading waiting] [--json FILE]
    python -m bench.data --what waiting --shards data/easy_vqa/train-*.tar

`reading` writes shards of 256 x 256 JPEGs with short conversations from a seed and measures, in
alternation, in one thread and in CPU seconds, what a sample costs until its pixels are there: with
this project's reader and decoder (in shuffled order, record and labels' fields checked, without
tokenising and resizing), with webdataset's own pipeline (in the shards' order), and with Pillow
alone, which decodes the same bytes from memory. `waiting` trains the quickstart's model with one
data worker and reads the share of its steps spent waiting for data from the run's metrics; it needs
a free core for the worker.
"""

from __future__ import annotations

import conceptmoe_vl_runtime

conceptmoe_vl_runtime.setup()

# ruff: noqa: E402  (the lines above must run before torch is imported)
import argparse
import io
import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import webdataset
from PIL import Image, ImageDraw
from rich.console import Console
from rich.table import Table

from bench.timing import Clock, alternate
from conceptmoe_vl.errors import UserError
from conceptmoe_vl.images import WHITE
from conceptmoe_vl.processing import IGNORED, EncodedSample
from conceptmoe_vl.prompts import Picture
from data_pipelines.config import DataConfig
from data_pipelines.encoding import SampleEncoder, Skipped
from data_pipelines.sampling import Place
from data_pipelines.shards import index_shards
from data_pipelines.writing import write_shards

SIDE = 256
GOALS = {"ours": 0.9, "waiting": 0.02}
SHARD_SIZE = 250
CALL = 16  # samples between two readings of the clock: a message of data workers
_TRAIN = Path(__file__).parent.parent / "train.py"


def picture(rng: np.random.Generator) -> bytes:
    """A JPEG of quality 90 with a photograph's mix: smooth ground, edges, a little noise."""
    ground = Image.fromarray(rng.integers(0, 256, (5, 5, 3), dtype=np.uint8))
    image = ground.resize((SIDE, SIDE), Image.Resampling.BICUBIC)
    draw = ImageDraw.Draw(image)
    for _ in range(6):
        left, top = rng.integers(0, SIDE - 32, 2).tolist()
        width, height = rng.integers(16, 96, 2).tolist()
        shape = draw.ellipse if rng.random() < 0.5 else draw.rectangle
        shape((left, top, left + width, top + height), fill=tuple(rng.integers(0, 256, 3).tolist()))
    pixels = np.asarray(image) + rng.normal(0, 5, (SIDE, SIDE, 3))
    buffer = io.BytesIO()
    Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def samples(count: int, seed: int) -> Iterator[tuple[str, dict, list[tuple[str, bytes]]]]:
    """Keys, conversations of one picture and two questions, pictures."""
    rng = np.random.default_rng(seed)
    for number in range(count):
        first = [{"type": "image"}, {"type": "text", "text": "What is to be seen here?"}]
        messages = [
            {"role": "user", "content": first},
            {"role": "assistant", "content": "Six shapes on a coloured ground."},
            {"role": "user", "content": "Which of them is the largest?"},
            {"role": "assistant", "content": f"The one with the number {number % 6}."},
        ]
        record = {"messages": messages, "source": "bench", "independent_turns": False}
        yield f"{number:08d}", record, [("jpg", picture(rng))]


class PixelsAlone:
    """A processor that takes the pictures as they come, and neither resizes nor tokenises."""

    image_processor = SimpleNamespace(background=WHITE)

    def encode_turns(self, turns: list) -> EncodedSample:
        images = [
            part.image.image for turn in turns for part in turn.parts if isinstance(part, Picture)
        ]
        if any(image.size != (SIDE, SIDE) for image in images):
            raise UserError(f"a picture has the size {[image.size for image in images]}")
        return EncodedSample([0, 0], [IGNORED, 0])


class Reading:
    """The three ways to the pixels of some shards' samples, a few of them at each call.

    Calls are short, so that what else the machine does falls on all ways alike.
    """

    def __init__(self, folder: Path, encoded: list[bytes], seed: int) -> None:
        shards = sorted(str(path) for path in folder.glob("*.tar"))
        index = index_shards(shards)
        order = np.random.default_rng(seed).permutation(len(index.samples)).tolist()
        config = DataConfig(shards=shards)
        processor: Any = PixelsAlone()
        self._encoder = SampleEncoder(config, [index.samples], [{}], processor)
        self._encoded = encoded
        self._order = {name: itertools.cycle(order) for name in ("pillow", "ours")}
        data = webdataset.WebDataset(shards, shardshuffle=False).repeat().decode("pil")
        self._webdataset = iter(data)

    def pillow(self) -> None:
        for number in itertools.islice(self._order["pillow"], CALL):
            Image.open(io.BytesIO(self._encoded[number])).convert("RGB")

    def ours(self) -> None:
        numbers = itertools.islice(self._order["ours"], CALL)
        for result in self._encoder.encode_all([Place(0, 0, number) for number in numbers]):
            if isinstance(result, Skipped):
                raise UserError(f"a sample of the benchmark was skipped: {result.message}")

    def webdataset(self) -> None:
        for sample in itertools.islice(self._webdataset, CALL):
            if sample["img0.jpg"].size != (SIDE, SIDE):
                raise UserError(f"webdataset gave a picture of {sample['img0.jpg'].size}")


def measure_reading(count: int, seed: int, repeats: int, folder: Path) -> dict[str, Any]:
    """Samples a second of each way, and its throughput as a share of Pillow's.

    Args:
        repeats: how often each way reads all samples.
    """
    made = list(samples(count, seed))
    write_shards(folder, "bench", made, SHARD_SIZE)
    encoded = [images[0][1] for _, _, images in made]
    reading = Reading(folder, encoded, seed)
    ways = {"ours": reading.ours, "webdataset": reading.webdataset}
    for way in (reading.pillow, *ways.values()):
        way()  # plugins are loaded, the record's code is compiled
    rounds = max(1, repeats * count // CALL)
    pairs, _ = alternate(Clock("cpu", "cpu"), reading.pillow, ways, rounds)
    return {
        "samples": count,
        "bytes_per_image": round(sum(map(len, encoded)) / count),
        "pillow_per_second": CALL / next(iter(pairs.values())).baseline,
        **{f"{name}_per_second": CALL / pair.variant for name, pair in pairs.items()},
        **{f"{name}_of_pillow": pair.speedup for name, pair in pairs.items()},
    }


def measure_waiting(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The share of its steps that the quickstart's training waits for data.

    The interval up to the first logged step starts the worker and is left out.

    Raises:
        UserError: the training failed, or logged no further interval.
    """
    run_dir = folder / "run"
    shards = json.dumps(options.shards)
    settings = {
        **{"run_dir": run_dir, "data.shards": shards, "data.num_workers": options.workers},
        **{"training.max_steps": options.steps, "training.log_every": 1},
        **{"training.engine": "torch", "training.gradient_accumulation_steps": 2},
        **{"training.checkpoint_every": 0, "training.threads": options.threads},
    }
    overrides = [f"{key}={value}" for key, value in settings.items()]
    command = [sys.executable, str(_TRAIN), "--config", options.config, *overrides]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if result.returncode:
        raise UserError(f"the training ended with status {result.returncode}:\n{result.stdout}")
    return waiting_share((run_dir / "metrics.jsonl").read_text().splitlines()) | {
        "workers": options.workers
    }


def waiting_share(lines: list[str]) -> dict[str, Any]:
    """Share of the seconds of all logged intervals but the first one, from a run's metrics."""
    metrics = [json.loads(line) for line in lines]
    seconds = [later["seconds"] - one["seconds"] for one, later in itertools.pairwise(metrics)]
    if not sum(seconds):
        raise UserError(f"the run logged {len(metrics)} steps; ask for more with --steps")
    waits = [line["data_wait_share"] for line in metrics[1:]]
    waited = sum(share * length for share, length in zip(waits, seconds, strict=True))
    return {
        "waiting": waited / sum(seconds),
        "waiting_median": float(np.median(waits)),
        "seconds_per_step": sum(seconds) / (metrics[-1]["step"] - metrics[0]["step"]),
        "steps": metrics[-1]["step"] - metrics[0]["step"],
    }


def print_reading(found: dict[str, Any], console: Console) -> None:
    table = Table(title=f"{SIDE} x {SIDE} JPEGs of {found['bytes_per_image']:,} bytes, one thread")
    for column in ("what", "samples/s", "of Pillow alone", "goal"):
        table.add_column(column, justify="left" if column == "what" else "right")
    table.add_row("Pillow, from memory", f"{found['pillow_per_second']:,.0f}", "1.00", "")
    for name in ("ours", "webdataset"):
        goal = f"{GOALS[name]:.2f}" if name in GOALS else ""
        share = found[f"{name}_of_pillow"]
        table.add_row(name, f"{found[f'{name}_per_second']:,.0f}", f"{share:.2f}", goal)
    console.print(table)


def print_waiting(found: dict[str, Any], console: Console) -> None:
    table = Table(title=f"{found['steps']} training steps, {found['workers']} data workers")
    for column in ("seconds a step", "waiting for data", "median of steps", "goal"):
        table.add_column(column, justify="right")
    shares = (found["waiting"], found["waiting_median"], GOALS["waiting"])
    table.add_row(f"{found['seconds_per_step']:.3f}", *(f"{share:.2%}" for share in shares))
    console.print(table)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    kinds = ["reading", "waiting"]
    parser.add_argument("--what", nargs="+", default=kinds, choices=kinds)
    parser.add_argument("--samples", type=int, default=1000, help="of the reading benchmark")
    parser.add_argument("--repeats", type=int, default=5, help="passes over all samples")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shards", nargs="+", default=["data/easy_vqa/train-*.tar"])
    parser.add_argument("--config", default="configs/easy_vqa.yaml", help="what is trained")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1, help="of the training process")
    parser.add_argument("--json", type=Path, help="file for the figures")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    torch.set_num_threads(1)
    console, found = Console(), {}
    try:
        with tempfile.TemporaryDirectory() as folder:
            if "reading" in options.what:
                found["reading"] = measure_reading(
                    options.samples, options.seed, options.repeats, Path(folder)
                )
                print_reading(found["reading"], console)
            if "waiting" in options.what:
                found["waiting"] = measure_waiting(options, Path(folder))
                print_waiting(found["waiting"], console)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
