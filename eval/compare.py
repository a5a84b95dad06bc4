"""python -m eval compare A B [C ...]: which differences between evaluations are real.

Every further run is compared with the first, question by question, over all questions and by kind.
A difference is called real if its p-value, adjusted by Holm's method for the number of differences
that the tables show, is below 0.05: then the chance that any of them is called so wrongly is below
5 %.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from conceptmoe_vl.errors import UserError
from data_pipelines.visible import visible
from eval.long_context.family import PREFIX, figures
from eval.report import format_figure, write_json, write_lines
from eval.statistics import PERMUTATIONS, RESAMPLES, SEED, Metrics, holm, paired
from eval.tasks import Question, Scored, all_tasks, mean_perplexity, mean_score

LEVEL = 0.05
_NAMED = 5  # questions that a message names


@dataclass(frozen=True)
class TaskRun:
    """What one evaluation found on one task.

    Fields:
        folder: with results.json and samples.jsonl. run: as the user named it.
        rows: of samples.jsonl, by key. samples: the same, as the metrics take them.
    """

    folder: Path
    run: str
    results: dict[str, Any]
    rows: dict[str, dict[str, Any]]
    samples: dict[str, Scored]

    @property
    def task(self) -> str:
        return self.results["task"]


@dataclass
class Comparison:
    """One line of the table.

    Fields:
        group: the kind of the questions; "all": all of them.
        first, second: the figure of the first run and of the other one, which `run` names.
        p_holm: p adjusted for the number of all lines. real: whether it is below 0.05.
    """

    task: str
    run: str
    group: str
    figure: str
    count: int
    first: float | None
    second: float | None
    difference: float | None
    interval_95: tuple[float, float] | None
    p: float | None
    p_holm: float | None = field(default=None)
    real: bool = field(default=False)


def compare_runs(runs: Sequence[str], output: str | None = None) -> None:
    """Prints what differs between evaluations, and writes it into a folder if one is named.

    Raises:
        UserError: fewer than two runs, a folder without results, or other questions in one of them.
    """
    if len(runs) < 2:
        raise UserError(f"compare needs two folders or more; {len(runs)} is given")
    if len(set(runs)) < len(runs):
        raise UserError("compare is given the same folder twice; name each run once")
    tables = [_tasks_of(run) for run in runs]
    for run, table in zip(runs[1:], tables[1:], strict=True):
        if set(table) != set(tables[0]):
            only = sorted(set(table) ^ set(tables[0]))
            raise UserError(
                f"'{runs[0]}' and '{run}' are of different tasks: {', '.join(only)} is in one of "
                "them alone; name the folders of the tasks that both have"
            )
    comparisons: list[Comparison] = []
    rows: list[dict[str, Any]] = []
    notes: list[str] = []
    for name in tables[0]:
        task_runs = [table[name] for table in tables]
        for other in task_runs[1:]:
            notes += check_same_questions(task_runs[0], other)
            comparisons += _compare(task_runs[0], other)
        rows += _different_rows(task_runs)
    _adjust(comparisons)
    _print(comparisons, notes, list(runs), Console())
    if output is not None:
        _write(Path(output), list(runs), comparisons, notes, rows)


def _tasks_of(run: str) -> dict[str, TaskRun]:
    folder = Path(run)
    if not folder.is_dir():
        raise UserError(f"there is no folder '{run}'; name the --output of an evaluation")
    folders = [folder, *sorted(path for path in folder.iterdir() if path.is_dir())]
    found = [_read(path, run) for path in folders if (path / "samples.jsonl").is_file()]
    if not found:
        raise UserError(
            f"'{run}' holds no samples.jsonl, nor does a folder in it; name the --output of an "
            "evaluation that has ended"
        )
    return {task_run.task: task_run for task_run in found}


def _read(folder: Path, run: str) -> TaskRun:
    try:
        results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
        with (folder / "samples.jsonl").open(encoding="utf-8") as file:
            rows = {row["key"]: row for row in map(json.loads, file)}
        samples = {key: to_scored(row) for key, row in rows.items()}
        task_run = TaskRun(folder, run, results, rows, samples)
        if len(task_run.rows) != results["count"]:
            raise UserError(
                f"'{folder}' counts {results['count']} questions and has {len(task_run.rows)}; "
                "evaluate again"
            )
        _check_scores(task_run)
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"'{folder}' cannot be read as results of python -m eval ({error!r}); evaluate again"
        ) from error
    return task_run


def _check_scores(task_run: TaskRun) -> None:
    """A line that was changed, or scored by another version, must not decide unseen.

    Raises:
        UserError: the scores do not give the headline figure of results.json.
        TypeError, ValueError: a line holds other kinds of values.
    """
    for key, sample in task_run.samples.items():
        if isinstance(sample.score, bool) or not isinstance(sample.score, (int, float)):
            raise TypeError(f"the score of '{key}' is {sample.score!r}")
    name, figure = next(iter(task_run.results["figures"].items()))
    found = _finite(_metrics(task_run)(list(task_run.samples.values())).get(name))
    written = figure["value"]
    if found != written and (
        found is None or written is None or not math.isclose(found, written, rel_tol=1e-9)
    ):
        raise UserError(
            f"'{task_run.folder}': samples.jsonl gives {name} {found}, results.json says "
            f"{written}; evaluate again (what was asked is kept)"
        )


def check_same_questions(first: TaskRun, other: TaskRun) -> list[str]:
    """What should be said of two runs whose questions are the same.

    Raises:
        UserError: they are not the same; names those that differ.
    """
    where = f"task '{first.task}' of '{first.run}' and '{other.run}'"
    for a, b in ((first, other), (other, first)):
        alone = [key for key in a.rows if key not in b.rows]
        if alone:
            raise UserError(
                f"{where}: {len(alone)} questions are in '{a.run}' alone: {_named(alone)}; "
                "evaluate both on the same data, with the same --limit"
            )
    asked = ("question", "references", "kind", "choices", "details")
    other_keys = [
        key
        for key, row in first.rows.items()
        if any(row.get(name) != other.rows[key].get(name) for name in asked)
    ]
    if other_keys:
        raise UserError(
            f"{where}: {len(other_keys)} questions are asked or scored otherwise: "
            f"{_named(other_keys)}; evaluate both on the same data"
        )
    settings = [task_run.results["settings"] for task_run in (first, other)]
    notes = []
    if settings[0]["data_checksum"] != settings[1]["data_checksum"]:
        notes.append(
            f"{where}: the questions read the same, but images, prompts or answer limits differ"
        )
    if settings[0].get("scoring") != settings[1].get("scoring"):
        notes.append(
            f"{where}: answers are read or scored in different ways (settings.scoring), by another "
            "parse or metric, or another version of the code"
        )
    return notes


def _named(keys: Sequence[str]) -> str:
    more = f" and {len(keys) - _NAMED} more" if len(keys) > _NAMED else ""
    return ", ".join(f"'{key}'" for key in keys[:_NAMED]) + more


def _metrics(task_run: TaskRun) -> Metrics:
    task = all_tasks().get(task_run.task)
    if task is not None:
        return task.metrics
    if task_run.task.startswith(PREFIX):  # made for a model's tokenizer, so not among all tasks
        return figures
    return mean_perplexity if task_run.results["mode"] == "perplexity" else mean_score


def to_scored(row: dict[str, Any]) -> Scored:
    """What a row of samples.jsonl was made from, but for the messages."""
    question = Question(
        row["key"], [], row["references"], row["kind"], row["choices"], row["details"]
    )
    pairs = [(total, count) for total, count in row["log_likelihoods"]]
    return Scored(question, row["parsed"], row["score"], row["score_normalised"], pairs)


def _compare(first: TaskRun, other: TaskRun) -> Iterator[Comparison]:
    """The lines of one task and one other run: all figures, and the headline figure by kind."""
    metrics = _metrics(first)
    samples = [[to_scored(task_run.rows[key]) for key in first.rows] for task_run in (first, other)]
    kinds = sorted({sample.question.kind for sample in samples[0]})
    for kind in [None, *(kinds if len(kinds) > 1 else [])]:
        chosen = [
            [sample for sample in side if kind is None or sample.question.kind == kind]
            for side in samples
        ]
        group = "all" if kind is None else kind
        differences = paired(chosen[0], chosen[1], metrics)
        values = [metrics(side) for side in chosen]
        names = list(differences) if kind is None else list(differences)[:1]
        for name in names:
            difference = differences[name]
            a, b = (_finite(side.get(name)) for side in values)
            yield Comparison(
                *(first.task, other.run, group, name, len(chosen[0]), a, b),
                *(difference.value, difference.interval, difference.p),
            )


def _finite(value: float | None) -> float | None:
    return value if value is not None and abs(value) < float("inf") else None


def _adjust(comparisons: Sequence[Comparison]) -> None:
    tested = [line for line in comparisons if line.p is not None]
    adjusted = holm([line.p for line in tested if line.p is not None])
    for line, p in zip(tested, adjusted, strict=True):
        line.p_holm, line.real = p, p < LEVEL


def _different_rows(task_runs: Sequence[TaskRun]) -> Iterator[dict[str, Any]]:
    """The questions that the runs do not all score alike."""
    for key, row in task_runs[0].rows.items():
        rows = {task_run.run: task_run.rows[key] for task_run in task_runs}
        if len({entry["score"] for entry in rows.values()}) > 1:
            yield {
                "task": task_runs[0].task,
                **{name: row[name] for name in ("key", "kind", "question", "references")},
                **{
                    name: {run: entry[name] for run, entry in rows.items()}
                    for name in ("score", "parsed", "raw")
                },
            }


def _print(
    comparisons: Sequence[Comparison], notes: Sequence[str], runs: Sequence[str], console: Console
) -> None:
    for task, run in dict.fromkeys((line.task, line.run) for line in comparisons):
        title = Text(visible(f"{task}: {run} against {runs[0]}"), style="table.title")
        table = Table(title=title, title_justify="left")
        table.add_column("questions")
        table.add_column("figure")
        for name in ("count", "first", "second", "difference", "95 % interval", "p (Holm)", ""):
            table.add_column(name, justify="right")
        for line in comparisons:
            if (line.task, line.run) == (task, run):
                table.add_row(*_cells(line), style="bold" if line.real else None)
        console.print(table)
    real = sum(line.real for line in comparisons)
    console.print(
        f"{real} of {len(comparisons)} differences are real (paired permutation tests, p < {LEVEL} "
        "after Holm's adjustment for all lines above)"
    )
    for note in notes:
        console.print(Text(visible(f"note: {note}")))


def _cells(line: Comparison) -> list[str | Text]:
    # A small difference of perplexities is no share of anything.
    is_share = all(value is None or abs(value) <= 1 for value in (line.first, line.second))
    return [
        Text(visible(line.group or "-")),  # a name from the data
        line.figure.replace("_", " "),
        str(line.count),
        format_figure(line.first, None)[0],
        format_figure(line.second, None)[0],
        *format_figure(line.difference, line.interval_95, is_share),
        "-" if line.p_holm is None else f"{line.p_holm:.4f}",
        "real" if line.real else "",
    ]


def _write(
    folder: Path,
    runs: list[str],
    comparisons: Sequence[Comparison],
    notes: list[str],
    rows: Sequence[dict[str, Any]],
) -> None:
    path = write_json(
        folder / "comparison.json",
        {
            "runs": runs,
            "level": LEVEL,
            "seed": SEED,
            "resamples": RESAMPLES,
            "permutations": PERMUTATIONS,
            "notes": notes,
            "comparisons": [asdict(line) for line in comparisons],
        },
    )
    lines = write_lines(folder / "differences.jsonl", rows)
    print(f"comparison: {path}\n{len(rows)} questions that are scored differently: {lines}")
