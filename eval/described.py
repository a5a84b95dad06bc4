"""Tasks that a YAML file describes: questions from JSONL files or shards, without a line of Python.

Keys of the file are the fields of `Description`; docs/evaluation.md has an example.
"""

from __future__ import annotations

import dataclasses
import difflib
import glob
import json
import os
import re
import string
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from conceptmoe_vl.errors import UserError
from conceptmoe_vl.field_checks import check_known_keys, check_type, require, require_choice
from conceptmoe_vl.training.yaml_io import read_yaml
from eval import metrics
from eval.records import load_questions
from eval.tasks import Question, Task, mean_perplexity, mean_score
from eval.tasks._scoring import against_references

LETTERS = string.ascii_uppercase

_METRIC_NAMES = (
    *("exact_match", "anls", "relaxed_accuracy", "vqa_accuracy", "vqa_accuracy_normalized"),
    "textvqa_accuracy",
)
METRICS: dict[str, Callable[[str, Sequence[str]], float]] = {
    name: getattr(metrics, name) for name in _METRIC_NAMES
}

PARSERS: dict[str, Callable[[str, Sequence[str]], str]] = {
    "text": lambda text, choices: text.strip(),
    "lower": lambda text, choices: text.strip().lower(),
    "first_line": lambda text, choices: text.strip().partition("\n")[0].strip(),
    "letter": lambda text, choices: metrics.parse_choice(text, choices),
    "yes_no": lambda text, choices: metrics.parse_yes_no(text),
}


@dataclasses.dataclass(frozen=True)
class Description:
    """The keys of a task's YAML file.

    Fields:
        data: a JSONL file, a pattern of several, or the shards `FOLDER/SPLIT-*.tar`; relative to
            the YAML file.
        name: of the results' folder; the YAML file's own by default.
        description: one line for the report.
        prompt: the user's turn; `{field}` stands for a field of the row, `{choices}` for the
            choices with their letters, a line each. Of shards `{question}` is the only field.
        system: the system turn, if any; the same fields.
        images: fields that hold a path or a list of paths, relative to the JSONL file. They stand
            before the prompt.
        references: field with the right answer, or a list of them. With choices: the text of the
            right one, its letter, or its number from 0.
        choices: field with a list, or the list itself.
        kind, key, cluster: fields: the group in the report, the question's name (by default the
            number of its line), and what is resampled together.
        mode: generate | choose | perplexity (of the references, behind the prompt if there is one).
        metric: what a parsed answer is scored by, a name in `METRICS`.
        parse: what is read from the answer, a name in `PARSERS`, or `{regex: ...}`: the first group
            of its first match.
        max_new_tokens: longest answer, in tokens. stop: strings that end it.
        official_size: questions of the official test set.
    """

    data: str
    name: str = ""
    description: str = ""
    prompt: str | None = None
    system: str | None = None
    images: str | list = ()  # type: ignore[assignment]
    references: str = "answer"
    choices: str | list | None = None
    kind: str | None = None
    key: str | None = None
    cluster: str | None = None
    mode: str = "generate"
    metric: str = "exact_match"
    parse: str | dict = "text"
    max_new_tokens: int = 32
    stop: str | list = ()  # type: ignore[assignment]
    official_size: int | None = None

    def check(self) -> None:
        """Raises `ValueError` where a value is none that its key takes."""
        for field in dataclasses.fields(self):
            check_type("task", field.name, getattr(self, field.name), str(field.type))
        require_choice("task", "mode", self.mode, ("generate", "choose", "perplexity"))
        require_choice("task", "metric", self.metric, tuple(METRICS))
        if isinstance(self.parse, dict):
            require(
                set(self.parse) == {"regex"}, f"task.parse is {self.parse}; give {{regex: ...}}"
            )
            try:
                groups = re.compile(str(self.parse["regex"])).groups
            except re.error as error:
                raise ValueError(f"task.parse.regex is no regular expression: {error}") from error
            require(groups > 0, "task.parse.regex has no group; put what is read in parentheses")
        else:
            require_choice("task", "parse", self.parse, tuple(PARSERS))
        require(self.max_new_tokens > 0, f"task.max_new_tokens is {self.max_new_tokens}; give 1")
        for name in ("choices", "images", "stop"):
            _texts(getattr(self, name) or [], f"task.{name}")
        needs_choices = self.mode == "choose" or self.parse == "letter"
        require(
            bool(self.choices) or not needs_choices,
            "task.choices is missing; mode choose and parse letter need them",
        )
        require(
            bool(self.prompt) or self.mode == "perplexity" or self.is_shards,
            "task.prompt is missing; write the user's turn, with {field} for fields of the row",
        )
        if self.is_shards:
            given = [name for name in _ROW_FIELDS if getattr(self, name) != _DEFAULTS[name]]
            require(
                not given,
                f"task.{'/'.join(given)}: records of shards have images, question and answer; "
                "only rows of JSONL have fields",
            )

    @property
    def is_shards(self) -> bool:
        return self.data.endswith(".tar")


