"""One rank of a stream in a process of its own, which records all that it delivers.

    python -m tests.data_pipelines.delivering SETTINGS.yaml RECORD RANK

The record holds what was delivered so far and the state behind it, and is replaced as a whole after
every batch; a process that is started again continues from it.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import yaml

from data_pipelines import DataConfig, PackedBatch, build_stream
from data_pipelines.stream import PackedStream
from tests.data_pipelines.conftest import make_processor

PHASES = ("start", "delivered", "writing", "written", "any")


def fingerprint(batch: PackedBatch) -> str:
    """Of the keys and of every tensor of a batch."""
    digest = hashlib.sha256(repr(batch.keys).encode())
    for name, tensor in batch.model_inputs().items():
        digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()[:16]


def open_stream(settings: dict, rank: int) -> PackedStream:
    config = DataConfig.from_mapping(settings["data"])
    return build_stream(config, make_processor(), rank, settings["world_size"])


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def deliver(stream: PackedStream, record: Path, delivered: list, phase: str, delay: float) -> None:
    """One batch, recorded; dies in the phase, if it is one."""
    if phase == "any":
        threading.Timer(delay, die).start()
    if phase == "start":
        die()
    batch = next(stream)
    if phase == "delivered":
        die()
    delivered.append([batch.keys, fingerprint(batch)])
    text = json.dumps({"delivered": delivered, "state": stream.state_dict()})
    beside = record.with_suffix(".writing")
    if phase == "writing":
        beside.write_text(text[: len(text) // 2])
        die()
    beside.write_text(text)
    beside.replace(record)
    if phase == "written":
        die()


def run(
    settings: dict, record: Path, rank: int, steps: int = -1, phase: str = "", delay: float = 0
) -> None:
    """Delivers until the record holds `settings["batches"]` batches.

    Args:
        steps, phase: dies by SIGKILL in the step after so many, in a phase of `PHASES`; in `any`,
            that time after the step's start, wherever it then is.
        delay: in seconds.
    """
    stream = open_stream(settings, rank)
    delivered: list = []
    if record.exists():
        before = json.loads(record.read_text())
        delivered = before["delivered"]
        stream.load_state_dict(before["state"])
    step = 0
    while len(delivered) < settings["batches"]:
        deliver(stream, record, delivered, phase if step == steps else "", delay)
        step += 1
    while phase:  # until the timer
        time.sleep(1)
    stream.close()


if __name__ == "__main__":
    run(yaml.safe_load(Path(sys.argv[1]).read_text()), Path(sys.argv[2]), int(sys.argv[3]))
