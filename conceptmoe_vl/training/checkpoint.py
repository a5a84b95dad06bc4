"""Checkpoints that a run resumes from exactly: engine, stream and random state of every rank.

A checkpoint is written into a folder beside, read back, and renamed with the manifest that holds
the checksums of all its files. So a folder `step-N` is complete or does not exist, and what happens
to it later is noticed.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from conceptmoe_vl.errors import UserError
from conceptmoe_vl.files import sync

from .config import TrainingConfig
from .distributed import World, gather_objects, raise_together, share_from_main, wait_for_all
from .engine import Engine
from .random_states import random_state, set_random_state, set_seed
from .resuming import layout_of, load_engine
from .run_files import (
    FORMAT,
    checkpoints_in,
    read_manifest,
    remove_checkpoint,
    remove_old_checkpoints,
    replace_folder,
    step_of,
    write_json,
    write_text,
)
from .verification import checked_files, damage_of


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

    Raises:
        UserError: what was written cannot be read back.
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
    files = checked_files(beside, world)
    if world.is_main:
        manifest = {"format": FORMAT, **layout_of(config, world), "counters": counters}
        write_json(beside / "manifest.json", {**manifest, "files": files})
        folders = (path for path in beside.rglob("*") if path.is_dir())
        for path in (beside / "manifest.json", *folders, beside):
            sync(path)
        replace_folder(beside, target)
        sync(folder)  # before an older one is removed
        _end_saving(target, config)
    wait_for_all()
    return target


def find_checkpoint(
    folder: Path, config: TrainingConfig, world: World, say: Callable[[str], None]
) -> Path | None:
    """The whole checkpoint that `training.resume` means. Collective.

    `auto` also ends what a run killed behind its newest one has not: `latest` names it, and those
    that are not kept go.

    Args:
        say: prints a line about damaged checkpoints, which `auto` puts aside as `damaged-step-N`.

    Raises:
        UserError: a path that is no checkpoint or is damaged, or no checkpoint of several is whole.
    """
    resume = config.resume
    if resume == "never":
        return None
    if resume != "auto":
        path = Path(resume)
        if not (path / "manifest.json").exists():
            raise UserError(
                f"training.resume is {resume}, which is no checkpoint folder (it has no "
                "manifest.json)"
            )
        damage = damage_of(path, world)
        if damage is not None:
            raise UserError(f"{damage}; give training.resume another one")
        return path
    left, found = share_from_main(
        ([path.name for path in folder.glob(".writing-*")], checkpoints_in(folder))
    )
    for name in left:
        say(f"{folder / name} was left half-written by a killed run; it is not used")
    newest = newest_whole(found, world, say)
    if newest is not None and world.is_main:
        _end_saving(newest, config)
    return newest


def _end_saving(newest: Path, config: TrainingConfig) -> None:
    """What is left to do when a checkpoint stands under its name."""
    write_text(newest.with_name("latest"), newest.name + "\n")
    remove_old_checkpoints(newest.parent, config.keep_checkpoints, config.keep_every)


def newest_whole(found: list[Path], world: World, say: Callable[[str], None]) -> Path | None:
    """The newest undamaged of some checkpoints; None of none. Collective.

    Raises:
        UserError: all are damaged.
    """
    damaged: dict[Path, str] = {}
    whole = None
    for path in reversed(found):
        damage = damage_of(path, world)
        if damage is None:
            whole = path
            break
        damaged[path] = damage
    if damaged and whole is not None and world.is_main:
        write_text(whole.with_name("latest"), whole.name + "\n")
    for path, damage in damaged.items():
        aside = path.with_name(f"damaged-{path.name}")
        say(f"warning: {damage}; it is put aside as {aside.name}, and the one before it is used")
        if world.is_main:
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
    wait_for_all()
    if damaged and whole is None:
        raise UserError(
            f"no checkpoint in {found[0].parent} is whole; the last: {damage}. Start a new run "
            "(another run_dir)"
        )
    return whole


def require_unused(run_dir: Path) -> None:
    """Raises if another run's metrics are in the way of a fresh start. Collective."""
    path = run_dir / "metrics.jsonl"
    if any(gather_objects(path.exists() and path.stat().st_size > 0)):
        raise UserError(
            f"{run_dir} holds a run without a checkpoint to resume from (or "
            "training.resume=never); give another run_dir, or remove that folder"
        )


def checkpoint_before(
    folder: Path, step: int, world: World, say: Callable[[str], None]
) -> Path | None:
    """The newest whole checkpoint of a step before this one; later ones are removed. Collective."""
    found = share_from_main(checkpoints_in(folder))
    path = newest_whole([each for each in found if step_of(each) < step], world, say)
    if path is not None and world.is_main:
        write_text(folder / "latest", path.name + "\n")
        for later in found:
            if step_of(later) >= step:
                remove_checkpoint(later)
    wait_for_all()
    return path


def load_checkpoint(
    path: Path, engine: Engine, stream: Any, config: TrainingConfig, world: World
) -> dict[str, Any]:
    """Restores engine, stream and random state; returns the counters. Collective.

    Args:
        stream: None leaves the data where they are.

    Raises:
        UserError: the checkpoint is damaged, or does not fit this run.
    """
    error, manifest = None, {}
    try:
        manifest = read_manifest(path)
    except UserError as found:
        error = found
    raise_together(error)
    load_engine(path, manifest, engine, config, world)
    if stream is not None:
        stream.load_state_dict(stream_state(path, manifest["world_size"], world))
    if world.rank < manifest["world_size"]:
        set_random_state(_rank_state(path, world.rank)["random"], world.device)
    else:
        # Not the numbers that it would have drawn from the run's first step on.
        set_seed(config.seed + 1 + world.rank + 1_000_003 * manifest["counters"]["step"])
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
