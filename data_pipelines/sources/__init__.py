"""What `python -m data_pipelines build SOURCE OUT` can build."""

from __future__ import annotations

from collections.abc import Callable

from data_pipelines.sources import easy_vqa, scenes

Build = Callable[..., dict]

SOURCES: dict[str, Build] = {"easy_vqa": easy_vqa.build, "scenes": scenes.build}
"""Name to `build(out, samples_per_shard, force) -> manifest`.

Further keyword arguments are what the source can be asked for (`samples`, `seed`, `level`)."""
