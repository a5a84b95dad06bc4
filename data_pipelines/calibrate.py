"""`conceptmoe-vl calibrate MODEL DATA...`: thresholds for a range of ratios, measured on shards."""

from __future__ import annotations

import argparse
from typing import Any

import conceptmoe_vl_runtime
from conceptmoe_vl.errors import UserError

RATIOS = (1.05, 1.1, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0)
_TEXT = (
    "Measures how p of the boundaries is distributed on shards of yours, by modality, and stores "
    "the thresholds for a range of ratios in the model's folder: generate(compression=R), demo.py "
    "and the evaluation then take any of them."
)


def add_command(commands: Any) -> None:
    """Adds `calibrate` to the commands of `conceptmoe-vl` (an entry point)."""
    parser = commands.add_parser(
        "calibrate", help="store thresholds for --compression", description=_TEXT
    )
    parser.add_argument("model", metavar="MODEL", help="model folder")
    parser.add_argument(
        "data", nargs="+", metavar="DATA", help="shards: files, patterns or folders"
    )
    parser.add_argument(
        "--tokens",
        type=int,
        default=200_000,
        metavar="N",
        help="tokens to measure at least (default: %(default)s)",
    )
    parser.add_argument(
        "--ratios",
        type=float,
        nargs="+",
        default=list(RATIOS),
        metavar="R",
        help="ratios to store (default: %(default)s)",
    )
    parser.add_argument("--device", help="torch device (default: cuda if there is one, else cpu)")
    parser.set_defaults(run=calibrate)


def calibrate(arguments: argparse.Namespace) -> int:
    """Runs the command.

    Raises:
        UserError: no model, no shards, a wrong number, or a router without thresholds.
    """
    conceptmoe_vl_runtime.setup(quiet=True)
    ratios = tuple(sorted(set(arguments.ratios)))
    if not all(1 < ratio < float("inf") for ratio in ratios):
        raise UserError(f"--ratios is {arguments.ratios}; give numbers above 1")
    if arguments.tokens < 1:
        raise UserError(f"--tokens is {arguments.tokens}; give 1 or more")
    from conceptmoe_vl.asking import check_model_folder, load_pretrained
    from conceptmoe_vl.calibration import calibration_table, store_calibration

    folder = check_model_folder(arguments.model)
    model, processor = load_pretrained(folder, arguments.device)
    distributions = _measure(model, processor, arguments.data, arguments.tokens)
    table = calibration_table(distributions, ratios)
    report = _report(model.config.chunk, distributions, table, arguments)
    store_calibration(folder, table, report)
    _print(report)
    print(f"thresholds: {folder / 'config.json'}\ndistributions: {folder / 'calibration.json'}")
    return 0


def _measure(model: Any, processor: Any, shards: list[str], tokens: int) -> dict[str, Any]:
    import torch
    from rich.console import Console
    from rich.progress import Progress

    from conceptmoe_vl.calibration import ProbabilityMeter
    from data_pipelines.config import DataConfig
    from data_pipelines.stream import build_stream

    stream = build_stream(DataConfig(shards=shards, epochs=1, tokens_per_batch=4096), processor)
    meter = ProbabilityMeter()
    console = Console(stderr=True)
    bar = Progress(transient=True, console=console, disable=not console.is_terminal)
    with meter.watch(model), torch.inference_mode(), bar as progress:
        task = progress.add_task("reading", total=tokens)
        for batch in stream:
            model(**batch.to(model.device).model_inputs(), logits_to_keep=1, return_logits=False)
            progress.update(task, completed=min(meter.tokens, tokens))
            if meter.tokens >= tokens:
                break
    return meter.distributions()


def _report(config: Any, distributions: dict, table: dict, arguments: Any) -> dict[str, Any]:
    from conceptmoe_vl.calibration import target_of

    report: dict[str, Any] = {"data": list(arguments.data), "table": table, "measured": {}}
    for name, own in distributions.items():
        target = target_of(config, name)
        report["measured"][name] = {
            "tokens": own.tokens,
            "forced": own.forced,
            "ratio": own.ratio,
            "target": target,
            "drift": own.ratio / target - 1 if target and own.ratio else None,
            "histogram": own.histogram(),
            "reached": [
                None if threshold is None or not own.tokens else own.reached(threshold)
                for threshold in table[name]
            ],
        }
    return report


def _print(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    drift = Table(title="ratio now, against what training asked for", title_justify="left")
    for name in ("tokens", "count", "forced", "ratio", "target", "drift", "p from 0 to 1"):
        drift.add_column(name, justify="left" if name in ("tokens", "p from 0 to 1") else "right")
    for name, own in report["measured"].items():
        shown = (_number(own[key]) for key in ("ratio", "target"))
        change = "-" if own["drift"] is None else f"{own['drift']:+.1%}"
        bars = _bars(own["histogram"])
        drift.add_row(name, f"{own['tokens']:,}", f"{own['forced']:,}", *shown, change, bars)
    console.print(drift)
    reached = Table(title="thresholds of p", title_justify="left")
    for name in ("ratio", "all", "text", "image"):
        reached.add_column(name, justify="right")
    columns = [report["table"][name] for name in ("all", "text", "image")]
    for ratio, *thresholds in zip(report["table"]["ratios"], *columns, strict=True):
        reached.add_row(f"{ratio:g}", *(_number(t, 4) for t in thresholds))
    console.print(reached)
    if any(threshold is None for column in columns for threshold in column):
        console.print("-: out of reach, since forced boundaries alone are more")


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _bars(counts: list[int]) -> str:
    """A histogram in one line of text."""
    top = max(max(counts), 1)
    return "".join(" ▁▂▃▄▅▆▇█"[-(-8 * count // top)] for count in counts)
