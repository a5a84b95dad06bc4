"""Errors that a user of a program can mend: programs print them in one line and exit with status 2."""

from __future__ import annotations


class UserError(ValueError):
    """What was wrong, where (file, shard, key, configuration field), and what to do, in one line."""
