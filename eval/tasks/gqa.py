"""GQA (Hudson and Manning 2019): the balanced questions of the splits testdev and val.

Notable:
- `gqa_val` has validity and plausibility where there is a `val_choices.json`; no such file was
  published for testdev;
- `gqa_consistency` and `gqa_val_consistency` ask beside the balanced questions those that they
  entail, which stand in the file of all questions alone. They enter no other figure.
- Grounding compares maps of attention with scene graphs; answers alone have none.
"""

from __future__ import annotations

import functools
import math
import string
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from conceptmoe_vl.asking import question_messages
from conceptmoe_vl.errors import UserError
from eval.tasks import Question, RatioOfSums, Scored, Task
from eval.tasks._files import (
    SHORT_ANSWER,
    Images,
    checked,
    complete,
    find_file,
    find_files,
    read_json,
    take,
    take_texts,
)

_SEMANTIC = {
    "attr": "attribute",
    "cat": "category",
    "global": "global",
    "obj": "object",
    "rel": "relation",
}
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
# What the published script takes for the valid and plausible answers of questions such as "what do
# both have in common?", whatever the file of choices says.
_COMMON = ("color", "material", "shape")
_GROUPS = {"valid": "validity", "plausible": "plausibility"}
ENTAILED = "entailed"  # kind of the questions that are asked for the consistency alone


def _places(name: str) -> list[str]:
    return [name, f"*/{name}"]


def _load(folder: Path, split: str, with_entailed: bool) -> list[Question]:
    """The balanced questions, and behind them those that they entail."""
    file = find_file(folder, _places(f"{split}_balanced_questions.json"), "questions of GQA")
    choices = find_files(folder, _places(f"{split}_choices.json"))[:1]
    images = Images(folder, ("images", "allImages/images", "allImages"))
    groups = checked(read_json(choices[0]), dict, f"'{choices[0]}'") if choices else None
    questions = [
        _question(key, record, f"question {key} of '{file}'", images, groups)
        for key, record in checked(read_json(file), dict, f"'{file}'").items()
    ]
    files = [file, *choices]
    if with_entailed:
        files.append(find_file(folder, _places(f"{split}_all_questions.json"), "all questions"))
        questions += _entailed_by(questions, files[-1], images)
    task = {"testdev": "gqa", "val": "gqa_val"}[split] + "_consistency" * with_entailed
    return complete(task, questions, files)


def _question(
    key: str, record: Any, where: str, images: Images, groups: Mapping[str, Any] | None = None
) -> Question:
    """A question with all that the figures need in its details."""
    image = take(record, "imageId", str, where)
    types = take(record, "types", dict, where)
    text = f"{take(record, 'question', str, where)}\n{SHORT_ANSWER}"
    details: dict[str, Any] = {
        "cluster": image,
        "semantic": take(types, "semantic", str, f"'types' of {where}"),
    }
    if groups is not None:
        details |= _choices(key, groups, types)
    found = record.get("entailed") or []
    details["entailed"] = [str(other) for other in found if str(other) != key]
    details["group"] = (record.get("groups") or {}).get("global")
    return Question(
        key=key,
        messages=question_messages([images.lazy(f"{image}.jpg", where)], text),
        references=(take(record, "answer", str, where),),
        kind=take(types, "structural", str, f"'types' of {where}"),
        details=details,
    )


def _choices(
    key: str, groups: Mapping[str, Any], types: Mapping[str, Any]
) -> dict[str, Sequence[str]]:
    where = f"the choices of question {key}"
    own = take(groups, key, dict, "the file of choices")
    if "Common" in types.get("detailed", ""):
        return dict.fromkeys(_GROUPS, _COMMON)
    return {name: take_texts(own, name, where) for name in _GROUPS}


