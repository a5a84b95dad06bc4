"""Checkpoints that a run resumes from exactly: engine, stream and random state of every rank.

A checkpoint is written into a folder beside and renamed when every rank has finished and the
manifest, with the sizes of all files, is there. So a folder `step-N` is complete or does not exist.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from conceptmoe_vl.errors import UserError

from .config import TrainingConfig
from .distributed import World, raise_together, share_from_main, wait_for_all
from .engine import Engine, zero_stage
from .run_files import (
    FORMAT,
    checkpoints_in,
    file_sizes,
    random_state,
    read_manifest,
    remove_old_checkpoints,
    replace_folder,
    set_random_state,
    write_json,
)


def _shape_of_run(config: TrainingConfig, world: World) -> dict[str, Any]:
    """What must be the same for engine and stream states to fit."""
    return {
        "engine": config.engine,
        "zero_stage": zero_stage(config),
        "world_size": world.size,
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
    }


def save_checkpoint(
    folder: Path,
    step: int,
    counters: dict[str, Any],
    engine: Engine,
    stream: Any,
    config: TrainingConfig,
    world: World,
) -> Path:
    """Writes `folder/step-<step>`. Collective.

    Args:
        counters: the trainer's plain numbers (step, samples, tokens, seconds, skipped steps).
        stream: anything with `state_dict()`.
    """
    target, beside = folder / f"step-{step}", folder / f".writing-step-{step}"
    if world.is_main:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
    wait_for_all()
    engine.save(beside / "engine")
    state = {"stream": stream.state_dict(), "random": random_state(world.device)}
    torch.save(state, beside / f"rank-{world.rank}.pt")
    wait_for_all()
    if world.is_main:
        manifest = {"format": FORMAT, **_shape_of_run(config, world), "counters": counters}
        write_json(beside / "manifest.json", {**manifest, "files": file_sizes(beside)})
        replace_folder(beside, target)
        remove_old_checkpoints(folder, config.keep_checkpoints)
    wait_for_all()
    return target


def find_checkpoint(folder: Path, resume: str) -> Path | None:
    """The checkpoint that `training.resume` means. Collective: rank 0 looks.

    Raises:
        UserError: a path that is no checkpoint.
    """
    if resume == "never":
        return None
    if resume != "auto":
        path = Path(resume)
        if not (path / "manifest.json").exists():
            raise UserError(
                f"training.resume is {resume}, which is no checkpoint folder (it has no "
                "manifest.json)"
            )
        return path
    found = checkpoints_in(folder)
    chosen = share_from_main(str(found[-1]) if found else None)
    return None if chosen is None else Path(chosen)


def load_checkpoint(
    path: Path, engine: Engine, stream: Any, config: TrainingConfig, world: World
) -> dict[str, Any]:
    """Restores engine, stream and random state; returns the counters. Collective.

    Raises:
        UserError: the checkpoint is damaged, or was written by a run of another shape.
    """
    error, manifest = None, {}
    try:
        manifest = read_manifest(path)
        _check_shape(manifest, _shape_of_run(config, world), path)
    except UserError as found:
        error = found
    raise_together(error)
    engine.load(path / "engine")
    stream.load_state_dict(stream_state(path, manifest["world_size"], world))
    set_random_state(_rank_state(path, world.rank)["random"], world.device)
    return manifest["counters"]


def stream_state(path: Path, written_by: int, world: World) -> Any:
    """What the stream of this rank continues from.

    Args:
        written_by: number of ranks that wrote the checkpoint.

    Returns:
        The rank's own state, or with another number of ranks a list of the states of all.
    """
    if written_by == world.size:
        return _rank_state(path, world.rank)["stream"]
    return [_rank_state(path, rank)["stream"] for rank in range(written_by)]


def _rank_state(path: Path, rank: int) -> dict[str, Any]:
    return torch.load(path / f"rank-{rank}.pt", map_location="cpu", weights_only=True)


def _check_shape(manifest: dict, present: dict, path: Path) -> None:
    for key, value in present.items():
        if manifest[key] != value:
            raise UserError(
                f"checkpoint {path} was written with {key} {manifest[key]}, this run has {value}; "
                f"resume with {key} {manifest[key]}, or start a new run from its weights "
                "(model.init_from)"
            )
