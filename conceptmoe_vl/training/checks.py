"""Checks of configuration values: what fails is a user's mistake."""

from __future__ import annotations

import math
from typing import Any

from conceptmoe_vl.configuration import check_known_keys
from conceptmoe_vl.errors import UserError
from conceptmoe_vl.sections import check_fields


def require(condition: bool, message: str) -> None:
    """Raises `UserError` unless the condition holds."""
    if not condition:
        raise UserError(message)


def require_known(given: Any, known: Any, where: str) -> None:
    """Raises `UserError` that names the nearest known key for the first unknown one."""
    try:
        check_known_keys(given, known, where)
    except ValueError as error:
        raise UserError(str(error)) from error


def require_fields(section: str, values: Any) -> None:
    """Raises `UserError` unless these are some of the fields of a section of the model."""
    try:
        check_fields(section, values)
    except ValueError as error:
        raise UserError(str(error)) from error


def require_share(section: Any, where: str, *names: str) -> None:
    """Raises `UserError` unless these fields of a section are None or from 0 to 1."""
    for name in names:
        value = getattr(section, name)
        require(value is None or 0 <= value <= 1, f"{where}.{name} is {value}; give 0 to 1")


def require_number(value: Any, name: str, least: float, inclusive: bool = True) -> None:
    """Raises `UserError` unless a value is a finite number from `least` on, or above it."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    fits = is_number and math.isfinite(value) and (value > least or (inclusive and value == least))
    bound = f"of {least:g} or more" if inclusive else f"above {least:g}"
    require(fits, f"{name} is {value!r}; give a number {bound}")
