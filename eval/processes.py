"""Several processes of one evaluation: each asks its share, and none waits for a dead one.

Launchers (`torchrun --nproc_per_node 2 -m eval ...`) say which process this is; without one the
evaluation is one process and needs no port. Processes exchange Python objects alone, by gloo, also
where their models lie on GPUs. Unlike ranks in training they meet in no collective for hours, which
a killed one would break: its silence has to be noticed.
"""

from __future__ import annotations

import datetime
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from conceptmoe_vl.errors import UserError
from conceptmoe_vl.training.launch_environment import complete_environment, read_number

# A process beats once a second from a thread of its own. Loading and asking release the
# interpreter's lock for all but moments; half a minute of silence is a process that has ended.
_BEAT, _SILENCE = 1.0, 30.0
_LONGEST_WAIT = datetime.timedelta(days=7)  # of a process that has asked its share for the others
_FAILED = "eval/failed"


@dataclass(frozen=True)
class World:
    """This process among all: its rank (0 to size - 1) and its rank on its machine."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def device(self, name: str | None) -> str | None:
        """The device by this name for this process: CUDA's one is that of its local rank."""
        if self.size == 1 or name not in (None, "cuda"):
            return name
        return f"cuda:{self.local_rank}" if name or torch.cuda.is_available() else None

    def share(self, value: Any) -> Any:
        """The value of rank 0, on every rank. Collective."""
        holder = [value]
        if self.size > 1:
            dist.broadcast_object_list(holder, src=0)
        return holder[0]

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks on rank 0, in their order; nothing on the others. Collective."""
        if self.size == 1:
            return [value]
        gathered: list[Any] | None = [None] * self.size if self.is_main else None
        dist.gather_object(value, gathered, dst=0)
        return gathered or []


class _Watch:
    """Ends this process when another one has failed or has gone silent."""

    def __init__(self, store: Any, world: World, silence: float) -> None:
        self._store, self._world = store.clone(), world  # a connection of the thread's own
        self._silence = silence
        self._last = {rank: (-1, time.monotonic()) for rank in range(world.size)}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="eval-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """From here on the ends of other processes are no failures."""
        self._over.set()
        self._thread.join()

    def fail(self, error: BaseException) -> bool:
        """Tells the others; whether this process was the first to fail."""
        self._over.set()
        self._thread.join()
        text = str(error) if isinstance(error, UserError) else repr(error)
        try:
            first = self._store.compare_set(_FAILED, "", f"{self._world.rank} {text}")
        except (RuntimeError, dist.DistError):  # rank 0, which keeps the store, has ended
            return True
        return first.decode().startswith(f"{self._world.rank} ")

    def _run(self) -> None:
        while not self._over.wait(_BEAT):
            try:
                reason = self._look()
            except (RuntimeError, dist.DistError):
                reason = "rank 0 has ended"
            if reason is not None and not self._over.is_set():
                print(f"error: rank {self._world.rank} stops: {reason}", file=sys.stderr)
                sys.stderr.flush()
                os._exit(1)  # the main thread may be waiting for the dead process

    def _look(self) -> str | None:
        self._store.add(f"eval/beat/{self._world.rank}", 1)
        if self._store.check([_FAILED]):
            rank, _, text = self._store.get(_FAILED).decode().partition(" ")
            return f"rank {rank} has failed: {text}"
        now = time.monotonic()
        for rank, (count, since) in self._last.items():
            beats = self._store.add(f"eval/beat/{rank}", 0)
            if beats != count:
                self._last[rank] = (beats, now)
            elif now - since > self._silence:
                return f"rank {rank} has been silent for {self._silence:.0f} s: killed, or it hangs"
        return None


@contextmanager
def joined(silence: float = _SILENCE) -> Iterator[World]:
    """The processes that the launcher started, for the length of the block.

    A failure in one process ends all: the others stop with status 1 within seconds, and within 40 s
    of one that was killed. Of a failure that all share, the first process alone tells.

    Args:
        silence: seconds without a sign of life after which a process counts as dead.
    """
    complete_environment(os.environ)
    world = World(
        read_number("RANK", 0), read_number("WORLD_SIZE", 1), read_number("LOCAL_RANK", 0)
    )
    if world.size == 1:
        yield world
        return
    store, _, _ = next(dist.rendezvous("env://", timeout=datetime.timedelta(minutes=10)))
    dist.init_process_group(
        "gloo", store=store, rank=world.rank, world_size=world.size, timeout=_LONGEST_WAIT
    )
    watch = _Watch(store, world, silence)
    try:
        yield world
    except BaseException as error:
        if not watch.fail(error) and isinstance(error, UserError):
            raise SystemExit(2) from error
        raise
    watch.stop()
    dist.barrier()  # the store lives in rank 0: the others are to be done with it
    dist.destroy_process_group()
