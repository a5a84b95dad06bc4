"""Local data and task files for the public harnesses: multiple choice, generation, pictures."""

from __future__ import annotations

import json
import random
from pathlib import Path

from tests.pictures import png

CHOICES = ("red", "blue", "no circle is there", "a")
_WORDS = ("what", "is", "the", "color", "of", "shape", "there", "a", "circle")


def write_data(folder: Path, count: int = 8) -> list[dict]:
    """`data.jsonl` and its PNGs; returns the rows: question, choices, answer, text, picture."""
    rng = random.Random(7)
    rows = []
    for number in range(count):
        (folder / f"{number}.png").write_bytes(png(number))
        row = {
            "question": " ".join(rng.choices(_WORDS, k=1 + 3 * number)),
            "choices": list(CHOICES),
            "answer": number % len(CHOICES),
            "text": " ".join(rng.choices(_WORDS, k=60 * (number % 3 + 1))),
            "picture": str(folder / f"{number}.png"),
        }
        rows.append(row)
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


def write_task(folder: Path, name: str, lines: str, functions: str = "") -> None:
    """A task file of either harness over `data.jsonl`; `functions` become `NAME_functions.py`."""
    if functions:
        (folder / f"{name}_functions.py").write_text(functions)
    (folder / f"{name}.yaml").write_text(
        f"""task: {name}
dataset_path: json
dataset_kwargs:
  cache_dir: {folder / "cache"}
  data_files:
    test: {folder / "data.jsonl"}
test_split: test
{lines}"""
    )
