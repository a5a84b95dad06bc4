"""Errors that a user of a program can mend.

Programs print them in one line and exit with status 2.
"""

from __future__ import annotations


class UserError(ValueError):
    """What was wrong, where (file, shard, key, configuration field), what to do: one line."""


class NothingUsableError(UserError):
    """A rank's stream that has gone through its samples and found none to train on."""


class DataFaultError(UserError):
    """A sample, or a part of one, that cannot be used.

    Attributes:
        reason: short and stable, for counting.
        field: what is at fault in the record; empty: the whole.
    """

    def __init__(self, reason: str, message: str, field: str = "") -> None:
        super().__init__(message)
        self.reason = reason
        self.field = field

    def __reduce__(self) -> tuple:
        return type(self), (self.reason, str(self), self.field)
