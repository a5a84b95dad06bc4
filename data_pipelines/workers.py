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
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from conceptmoe_vl.errors import UserError

Item = TypeVar("Item")
Result = TypeVar("Result")

_ITEMS_PER_MESSAGE = 16  # a message costs about 0.2 ms of CPU time


def default_workers() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


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
    with contextlib.ExitStack() as stack:
        pool = ProcessPoolExecutor(workers, initializer=_start_worker)
        stack.callback(pool.shutdown, cancel_futures=True)
        pending: collections.deque[tuple[list[Item], Future]] = collections.deque()
        for chunk, failure in _chunks(items):
            if chunk:
                work = functools.partial(_all_results, function)
                pending.append((chunk, pool.submit(work, chunk)))
            while pending and (failure is not None or len(pending) > 2 * workers):
                yield from _pairs(pending.popleft())
            if failure is not None:
                raise failure
        while pending:
            yield from _pairs(pending.popleft())


def _pairs(entry: tuple[list[Any], Future]) -> Iterator[tuple[Any, Any]]:
    chunk, future = entry
    return zip(chunk, future.result(), strict=True)


def _chunks(items: Iterable[Item]) -> Iterator[tuple[list[Item], Exception | None]]:
    """Items in groups, the last with the error that ended them: what was before it still counts."""
    source = iter(items)
    chunk: list[Item] = []
    failure: Exception | None = None
    while failure is None:
        try:
            chunk.append(next(source))
        except StopIteration:
            break
        except Exception as error:  # handed on behind the results of the items before it
            failure = error
        if len(chunk) == _ITEMS_PER_MESSAGE or failure is not None:
            yield chunk, failure
            chunk = []
    if chunk:
        yield chunk, None


def _all_results(function: Callable[[Any], Any], chunk: list[Any]) -> list[Any]:
    return [function(item) for item in chunk]


def _start_worker() -> None:
    """Ctrl-C is the parent's affair; when the parent is gone, even killed, so is the worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)
