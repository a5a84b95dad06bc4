"""Processes of a run: starting and ending the process group, small exchanges between ranks.

Launchers (`torchrun`, `deepspeed`, SLURM's `srun`) say which process this is
(`launch_environment`); without one the run is one process and needs no port.
"""

from __future__ import annotations

import dataclasses
import datetime
import errno
import importlib.util
import logging
import os
import shutil
import socket
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from conceptmoe_vl.errors import UserError

from .launch_environment import bind_gloo, complete_environment, own_address, read_number
from .peers import Peers, is_lost_connection, one_line

_peers: Peers | None = None  # of this process, as torch's process group is


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
    # A launcher may show each process its own GPU alone.
    return torch.device("cuda", local_rank % torch.cuda.device_count())


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
    complete_environment(os.environ)
    rank, size, local_rank = (
        read_number("RANK", 0),
        read_number("WORLD_SIZE", 1),
        read_number("LOCAL_RANK", 0),
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
        _join(world, datetime.timedelta(minutes=timeout_minutes))
    deepspeed.init_distributed(dist_backend=dist.get_backend(), verbose=False)
    return world


def _join(world: World, timeout: datetime.timedelta) -> None:
    """Makes the process group, and the watch over its ranks.

    Raises:
        UserError: the other ranks have not come in time.
    """
    global _peers
    backend = "nccl" if world.device.type == "cuda" else "gloo"
    if world.size == 1:
        os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed asks for it
        store: Any = dist.HashStore()
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
        return
    address = own_address()
    bind_gloo(address)
    host, port = (os.environ.get(name, "unset") for name in ("MASTER_ADDR", "MASTER_PORT"))
    try:
        store, _, _ = next(
            dist.rendezvous("env://", rank=world.rank, world_size=world.size, timeout=timeout)
        )
        store.set_timeout(timeout)
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("process_group", store),
            rank=world.rank,
            world_size=world.size,
            timeout=timeout,
        )
        places = gather_objects(f"{socket.gethostname()}, {address}")
    except (dist.DistError, RuntimeError, ValueError) as error:
        raise UserError(
            f"rank {world.rank} of {world.size} ({address}) has not met the others at "
            f"{host}:{port} within {timeout.total_seconds():g} s ({one_line(error)}); look whether "
            "all have started and whether the network lets them through (GLOO_SOCKET_IFNAME or "
            "NCCL_SOCKET_IFNAME names the interface)"
        ) from error
    watched = dist.PrefixStore("peers", store.clone())  # a connection of its own
    is_launchers = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    keeper = host if is_launchers else None
    _peers = Peers(watched, keeper, world.rank, places, timeout.total_seconds())


_CANNOT_WRITE = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM),
    *(errno.ENOTDIR, errno.EEXIST),  # a file where a folder should be
}

_TORCH_CANNOT = ("PytorchStreamWriter failed", "inline_container.cc")  # what torch.save says


def of_disk(error: Exception) -> Exception:
    """A full disk or a folder that cannot be written as the user's error; others as they are."""
    where = getattr(error, "filename", None) or "a file of the run"
    if isinstance(error, OSError) and error.errno in _CANNOT_WRITE:
        what = error.strerror
    elif isinstance(error, RuntimeError) and any(sign in str(error) for sign in _TORCH_CANNOT):
        what = "torch could not write all of it; the disk may be full"
    else:
        return error
    return UserError(
        f"cannot write {where}: {what}; make room or rights for it, then the same command goes on "
        "from the newest checkpoint, or give another run_dir"
    )


def report_failure(error: BaseException) -> bool:
    """Tells the other ranks what this one ended with, and says in one line what happened.

    Returns:
        Whether the line is all there is to say: the error is a user's, or others' failure has
        reached this rank in a collective. Otherwise it is a defect, whose traceback is wanted.
    """
    is_lost = is_lost_connection(error) and _peers is not None
    line: str | None = one_line(error)
    if _peers is not None:
        line = _peers.report(error)
    if not is_lost and not isinstance(error, UserError):
        return False
    if line is not None:
        print(f"error: {line}", file=sys.stderr, flush=True)
    return True


def stop() -> None:
    """Leaves the process group. Without this, gloo processes sometimes abort at exit after all
    is done.
    """
    global _peers
    if _peers is not None:
        _peers.stop()
        _peers = None
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
