"""Scores by length and depth with 95 % intervals, and the effective length of a model."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from eval.compare import to_scored
from eval.long_context.family import CONTROL, SPREAD, length_name
from eval.long_context.keys import credits
from eval.statistics import Figure, estimate
from eval.tasks import RatioOfSums, Scored, mean_score

THRESHOLD = 0.85


@dataclasses.dataclass(frozen=True)
class LengthSummary:
    """One task at one length.

    Fields:
        score: of all questions but the controls.
        control: score of the questions without their needles. None without controls.
        control_named: share of the controls whose answer names a key.
        depths: by depth what the keys there earned; `SPREAD` where keys have no place.
        tokens: shortest and longest prompt.
        questions: how many, the controls left out.
    """

    score: Figure
    control: Figure | None
    control_named: Figure | None
    depths: dict[float | str, Figure]
    tokens: tuple[int, int]
    questions: int

    def to_json(self) -> dict[str, Any]:
        return {
            "questions": self.questions,
            "tokens": list(self.tokens),
            "score": self.score.to_json(),
            "control": self.control and self.control.to_json(),
            "control_named": self.control_named and self.control_named.to_json(),
            "depths": {str(depth): figure.to_json() for depth, figure in self.depths.items()},
        }


def read_samples(path: Path) -> list[Scored]:
    """The lines of a `samples.jsonl` of a long-context task."""
    with open(path, encoding="utf-8") as file:
        return [to_scored(json.loads(line)) for line in file]


def summarise_length(samples: Sequence[Scored]) -> LengthSummary:
    """The figures of one task at one length.

    Args:
        samples: at least one that is no control.
    """
    asked = [sample for sample in samples if not sample.question.details["control"]]
    controls = [sample for sample in samples if sample.question.details["control"]]
    tokens = [sample.question.details["tokens"] for sample in samples]
    named = [(sample, float(bool(sample.parsed))) for sample in controls]
    depths = sorted({depth for sample in asked for depth in _earned(sample)}, key=_rank)
    return LengthSummary(
        score=_score(asked),
        control=_score(controls) if controls else None,
        control_named=_score([dataclasses.replace(one, score=share) for one, share in named])
        if controls
        else None,
        depths={depth: _score_at(asked, depth) for depth in depths},
        tokens=(min(tokens), max(tokens)),
        questions=len(asked),
    )


def _rank(depth: float | str) -> float:
    return 2.0 if isinstance(depth, str) else depth


def _score(samples: Sequence[Scored]) -> Figure:
    return estimate(samples, mean_score)["accuracy"]


def _score_at(samples: Sequence[Scored], depth: float | str) -> Figure:
    """What the keys at a depth earned, over the questions that have some there."""

    def parts(sample: Scored) -> dict[str, tuple[float, float]]:
        return {"score": _earned(sample)[depth]}

    here = [sample for sample in samples if depth in _earned(sample)]
    return estimate(here, RatioOfSums(parts))["score"]


def _earned(sample: Scored) -> dict[float | str, tuple[float, float]]:
    """By depth: what the keys there earned, and how many they are."""
    details = sample.question.details
    if not details["depths"]:
        return {SPREAD: (sample.score, 1.0)}
    earned: dict[float | str, tuple[float, float]] = {}
    for depth, credit in zip(details["depths"], credits(sample.parsed, details), strict=True):
        total, count = earned.get(depth, (0.0, 0.0))
        earned[depth] = (total + credit, count + 1)
    return earned


def effective_length(lengths: dict[int, LengthSummary], threshold: float) -> int | None:
    """The largest length at which, as at all shorter ones, the score is at least the threshold;
    None if there is none."""
    reached = None
    for length, summary in sorted(lengths.items()):
        if summary.score.value is None or summary.score.value < threshold:
            break
        reached = length
    return reached


def to_json(tasks: dict[str, dict[int, LengthSummary]], threshold: float) -> dict[str, Any]:
    """All figures, by task and length."""
    return {
        "threshold": threshold,
        "tasks": {
            name: {
                "effective_length": effective_length(lengths, threshold),
                "lengths": {str(length): part.to_json() for length, part in lengths.items()},
            }
            for name, lengths in tasks.items()
        },
    }


def print_summary(
    tasks: dict[str, dict[int, LengthSummary]], threshold: float, console: Console
) -> None:
    """A row a task, a column a length; below each score its interval, and the worst control."""
    lengths = sorted({length for parts in tasks.values() for length in parts})
    table = Table(title="Scores by length, % (95 % interval)", title_justify="left")
    table.add_column("task")
    for length in lengths:
        table.add_column(length_name(length), justify="right")
    table.add_column(CONTROL, justify="right")
    table.add_column(f"effective (≥ {100 * threshold:g} %)", justify="right")
    for name, parts in tasks.items():
        cells = [_cell(parts[length].score) if length in parts else "" for length in lengths]
        reached = effective_length(parts, threshold)
        effective = "none" if reached is None else length_name(reached)
        table.add_row(name, *cells, _worst(part.control for part in parts.values()), effective)
    console.print(table)
    console.print(
        "control: the same questions without their needles, at the length where they score most"
    )


def _cell(figure: Figure) -> str:
    if figure.value is None or figure.interval is None:
        return "-"
    low, high = figure.interval
    return f"{100 * figure.value:.0f} ({100 * low:.0f}-{100 * high:.0f})"


def _worst(figures: Iterable[Figure | None]) -> str:
    known = [figure for figure in figures if figure is not None and figure.value is not None]
    return _cell(max(known, key=lambda figure: figure.value or 0.0)) if known else "-"
