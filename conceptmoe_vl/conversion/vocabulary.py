"""The tokenizer of a converted model: the source's, with the marks that pictures need."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from conceptmoe_vl.errors import UserError
from conceptmoe_vl.prompts import CHAT_TEMPLATE, PromptBuilder, read_messages
from conceptmoe_vl.tokenizing import add_special_tokens

_MULTIPLE = 64  # rows of a matrix that GPUs multiply fast
_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """A tokenizer and the rows of embedding and head that go with it.

    Attributes:
        tokenizer: with the added tokens. chat_template: the source's, or this package's.
        template_note: why the source's template was replaced; empty where it was kept.
        end_id: the mark that ends an answer under this template.
        known: tokens of the source's tokenizer. rows: rows of the converted model.
        new_rows: rows that no token of the source's tokenizer has: of added tokens, and appended.
        added: the added tokens.
    """

    tokenizer: Any
    chat_template: str
    template_note: str
    end_id: int
    known: int
    rows: int
    new_rows: list[int]
    added: list[str]


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a folder.

    Raises:
        UserError: there is none, or it cannot be loaded.
    """
    if not any((folder / name).is_file() for name in _FILES):
        raise UserError(f"'{folder}' holds no tokenizer; name a folder that does with --tokenizer")
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, ImportError) as error:
        raise UserError(
            f"the tokenizer in '{folder}' cannot be loaded: {' '.join(str(error).split())[:300]}"
        ) from error


def extend_vocabulary(tokenizer: Any, rows: int, where: Path) -> Vocabulary:
    """Adds the marks that a tokenizer lacks, and says which rows they take.

    Rows that pad the source's embedding are kept; an added token whose id falls on one takes it.
    Where rows must be appended to a multiple of 64, they are filled up to the next.

    Args:
        rows: rows of the source's embedding. where: its folder, for the error.

    Raises:
        UserError: the embedding has fewer rows than the tokenizer has tokens.
    """
    before = tokenizer.get_vocab()
    known, largest = len(tokenizer), max(before.values(), default=-1)
    if rows < known or rows <= largest:
        raise UserError(
            f"the tokenizer has {known} tokens with ids up to {largest}, but the embedding in "
            f"'{where}' has {rows} rows; they do not belong together: name the right one with "
            "--tokenizer"
        )
    add_special_tokens(tokenizer)
    added = sorted(set(tokenizer.get_vocab()) - before.keys(), key=tokenizer.convert_tokens_to_ids)
    needed = max(rows, max(tokenizer.get_vocab().values()) + 1)
    if needed > rows and rows % _MULTIPLE == 0:
        needed = -(-needed // _MULTIPLE) * _MULTIPLE
    ids = {tokenizer.convert_tokens_to_ids(token) for token in added}
    template, note = _fitting_template(tokenizer)
    return Vocabulary(
        tokenizer=tokenizer,
        chat_template=template,
        template_note=note,
        end_id=_end_of_answer(tokenizer, template),
        known=known,
        rows=needed,
        new_rows=sorted(ids | set(range(rows, needed))),
        added=added,
    )


def _fitting_template(tokenizer: Any) -> tuple[str, str]:
    """The tokenizer's chat template if the prompt builder can use it, else this package's; and why.

    A template that refuses system turns is kept.
    """
    own = tokenizer.chat_template
    if not isinstance(own, str):
        return CHAT_TEMPLATE, "the source has none"
    try:
        _end_of_answer(tokenizer, own)
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        return CHAT_TEMPLATE, " ".join(str(error).split())
    return own, ""


def _end_of_answer(tokenizer: Any, template: str) -> int:
    """Id of the mark behind an answer, from conversations of one and two questions.

    Raises:
        ValueError: the template does not fit the prompt builder's rules.
    """
    builder = PromptBuilder(tokenizer, template)
    asked = {"role": "user", "content": "a"}
    answered = [asked, {"role": "assistant", "content": "b"}]
    builder.build(read_messages([asked], True), [], True)
    builder.build(read_messages(answered * 2), [])
    _, labels = builder.build(read_messages(answered), [])
    supervised = [label for label in labels if label >= 0]
    return supervised[-1]


def end_ids(own: list[int], end_of_answer: int) -> int | list[int]:
    """Ids at which generation stops: the source's own and the mark behind an answer."""
    every = list(dict.fromkeys([*own, end_of_answer]))
    return every if len(every) > 1 else every[0]
