"""openclipart (public domain): drawings with the titles that their authors gave them.

The pictures come with the Debian package `openclipart-png`, the titles with `openclipart-svg`, in
the metadata of the SVG files of the same names. One sample is one picture with its title as its
caption. Links from one folder to another and titles that name a collection instead of a picture are
left out; blank, very large and repeated pictures are rejected. Titles that differ in numbers,
colours and articles alone go to the same split, since such pictures are variants of one drawing.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

from conceptmoe_vl.errors import UserError
from data_pipelines.building import Recipe
from data_pipelines.sources.splits import Entry, make_caption, split_recipe, title_group

NAME = "openclipart"
FOLDER = Path("/usr/share/openclipart")

_DC = "{http://purl.org/dc/elements/1.1/}"
_CC = "{http://web.resource.org/cc/}"
_RDF = "{http://www.w3.org/1999/02/22-rdf-syntax-ns#}"
_MOST_USES = 10  # a title of more pictures names a collection
_COLLECTION = re.compile(r"clip ?art|\bpart of\b|collection|theme|iconset|@|\bsu?bmission", re.I)


def recipe(
    *,
    path: Path = FOLDER,
    question: str | None = None,
) -> Recipe:
    """Both splits.

    Args:
        path: the folder that holds `png` and `svg`.
        question: asked about each picture; None: the picture alone asks.

    Raises:
        UserError: a package is missing.
    """
    missing = [kind for kind in ("png", "svg") if not (path / kind).is_dir()]
    if missing:
        raise UserError(
            f"building {NAME} needs the folder '{path / missing[0]}': apt-get install "
            "openclipart-png openclipart-svg, or name the folder of both with --path"
        )
    left_out: Counter[str] = Counter()
    header = {
        "source": NAME,
        "license": "public domain (openclipart.org, dedications of the authors)",
        "question": question,
    }
    entries = list(_entries(path, left_out))
    return split_recipe(header, entries, left_out, partial(make_caption, NAME, question))


def _entries(path: Path, left_out: Counter[str]) -> Iterator[Entry]:
    titles = {}
    for drawing in sorted((path / "svg").rglob("*.svg")):
        if drawing.is_symlink():
            left_out["link"] += 1
            continue
        picture = path / "png" / drawing.relative_to(path / "svg").with_suffix(".png")
        title, reason = read_title(drawing)
        if title is None:
            left_out[reason] += 1
        elif not picture.is_file():
            left_out["no_picture"] += 1
        else:
            titles[picture] = title
    uses = Counter(title.casefold() for title in titles.values())
    for picture, title in titles.items():
        if uses[title.casefold()] > _MOST_USES:
            left_out["title_of_a_collection"] += 1
            continue
        name = str(picture.relative_to(path / "png").with_suffix(""))
        yield Entry(name, title_group(title), (str(picture), title))


def read_title(drawing: Path) -> tuple[str | None, str]:
    """The title of a picture in the public domain; or None and the reason why there is none."""
    try:
        root = ElementTree.parse(drawing).getroot()
    except (ElementTree.ParseError, ValueError):  # ValueError: an encoding that Python lacks
        return None, "broken_svg"
    work = next(root.iter(f"{_CC}Work"), None)
    if work is None:
        return None, "no_title"
    licence = work.find(f"{_CC}license")
    address = "" if licence is None else licence.get(f"{_RDF}resource", "")
    title = clean_title(work.findtext(f"{_DC}title") or "")
    if not re.search("[^\\W\\d_]{2}", title):
        return None, "no_title"
    if not address.rstrip("/").casefold().endswith("publicdomain"):
        return None, "other_licence"
    if _COLLECTION.search(title):
        return None, "title_of_a_collection"
    return title, ""


def clean_title(title: str) -> str:
    """The title without the numbers of variants (`bee2`, `Woman Police 02`), in one line."""
    title = " ".join(title.replace("_", " ").split())
    return re.sub(r"(?<=[A-Za-z]{2})(?:\s*#\d+|\d{1,3}|[\s-]+0\d)$", "", title)
