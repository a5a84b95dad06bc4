"""Errors that a user of a program can mend.

Programs print them in one line and exit with status 2.
"""

from __future__ import annotations


class UserError(ValueError):
    """What was wrong, where (file, shard, key, configuration field), what to do: one line."""
