"""What `python -m data_pipelines build SOURCE OUT` can build."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from data_pipelines.sources import easy_vqa

Build = Callable[[Path, int, bool], dict]

SOURCES: dict[str, Build] = {"easy_vqa": easy_vqa.build}
"""Name to `build(out, samples_per_shard, force) -> manifest`."""
