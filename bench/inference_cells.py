"""The cells of `bench.inference`: what is timed against what, and what was predicted."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import statistics
from collections.abc import Callable
from typing import Any

import torch

from bench.component_profile import PARTS, component_milliseconds
from bench.inference_models import BASELINE, Contestant
from bench.inference_report import Report
from bench.inference_runs import Decoding, cache_need, held_bytes, prefill, random_ids
from bench.roofline import (
    Rates,
    Work,
    break_even,
    decoding_work,
    fit_rates,
    peak_rates,
    predicted_break_even,
    prefill_work,
)
from bench.timing import Clock, Pairs, alternate

_WARM_UP = 4096  # longest warm-up: above it a first run's share of one-time costs is small
_SPARE = 2**30  # bytes left free beside the caches


class Bench:
    """Times contestants against the baseline.

    Args:
        contestants: by name, the baseline among them. options: of the program. clock: of the
            device. report: takes every cell.
    """

    def __init__(
        self,
        contestants: dict[str, Contestant],
        options: argparse.Namespace,
        clock: Clock,
        report: Report,
    ) -> None:
        self.baseline = contestants[BASELINE]
        self.others = {name: c for name, c in contestants.items() if name != BASELINE}
        self.options, self.clock, self.report = options, clock, report
        self.value_bytes = torch.empty(0, dtype=getattr(torch, options.dtype)).element_size()

    def count(self) -> int:
        """Cells that the run will have."""
        lengths, others = len(self.options.lengths), len(self.others)
        sizes = {
            "prefill": lengths * others,
            "decode": lengths * others * len(self.options.batch),
            "profile": lengths,
        }
        return sum(sizes[what] for what in self.options.what)

    def prefills(self) -> None:
        """One document of every length; the models of one length take turns."""
        cells = []
        for length in self.options.lengths:
            ids = random_ids(self.baseline, 1, length)
            self._warm_up(self.baseline, length)
            runs, held = {}, {}
            for name, contestant in self.others.items():
                self._warm_up(contestant, length)
                runs[name], held[name] = self._remembering(prefill(contestant, ids))
            found, _ = alternate(
                self.clock,
                prefill(self.baseline, ids),
                runs,
                self.options.repeats,
                self.options.cell_seconds,
            )
            cells += [
                self._cell("prefill", name, 1, length, pairs, held[name])
                for name, pairs in found.items()
            ]
        self._predict(cells, lambda c, length: prefill_work(c, length), decoding=False)

    def _remembering(self, run: Callable[[], Any]) -> tuple[Callable[[], None], dict[str, int]]:
        """A run that notes what its cache holds, and lets go of the cache before the next run."""
        held: dict[str, int] = {}

        def remembering() -> None:
            out = run()
            cache = getattr(out, "cache", None)
            held.update(held_bytes(out.past_key_values if cache is None else cache))

        return remembering, held

    def _warm_up(self, contestant: Contestant, length: int) -> None:
        prefill(contestant, random_ids(contestant, 1, min(length, _WARM_UP)))()

    def decodings(self) -> None:
        """Steps of every batch at every context."""
        for rows in self.options.batch:
            cells = []
            for length in self.options.lengths:
                cells += self._decodings_at(rows, length)

            def work(contestant: Contestant, length: int, rows: int = rows) -> Work:
                return decoding_work(contestant, length, rows, self.value_bytes)

            self._predict(cells, work, decoding=True)

    def _decodings_at(self, rows: int, length: int) -> list[dict[str, Any]]:
        steps, cells = self.options.steps, []
        need = cache_need(self.baseline, rows, length + steps, self.value_bytes)
        baseline, before = None, None
        for name, contestant in self.others.items():
            both = need + cache_need(contestant, rows, length + steps, self.value_bytes) + _SPARE
            free = _free_bytes(self.options.device) + (need if baseline is not None else 0)
            if both > free:
                self.report.skip("decode", name, rows, length, f"needs {both / 2**30:.1f} GiB")
                continue
            if baseline is None:
                baseline = Decoding(self.baseline, rows, length, steps)
                baseline()
            run = Decoding(contestant, rows, length, steps)
            run()
            found, before = alternate(
                self.clock,
                baseline,
                {name: run},
                self.options.repeats,
                self.options.cell_seconds,
                before,
            )
            cells.append(self._cell("decode", name, rows, length, found[name], run.bytes, steps))
            del run
            _give_back(self.options.device)  # its cache may take half of the memory
        del baseline
        _give_back(self.options.device)
        return cells

    def _cell(
        self,
        what: str,
        name: str,
        rows: int,
        length: int,
        pairs: Pairs,
        held: dict[str, int],
        runs: int = 1,
    ) -> dict[str, Any]:
        """A cell as it is written; what is predicted follows when all lengths are measured."""
        cell = {
            "what": what,
            "model": name,
            "batch": rows,
            "length": length,
            "milliseconds": 1e3 * pairs.variant / runs,
            "baseline_milliseconds": 1e3 * pairs.baseline / runs,
            "speedup": pairs.speedup,
            "pairs": pairs.count,
            "cache_bytes": sum(held.values()),
            "concept_cache_bytes": held["concepts"],
        }
        self.report.add(cell)
        return cell

    def _predict(
        self,
        cells: list[dict[str, Any]],
        work: Callable[[Contestant, int], Work],
        decoding: bool,
    ) -> None:
        """Adds what the rates of the baseline's cells predict."""
        if not cells:
            return
        base = {c["length"]: c["baseline_milliseconds"] / 1e3 for c in cells}
        peaks = peak_rates(self.baseline, decoding, self.clock)
        rates = fit_rates([work(self.baseline, n) for n in base], list(base.values()), peaks)
        for cell in cells:
            length, contestant = cell["length"], self.others[cell["model"]]
            expected = rates.seconds(work(self.baseline, length))
            cell["predicted"] = expected / rates.seconds(work(contestant, length))
            cell["measured_over_predicted"] = cell["speedup"] / cell["predicted"]
        kind = f"decode, batch {cells[0]['batch']}" if decoding else "prefill"
        self.report.rates(kind, rates, "bytes" if decoding else "FLOPs")
        if not decoding:
            self._break_evens(cells, rates)
        self.report.table(cells)

    def _break_evens(self, cells: list[dict[str, Any]], rates: Rates) -> None:
        for name, contestant in self.others.items():
            own = sorted((c["length"], c["speedup"]) for c in cells if c["model"] == name)
            if contestant.is_peer or not own:
                continue
            self.report.results["break_even"][name] = {
                "measured": break_even(*zip(*own, strict=True)),
                "predicted": predicted_break_even(self.baseline, contestant, rates),
            }

    def profiles(self) -> None:
        """Milliseconds of the parts of a prefill; the models take turns."""
        ours = {BASELINE: self.baseline}
        ours |= {name: c for name, c in self.others.items() if not c.is_peer}
        for length in self.options.lengths:
            ids = random_ids(self.baseline, 1, length)
            for contestant in ours.values():
                self._warm_up(contestant, length)
            found: dict[str, list[dict[str, float]]] = {name: [] for name in ours}
            for _ in range(1 if length > _WARM_UP else self.options.repeats):
                for name, contestant in ours.items():
                    run = prefill(contestant, ids)
                    found[name].append(component_milliseconds(contestant.model, run, self.clock))
            for name, runs in found.items():
                parts = {part: statistics.median(run[part] for run in runs) for part in runs[0]}
                self.report.results["profile"].append(
                    {"model": name, "length": length, "milliseconds": parts}
                )
            self.report.advance()
        self.report.profile(PARTS)


def _give_back(device: str) -> None:
    """Freed memory goes back to the system: the process keeps it otherwise (see
    conceptmoe_vl_runtime), and the next cache, of another size, might not fit beside it.
    """
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
        return
    # Other C libraries than glibc have no such call, and nothing to give back.
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def _free_bytes(device: str) -> float:
    """Memory that can still be taken, or infinity where the system does not say."""
    if device.startswith("cuda"):
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            values = dict(line.split(":", 1) for line in lines)
    except OSError:
        return float("inf")
    return int(values["MemAvailable"].split()[0]) * 1024
