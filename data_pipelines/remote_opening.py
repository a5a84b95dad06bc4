"""Opens remote files: an address to a stream of bytes from a position on.

Notable:
- addresses are shown without user, password and query, commands by the shard's name alone: both
  may hold secrets;
- an http connection that is opened again must find the same file, by its ETag, or by its time and
  size.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import http.client
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote, urlsplit

PIPE = "pipe:"
BLOCK_BYTES = 1 << 18  # read at once
_TAR_NAME = re.compile(r"[^\s/\\'\"?=&:;|<>()]+\.tar(?![\w.-])")
_PASSING_STATUS = (408, 425, 429)  # and from 500 on: a later attempt may succeed
_CHANGED = "it changed on the server while it was read"

_STREAM_ERRORS = (OSError, http.client.HTTPException, EOFError, ValueError, RuntimeError)
_LIBRARY_ERRORS = {
    "aiohttp": "ClientError",
    "botocore.exceptions": "BotoCoreError",
    "gcsfs.retry": "HttpError",
}


class StreamError(Exception):
    """The bytes of a remote file end here.

    Attributes:
        passing: a later attempt may succeed.
    """

    def __init__(self, message: str, passing: bool = False) -> None:
        super().__init__(message)
        self.passing = passing


def is_remote(pattern: str) -> bool:
    """Whether a pattern of shards is read through this module."""
    return pattern.startswith(PIPE) or "://" in pattern


def file_name(address: str) -> str:
    """The last part of an address's path; of a command, the last name in it that ends with .tar;
    "" where there is none.
    """
    if address.startswith(PIPE):
        found = _TAR_NAME.findall(address)
        return found[-1] if found else ""
    return _path(address).rpartition("/")[2]


def shown(address: str) -> str:
    """An address without what may be secret; its last part is the file's name."""
    if address.startswith(PIPE):
        return f"{PIPE}.../{file_name(address)}"
    return re.sub(r"://[^/]*@", "://", _path(address))


def _path(address: str) -> str:
    """An address without query and fragment."""
    return re.split(r"[?#]", address, maxsplit=1)[0]


def stream_errors() -> tuple[type[BaseException], ...]:
    """What urllib, sockets and the libraries behind fsspec raise (those try again themselves)."""
    loaded = [
        getattr(sys.modules.get(module), name, None) for module, name in _LIBRARY_ERRORS.items()
    ]
    return (*_STREAM_ERRORS, *(error for error in loaded if error is not None))


def explained(error: BaseException) -> StreamError:
    """What is said of a failure: no text that may repeat the address."""
    if isinstance(error, urllib.error.URLError) and isinstance(error.reason, BaseException):
        error = error.reason
    if isinstance(error, FileNotFoundError):
        return StreamError("there is no such file")
    if isinstance(error, PermissionError):
        return StreamError("access is refused; check the credentials")
    what = getattr(error, "strerror", None) or type(error).__name__
    return StreamError(f"the connection broke ({what})", passing=True)


def opener(address: str, size: int | None, timeout: float) -> Callable[[int], Any]:
    """A function from a position to a stream that starts there."""
    if address.startswith(PIPE):
        return lambda position: _Command(address.removeprefix(PIPE))
    if address.startswith(("http://", "https://")):
        return _Http(address, size, timeout).open
    return functools.partial(_open_fsspec, address, size)


class _Command:
    """The output of a shell command, in a process group of its own."""

    def __init__(self, command: str) -> None:
        self._process = subprocess.Popen(
            command,
            shell=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._stopped = False

    def read(self, count: int) -> bytes:
        assert self._process.stdout is not None
        block = self._process.stdout.read1(count)  # type: ignore[attr-defined]
        if not block and (status := self._process.wait()) and not self._stopped:
            raise StreamError(f"its command ended with status {status}")
        return block

    def stop(self) -> None:
        self._stopped = True
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        self.stop()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._process.wait()


class _Http:
    """Opens an address at a byte, and sees to it that it stays the same file."""

    def __init__(self, address: str, size: int | None, timeout: float) -> None:
        parts = urlsplit(address)
        self._authorization: str | None = None
        if parts.username is not None:
            address = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
            pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            self._authorization = f"Basic {base64.b64encode(pair.encode()).decode()}"
        self._address, self._size, self._timeout = address, size, timeout
        self._same: tuple[str | None, str | None] = (None, None)

    def open(self, position: int) -> Any:
        request = urllib.request.Request(self._address, headers={"User-Agent": "conceptmoe-vl"})
        if self._authorization is not None:  # not sent along where the server points elsewhere
            request.add_unredirected_header("Authorization", self._authorization)
        if position:
            request.add_header("Range", f"bytes={position}-")
        try:
            response = urllib.request.urlopen(request, timeout=self._timeout)
        except urllib.error.HTTPError as error:
            passing = error.code in _PASSING_STATUS or error.code >= 500
            raise StreamError(f"the server answers {error.code}", passing) from None
        try:
            return self._checked(response, position)
        except StreamError:
            response.close()
            raise

    def _checked(self, response: Any, position: int) -> Any:
        found = _identity(response)
        for before, now in zip(self._same, found, strict=True):
            if position and before and now and before != now:
                raise StreamError(_CHANGED)
        self._same = found
        if position and response.status == 206:
            start = response.headers.get("Content-Range", "").removeprefix("bytes ")
            if not start.startswith(f"{position}-"):
                raise StreamError(f"the server sends bytes {start!r:.40}, not from {position} on")
            return _HttpBody(response, position)
        length = response.headers.get("Content-Length")
        if self._size is not None and length is not None and int(length) != self._size:
            raise _other_size(int(length), self._size)
        body = _HttpBody(response, 0)
        while position:  # a server without ranges sends all of it again
            skipped = body.read(min(position, BLOCK_BYTES))
            if not skipped:
                raise StreamError(_CHANGED)
            position -= len(skipped)
        return body


def _identity(response: Any) -> tuple[str | None, str | None]:
    """ETag or time of a file, and its bytes; None where the server does not say."""
    headers = response.headers
    size = headers.get("Content-Length")
    if response.status == 206:
        size = headers.get("Content-Range", "").rpartition("/")[2].replace("*", "")
    return headers.get("ETag") or headers.get("Last-Modified"), size


class _HttpBody:
    """A response whose early end is an error; http.client takes it for the end of the file."""

    def __init__(self, response: Any, start: int) -> None:
        self._response = response
        length = response.headers.get("Content-Length")
        self._left = None if length is None else int(length)
        self._position = start

    def read(self, count: int) -> bytes:
        block = self._response.read1(count)
        self._position += len(block)
        if self._left is not None:
            self._left -= len(block)
            if not block and self._left:
                raise StreamError(f"the server closed early, at byte {self._position}", True)
        return block

    def close(self) -> None:
        self._response.close()


def _open_fsspec(address: str, size: int | None, position: int) -> Any:
    try:
        from fsspec.core import url_to_fs

        system, path = url_to_fs(address)
        file = system.open(path, "rb")
    except ImportError as error:  # names the package of the scheme, as s3fs
        raise StreamError(f"{error}; or pip install conceptmoe-vl[remote]") from error
    except ValueError as error:
        raise StreamError("fsspec knows no such address; check its scheme") from error
    found = getattr(file, "size", None)
    if size is not None and isinstance(found, int) and found != size:
        file.close()
        raise _other_size(found, size)
    file.seek(position)
    return file


def _other_size(found: int, size: int) -> StreamError:
    return StreamError(
        f"it has {found} bytes, its manifest says {size}; write the manifest again, or the shard"
    )
