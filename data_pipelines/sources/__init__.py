"""What `python -m data_pipelines build SOURCE OUT` can build."""

from __future__ import annotations

from collections.abc import Callable

from data_pipelines.building import Recipe
from data_pipelines.sources import easy_vqa, scenes

SOURCES: dict[str, Callable[..., Recipe]] = {"easy_vqa": easy_vqa.recipe, "scenes": scenes.recipe}
"""Name to its recipe.

Keyword arguments are what the source can be asked for (`samples`, `seed`, `level`)."""
