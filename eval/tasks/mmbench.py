"""MMBench (Liu et al. 2023), English development split: the TSV with pictures in base64.

The published score is circular: a question counts if it is answered rightly in every order of its
options. The file has one row an order, `index` one million apart, where it was made for that.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

from conceptmoe_vl.asking import question_messages
from conceptmoe_vl.errors import UserError
from eval.metrics import LETTERS
from eval.tasks import Question, Scored, Task
from eval.tasks._files import LETTER_ANSWER, complete, find_file, lettered
from eval.tasks._scoring import chosen_letter, is_reference
from eval.tasks._tables import TableRow, tsv_rows

_NAMES = (
    "MMBench_DEV_EN.tsv",
    "MMBench_DEV_EN_V11.tsv",
    "mmbench_dev_en_*.tsv",
    "mmbench_dev_*.tsv",
)
_ORDERS = 1_000_000  # `index` of the next order of the options
_EMPTY = ("", "nan", "NaN")


def load(path: Path) -> list[Question]:
    places = [place for name in _NAMES for place in (name, f"*/{name}")]
    file = path if path.is_file() else find_file(path, places, "table of MMBench")
    rows = tsv_rows(file, ("question", "A", "B", "answer"))
    questions = [_question(row) for row in rows]
    orders: dict[int, int] = {}
    for question in questions:
        group = question.details["cluster"]
        orders[group] = orders.get(group, 0) + 1
    known = (_with_orders(question, orders[question.details["cluster"]]) for question in questions)
    return complete("mmbench", known, [file])


def _question(row: TableRow) -> Question:
    fields = row.fields
    try:
        index = int(float(fields["index"]))
    except ValueError as error:
        raise UserError(f"'index' of {row.where} is '{fields['index']}', no number") from error
    options = []
    for letter in LETTERS:
        if fields.get(letter, "") in _EMPTY:
            break
        options.append(fields[letter])
    gold = fields["answer"].strip()
    if gold not in LETTERS[: len(options)] or not gold:
        raise UserError(
            f"'answer' of {row.where} is '{gold}', none of its {len(options)} options; the test "
            "split has no answers, take the development split"
        )
    hint = fields.get("hint", "")
    text = "" if hint in _EMPTY else f"{hint}\n"
    text += f"{fields['question']}\n{lettered(options)}\n{LETTER_ANSWER}"
    return Question(
        key=str(index),
        messages=question_messages([row.image()], text),
        references=(gold,),
        kind=fields.get("category", ""),
        choices=tuple(LETTERS[: len(options)]),
        details={
            "cluster": index % _ORDERS,
            "is_first_order": index < _ORDERS,
            "options": options,
            "ability": fields.get("l2-category", fields.get("L2-category", "")),
        },
    )


def _with_orders(question: Question, orders: int) -> Question:
    return dataclasses.replace(question, details={**question.details, "orders": orders})


def mmbench_figures(samples: Sequence[Scored]) -> dict[str, float]:
    """`circular_accuracy` (a question is right if every order is), `accuracy` of the first order
    alone, and the share of answers without a letter.
    """
    wrong = {sample.question.details["cluster"] for sample in samples if sample.score < 1}
    # Weighted by the question's orders, so that a question drawn twice counts twice.
    weights = [1 / sample.question.details["orders"] for sample in samples]
    right = [sample.question.details["cluster"] not in wrong for sample in samples]
    first = [sample.score for sample in samples if sample.question.details["is_first_order"]]
    return {
        "circular_accuracy": math.fsum(w for w, r in zip(weights, right, strict=True) if r)
        / math.fsum(weights),
        "accuracy": math.fsum(first) / len(first) if first else math.nan,
        "abstained": sum(sample.parsed == "" for sample in samples) / len(samples),
    }


TASK = Task(
    name="mmbench",
    description="MMBench (English, development): right in every order of the options",
    default_data="data/mmbench",
    load=load,
    parse=chosen_letter,
    score=is_reference,
    max_new_tokens=16,
    metrics=mmbench_figures,
    official_size=4329,
)
