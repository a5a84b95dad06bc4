"""GQA (Hudson and Manning 2019): the balanced questions of the split testdev.

Of the published figures there are accuracy, binary and open questions, and types; the validity and
plausibility of answers need files that exist for no split with public answers but val, consistency
the unbalanced questions.
"""

from __future__ import annotations

import string
from pathlib import Path

from conceptmoe_vl.asking import question_messages
from eval.tasks import Question, RatioOfSums, Scored, Task
from eval.tasks._files import SHORT_ANSWER, Images, checked, complete, find_file, read_json, take

_FILE = "testdev_balanced_questions.json"
_SEMANTIC = {
    "attr": "attribute",
    "cat": "category",
    "global": "global",
    "obj": "object",
    "rel": "relation",
}
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def load(folder: Path) -> list[Question]:
    file = find_file(folder, [_FILE, f"*/{_FILE}"], "questions of GQA")
    images = Images(folder, ("images", "allImages/images", "allImages"))
    questions = []
    for key, record in checked(read_json(file), dict, f"'{file}'").items():
        where = f"question {key} of '{file}'"
        image = take(record, "imageId", str, where)
        types = take(record, "types", dict, where)
        text = f"{take(record, 'question', str, where)}\n{SHORT_ANSWER}"
        questions.append(
            Question(
                key=key,
                messages=question_messages([images.lazy(f"{image}.jpg", where)], text),
                references=(take(record, "answer", str, where),),
                kind=take(types, "structural", str, f"'types' of {where}"),
                details={
                    "cluster": image,
                    "semantic": take(types, "semantic", str, f"'types' of {where}"),
                },
            )
        )
    return complete("gqa", questions, [file])


def _parse(text: str, question: Question) -> str:
    """In lower case without punctuation, as the answers of the vocabulary are."""
    return _plain(text)


def _plain(text: str) -> str:
    return " ".join(text.lower().translate(_NO_PUNCTUATION).split())


def _score(parsed: str, question: Question) -> float:
    return float(parsed in {_plain(reference) for reference in question.references})


def _figures(sample: Scored) -> dict[str, tuple[float, float]]:
    is_open = sample.question.kind == "query"
    belongs = {
        "accuracy": True,
        "binary": not is_open,
        "open": is_open,
        **{name: sample.question.details["semantic"] == short for short, name in _SEMANTIC.items()},
    }
    return {name: (sample.score * inside, float(inside)) for name, inside in belongs.items()}


TASK = Task(
    name="gqa",
    description="GQA testdev, balanced: accuracy by type of question",
    default_data="data/gqa",
    load=load,
    parse=_parse,
    score=_score,
    max_new_tokens=16,
    metrics=RatioOfSums(_figures),
    official_size=12578,
)
