"""Runs a list of small trainings in one process, or in each of several, and writes what they gave.

    python -m tests.training.worker SPECS.json OUT
    python -m torch.distributed.run --standalone --nproc_per_node 2 -m tests.training.worker ...

A specification: name, stage (ZeRO), and optionally steps, images, accumulation, precision, noise,
auxiliary (weights of the auxiliary losses), masked_steps, poisoned, missing, held_out_missing,
unusable and held_out_unusable (ranks without a usable sample),
checkpoint_every, evaluate_every, run_dir, engine, freeze, freeze_layers, lora,
activation_checkpointing, experts (of a layer), zero (further keys of zero_optimization).
"""

from __future__ import annotations

import conceptmoe_vl_runtime

conceptmoe_vl_runtime.setup(quiet=True)

# ruff: noqa: E402  (the lines above must run before torch is imported)
import json
import sys
from pathlib import Path
from typing import Any

import torch

from conceptmoe_vl.training import Trainer, TrainingConfig, World, distributed
from conceptmoe_vl.training.lora import LoraSection
from tests.tiny import tiny_model
from tests.training.synthetic import SyntheticStream


def make_trainer(spec: dict[str, Any], out: Path, world: World) -> Trainer:
    """The trainer of a specification; the same weights on every rank."""
    accumulation, engine = spec.get("accumulation", 1), spec.get("engine", "deepspeed")
    zero = {"zero_optimization": {"stage": spec.get("stage", 0), **spec.get("zero", {})}}
    config = TrainingConfig(
        engine=engine,
        deepspeed=zero if engine == "deepspeed" else None,
        max_steps=10,
        log_every=1,
        device="cpu",
        precision=spec.get("precision", "float32"),
        gradient_accumulation_steps=accumulation,
        gradient_clipping=0.5,
        learning_rate=3e-3,
        epsilon=1e-3,  # with less, Adam turns rounding noise of idle weights into full steps
        checkpoint_every=spec.get("checkpoint_every", 0),
        max_nonfinite_steps=spec.get("max_nonfinite_steps", 10),
        freeze=spec.get("freeze", []),
        freeze_layers=spec.get("freeze_layers", {}),
        lora=LoraSection(**spec.get("lora", {})),
        activation_checkpointing=spec.get("activation_checkpointing", False),
    )
    text = {"tie_word_embeddings": spec.get("tied", False), "num_experts": spec.get("experts", 4)}
    chunk = {"noise": spec.get("noise", "none"), "image_mode": "grid"}
    if not spec.get("auxiliary", True):
        text |= {"balance_loss_weight": 0.0, "router_z_loss_weight": 0.0}
        chunk |= {"ratio_loss_weight": 0.0}
    stream = SyntheticStream(
        world.rank,
        world.size,
        accumulation,
        images=spec.get("images", "all"),
        masked_steps=tuple(spec.get("masked_steps", ())),
        poisoned=tuple(spec.get("poisoned", ())),
        steps=spec.get("stream_steps"),
        missing=tuple(spec.get("missing", ())),
        unusable=world.rank in spec.get("unusable", ()),
    )
    run_dir = out / spec.get("run_dir", spec["name"])
    return Trainer(
        tiny_model(text=text, **chunk),
        stream,
        config,
        run_dir,
        world,
        held_out=lambda: iter(
            SyntheticStream(
                *(world.rank, world.size),
                steps=2,
                missing=tuple(spec.get("held_out_missing", ())),
                unusable=world.rank in spec.get("held_out_unusable", ()),
            )
        ),
        evaluate_every=spec.get("evaluate_every", 0),
    )


def run(spec: dict[str, Any], out: Path, world: World) -> dict[str, Any]:
    """Trains, and returns the metrics of each step and the keys of the samples."""
    trainer = make_trainer(spec, out, world)
    resumed = trainer.resume()
    metrics = []
    for _ in range(spec.get("steps", 3)):
        metrics.append(trainer.step())
        if spec.get("checkpoint_every") and trainer.step_number % spec["checkpoint_every"] == 0:
            trainer.save_checkpoint()
        if spec.get("evaluate_every") and trainer.step_number % spec["evaluate_every"] == 0:
            trainer.evaluate()
    result = {"resumed": resumed, "metrics": metrics, "keys": trainer.stream.keys_seen}
    if spec.get("evaluate"):
        result["evaluation"] = trainer.evaluate()
    if spec.get("export"):
        trainer.export()
    return result


def main() -> None:
    torch.set_num_threads(1)
    specs, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    world = distributed.start("deepspeed", "cpu", timeout_minutes=2)
    results = {spec["name"]: run(spec, out, world) for spec in specs}
    (out / f"rank-{world.rank}.json").write_text(json.dumps(results))
    distributed.stop()


if __name__ == "__main__":
    main()
