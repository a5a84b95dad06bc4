"""MME (Fu et al. 2023): two yes/no questions an image in 14 subtasks, one folder each or a
parquet export."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from conceptmoe_vl.asking import question_messages
from conceptmoe_vl.errors import UserError
from eval.metrics import parse_yes_no_prefix
from eval.tasks import Question, Scored, Task
from eval.tasks._files import SHORT_ANSWER, Images, complete, find_files, take
from eval.tasks._scoring import is_reference
from eval.tasks._tables import TableRow, parquet_rows, record_row

PERCEPTION = (
    *("existence", "count", "position", "color", "posters"),
    *("celebrity", "scene", "landmark", "artwork", "OCR"),
)
COGNITION = (
    *("commonsense_reasoning", "numerical_calculation", "text_translation", "code_reasoning"),
)
_ROOTS = (".", "MME_Benchmark_release_version", "MME_Benchmark")
_SUFFIXES = (".jpg", ".png", ".jpeg")
_REQUEST = "Please answer yes or no."


_PARQUET = ("data/test-*.parquet", "test-*.parquet")
_COLUMNS = ("question_id", "question", "answer", "category")


def load(folder: Path) -> list[Question]:
    files = find_files(folder, _PARQUET)
    rows = parquet_rows(files, _COLUMNS, ("image",)) if files else _official_rows(folder)
    counts: dict[str, int] = {}
    questions = [_question(row, counts) for row in rows]
    for image, count in counts.items():
        if count != 2:
            raise UserError(f"image '{image}' of MME has {count} questions, not two")
    return complete("mme", questions, files or [folder])


def _official_rows(folder: Path) -> Iterator[TableRow]:
    for subtask in (*PERCEPTION, *COGNITION):
        places = [
            f"{root}/{subtask}/{inside}*.txt"
            for root in _ROOTS
            for inside in ("questions_answers_YN/", "")
        ]
        files = find_files(folder, places)
        if not files:
            raise UserError(
                f"'{folder}' holds no subtask '{subtask}' of MME: put its texts at "
                f"'{subtask}/*.txt' or '{subtask}/questions_answers_YN/*.txt' in it, or a parquet "
                f"export at '{_PARQUET[0]}'"
            )
        for file in files:
            yield from _file_rows(subtask, file)


def _file_rows(subtask: str, file: Path) -> Iterator[TableRow]:
    """The lines of one image's text, with the names of the export."""
    in_folders = file.parent.name == "questions_answers_YN"
    images = Images(file.parent.parent if in_folders else file.parent, ("images", "."))
    lazy = images.lazy([f"{file.stem}{suffix}" for suffix in _SUFFIXES], f"'{file}'")
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, ValueError) as error:
        raise UserError(f"'{file}' cannot be read ({error}); download it again") from error
    rows = [line.rsplit("\t", 1) for line in lines if line.strip()]
    if len(rows) != 2 or any(len(row) != 2 for row in rows):
        raise UserError(
            f"'{file}' holds no two lines, each a question, a tab, and Yes or No; download it again"
        )
    for question, answer in rows:
        name = f"{subtask}/{file.stem}"
        fields = {"question_id": name, "question": question, "answer": answer, "category": subtask}
        yield record_row(fields, f"'{file}'", lazy)


def _question(row: TableRow, counts: dict[str, int]) -> Question:
    """Args: counts: questions of each image so far."""
    subtask = take(row.fields, "category", str, row.where)
    gold = take(row.fields, "answer", str, row.where).strip().rstrip(".").lower()
    if gold not in ("yes", "no") or subtask not in (*PERCEPTION, *COGNITION):
        raise UserError(f"{row.where}: '{gold}' is no answer or '{subtask}' no subtask of MME")
    # Exports name the file, `code_reasoning/0020.png`, or only what is behind the subtask.
    name = take(row.fields, "question_id", str, row.where).rpartition("/")[2]
    image = f"{subtask}/{name}"
    counts[image] = counts.get(image, 0) + 1
    return Question(
        key=f"{image}/{counts[image]}",
        messages=question_messages(
            [row.image()], _prompt(take(row.fields, "question", str, row.where))
        ),
        references=(gold,),
        kind=subtask,
        details={"cluster": image},
    )


def _prompt(question: str) -> str:
    return f"{question.replace(_REQUEST, '').strip()}\n{SHORT_ANSWER}"


def _parse(text: str, question: Question) -> str:
    return parse_yes_no_prefix(text)


def mme_figures(samples: Sequence[Scored]) -> dict[str, float]:
    """The published scores: of a subtask accuracy + accuracy+ in percent, up to 200; summed over
    the subtasks of `perception` (up to 2,000), of `cognition` (up to 800) and of both (`score`).

    Accuracy+ is the share of images with both questions right.
    """
    wrong = {sample.question.details["cluster"] for sample in samples if sample.score < 1}
    by_subtask: dict[str, list[tuple[float, float]]] = {}
    for sample in samples:
        both = float(sample.question.details["cluster"] not in wrong)
        by_subtask.setdefault(sample.question.kind, []).append((sample.score, both))
    scores = {
        # Every image has two questions, so that the mean over questions is that over images.
        subtask: 100 * math.fsum(right + both for right, both in rows) / len(rows)
        for subtask, rows in by_subtask.items()
    }
    rows = [row for subtask in by_subtask.values() for row in subtask]
    return {
        "score": math.fsum(scores.values()),
        "perception": _total(scores, PERCEPTION),
        "cognition": _total(scores, COGNITION),
        "accuracy": math.fsum(right for right, _ in rows) / len(rows),
        "accuracy_plus": math.fsum(both for _, both in rows) / len(rows),
        "unreadable": sum(sample.parsed == "" for sample in samples) / len(rows),
    }


def _total(scores: dict[str, float], subtasks: Sequence[str]) -> float:
    found = [scores[subtask] for subtask in subtasks if subtask in scores]
    return math.fsum(found) if found else math.nan


TASK = Task(
    name="mme",
    description="MME: accuracy and accuracy+ summed over perception (2,000) and cognition (800)",
    default_data="data/mme",
    load=load,
    parse=_parse,
    score=is_reference,
    max_new_tokens=16,
    metrics=mme_figures,
    official_size=2374,
)
