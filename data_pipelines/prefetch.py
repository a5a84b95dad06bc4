"""Encoded samples in order, from this process or from workers that run ahead.

The order is decided by the caller's sequence alone, so the number of workers changes nothing but
speed, and a position is a place in that sequence.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import os
import queue
import signal
import sys
import threading
from collections.abc import Generator, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from data_pipelines.encoding import Document, Encoded, SampleEncoder, Skipped
from data_pipelines.sampling import Place

_SAMPLES_PER_MESSAGE = 16
_MESSAGES_RECEIVED = 2  # that wait in the training process
_ENDING_TRIALS, _ENDING_SECONDS = 1000, 0.01  # a reader of remote shards may take minutes
_PR_SET_PDEATHSIG = 1  # of Linux's prctl


def encoded_in_order(
    encoder: SampleEncoder, places: Iterable[Place], num_workers: int
) -> Iterator[Encoded]:
    """The encoded samples of `places`, in their order."""
    if num_workers == 0:
        for place in places:
            yield encoder.encode(place)
        return
    loader = DataLoader(
        _Encoded(encoder),
        batch_size=_SAMPLES_PER_MESSAGE,
        sampler=places,
        num_workers=num_workers,
        collate_fn=_to_arrays,
        worker_init_fn=functools.partial(_end_with, os.getpid()),
    )
    # Workers are forked here and not by the thread: they end with what forked them.
    with contextlib.closing(_received(iter(loader))) as messages:
        del loader
        for message in messages:
            for result in message:
                yield _with_pixels(result, torch.from_numpy)


def _received(messages: Iterator[Any]) -> Generator[Any, None, None]:
    """The messages of workers, received by a thread while this one computes.

    A message of pictures is far larger than a pipe: without the thread its worker would stand still
    until the next batch is asked for, and that batch would wait for the rest.
    """
    received: queue.Queue[tuple[Any, Exception | None]] = queue.Queue(_MESSAGES_RECEIVED)
    ended = threading.Event()
    thread = threading.Thread(target=_receive, args=(messages, received, ended), daemon=True)
    thread.start()
    del messages  # the thread's alone: the workers end with it
    try:
        while True:
            message, error = received.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            yield message
    finally:
        ended.set()
        for _ in range(_ENDING_TRIALS):  # it ends behind the message that it waits for
            with contextlib.suppress(queue.Empty):
                received.get_nowait()
            thread.join(_ENDING_SECONDS)
            if not thread.is_alive():
                break


def _receive(messages: Iterator[Any], received: queue.Queue, ended: threading.Event) -> None:
    while not ended.is_set():
        try:
            entry: tuple[Any, Exception | None] = (next(messages), None)
        except Exception as error:  # raised again where the message is asked for
            entry = (None, error)
        received.put(entry)
        if entry[1] is not None:
            return


def _end_with(parent: int, worker: int) -> None:
    """Makes the kernel end this worker with its parent.

    torch's workers look for their parent too, but wait for ever to hand over what they hold when it
    was killed while the pipe to it was full: each keeps the pipe of the other open.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call above
        os._exit(1)


class _Encoded(Dataset):
    def __init__(self, encoder: SampleEncoder) -> None:
        self._encoder = encoder

    def __getitems__(self, places: list[Place]) -> list[Encoded]:
        """Those of a message; torch calls this instead of asking for each."""
        return self._encoder.encode_all(places)


def _to_arrays(results: list[Encoded]) -> list[Encoded]:
    """Arrays travel inside the message; each tensor would need a file descriptor of its own."""
    return [_with_pixels(result, lambda tensor: tensor.numpy()) for result in results]


def _with_pixels(result: Encoded, convert: Any) -> Encoded:
    if isinstance(result, Skipped):
        return result
    return tuple(_converted(document, convert) for document in result)


def _converted(document: Document, convert: Any) -> Document:
    images = [
        dataclasses.replace(
            image,
            pixels=convert(image.pixels),
            coord=None if image.coord is None else convert(image.coord),
        )
        for image in document.sample.images
    ]
    return dataclasses.replace(document, sample=dataclasses.replace(document.sample, images=images))
