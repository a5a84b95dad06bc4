"""YAML in and out: floats such as `3e-4` are numbers, a key given twice is an error.

PyYAML follows YAML 1.1, which reads `3e-4` as a string and takes the last of two equal keys without
a word; both have cost people runs.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from conceptmoe_vl.errors import UserError
from conceptmoe_vl.files import written_whole


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen: set = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key '{key}' is given twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*)(\.[\d_]*)?[eE][-+]?\d+$"),
    list("-+0123456789"),
)


def _one_line(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    place = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
    return f"{getattr(error, 'problem', None) or error}{place}".replace("\n", " ")


def parse_yaml(text: str, where: str) -> Any:
    """The value of a YAML text; `where` names it in the error.

    Raises:
        UserError: the text is no YAML, or a mapping in it gives a key twice.
    """
    try:
        return yaml.load(text, Loader=_Loader)  # a SafeLoader
    except yaml.YAMLError as error:
        raise UserError(f"{where} is no valid YAML: {_one_line(error)}") from error


def read_yaml(path: str | Path) -> dict:
    """The mapping in a YAML file, laid over the file that its key `extends` names.

    `extends` is a path from the file's own folder. Mappings are merged key by key, at any depth;
    any other value, null too, replaces what it extends.

    Raises:
        UserError: a file is missing, unreadable, not YAML, or holds no mapping; or it extends
            itself.
    """
    return _read_extended(Path(path), ())


def _read_extended(path: Path, children: tuple[Path, ...]) -> dict:
    if path.resolve() in children:
        raise UserError(f"{path} extends itself; take a key 'extends' out")
    values = _read_file(path)
    base = values.pop("extends", None)
    if base is None:
        return values
    if not isinstance(base, str):
        raise UserError(f"{path}: extends is {base!r}; name one YAML file")
    return _merged(_read_extended(path.parent / base, (*children, path.resolve())), values)


def _merged(base: dict, values: dict) -> dict:
    merged = dict(base)
    for key, value in values.items():
        both = isinstance(value, dict) and isinstance(base.get(key), dict)
        merged[key] = _merged(base[key], value) if both else value
    return merged


def _read_file(path: Path) -> dict:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the configuration {path}: {error}") from error
    values = parse_yaml(text, str(path))
    if not isinstance(values, dict):
        raise UserError(
            f"{path} holds {type(values).__name__}, not a mapping of configuration sections"
        )
    return values


def write_yaml(path: str | Path, values: dict) -> None:
    """Writes a mapping beside `path` and renames it, so that `path` is whole or absent."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    with written_whole(target) as beside:
        beside.write_text(text, encoding="utf-8")
