"""What `conceptmoe-vl plan` prints, draws and writes."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from conceptmoe_vl.configuration import ConceptMoEVLConfig
from conceptmoe_vl.conversion.settings import source_config
from conceptmoe_vl.errors import UserError
from conceptmoe_vl.files import written_whole
from conceptmoe_vl.flops import count_parameters, decoding_cost, forward_flops
from conceptmoe_vl.flops_report import VALUE_BYTES, read_config, read_json, short
from conceptmoe_vl.memory import cache_bytes
from conceptmoe_vl.plan_remedies import remedies
from conceptmoe_vl.plan_search import FLOPS_LIMIT, PARAMETER_LIMIT
from conceptmoe_vl.planning import PLANNED_FIELDS, Plan, plan

LENGTHS = tuple(2**power for power in range(10, 21))  # 1k to 1M tokens
_OPTIONS = ("encoder_layers", "decoder_layers", "joint_layers", "loops", "width")
_TABLE1 = {
    "experts": ("R²", "R"),
    "loops": ("R² L / (L + L_loop)", "R L / (L + L_loop)"),
    "width": ("R²", "R"),
}


@dataclasses.dataclass(frozen=True)
class Saving:
    """FLOPs of a prefill, bytes a decoded token reads and writes, bytes of the cache: pairs of
    baseline and plan, at `tokens` tokens.
    """

    tokens: int
    prefill_flops: tuple[float, float]
    decoding_bytes: tuple[float, float]
    cache_bytes: tuple[float, float]


def savings(found: Plan, rows: int = 1, bytes_per_value: int = 2) -> list[Saving]:
    """What a document of each length costs (a prefill computes one position of logits)."""
    pair = found.baseline, found.config
    return [
        Saving(
            tokens,
            *(
                (measure(pair[0], tokens), measure(pair[1], tokens))
                for measure in (
                    _prefill,
                    _decoding(rows, bytes_per_value),
                    _cache(rows, bytes_per_value),
                )
            ),
        )
        for tokens in LENGTHS
    ]


_Measure = Callable[[ConceptMoEVLConfig, int], float]


def _prefill(config: ConceptMoEVLConfig, tokens: int) -> float:
    return sum(f.total for f in forward_flops(config, tokens, logits=1).values())


def _decoding(rows: int, bytes_per_value: int) -> _Measure:
    def measure(config: ConceptMoEVLConfig, tokens: int) -> float:
        costs = decoding_cost(config, tokens, rows=rows, bytes_per_value=bytes_per_value)
        return sum(cost.bytes for cost in costs.values())

    return measure


def _cache(rows: int, bytes_per_value: int) -> _Measure:
    def measure(config: ConceptMoEVLConfig, tokens: int) -> float:
        return cache_bytes(config, tokens, rows=rows, bytes_per_value=bytes_per_value).total

    return measure


def break_even(found: Plan, rows: int = 1, bytes_per_value: int = 2) -> dict[str, int | None]:
    """Tokens from which on a prefill takes no more FLOPs, and decoding no more bytes, than the
    baseline's: 1 where they never do, None where they always do; the rounding of T / R apart.
    """

    def prefill_a_token(config: ConceptMoEVLConfig, tokens: int) -> float:
        return _prefill(config, tokens) / tokens

    measures = {"prefill": prefill_a_token, "decoding": _decoding(rows, bytes_per_value)}
    result: dict[str, int | None] = {}
    for name, measure in measures.items():
        # Both are linear in the length but for the head and the rounding of T / R.
        low, high = (
            measure(found.config, tokens) - measure(found.baseline, tokens)
            for tokens in (LENGTHS[0], LENGTHS[-1])
        )
        slope = (high - low) / (LENGTHS[-1] - LENGTHS[0])
        start = low - slope * LENGTHS[0]
        if start <= 0:
            result[name] = 1
        else:
            result[name] = math.ceil(start / -slope) if slope < 0 else None
    return result


def read_base(
    source: str, encoder_layers: int | None, decoder_layers: int | None
) -> ConceptMoEVLConfig:
    """A configuration as `read_config` takes it, or that of a checkpoint that `convert` takes.

    Raises:
        UserError: there is none, or it is of an unsupported family.
    """
    path = Path(source)
    folder = path.parent if path.name == "config.json" else path
    file = folder / "config.json"
    own = not file.is_file() or read_json(file).get("model_type") == ConceptMoEVLConfig.model_type
    return read_config(source) if own else source_config(folder, encoder_layers, decoder_layers)


def figures(found: Plan, rows: int = 1, dtype: str = "bfloat16") -> dict[str, Any]:
    """Everything that the command prints, as plain values; pairs are baseline and plan."""
    size = VALUE_BYTES[dtype]
    pair = found.baseline, found.config
    counts, tokens = [count_parameters(config) for config in pair], LENGTHS[-1]
    flops = [forward_flops(config, tokens) for config in pair]
    maps = [f["concept"].maps for f in flops]
    cache = [cache_bytes(config, tokens, bytes_per_value=size).concepts for config in pair]
    return {
        "strategy": found.strategy,
        "for": found.purpose,
        "ratio": found.ratio,
        "matched": found.match.is_matched,
        "reason": found.reason,
        "changes": found.changes,
        "parameters": found.match.parameters,
        "parameter_miss": found.match.parameter_miss,
        "active_parameters": [sum(c.active for c in count.values()) for count in counts],
        "flops_per_token": found.match.flops,
        "flops_miss": found.match.flops_miss,
        "components": {
            name: {
                "parameters": [count[name].total for count in counts],
                "flops_per_token": [f[name].rest / tokens for f in flops],
            }
            for name in counts[0]
        },
        "concept_maps_divided_by": maps[0] / maps[1],
        "concept_cache_divided_by": cache[0] / cache[1],
        "batch": rows,
        "dtype": dtype,
        "savings": [dataclasses.asdict(saving) for saving in savings(found, rows, size)],
        "break_even_tokens": break_even(found, rows, size),
    }


def print_plan(arguments: argparse.Namespace) -> int:
    """Prints, draws and writes; 1 where no configuration is matched (then nothing is written).

    Raises:
        UserError: no such baseline, an option out of range, no matplotlib for --plot.
    """
    if arguments.batch < 1:
        raise UserError(f"--batch is {arguments.batch}; give 1 or more")
    if arguments.plot and importlib.util.find_spec("matplotlib") is None:
        raise UserError("--plot needs matplotlib; pip install 'conceptmoe-vl[bench]'")
    base = read_base(arguments.base, arguments.encoder_layers, arguments.decoder_layers)
    options = {name: getattr(arguments, name) for name in _OPTIONS}
    found = plan(base, arguments.ratio, arguments.strategy, arguments.purpose, **options)
    values = figures(found, arguments.batch, arguments.dtype)
    if not found.match.is_matched:
        values["remedies"] = remedies(base, found, options, arguments.strategy)
    else:  # before printing, whose reader may stop early
        if arguments.plot:
            draw(values, Path(arguments.plot))
        if arguments.out:
            write_plan(found, arguments.base, Path(arguments.out))
    if arguments.json:
        print(json.dumps(values, indent=2))
    else:
        _print_tables(values, found)
    if not found.match.is_matched:
        print(_missed(values), file=sys.stderr)
        return 1
    return 0


def _missed(values: dict[str, Any]) -> str:
    advice = values["remedies"]
    change = (
        f"; this is matched: {'; or '.join(advice)}"
        if advice
        else ("; no change of one or two fields leads to a match: the baseline is too small")
    )
    return (
        f"no matched configuration with strategy {values['strategy']}: the nearest has "
        f"{values['parameter_miss']:+.2%} parameters (limit {PARAMETER_LIMIT:.1%}) and "
        f"{values['flops_miss']:+.2%} FLOPs (limit {FLOPS_LIMIT:.0%}){change}"
    )


def write_plan(found: Plan, source: str, path: Path) -> None:
    """The matched configuration as YAML: a run's file keeps its other sections and keys.

    Raises:
        UserError: the file cannot be written.
    """
    from conceptmoe_vl.training.yaml_io import read_yaml, write_yaml

    sections = {name: dataclasses.asdict(getattr(found.config, name)) for name in ("text", "chunk")}
    vision = found.config.vision
    if Path(source).suffix in (".yaml", ".yml"):
        values = read_yaml(source)
        model = values["model"] if isinstance(values.get("model"), dict) else values
        # What the file leaves to its tokenizer or to defaults stays so.
        kept = {k: v for k, v in model["text"].items() if k not in PLANNED_FIELDS}
        planned = {k: sections["text"][k] for k in PLANNED_FIELDS if sections["text"][k]}
        model |= {"text": {**kept, **planned}, "chunk": sections["chunk"]}
        values = values if model is not values else {"model": model}
    else:
        values = {"model": {**sections, "vision": vision and dataclasses.asdict(vision)}}
    try:
        write_yaml(path, values)
    except OSError as error:
        raise UserError(f"cannot write the plan to '{path}': {error}") from error


def _print_tables(values: dict[str, Any], found: Plan) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 110
    nearest = "" if found.match.is_matched else "not matched; the nearest is "
    console.print(f"{nearest}strategy {found.strategy}: {found.reason}", soft_wrap=True)
    console.print(_changes(values))
    console.print(_components(values))
    console.print(_table1(values, found), soft_wrap=True)
    console.print(_savings(values))
    console.print(_break_even(values), soft_wrap=True)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left")
    return table


def _changes(values: dict[str, Any]) -> Table:
    table = _table(f"fields that change, R = {values['ratio']:g}", "field", "baseline", "plan")
    for name, (before, after) in values["changes"].items():
        table.add_row(name, *("-" if value is None else str(value) for value in (before, after)))
    return table


def _components(values: dict[str, Any]) -> Table:
    table = _table(
        "parameters, and FLOPs a token without attention maps",
        *("component", "parameters", "plan", "FLOPs", "plan "),
    )
    for name, component in values["components"].items():
        row = (*component["parameters"], *component["flops_per_token"])
        if any(row):
            table.add_row(name, *(short(value) for value in row))
    parameters, flops = values["parameters"], values["flops_per_token"]
    sums = (*parameters, *flops)
    table.add_row("all, FLOPs without head", *(short(value) for value in sums), style="bold")
    misses = (f"{values[key]:+.2%}" for key in ("parameter_miss", "flops_miss"))
    table.add_row("against the baseline", "", next(misses), "", next(misses), style="bold")
    return table


def _table1(values: dict[str, Any], found: Plan) -> str:
    maps, cache = _TABLE1[found.strategy]
    text = found.config.text
    looped = len(text.concept_schedule) - text.concept_layers
    loops = f", L = {text.concept_layers}, L_loop = {looped}" if looped else ""
    return (
        f"Table 1, of the concept model{loops}: attention maps ÷ {maps} = "
        f"{values['concept_maps_divided_by']:.4g}, cache ÷ {cache} = "
        f"{values['concept_cache_divided_by']:.4g}"
    )


def _savings(values: dict[str, Any]) -> Table:
    table = _table(
        f"baseline over plan by length; decoding: batch {values['batch']}, {values['dtype']}",
        *(
            "tokens",
            "prefill FLOPs",
            "ratio",
            "bytes a decoded token",
            "ratio ",
            "cache",
            "ratio  ",
        ),
    )
    for saving in values["savings"]:
        row = [label(saving["tokens"])]
        for key, unit in (("prefill_flops", ""), ("decoding_bytes", "B"), ("cache_bytes", "B")):
            before, after = saving[key]
            row += [f"{short(before)}{unit} → {short(after)}{unit}", f"{before / after:.2f}"]
        table.add_row(*row)
    return table


def label(tokens: int) -> str:
    return f"{tokens // 2**20}M" if tokens >= 2**20 else f"{tokens // 2**10}k"


def _break_even(values: dict[str, Any]) -> str:
    words = {1: "from the first token", None: "never"}
    prefill, decoding = (
        words.get(tokens, f"from {tokens:,} tokens" if tokens else "")
        for tokens in values["break_even_tokens"].values()
    )
    return (
        f"breaks even: prefill FLOPs {prefill}, decoding bytes {decoding} "
        "(chunking, dechunking and joint decoding included)"
    )


def draw(values: dict[str, Any], path: Path) -> None:
    """Writes the figure: savings by length, and FLOPs a token by component.

    Raises:
        UserError: matplotlib writes no such format, or the file cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")  # no display is needed to write a file
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    rows = values["savings"]
    for key, name in (
        ("prefill_flops", "prefill FLOPs"),
        ("decoding_bytes", f"bytes a decoded token, batch {values['batch']}"),
        ("cache_bytes", "cache"),
    ):
        left.plot(
            [label(r["tokens"]) for r in rows],
            [r[key][0] / r[key][1] for r in rows],
            "o-",
            label=name,
        )
    left.axhline(1, color="gray", linewidth=0.8)
    left.set(
        xlabel="tokens",
        ylabel="baseline / plan",
        title=f"{values['strategy']}, R = {values['ratio']:g}",
    )
    left.legend(loc="upper left")
    bottoms = [0.0, 0.0]
    for name, component in values["components"].items():
        heights = [value / 1e9 for value in component["flops_per_token"]]
        if any(heights):
            right.bar(["baseline", "plan"], heights, bottom=bottoms, label=name, width=0.5)
            bottoms = [b + h for b, h in zip(bottoms, heights, strict=True)]
    right.set(ylabel="GFLOP a token, without attention maps")
    right.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    kind = path.suffix.lstrip(".") or "png"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(path) as beside:
            figure.savefig(beside, dpi=130, format=kind)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot draw '{path}': {error}") from error
    finally:
        pyplot.close(figure)
