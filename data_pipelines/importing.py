"""Recipes of the layouts in circulation: what training could not use is left out and counted."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from conceptmoe_vl.errors import UserError
from data_pipelines.building import Made, Recipe
from data_pipelines.layouts import LAYOUTS, ImageFolder, check_row
from data_pipelines.layouts.rows import Row, source_files
from data_pipelines.shards import expand_patterns

_Item = tuple[int, Row]  # number of the record, from 0


def layout_recipe(
    layout: str, path: Path, images: Path | None = None, name: str | None = None
) -> Recipe:
    """All records of `path` as the split `train`; a sample's key is the number of its record.

    Args:
        layout: a name in `LAYOUTS`.
        images: the folder that paths in records are relative to; None: the folder of `path`.
        name: the data set's name in losses by source; None: `layout`.

    Raises:
        UserError: `images` is no folder.
    """
    folder = ImageFolder(image_folder(path, images))
    files = source_files(path)
    if layout == "img2dataset" and not files:  # a pattern
        files = [Path(shard) for shard in expand_patterns([str(path)])]
    return Recipe(
        manifest={"source": name or layout, "layout": layout},
        splits={"train": partial(_items, layout, path)},
        make=partial(_make, layout, folder, name or layout),
        name=_name,
        inputs=[str(path), str(path.absolute()), str(folder.folder.absolute()), _state(files)],
    )


def _state(files: list[Path]) -> list[tuple[str, int, int]]:
    """Name, size and time of change of each file."""
    found = ((file.name, file.stat()) for file in files)
    return [(name, about.st_size, about.st_mtime_ns) for name, about in found]


def image_folder(path: Path, images: Path | None) -> Path:
    """The folder that image paths are relative to.

    Raises:
        UserError: `images` is no folder.
    """
    if images is not None and not images.is_dir():
        raise UserError(f"--images: there is no folder '{images}'")
    return images or (path if path.is_dir() else path.parent)


def _items(layout: str, path: Path) -> Iterator[_Item]:
    return enumerate(LAYOUTS[layout].rows(path))


def _make(layout: str, folder: ImageFolder, source: str, item: _Item) -> Made:
    number, row = item
    checked = check_row(LAYOUTS[layout], row, folder, source)
    return Made(f"{number:09d}", checked.record, checked.images)


def _name(item: _Item) -> str:
    return item[1].name
