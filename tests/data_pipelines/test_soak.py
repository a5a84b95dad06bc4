"""Memory over many samples: what a stream holds does not grow with what it has delivered."""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
from pathlib import Path

import pytest

from data_pipelines import DataConfig, build_stream
from data_pipelines.stream import PackedStream
from tests.data_pipelines.conftest import toy_shards

SAMPLES = 300  # pictures of 16 x 16 with three questions


@pytest.fixture
def stream_of(processor, tmp_path):
    """Makes a stream over two mixed sources, with augmentation and chosen questions."""
    options = {"questions": 3, "independent": True}
    sources = [
        {"name": name, "shards": toy_shards(tmp_path / name, [SAMPLES // 2], **options)}
        for name in ("a", "b")
    ]
    weighted = [{**source, "weight": 1 + number} for number, source in enumerate(sources)]

    def make(num_workers: int) -> PackedStream:
        config = DataConfig(
            sources=weighted,
            tokens_per_batch=1024,
            questions_per_conversation=2,
            shuffle_questions=True,
            augment="flip_shift",
            num_workers=num_workers,
        )
        return build_stream(config, processor)

    return make


def deliver(stream: PackedStream, samples: int) -> None:
    """Goes on until so many documents have been delivered in all."""
    while stream.documents < samples:
        next(stream)


def resident_bytes() -> int:
    """Of this process and its workers."""
    processes = [os.getpid(), *(child.pid for child in multiprocessing.active_children())]
    pages = [int(Path(f"/proc/{each}/statm").read_text().split()[1]) for each in processes]
    return sum(pages) * os.sysconf("SC_PAGE_SIZE")


def test_nothing_is_kept_of_what_was_delivered(stream_of):
    """Python's allocated blocks: a single object kept of each sample would be 3,000 of them."""
    stream = stream_of(0)
    deliver(stream, 1500)  # every text has been seen and remembered
    gc.collect()
    before = sys.getallocatedblocks()
    deliver(stream, 4500)
    gc.collect()
    assert sys.getallocatedblocks() - before < 1500
    assert len(str(stream.state_dict())) < 100_000


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads memory from /proc")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_resident_memory_stays_flat_over_100_000_samples(stream_of, num_workers):
    stream = stream_of(num_workers)
    deliver(stream, 10_000)
    sizes = []
    for samples in range(20_000, 100_001, 10_000):
        sizes.append(resident_bytes())
        deliver(stream, samples)
    sizes.append(resident_bytes())
    print([round(size / 2**20, 1) for size in sizes])
    assert stream.epoch > 300
    assert max(sizes) < 1.05 * sizes[0]
    stream.close()
