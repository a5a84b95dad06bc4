"""Processes of a run: starting and ending the process group, small exchanges between ranks.

Launchers (`torchrun`, `deepspeed`, SLURM scripts that export the same names) set RANK, LOCAL_RANK,
WORLD_SIZE, MASTER_ADDR and MASTER_PORT; without them the run is one process and needs no port.
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib.util
import logging
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from conceptmoe_vl.errors import UserError


@dataclasses.dataclass(frozen=True)
class World:
    """This process among all: its rank (0 to size - 1), rank on its machine, and its device."""

    rank: int
    size: int
    local_rank: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def _read_number(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdigit():
        raise UserError(f"environment variable {name} is {text!r}; launchers set it to a number")
    return int(text)


def choose_device(name: str, local_rank: int) -> torch.device:
    """The device of this process for `auto`, `cpu` or `cuda`.

    Raises:
        UserError: cuda is asked for and not there.
    """
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise UserError(
            "training.device is cuda, but torch finds no CUDA device; set training.device=cpu"
        )
    if name == "cpu" or not available:
        return torch.device("cpu")
    return torch.device("cuda", local_rank)


def require_deepspeed(device: torch.device) -> Any:
    """The deepspeed module, quiet and set to the device.

    Raises:
        UserError: deepspeed is not installed, or needs a C++ compiler or ninja that is missing.
    """
    if importlib.util.find_spec("deepspeed") is None:
        raise UserError(
            "training.engine is deepspeed, which is not installed: pip install deepspeed, "
            "or train with training.engine=torch (one process)"
        )
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    import deepspeed

    deepspeed.utils.logger.setLevel(logging.WARNING)
    deepspeed.utils.logger.addFilter(_is_worth_reading)
    # Names that DeepSpeed calls and torch has renamed since: nothing that a user could change.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    if device.type == "cpu" and not _leave_out_shared_memory_operator(deepspeed):
        _require_compiler()
    return deepspeed


def _is_worth_reading(record: logging.LogRecord) -> bool:
    """Hides that ZeRO-3 cannot look into dataclasses that modules return.

    Only modules that own parameters need its hooks, and those take and return tensors: the tests
    compare ZeRO-3 with stage 0.
    """
    return "unknown inputs or outputs type" not in record.getMessage()


def _leave_out_shared_memory_operator(deepspeed: Any) -> bool:
    """Keeps DeepSpeed from compiling its shared-memory all-reduce at start (30 s and a C++
    compiler).

    That operator serves tensor-parallel inference alone; training reduces by gloo with and without
    it.
    """
    table = getattr(deepspeed.ops, "__compatible_ops__", None)
    if not isinstance(table, dict):
        return False
    table["deepspeed_shm_comm"] = False
    return True


def _require_compiler() -> None:
    """Raises `UserError` when DeepSpeed's operators could not be compiled, before it tries."""
    instead = "or train with training.engine=torch (one process)"
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        raise UserError(
            f"this DeepSpeed needs a C++ compiler on CPU ('{compiler}' is not found): "
            f"install g++, {instead}"
        )
    if shutil.which("ninja") is None:
        raise UserError(
            "this DeepSpeed needs ninja on CPU, which is not on the PATH: pip install ninja, "
            f"{instead}"
        )


def start(
    engine: str, device_name: str = "auto", timeout_minutes: float = 30.0, threads: int = 0
) -> World:
    """Joins the process group (deepspeed engine) or checks that this is one process (torch engine).

    Raises:
        UserError: missing parts of DeepSpeed, a missing device, or many processes under the torch
            engine.
    """
    rank, size, local_rank = (
        _read_number("RANK", 0),
        _read_number("WORLD_SIZE", 1),
        _read_number("LOCAL_RANK", 0),
    )
    device = choose_device(device_name, local_rank)
    if threads:
        torch.set_num_threads(threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    world = World(rank, size, local_rank, device)
    if engine == "torch":
        if size > 1:
            raise UserError(
                f"training.engine is torch, which is one process, but the launcher started {size}; "
                "use training.engine=deepspeed"
            )
        return world
    deepspeed = require_deepspeed(device)
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        timeout = datetime.timedelta(minutes=timeout_minutes)
        if size == 1:
            os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed asks for it
            dist.init_process_group(
                backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout
            )
        else:
            dist.init_process_group(backend, timeout=timeout)
    deepspeed.init_distributed(dist_backend=dist.get_backend(), verbose=False)
    return world


def stop() -> None:
    """Leaves the process group. Without this, gloo processes sometimes abort at exit after all
    is done.
    """
    if dist.is_initialized():
        dist.destroy_process_group()


def sum_over_ranks(values: list[float], device: torch.device) -> list[float]:
    """Elementwise sums over all ranks, in float64."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return values
    packed = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(packed)
    return packed.tolist()


def gather_objects(value: Any) -> list[Any]:
    """The value of every rank, in rank order, on every rank. Collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def share_from_main(value: Any) -> Any:
    """Rank 0's value on every rank. Collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    holder = [value]
    dist.broadcast_object_list(holder, src=0)
    return holder[0]


def wait_for_all() -> None:
    """Returns when every rank has come here. Collective."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()


def raise_together(error: UserError | None) -> None:
    """Raises on every rank if any rank has an error, so that none is left waiting. Collective.

    Raises:
        UserError: the error of the lowest rank that has one.
    """
    errors = [
        message
        for message in gather_objects(None if error is None else str(error))
        if message is not None
    ]
    if errors:
        raise UserError(errors[0]) from error


def ensure_folder(path: Path, world: World) -> None:
    """Makes a folder on rank 0 and waits for it. Collective."""
    if world.is_main:
        path.mkdir(parents=True, exist_ok=True)
    wait_for_all()
