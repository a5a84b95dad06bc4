"""Stamps of Tux Paint (GPL-2): pictures with captions in up to 78 languages.

They come with the Debian package `tuxpaint-stamps-default`: `frog.png` and, beside it, `frog.txt`,
whose first line is the English caption and whose others are `de.utf8=...`. Stamps that are drawings
in SVG alone are left out. Stamps whose English captions differ in numbers, colours and articles
alone go to the same split, in every language.
"""

from __future__ import annotations

import difflib
from collections import Counter
from functools import partial
from pathlib import Path

from conceptmoe_vl.errors import UserError
from data_pipelines.building import Recipe
from data_pipelines.sources.splits import Entry, make_caption, split_recipe, title_group

NAME = "tuxpaint"
FOLDER = Path("/usr/share/tuxpaint/stamps")
_MARK = ".utf8="


def recipe(
    *,
    path: Path = FOLDER,
    language: str = "en",
    question: str | None = None,
) -> Recipe:
    """Both splits.

    Args:
        path: the folder of the stamps.
        language: of the captions, `en` or as the stamps name it (`de`, `pt_BR`).
        question: asked about each picture; None: the picture alone asks.

    Raises:
        UserError: the package is missing, or no stamp knows the language.
    """
    found = sorted(path.rglob("*.txt")) if path.is_dir() else []
    if not found:
        raise UserError(
            f"building {NAME} needs the stamps in '{path}': apt-get install "
            "tuxpaint-stamps-default, or name their folder with --path"
        )
    left_out: Counter[str] = Counter()
    languages: Counter[str] = Counter()
    entries = []
    for text in found:
        captions = read_captions(text)
        languages.update(captions.keys())
        picture = text.with_suffix(".png")
        if not picture.is_file():
            left_out["no_png"] += 1
        elif language not in captions:
            left_out["no_caption"] += 1
        else:
            group = title_group(captions.get("en", captions[language]))
            name = str(text.relative_to(path).with_suffix(""))
            entries.append(Entry(name, group, (str(picture), captions[language])))
    _check_language(language, languages)
    header = {
        "source": NAME,
        "license": "GPL-2, Copyright (c) 2002-2022 Bill Kendrick and contributors",
        "language": language,
        "question": question,
    }
    return split_recipe(header, entries, left_out, partial(make_caption, NAME, question))


def _check_language(language: str, languages: Counter[str]) -> None:
    if language not in languages:
        near = difflib.get_close_matches(language, languages, n=1, cutoff=0.0)
        raise UserError(
            f"--language: no stamp has a caption in '{language}'"
            + (f"; the nearest is '{near[0]}', all: {', '.join(sorted(languages))}" if near else "")
        )


def read_captions(path: Path) -> dict[str, str]:
    """The captions of a stamp by language, without empty ones."""
    lines = path.read_text(encoding="utf-8-sig", errors="replace").splitlines()
    captions = {"en": lines[0].strip()} if lines and _MARK not in lines[0] else {}
    for line in lines:
        language, mark, text = line.partition(_MARK)
        if mark:
            captions[language.strip()] = text.strip()
    return {language: text for language, text in captions.items() if text}
