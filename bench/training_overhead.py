"""What the trainer adds to a step: metrics of every kind, checks, the watch, a line, the live view.

    python -m bench.training --what overhead --clock cpu

The bare step is the same engine with the same batch: forward, backward, clipping, optimiser.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from bench.plain_moe import SHAPE
from bench.timing import Clock, alternate
from conceptmoe_vl import ConceptMoEVLConfig, ConceptMoEVLForConditionalGeneration
from conceptmoe_vl.training import Trainer, TrainingConfig, World
from conceptmoe_vl.training.engine import build_engine
from conceptmoe_vl.training.progress import Reporter
from data_pipelines.batch import PackedBatch

WORLD = World(0, 1, 0, torch.device("cpu"))
LAYERS = {"encoder_layers": 1, "concept_layers": 2, "decoder_layers": 1}


class OneBatch:
    """A stream of the same packed batch again and again."""

    def __init__(self, batch: PackedBatch) -> None:
        self._batch, self.epoch = batch, 0
        self.skipped: dict[str, int] = {}
        self.over_length: dict[str, int] = {}
        self.delivered = {"text": {"samples": 0, "tokens": 0, "images": 0}}

    def __iter__(self) -> Iterator[PackedBatch]:
        while True:
            yield self._batch

    def filler(self) -> PackedBatch:
        return PackedBatch.filler(1)


def make_batch(documents: int, length: int, vocabulary: int) -> PackedBatch:
    """Documents of equal length, every token supervised, from two sources in turn."""
    ids = torch.randint(0, vocabulary, (documents * length,))
    return PackedBatch(
        input_ids=ids,
        labels=ids.clone(),
        cu_seqlens=torch.arange(0, documents * length + 1, length, dtype=torch.int32),
        keys=[f"doc-{number}" for number in range(documents)],
        sources=[("even", "odd")[number % 2] for number in range(documents)],
    )


def make_model(shape: dict[str, Any]) -> nn.Module:
    """A text model that chunks, without sampled boundaries."""
    torch.manual_seed(0)
    chunk = {"target_ratio": 2, "noise": "none", "joint_decoding_layers": 1}
    config = ConceptMoEVLConfig(text={**shape, **LAYERS}, chunk=chunk)
    return ConceptMoEVLForConditionalGeneration(config)


def contestants(
    model: nn.Module, batch: PackedBatch, folder: Path, log_every: int
) -> tuple[dict[str, Callable[[], None]], dict[str, nn.Module]]:
    """Steps and models of `bare` and of `trainer`, which start from the same weights."""
    settings: dict[str, Any] = {"schedule": "wsd", "warmup_fraction": 0.0, "decay_fraction": 0.0}
    config = TrainingConfig(engine="torch", max_steps=10**6, log_every=log_every, **settings)
    models = {"bare": copy.deepcopy(model).train(), "trainer": copy.deepcopy(model).train()}
    engine = build_engine(models["bare"], config, WORLD)

    def bare() -> None:
        supervised = float(batch.num_supervised)
        out = engine.forward(**batch.model_inputs(), num_items_in_batch=supervised)
        engine.backward(out.loss)
        engine.step(cancel=False)

    trainer = Trainer(models["trainer"], OneBatch(batch), config, folder, WORLD)
    terminal = Console(file=io.StringIO(), force_terminal=True, width=120)
    trainer.reporter = Reporter(True, terminal)

    def watched() -> None:
        metrics = trainer.step()
        assert metrics is not None  # the stream has no end
        trainer.reporter.update(metrics, trainer.progress)

    return {"bare": bare, "trainer": watched}, models


def overhead(
    clock: Clock,
    repeats: int,
    folder: Path,
    shape: dict[str, Any] | None = None,
    length: int = 512,
) -> dict[str, float]:
    """Share that the trainer adds to a bare step of 8 documents, with a line for every step."""
    shape = {**SHAPE, "head_dim": 32} if shape is None else shape
    batch = make_batch(8, length, shape["vocab_size"])
    steps, _ = contestants(make_model(shape), batch, folder, log_every=1)
    for step in steps.values():
        step()
    found, _ = alternate(clock, steps["bare"], {"trainer": steps["trainer"]}, repeats)
    pairs = found["trainer"]
    return {"share": 1 / pairs.speedup - 1, "bare seconds": pairs.baseline, "pairs": pairs.count}