_DEFAULTS = {field.name: field.default for field in dataclasses.fields(Description)}
_ROW_FIELDS = ("images", "references", "kind", "key", "cluster")
_CHOICES = "{choices}"
_TAKEN = frozenset({"", ".", "..", "replies"})  # names that are no folders of results


def read_task(path: Path) -> Task:
    """The task that a YAML file describes.

    Raises:
        UserError: the file cannot be read, has a key that nothing knows (the nearest is named), or
            a value that its key does not take.
    """
    values = read_yaml(path)
    try:
        check_known_keys(values, _DEFAULTS, "task")
        require("data" in values, "task.data is missing; name a JSONL file or shards")
        description = Description(**values)
        description.check()
        name = description.name or path.stem
        require(
            Path(name).name == name and name not in _TAKEN,
            f"task.name is {name!r}; give one that can be the results' folder in --output",
        )
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error
    return Task(
        name=name,
        description=description.description or name,
        default_data=str(path.parent / description.data),
        load=lambda data: load_described(description, data),
        parse=_parser(description),
        score=against_references(METRICS[description.metric]),
        max_new_tokens=description.max_new_tokens,
        mode=description.mode,  # type: ignore[arg-type]
        stop=tuple(_texts(description.stop, "task.stop")),
        metrics=mean_perplexity if description.mode == "perplexity" else mean_score,
        official_size=description.official_size,
        scoring={"parse": description.parse, "metric": description.metric},
    )


def _as_list(value: Any) -> list:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _texts(value: Any, where: str) -> list[str]:
    """A text or number, or a list of them, as texts.

    Raises:
        UserError: it is anything else, such as null, or the true that an unquoted yes is in YAML.
    """
    for item in _as_list(value):
        if isinstance(item, bool) or not isinstance(item, (str, int, float)):
            raise UserError(f"{where} holds {item!r}; give texts, yes and no in quotes")
    return [str(item) for item in _as_list(value)]


def _parser(description: Description) -> Callable[[str, Question], str]:
    if description.mode != "generate":
        return lambda text, question: text
    if isinstance(description.parse, dict):
        pattern = re.compile(str(description.parse["regex"]))

        def first_group(text: str, question: Question) -> str:
            match = pattern.search(text)
            return (match.group(1) or "") if match else ""

        return first_group
    parse = PARSERS[description.parse]
    return lambda text, question: parse(text, question.choices)


def load_described(description: Description, data: Path) -> list[Question]:
    """The questions of a description's data, in the order of its rows or shards.

    Raises:
        UserError: no such data, or a row lacks a field or is damaged; names file and line.
    """
    if description.is_shards:
        return _of_shards(description, data)
    # A file is taken as it is called: brackets in its path are no pattern.
    found = [str(data)] if data.is_file() else glob.glob(str(data), recursive=True)
    paths = sorted(map(Path, found))
    if not paths:
        raise UserError(f"there is no file '{data}'; name the rows with data or --data")
    # Questions have the same names wherever the folder lies, so that their runs can be compared.
    root = Path(os.path.commonpath([path.parent for path in paths]))
    return [
        _question(description, row, path, f"{path.relative_to(root).as_posix()}:{number}", number)
        for path in paths
        for number, row in _rows(path)
    ]


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Numbers (from 1) and rows of a JSONL file's lines; empty lines are passed over."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"'{path}' cannot be read ({error}); it should be JSONL") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if "\\ud" in line.lower():  # half a character, which no tokenizer takes
                json.dumps(row, ensure_ascii=False).encode()
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}:{number} is no JSON ({error}); mend the line") from error
        if not isinstance(row, dict):
            raise UserError(f"{path}:{number} is no JSON object; give {{field: value}}")
        yield number, row


def _field(row: dict[str, Any], name: str, where: str) -> Any:
    if name not in row:
        near = difflib.get_close_matches(name, row, n=1, cutoff=0.0)
        hint = f"; the nearest is '{near[0]}'" if near else ""
        raise UserError(f"{where} has no field '{name}'{hint}")
    return row[name]


