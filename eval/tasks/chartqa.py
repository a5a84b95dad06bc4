"""ChartQA (Masry et al. 2022), test: questions by people and generated ones, charts as PNG."""

from __future__ import annotations

from pathlib import Path

from conceptmoe_vl.asking import question_messages
from eval.metrics import relaxed_accuracy
from eval.tasks import Question, RatioOfSums, Scored, Task
from eval.tasks._files import Images, checked, complete, find_file, read_json, take
from eval.tasks._scoring import as_written

_INSTRUCTION = "Answer the question with a single word."
_PARTS = ("human", "augmented")
_ROOTS = ("test", "ChartQA Dataset/test", ".")


def load(folder: Path) -> list[Question]:
    files = {
        part: find_file(
            folder, [f"{root}/test_{part}.json" for root in _ROOTS], f"{part} questions of ChartQA"
        )
        for part in _PARTS
    }
    questions = []
    for part, file in files.items():
        images = Images(file.parent, ("png",))
        for number, record in enumerate(checked(read_json(file), list, f"'{file}'")):
            where = f"question {number} of '{file}'"
            image = take(record, "imgname", str, where)
            text = f"{take(record, 'query', str, where)}\n{_INSTRUCTION}"
            questions.append(
                Question(
                    key=f"{part}-{number}",
                    messages=question_messages([images.lazy(image, where)], text),
                    references=(take(record, "label", str, where),),
                    kind=part,
                    details={"cluster": image},
                )
            )
    return complete("chartqa", questions, files.values())


def _score(parsed: str, question: Question) -> float:
    return relaxed_accuracy(parsed, question.references)


def _parts(sample: Scored) -> dict[str, tuple[float, float]]:
    return {"relaxed_accuracy": (sample.score, 1.0)}


TASK = Task(
    name="chartqa",
    description="ChartQA test, relaxed accuracy (5 % of the gold value)",
    default_data="data/chartqa",
    load=load,
    parse=as_written,
    score=_score,
    max_new_tokens=16,
    metrics=RatioOfSums(_parts),
    official_size=2500,
)
