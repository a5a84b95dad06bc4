"""What `bench.inference` prints and writes."""

from __future__ import annotations

import contextlib
import json
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table

from bench.figure5 import draw, label
from bench.inference_models import BASELINE
from bench.roofline import Rates, break_even


class Report:
    """Tables on standard output, a bar on terminals, `results.json` after every cell.

    Args:
        folder: made if absent. machine: a line about it. options: of the program.
    """

    def __init__(self, folder: Path, machine: str, options: dict[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.machine = folder, machine
        self.console = Console(highlight=False)
        if not self.console.is_terminal:
            self.console.width = 120
        self.bar: Progress | None = None
        self.task: TaskID | None = None
        self.results: dict[str, Any] = {
            "machine": machine,
            "processor": platform.processor() or platform.machine(),
            "options": options,
            "complete": False,
            "cells": [],
            "skipped": [],
            "rates": {},
            "break_even": {},
            "profile": [],
        }
        self.say(f"bench.inference on {machine}")

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)

    @contextlib.contextmanager
    def progress(self, cells: int) -> Iterator[None]:
        """A bar over all cells, on terminals only."""
        if not self.console.is_terminal:
            yield
            return
        with Progress(console=self.console, transient=True) as self.bar:
            self.task = self.bar.add_task("cells", total=cells)
            yield
        self.bar = None

    def advance(self) -> None:
        if self.bar is not None and self.task is not None:
            self.bar.advance(self.task)

    def add(self, cell: dict[str, Any]) -> None:
        """Takes a cell: a line where there is no bar, and the file."""
        self.results["cells"].append(cell)
        self.advance()
        if self.bar is None:
            self.say(
                f"{cell['what']:8} batch {cell['batch']:<3} {label(cell['length']):>5}  "
                f"{cell['model']:18} {cell['milliseconds']:11.2f} ms  {cell['speedup']:6.2f}x"
            )
        self.write()

    def skip(self, what: str, name: str, rows: int, length: int, reason: str) -> None:
        self.results["skipped"].append(
            {"what": what, "model": name, "batch": rows, "length": length, "reason": reason}
        )
        self.say(f"{what} batch {rows} {label(length)} {name}: skipped, it {reason} of memory")
        self.advance()

    def matching(self, rows: dict[str, dict[str, float]]) -> None:
        """The matched configurations: parameters and FLOPs beside the baseline's."""
        self.results["matching"] = rows
        table = Table(title="FLOPs a token without attention maps and head", title_justify="left")
        for name in (
            "model",
            "parameters",
            "to the MoE's",
            "FLOPs",
            "to the MoE's ",
            "C's layers alone",
        ):
            table.add_column(name, justify="left" if name == "model" else "right")
        for name, row in rows.items():
            table.add_row(
                name,
                f"{row['parameters'] / 1e6:.2f} M",
                _percent(row["parameters_to_baseline"]),
                f"{row['flops_per_token'] / 1e6:.2f} M",
                _percent(row["flops_per_token_to_baseline"]),
                _percent(row["concept_flops_per_token_to_baseline"]),
            )
        self.console.print(table)

    def rates(self, kind: str, rates: Rates, unit: str) -> None:
        first, second = rates.first / 1e9, rates.second / 1e9
        self.results["rates"][kind] = {
            f"products_G{unit}_per_s": first,
            f"attention_G{unit}_per_s": second,
            "source": rates.source,
        }
        names = ("weights", "cache") if unit == "bytes" else ("products", "attention maps")
        self.say(
            f"rates of {kind} ({rates.source}): {names[0]} {first:.1f} G{unit}/s, "
            f"{names[1]} {second:.1f} G{unit}/s"
        )

    def table(self, cells: Sequence[dict[str, Any]]) -> None:
        """Cells of one kind and batch."""
        first = cells[0]
        title = "prefill" if first["what"] == "prefill" else f"decoding, batch {first['batch']}"
        table = Table(title=f"{title}, {self.machine}", title_justify="left")
        table.add_column("length", justify="right")
        table.add_column("model")
        for name in ("ms", "MoE ms", "speed-up", "predicted", "measured/predicted", "cache MB"):
            table.add_column(name, justify="right")
        table.add_column("C's MB", justify="right")
        for cell in cells:
            table.add_row(
                label(cell["length"]),
                cell["model"],
                f"{cell['milliseconds']:.2f}",
                f"{cell['baseline_milliseconds']:.2f}",
                f"{cell['speedup']:.2f}",
                f"{cell['predicted']:.2f}",
                f"{cell['measured_over_predicted']:.2f}",
                f"{cell['cache_bytes'] / 1e6:.2f}",
                f"{cell['concept_cache_bytes'] / 1e6:.2f}",
            )
        self.console.print(table)
        self.write()

    def profile(self, parts: Sequence[str]) -> None:
        """Milliseconds by part, and the length from which on each variant is not slower."""
        rows = self.results["profile"]
        table = Table(title="prefill by component, ms", title_justify="left")
        table.add_column("length", justify="right")
        table.add_column("model")
        names = (*parts, "rest", "total")
        for name in names:
            table.add_column(name, justify="right")
        for row in rows:
            times = [f"{row['milliseconds'][name]:.2f}" for name in names]
            table.add_row(label(row["length"]), row["model"], *times)
        self.console.print(table)
        totals = {(r["model"], r["length"]): r["milliseconds"]["total"] for r in rows}
        lengths = sorted({length for _, length in totals})
        for name in dict.fromkeys(model for model, _ in totals):
            if name == BASELINE:
                continue
            ratios = [totals[BASELINE, n] / totals[name, n] for n in lengths]
            found = self.results["break_even"].setdefault(name, {})
            found["by_profile"] = break_even(lengths, ratios)
        self.write()

    def finish(self, variants: Sequence[str]) -> None:
        """The break-even lengths, the last writing of the results, the figure."""
        for name in variants:
            found = self.results["break_even"].get(name)
            if found:
                text = ", ".join(f"{how.replace('_', ' ')} {at}" for how, at in found.items())
                self.say(f"break-even length of {name} (tokens): {text}")
        self.results["complete"] = True
        self.write()
        drawn = [c for c in self.results["cells"] if c["model"] in variants]
        if drawn:
            draw(drawn, self.machine, self.folder / "figure5.png")
        self.say(f"written to {self.folder}")

    def write(self) -> None:
        """Beside, then renamed: the file is whole at any time."""
        target = self.folder / "results.json"
        beside = target.with_name(".results.json.tmp")
        beside.write_text(json.dumps(self.results, indent=1), encoding="utf-8")
        beside.replace(target)


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.2f} %"