def _question(
    description: Description, row: dict[str, Any], path: Path, key: str, number: int
) -> Question:
    where = f"{path}:{number}"

    def texts(field: str) -> list[str]:
        return _texts(_field(row, field, where), f"'{field}' of {where}")

    choices = _choices(description, texts)
    texts(description.references)
    answers = _as_list(row[description.references])
    if not answers:
        raise UserError(f"'{description.references}' of {where} is empty; give the right answer")
    details = {}
    if description.cluster:
        details["cluster"] = _field(row, description.cluster, where)
    images = [
        {"type": "image", "image": path.parent / name}
        for field in _texts(description.images, "task.images")
        for name in (texts(field) if _field(row, field, where) is not None else ())
    ]
    fields = _with_choices(row, choices, description, where)
    return Question(
        key=str(_field(row, description.key, where)) if description.key else key,
        messages=_messages(description, fields, images, where),
        references=[_reference(description, answer, choices, where) for answer in answers],
        kind=str(_field(row, description.kind, where)) if description.kind else "",
        choices=choices,
        details=details,
    )


def _choices(description: Description, texts: Callable[[str], list[str]]) -> list[str]:
    """The choices of a row: its field, or those that the description lists for all rows."""
    if isinstance(description.choices, str):
        return texts(description.choices)
    return _texts(description.choices or [], "task.choices")


def _with_choices(
    fields: dict[str, Any], choices: list[str], description: Description, where: str
) -> dict[str, Any]:
    """The fields of a template, `choices` with letters among them if there are any."""
    if description.choices is None:
        return fields
    shown = _CHOICES in f"{description.prompt}{description.system}"
    if len(choices) > len(LETTERS) and (shown or description.parse == "letter"):
        raise UserError(f"{where} has {len(choices)} choices; letters name {len(LETTERS)} at most")
    return {**fields, "choices": _lettered(choices)}


def _messages(
    description: Description, fields: dict[str, Any], images: list[dict], where: str
) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if description.system is not None:
        messages.append({"role": "system", "content": _fill(description.system, fields, where)})
    if description.prompt is not None or images:
        text = _fill(description.prompt or "", fields, where)
        messages.append({"role": "user", "content": [*images, {"type": "text", "text": text}]})
    return messages


def _fill(template: str, fields: dict[str, Any], where: str) -> str:
    """The template with its fields; `{{` is a brace."""
    try:
        pieces = list(string.Formatter().parse(template))
    except ValueError as error:
        raise UserError(f"the prompt {template!r} is no template ({error})") from error
    filled = []
    for text, name, format_, conversion in pieces:
        if format_ or conversion:
            raise UserError(
                f"the prompt {template!r} formats '{name}'; fields stand as {{{name}}}, a brace as "
                "{{"
            )
        filled += [text, "" if name is None else str(_field(fields, name, where))]
    return "".join(filled)


def _lettered(choices: Sequence[str]) -> str:
    return "\n".join(
        f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices, strict=False)
    )


def _reference(description: Description, answer: Any, choices: list[str], where: str) -> str:
    """The reference as it is compared: of choices the text, or the letter if letters are parsed."""
    if not choices or (description.mode == "generate" and description.parse != "letter"):
        return str(answer)
    letters = LETTERS[: len(choices)]
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(choices):
        number = answer
        if str(answer) in choices and choices[number] != str(answer):
            raise UserError(
                f"{where}: the right answer {answer} is a choice's number and another one's text; "
                "give its letter, or its text in quotes"
            )
    elif str(answer) in choices:
        number = choices.index(str(answer))
    elif isinstance(answer, str) and len(answer) == 1 and answer in letters:
        number = letters.index(answer)
    else:
        raise UserError(
            f"{where}: the right answer {answer!r} is none of the choices {choices}; give its "
            "text, its letter or its number from 0"
        )
    return choices[number] if description.mode == "choose" else letters[number]


def _of_shards(description: Description, data: Path) -> list[Question]:
    split, star, rest = data.name.partition("-*")
    if not star or rest != ".tar":
        raise UserError(f"data is '{data}'; name shards as FOLDER/SPLIT-*.tar")
    choices = _texts(description.choices or [], "task.choices")
    questions = load_questions(data.parent, split, lambda references: "", "SOURCE")
    return [_asked_otherwise(question, description, choices) for question in questions]


def _asked_otherwise(question: Question, description: Description, choices: list[str]) -> Question:
    """A shard's question with the description's prompt, system turn and choices."""
    *before, last = question.messages
    where = f"record '{question.key}'"
    fields = _with_choices({"question": question.text}, choices, description, where)
    images = [part for part in last["content"] if part["type"] == "image"]
    messages = _messages(description, fields, images, where) if description.prompt else [last]
    if description.prompt is None and description.system is not None:
        system = _fill(description.system, fields, where)
        messages = [{"role": "system", "content": system}, last]
    if description.system is None:
        messages = [*before, *messages]
    references = [_reference(description, answer, choices, where) for answer in question.references]
    return dataclasses.replace(question, messages=messages, references=references, choices=choices)
