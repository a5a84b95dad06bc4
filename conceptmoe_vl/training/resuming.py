"""What may differ between the run that wrote a checkpoint and the one that resumes it.

Engine, ZeRO stage and its settings, and the number of processes may: the checkpoint is then taken
apart and put together anew (`saved_state`, `restoring`). The batch of a step stays, unless
`training.keep_batch` is off: other processes share its micro-batches.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from conceptmoe_vl.errors import UserError

from .config import TrainingConfig
from .deepspeed_settings import read_deepspeed_config, zero_stage
from .distributed import World, share_from_main
from .engine import Engine
from .run_files import checkpoints_in, read_manifest
from .saved_state import read_state


def layout_of(config: TrainingConfig, world: World) -> dict[str, Any]:
    """What decides how an engine lays its state out, for the manifest."""
    deepspeed = config.engine == "deepspeed"
    zero = read_deepspeed_config(config.deepspeed).get("zero_optimization", {}) if deepspeed else {}
    return {
        "engine": config.engine,
        "zero_stage": zero_stage(config),
        "zero_optimization": json.loads(json.dumps(zero)),
        "world_size": world.size,
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
    }


def load_engine(
    path: Path, manifest: dict[str, Any], engine: Engine, config: TrainingConfig, world: World
) -> None:
    """Restores an engine from a checkpoint of any layout. Collective.

    Raises:
        UserError: the checkpoint has other tensors than this run, or cannot be taken apart.
    """
    present = layout_of(config, world)
    folder = path / "engine"
    if all(
        manifest.get(key, value) == value
        for key, value in present.items()
        if key != "gradient_accumulation_steps"
    ):
        _load_same_layout(engine, folder)
        return
    engine.restore(read_state(folder, manifest))


def _load_same_layout(engine: Engine, folder: Path) -> None:
    """Loads an engine's own files, and keeps the configuration's rates, decay and betas.

    Optimisers save these with their state; the checkpoint's would hold without a word, while the
    metrics report the configured ones.
    """
    groups = engine.optimizer.param_groups
    own = [{key: value for key, value in each.items() if key != "params"} for each in groups]
    engine.load(folder)
    for group, configured in zip(engine.optimizer.param_groups, own, strict=True):
        group.update(configured)


def batch_of_run(
    config: TrainingConfig, folder: Path, world: World, say: Callable[[str], None]
) -> TrainingConfig:
    """The configuration with the accumulation that keeps the batch of a run's step. Collective.

    Args:
        folder: of the run's checkpoints.

    Raises:
        UserError: the micro-batches of a step cannot be shared evenly by this many processes.
    """
    if not config.keep_batch or config.resume == "never":
        return config
    found = share_from_main(_newest(config.resume, folder) if world.is_main else None)
    if found is None:
        return config
    path, processes, steps = found
    total = processes * steps
    if total % world.size:
        raise UserError(
            f"checkpoint {path} was written by {processes} processes with {steps} micro-batches "
            f"each in a step, and this run has {world.size} processes, which cannot share "
            f"{total} evenly; start a number of processes that divides {total}, or let the batch "
            "of a step change: training.keep_batch=false"
        )
    own = total // world.size
    if own != config.gradient_accumulation_steps:
        say(
            f"gradient_accumulation_steps is {own} instead of "
            f"{config.gradient_accumulation_steps}: {world.size} processes go on with the "
            f"{total} micro-batches of a step of {path} ({processes} processes with {steps})"
        )
    return dataclasses.replace(config, gradient_accumulation_steps=own)


def _newest(resume: str, folder: Path) -> tuple[str, int, int] | None:
    """Path, processes, and micro-batches of each in a step, of the checkpoint to resume from."""
    for path in reversed(checkpoints_in(folder)) if resume == "auto" else [Path(resume)]:
        try:
            manifest = read_manifest(path)
        except UserError:
            continue  # said when the run resumes
        return str(path), manifest["world_size"], manifest["gradient_accumulation_steps"]
    return None
