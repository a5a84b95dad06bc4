"""Checks of configuration fields: `ValueError` with the field's name, its value and the remedy."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterable
from typing import Any

from conceptmoe_vl.errors import UserError


def check_known_keys(given: Any, known: Any, where: str) -> None:
    """Raises `ValueError` for the first key of `given` not in `known`, naming the nearest."""
    known = sorted(known)
    for key in given:
        if key in known:
            continue
        near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.0)
        hint = f"; the nearest known key is '{near[0]}'" if near else ""
        raise ValueError(f"unknown configuration key '{where}.{key}'{hint}")


def require(condition: bool, message: str) -> None:
    """Raises `ValueError` with the message unless the condition holds."""
    if not condition:
        raise ValueError(message)


def require_choice(section: str, name: str, value: Any, choices: tuple) -> None:
    """Raises `ValueError` unless the field has one of these values."""
    require(value in choices, f"{section}.{name} is {value!r}; choose one of {list(choices)}")


def require_numbers(
    section: str, values: Any, *names: str, least: float = 0.0, above: bool = False
) -> None:
    """Raises `ValueError` unless fields are None or finite numbers from `least` on, or above it.

    Args:
        section: the name of `values` in messages.
    """
    for name in names:
        value = getattr(values, name)
        fits = value is None or (
            math.isfinite(value) and (value > least if above else value >= least)
        )
        bound = f"above {least:g}" if above else f"of {least:g} or more"
        require(fits, f"{section}.{name} is {value}; give a number {bound}")


def refuse_idle(section: Any, where: str, names: Iterable[str], because: str) -> None:
    """Raises `UserError` for the first field that is not its default although it has no effect.

    A run must not differ from what its configuration says. Defaults pass: a resolved configuration
    holds all fields.

    Args:
        section: a dataclass. names: its fields that have no effect.
        because: why, and what to set instead.
    """
    for field in dataclasses.fields(section):
        value, made = getattr(section, field.name), field.default_factory
        default = field.default if made is dataclasses.MISSING else made()
        if field.name in names and value != default:
            raise UserError(
                f"{where}.{field.name} is {value!r}, which has no effect: {because}, or leave it "
                "out"
            )


# Parameters of each kind of rope scaling; the first ones must be given.
ROPE_SCALINGS = {
    "linear": (("factor",), ()),
    "llama3": (
        ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        (),
    ),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
}


def check_rope_scaling(scaling: dict) -> None:
    """Raises `ValueError` unless these are the parameters of a kind of rope scaling."""
    where = "text.rope_scaling"
    kind = scaling.get("rope_type")
    require_choice("text", "rope_scaling.rope_type", kind, tuple(ROPE_SCALINGS))
    needed, optional = ROPE_SCALINGS[str(kind)]
    check_known_keys(scaling, ("rope_type", *needed, *optional), where)
    for name in needed:
        value = scaling.get(name)
        require(
            isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0,
            f"{where}.{name} is {value!r}; {kind} scaling needs a positive number",
        )


def check_type(section: str, key: str, value: Any, annotation: str) -> None:
    """Raises `ValueError` unless the value is of a dataclass field's annotated type."""
    allowed = {part.strip() for part in annotation.split("|")}
    number: dict[str, type | tuple[type, ...]] = {
        "int": int,
        "float": (int, float),
        "bool": bool,
        "str": str,
        "list": (list, tuple),
        "dict": dict,
    }
    if value is None:
        ok = "None" in allowed
    elif isinstance(value, bool):
        ok = "bool" in allowed
    else:
        ok = any(
            isinstance(value, number[part]) for part in allowed if part in number and part != "bool"
        )
    require(ok, f"{section}.{key} is {value!r}; its type is {annotation}")
