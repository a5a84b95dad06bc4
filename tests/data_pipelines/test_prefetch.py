"""Messages of workers, received by a thread."""

from __future__ import annotations

import itertools
import threading

import pytest

from data_pipelines.prefetch import _received


def test_messages_come_in_order_and_an_error_behind_them():
    def messages():
        yield from range(5)
        raise OSError("a worker has died")

    before = threading.active_count()
    received = _received(messages())
    assert [next(received) for _ in range(5)] == list(range(5))
    with pytest.raises(OSError, match="a worker has died"):
        next(received)
    assert threading.active_count() == before


def test_all_messages_are_received_and_then_the_end():
    assert list(_received(iter(range(7)))) == list(range(7))


@pytest.mark.parametrize("taken", [1, 2, 5])
def test_closing_ends_the_thread_and_the_messages(taken):
    ended = []

    def messages():
        try:
            yield from itertools.count()
        finally:
            ended.append(True)

    before = threading.active_count()
    received = _received(messages())
    assert list(itertools.islice(received, taken)) == list(range(taken))
    assert threading.active_count() == before + 1
    received.close()
    assert threading.active_count() == before
    assert ended == [True]
