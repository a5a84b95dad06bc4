"""Records that a build left out, counted by reason and named."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

from conceptmoe_vl.errors import UserError

DUPLICATE = "duplicate"
"""The reason of what `--deduplicate` leaves out: no fault, so --max-rejects does not count it."""

_EARLY = 1000  # records after which a share that is too high stops the build at once
_NAMED = 1000  # rejects that the report names; all are counted


@dataclasses.dataclass
class Rejects:
    """Records that were left out.

    Fields:
        records: all records so far, the rejected ones too.
        by_reason: counts.
        named: the first ones: record, field, reason, message.
    """

    records: int = 0
    by_reason: Counter[str] = dataclasses.field(default_factory=Counter)
    named: list[dict[str, str]] = dataclasses.field(default_factory=list)

    @property
    def count(self) -> int:
        return self.by_reason.total()

    def add(self, record: str, field: str, reason: str, message: str) -> None:
        self.by_reason[reason] += 1
        if len(self.named) < _NAMED:
            self.named.append(
                {"record": record, "field": field, "reason": reason, "message": message}
            )

    def check(self, most: float, early: bool = False) -> None:
        """Stops the build where the faults are more than this share of the records.

        Args:
            early: the build is under way: says nothing about a few records.

        Raises:
            UserError: names the counts and the first fault.
        """
        faults = self.count - self.by_reason[DUPLICATE]
        if faults > most * self.records and not (early and self.records < _EARLY):
            named = [entry for entry in self.named if entry["reason"] != DUPLICATE]
            first = f", first {named[0]['record']}: {named[0]['message']}" if named else ""
            raise UserError(
                f"{self.describe()}; more than --max-rejects {most:g} of the records cannot be "
                f"used{first}"
            )

    def describe(self) -> str:
        """One line: how many of how many, by reason."""
        reasons = ", ".join(
            f"{reason} {number:,}" for reason, number in self.by_reason.items() if number
        )
        return f"rejected {self.count:,} of {self.records:,} records" + (
            f": {reasons}" if reasons else ""
        )

    def as_report(self) -> dict[str, Any]:
        return {
            "records": self.records,
            "rejected": self.count,
            "by_reason": {name: count for name, count in self.by_reason.most_common() if count},
            "first": self.named,
        }
