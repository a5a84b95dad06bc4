"""The bytes of a remote file: whole, or an error that says what is wrong."""

from __future__ import annotations

import pytest

from data_pipelines.remote_opening import StreamError
from data_pipelines.remote_streams import Limits, RemoteFile
from tests.data_pipelines.http_server import Server

DATA = bytes(range(256)) * 50
SIZE = len(DATA)


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    monkeypatch.setattr("data_pipelines.remote_streams._LONGEST_PAUSE", 0.0)


@pytest.fixture
def serve(tmp_path):
    """Serves a file; with a plan of what single requests get (see `Server`)."""
    (tmp_path / "a.tar").write_bytes(DATA)
    servers = []

    def make(plan: list, ranges: bool = True) -> Server:
        servers.append(Server(tmp_path, ranges))
        servers[-1].plans["a.tar"] = plan
        return servers[-1]

    yield make
    for server in servers:
        server.close()


def opened(server: Server, size: int | None = None, **limits) -> RemoteFile:
    return RemoteFile(f"{server.url}/a.tar", size, Limits(**{"timeout": 20, "pause": 0, **limits}))


def test_a_server_that_always_closes_early_ends_the_run(serve):
    server = serve([100, *[0] * 10])
    with pytest.raises(StreamError, match="closed early, at byte 100"):
        opened(server, SIZE, retries=3).read(SIZE)
    assert len(server.requests) == 1 + 3


def test_what_stalls_ends_after_the_timeout(serve):
    server = serve(["stall", "stall"])
    with pytest.raises(StreamError):
        opened(server, timeout=0.2, retries=1).read(1)
    assert len(server.requests) == 2
    command = RemoteFile("pipe:sleep 1000; echo a.tar", None, Limits(0.2, retries=5, pause=0))
    with pytest.raises(StreamError, match="bytes came in"):
        command.read(1)


@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize("what", ["ETag", "Last-Modified", "size"])
def test_a_file_that_changes_between_two_attempts_is_refused(serve, tmp_path, what, ranges):
    server = serve([3000], ranges)
    server.headers_sent = {} if what == "size" else {what: "1"}
    file = opened(server)
    assert file.read(100) == DATA[:100]
    server.headers_sent = {} if what == "size" else {what: "2"}
    if what == "size":
        (tmp_path / "a.tar").write_bytes(DATA + DATA)
    with pytest.raises(StreamError, match="changed on the server"):
        file.read(SIZE)


@pytest.mark.parametrize("ranges", [True, False])
def test_a_file_that_nothing_is_said_of_is_continued(serve, ranges):
    server = serve([3000, "503", 10], ranges)
    server.headers_sent = {}
    assert opened(server).read(2 * SIZE) == DATA
