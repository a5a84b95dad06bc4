"""What a run's folder says, as series over its steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeGuard

from conceptmoe_vl.errors import UserError
from conceptmoe_vl.training.run_files import read_lines

Points = list[tuple[int, float]]
_LARGEST = 1e300  # axes reach a little further


@dataclasses.dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
        name: shown, different from that of every other run of a page.
        metrics, evaluations, rollbacks: lines of its files, oldest first.
    """

    name: str
    metrics: list[dict]
    evaluations: list[dict]
    rollbacks: list[dict]

    def series(self, path: str) -> Points:
        """(step, value) of a field, nested ones by slashes; lines without a number are left out.

        `held_out/NAME` is a field of the evaluations.
        """
        lines = self.metrics
        if path.startswith("held_out/"):
            lines, path = self.evaluations, path.removeprefix("held_out/")
        keys = path.split("/")
        points = ((line.get("step"), _at(line, keys)) for line in lines)
        return [(step, value) for step, value in points if _is_number(step) and _is_number(value)]

    def keys(self, path: str) -> list[str]:
        """The keys that a nested field has in any line, sorted."""
        found: set[str] = set()
        for line in self.metrics:
            value = _at(line, path.split("/"))
            found |= set(value) if isinstance(value, dict) else set()
        return sorted(found)

    def last(self, path: str) -> float | None:
        points = self.series(path)
        return points[-1][1] if points else None

    def warnings(self) -> Iterator[tuple[int, str]]:
        """(step, text) of every warning, roll-back and number of skipped steps."""
        skipped = 0
        for line in self.metrics:  # which another program may have written
            step, texts = line.get("step"), line.get("warnings")
            if not _is_number(step):
                continue
            for text in texts if isinstance(texts, list) else []:
                yield step, str(text)
            number = line.get("nonfinite_steps")
            if _is_number(number) and number > skipped:
                skipped = number
                yield step, f"steps skipped so far as not finite: {skipped}"
        for line in self.rollbacks:
            if _is_number(line.get("step")):
                yield line["step"], f"the loss spiked; rolled back to step {line.get('to_step')}"


def _at(line: Any, keys: list[str]) -> Any:
    for key in keys:
        line = line.get(key) if isinstance(line, dict) else None
    return line


def _is_number(value: Any) -> TypeGuard[int]:
    """Whether a value can be drawn: a finite number, as our own lines hold alone."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and abs(value) <= _LARGEST


def read_runs(folders: list[Path]) -> list[Run]:
    """The runs of the folders, named by them.

    Raises:
        UserError: a folder holds no metrics, or they cannot be read.
    """
    names = _names(folders)
    return [_read_run(folder, name) for folder, name in zip(folders, names, strict=True)]


def _names(folders: list[Path]) -> list[str]:
    """The shortest ends of the paths that differ; equal paths get numbers."""
    paths = [folder.resolve().parts for folder in folders]
    for depth in range(1, max(map(len, paths)) + 1):
        names = ["/".join(parts[-depth:]) for parts in paths]
        if len(set(names)) == len(names):
            return names
    return [f"{name} ({number})" for number, name in enumerate(names, start=1)]


def _read_run(folder: Path, name: str) -> Run:
    path = folder / "metrics.jsonl"
    if not path.is_file():
        raise UserError(f"{folder} is no run: it has no metrics.jsonl; give the run's folder")
    lines = [_read(folder / f"{kind}.jsonl") for kind in ("metrics", "evaluation", "rollbacks")]
    if not lines[0]:
        raise UserError(f"{path} has no complete line yet; wait for the run's first step")
    return Run(name, *lines)


def _read(path: Path) -> list[dict]:
    try:
        lines = read_lines(path)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error}") from error
    wrong = [number for number, line in enumerate(lines, start=1) if not isinstance(line, dict)]
    if wrong:
        raise UserError(f"{path} line {wrong[0]} is no object; a run writes one object a line")
    return lines
