"""The bytes of a remote file in order: over http, from a command, or from an object store.

Notable:
- every wait has an end: a thread reads ahead, and what does not come within the timeout counts as
  a broken connection;
- a broken http or object-store connection is opened again at the byte where it broke, a bounded
  number of times without progress; a command is not started again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from data_pipelines.remote_opening import (
    BLOCK_BYTES,
    PIPE,
    StreamError,
    explained,
    opener,
    shown,
    stream_errors,
)

logger = logging.getLogger(__name__)

_BLOCKS_AHEAD = 4
_LONGEST_PAUSE = 30.0  # seconds between two attempts


@dataclasses.dataclass(frozen=True)
class Limits:
    """How long remote reading waits, and how often it tries.

    Fields:
        timeout: seconds without a block of bytes after which a connection counts as broken.
        retries: attempts after the first one without a single new byte.
        pause: seconds before the first of them; doubled from one to the next.
    """

    timeout: float = 60.0
    retries: int = 5
    pause: float = 0.5


class RemoteFile:
    """A remote file, read once from its start.

    Args:
        address: `pipe:COMMAND` (run by the shell), `http(s)://...`, or anything that fsspec opens.
        size: bytes that it must have; None: not known.

    Attributes:
        position: bytes read so far.
    """

    def __init__(self, address: str, size: int | None, limits: Limits) -> None:
        self.address, self.size, self.limits = address, size, limits
        self.position = 0
        self._opener = opener(address, size, limits.timeout)
        self._retries = 0 if address.startswith(PIPE) else limits.retries
        self._ahead: _ReadAhead | None = None
        self._block, self._taken = b"", 0  # the present block, and bytes of it that were read
        self._ended = False

    def read(self, count: int) -> bytes:
        """The next `count` bytes; fewer at the end of the file alone.

        Raises:
            StreamError: they did not come, the command failed, or the file has another size.
        """
        parts, wanted = [], count
        while wanted and (self._taken < len(self._block) or self._next_block()):
            part = self._block[self._taken : self._taken + wanted]
            self._taken += len(part)
            parts.append(part)
            wanted -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _next_block(self) -> bool:
        """Makes the next block the present one; False at the end."""
        attempt = 0
        while not self._ended:
            try:
                if self._ahead is None:
                    opened = functools.partial(self._opener, self.position)
                    self._ahead = _ReadAhead(opened, self.limits.timeout)
                block = self._ahead.next_block()
                if block:
                    self._block, self._taken = block, 0
                    self.position += len(block)
                    return True
                self._check_end()
                self._ended = True
                self.close()
            except StreamError as error:
                self.close()
                attempt += 1
                if not error.passing or attempt > self._retries:
                    raise
                self._pause(attempt, error)
        return False

    def _pause(self, attempt: int, error: StreamError) -> None:
        pause = min(self.limits.pause * 2 ** (attempt - 1), _LONGEST_PAUSE)
        logger.warning(
            "shard '%s': %s; attempt %d of %d follows at byte %d in %.1f s",
            *(shown(self.address), error, attempt, self._retries, self.position, pause),
        )
        time.sleep(pause)

    def _check_end(self) -> None:
        if self.size is None or self.position == self.size:
            return
        if self.position < self.size:
            raise StreamError(
                f"it ends early, at byte {self.position} of {self.size}", passing=True
            )
        raise StreamError(f"it has more than the {self.size} bytes that its manifest says")

    def close(self) -> None:
        """Ends connection or command, also in the middle of the file."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None


class _ReadAhead:
    """Blocks of a stream, opened and read by a thread of their own; bounded in number.

    Args:
        opened: gives the stream: `read(count)`, which may return fewer bytes and an empty block at
            the end alone, `close()`, and where there is one `stop()`, which ends a `read` that
            waits.
    """

    def __init__(self, opened: Callable[[], Any], timeout: float) -> None:
        self._timeout = timeout
        self._shared = _Shared(queue.Queue(_BLOCKS_AHEAD), threading.Event(), [])
        self.close = weakref.finalize(self, _stop, self._shared)
        arguments = (opened, self._shared)
        threading.Thread(target=_read_blocks, args=arguments, daemon=True).start()

    def next_block(self) -> bytes:
        """Empty at the end.

        Raises:
            StreamError: see `RemoteFile.read`; or no block came in time.
        """
        try:
            block = self._shared.blocks.get(timeout=self._timeout)
        except queue.Empty:
            message = f"less than {BLOCK_BYTES} bytes came in {self._timeout:g} seconds"
            raise StreamError(message, passing=True) from None
        if isinstance(block, Exception):
            raise block
        return block


class _Shared(NamedTuple):
    """What the thread and its reader have in common.

    Fields:
        streams: the one stream, from when it is open.
    """

    blocks: queue.Queue[bytes | StreamError]
    stopped: threading.Event
    streams: list[Any]


def _read_blocks(opened: Callable[[], Any], shared: _Shared) -> None:
    """The thread: an empty block marks the end, an exception a failure."""
    failure: StreamError | None = None
    block = bytearray()
    try:
        stream = opened()
        shared.streams.append(stream)
        part = b"start"
        while part and not shared.stopped.is_set():
            block.clear()
            while part and len(block) < BLOCK_BYTES and not shared.stopped.is_set():
                part = stream.read(BLOCK_BYTES - len(block))
                block += part
            if block:
                shared.blocks.put(bytes(block))
    except StreamError as error:
        failure = error
    except stream_errors() as error:
        failure = explained(error)
    if failure is not None and block:
        shared.blocks.put(bytes(block))
    shared.blocks.put(failure or b"")
    for stream in shared.streams:
        with contextlib.suppress(*stream_errors()):
            stream.close()


def _stop(shared: _Shared) -> None:
    shared.stopped.set()
    for stream in shared.streams:
        if hasattr(stream, "stop"):
            stream.stop()
    with contextlib.suppress(queue.Empty):
        while True:  # the thread may wait for room, for its last block and the end
            shared.blocks.get_nowait()
