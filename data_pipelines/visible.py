"""Texts of records for the terminal and for pages."""

from __future__ import annotations

import unicodedata

_KEPT = "\n\t\u200c\u200d"  # joiners make letters of several scripts and emoji


def visible(text: str) -> str:
    """The text with control characters as `<U+001B>`: none of them moves a cursor or turns the
    direction of what follows. Line breaks, tabs and joiners stay."""
    return "".join(
        character
        if character in _KEPT or unicodedata.category(character) not in ("Cc", "Cf", "Cs")
        else f"<U+{ord(character):04X}>"
        for character in text
    )
