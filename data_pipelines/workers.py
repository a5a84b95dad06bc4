"""Work on items in processes, with the results in the order of the items."""

from __future__ import annotations

import collections
import contextlib
import functools
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from conceptmoe_vl.errors import UserError

Item = TypeVar("Item")
Result = TypeVar("Result")

_SECONDS, _MOST_ITEMS = 0.03, 256  # of a message


def default_workers() -> int:
    """The cores that this process may use, at most 16: from there on writing is what takes time."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(cores or 1, 16)


def results_in_order(
    function: Callable[[Item], Result], items: Iterable[Item], workers: int
) -> Iterator[tuple[Item, Result]]:
    """Pairs of item and `function(item)`; whatever the number of workers, the same.

    Args:
        function: picklable, as are the items and results.
        workers: processes; 1 works in this one.

    Raises:
        UserError: a worker was ended, by want of memory for instance.
    """
    if workers == 1:
        for item in items:
            yield item, function(item)
        return
    try:
        yield from _from_workers(function, items, workers)
    except BrokenProcessPool as error:
        raise UserError(
            "a worker process was ended from outside (for want of memory?); use fewer --workers"
        ) from error


def _from_workers(
    function: Callable[[Item], Result], items: Iterable[Item], workers: int
) -> Iterator[tuple[Item, Result]]:
    work = functools.partial(_all_results, function)
    chunks = _Chunks(items)
    pending: collections.deque[tuple[list[Item], Future]] = collections.deque()
    with contextlib.ExitStack() as stack:
        pool = ProcessPoolExecutor(workers, initializer=_start_worker)
        stack.callback(pool.shutdown, cancel_futures=True)
        while chunk := chunks.take():
            pending.append((chunk, pool.submit(work, chunk)))
            if len(pending) > 2 * workers:
                yield from chunks.pairs(*pending.popleft())
        while pending:
            yield from chunks.pairs(*pending.popleft())
        if chunks.failure is not None:
            raise chunks.failure


class _Chunks:
    """Groups of items, as many as take some 30 ms of work: a message costs up to 1 ms, and few
    large pictures are in memory at once.

    Attributes:
        failure: the error that ended the items; what came before it still counts.
    """

    def __init__(self, items: Iterable[Any]) -> None:
        self._items = iter(items)
        self._size = 16
        self.failure: Exception | None = None

    def take(self) -> list[Any]:
        """The next items; none where they have ended."""
        chunk: list[Any] = []
        while len(chunk) < self._size and self.failure is None:
            try:
                chunk.append(next(self._items))
            except StopIteration:
                break
            except Exception as error:  # raised behind the results of the items before it
                self.failure = error
        return chunk

    def pairs(self, chunk: list[Any], future: Future) -> Iterator[tuple[Any, Any]]:
        results, seconds = future.result()
        self._size = max(1, min(_MOST_ITEMS, int(_SECONDS * len(chunk) / max(seconds, 1e-6))))
        return zip(chunk, results, strict=True)


def _all_results(function: Callable[[Any], Any], chunk: list[Any]) -> tuple[list[Any], float]:
    start = time.perf_counter()
    return [function(item) for item in chunk], time.perf_counter() - start


def _start_worker() -> None:
    """Ctrl-C is the parent's affair; when the parent is gone, even killed, so is the worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)
