"""What `python -m data_pipelines build SOURCE OUT` can build."""

from __future__ import annotations

from collections.abc import Callable

from data_pipelines.building import Recipe
from data_pipelines.sources import easy_vqa, openclipart, scenes, shakespeare, tuxpaint, wiki

SOURCES: dict[str, Callable[..., Recipe]] = {
    source.NAME: source.recipe
    for source in (easy_vqa, scenes, openclipart, tuxpaint, wiki, shakespeare)
}
"""Name to its recipe.

Keyword arguments are what the source can be asked for (`samples`, `seed`, `level`, `path`,
`language`, `question`, `unit`)."""