def _entailed_by(questions: Sequence[Question], file: Path, images: Images) -> list[Question]:
    """The entailed questions that are not among the balanced ones themselves.

    Raises:
        UserError: the file of all questions lacks one.
    """
    known = {question.key for question in questions}
    wanted = dict.fromkeys(key for question in questions for key in question.details["entailed"])
    records = checked(read_json(file), dict, f"'{file}'")
    found = []
    for key in wanted:
        if key in known:
            continue
        if key not in records:
            raise UserError(f"'{file}' lacks the entailed question {key}; download it again")
        question = _question(key, records[key], f"question {key} of '{file}'", images)
        details = {"cluster": question.details["cluster"]}
        found.append(
            Question(key, question.messages, question.references, ENTAILED, details=details)
        )
    return found


def _parse(text: str, question: Question) -> str:
    """In lower case without punctuation, as the answers of the vocabulary are."""
    return _plain(text)


@functools.lru_cache(maxsize=1 << 16)
def _plain(text: str) -> str:
    return " ".join(text.lower().translate(_NO_PUNCTUATION).split())


def _score(parsed: str, question: Question) -> float:
    return float(parsed in {_plain(reference) for reference in question.references})


def _parts(sample: Scored) -> dict[str, tuple[float, float]]:
    details, is_open = sample.question.details, sample.question.kind == "query"
    belongs = {
        "accuracy": True,
        "binary": not is_open,
        "open": is_open,
        **{name: details["semantic"] == short for short, name in _SEMANTIC.items()},
    }
    found = {name: (sample.score * inside, float(inside)) for name, inside in belongs.items()}
    for group, name in _GROUPS.items():
        if group in details:
            inside = sample.parsed in map(_plain, details[group])
            found[name] = (float(inside), 1.0)
    return found


_balanced_figures = RatioOfSums(_parts)


def consistency_figures(samples: Sequence[Scored]) -> dict[str, float]:
    """`consistency`: the mean over the right answers to balanced questions of the accuracy over the
    questions that they entail; `distribution`: how far answers to questions of one group are
    from the right ones in their frequencies (chi square by group, weighted by its questions, over
    100; 0 is best); and the figures of the balanced questions.
    """
    asked = [sample for sample in samples if sample.question.kind != ENTAILED]
    if not asked:  # the report's row of the entailed ones
        values = [sample.score for sample in samples]
        return {"consistency": math.nan, "accuracy": math.fsum(values) / len(values)}
    score_of = {sample.question.key: sample.score for sample in samples}
    means = []
    for sample in asked:
        scores = [score_of[k] for k in sample.question.details["entailed"] if k in score_of]
        if sample.score == 1.0 and scores:
            means.append(math.fsum(scores) / len(scores))
    return {
        "consistency": math.fsum(means) / len(means) if means else math.nan,
        **_balanced_figures(asked),
        "distribution": _distribution(asked),
    }


def _distribution(samples: Sequence[Scored]) -> float:
    right: dict[str, Counter[str]] = defaultdict(Counter)
    given: dict[str, Counter[str]] = defaultdict(Counter)
    for sample in samples:
        group = sample.question.details["group"]
        if group is not None:
            right[group][_plain(sample.question.references[0])] += 1
            given[group][sample.parsed] += 1
    total = sum(counts.total() for counts in right.values())
    if not total:
        return math.nan
    distances = (
        counts.total() * math.fsum((given[group][a] - n) ** 2 / n for a, n in counts.items())
        for group, counts in right.items()
    )
    return math.fsum(distances) / total / 100


def _task(name: str, split: str, size: int | None, with_entailed: bool = False) -> Task:
    what = "and the questions they entail: consistency" if with_entailed else "accuracy by type"
    return Task(
        name=name,
        description=f"GQA {split}, balanced: {what}",
        default_data="data/gqa",
        load=functools.partial(_load, split=split, with_entailed=with_entailed),
        parse=_parse,
        score=_score,
        max_new_tokens=16,
        metrics=consistency_figures if with_entailed else _balanced_figures,
        official_size=size,
    )


TASKS = [
    _task("gqa", "testdev", 12578),
    _task("gqa_consistency", "testdev", None, with_entailed=True),
    _task("gqa_val", "val", 132062),
    _task("gqa_val_consistency", "val", None, with_entailed=True),
]
