"""`conceptmoe-vl flops`: parameters, FLOPs, bytes of a configuration, and the paper's Table 1."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from conceptmoe_vl.configuration import ConceptMoEVLConfig
from conceptmoe_vl.errors import UserError
from conceptmoe_vl.flops import (
    count_parameters,
    decoding_cost,
    forward_flops,
    ratio_of,
)
from conceptmoe_vl.memory import activation_bytes, cache_bytes

VALUE_BYTES = {"float32": 4, "bfloat16": 2}


@dataclasses.dataclass(frozen=True)
class Table1Row:
    """A row of Table 1 with numbers.

    Attributes:
        name: the strategy. maps, cache: the paper's formulas in words.
        map_flops: FLOPs of the concept model's attention maps. cache_values: values in its cache.
    """

    name: str
    maps: str
    cache: str
    map_flops: float
    cache_values: float


def table1(config: ConceptMoEVLConfig, tokens: int, ratio: float | None = None) -> list[Table1Row]:
    """The paper's Table 1 with this configuration's L, L_loop, d, N and R.

    The paper leaves constants out of the maps: here they are 4 d L N^2, where 4 stands for two
    products of 2 FLOPs a multiply-add. d is the width of attention: N_heads H for the maps and
    N_kv H for the cache. Strategy 3 widens attention by sqrt(R) in the paper; `text` gives E, C
    and D the same heads, so that in this package a wider C saves as much as strategy 1.
    """
    text = config.text
    assert text.head_dim is not None  # TextConfig fills it in
    r = ratio_of(config, ratio)
    layers, looped = text.concept_layers, len(text.concept_schedule) - text.concept_layers
    query, key = (
        heads * text.head_dim for heads in (text.num_attention_heads, text.num_key_value_heads)
    )
    maps, cache = 4 * layers * query * tokens**2, 2 * layers * key * tokens
    passed = (layers + looped) / layers if layers else 1.0
    return [
        Table1Row("MoE", "L d N²", "2 L d N", maps, cache),
        Table1Row("1 more experts", "L d N² / R²", "2 L d N / R", maps / r**2, cache / r),
        Table1Row(
            "2 loops and experts",
            "(L + L_loop) d N² / R²",
            "2 (L + L_loop) d N / R",
            maps * passed / r**2,
            cache * passed / r,
        ),
        Table1Row("3 width by √R", "L d N² / R^1.5", "2 L d N / √R", maps / r**1.5, cache / r**0.5),
    ]


def read_config(source: str) -> ConceptMoEVLConfig:
    """The configuration in a YAML file, a config.json or a model folder.

    Raises:
        UserError: there is none, it is of another kind, or it has an unknown key or wrong value.
    """
    path = Path(source)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise UserError(f"there is no file '{path}'; name a YAML file or a model folder")
    if path.suffix == ".json":
        return _from_json(path)
    from conceptmoe_vl.training.yaml_io import read_yaml

    values = read_yaml(path)
    model = values.get("model", values)
    if not isinstance(model, dict) or not isinstance(model.get("text"), dict):
        raise UserError(f"'{path}' describes no model: it has no section 'text' or 'model.text'")
    return _text_of(model, path)


def _text_of(model: dict[str, Any], path: Path) -> ConceptMoEVLConfig:
    """From the sections of a run; without its tokenizer, the wanted size is the vocabulary's."""
    text = dict(model["text"])
    wanted = (model.get("tokenizer") or {}).get("vocab_size")
    if wanted is not None:
        text.setdefault("vocab_size", wanted)
    try:
        return ConceptMoEVLConfig(
            text=text, chunk=model.get("chunk") or {}, vision=model.get("vision")
        )
    except ValueError as error:
        raise UserError(f"'{path}': {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        UserError: it cannot be read or holds something else.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"'{path}' is no readable JSON file: {error}") from error
    if not isinstance(values, dict):
        raise UserError(f"'{path}' holds {type(values).__name__}, not a configuration")
    return values


def _from_json(path: Path) -> ConceptMoEVLConfig:
    values = read_json(path)
    kind = values.get("model_type")
    if kind != ConceptMoEVLConfig.model_type:
        raise UserError(
            f"'{path}' describes a model of type {kind!r}; this program counts "
            f"'{ConceptMoEVLConfig.model_type}'"
        )
    try:
        return ConceptMoEVLConfig.from_dict(values)
    except ValueError as error:
        raise UserError(f"'{path}': {error}") from error


def figures(config: ConceptMoEVLConfig, arguments: argparse.Namespace) -> dict[str, Any]:
    """Everything that the command prints, as plain values."""
    size = VALUE_BYTES[arguments.dtype]
    tokens, ratio = arguments.tokens, arguments.ratio
    parameters = count_parameters(config)
    flops = forward_flops(config, tokens, ratio, images=arguments.images)
    decoding = decoding_cost(config, tokens, ratio, rows=arguments.batch, bytes_per_value=size)
    components = {
        name: {
            "parameters": parameters[name].total,
            "active_parameters": parameters[name].active,
            "flops_per_token": flops[name].rest / tokens,
            "map_flops_per_token": flops[name].maps / tokens,
            "decoding_flops": decoding[name].flops.total,
            "decoding_bytes": decoding[name].bytes,
        }
        for name in parameters
    }
    cache = cache_bytes(config, tokens, ratio, rows=arguments.batch, bytes_per_value=size)
    return {
        "tokens": tokens,
        "ratio": ratio_of(config, ratio),
        "batch": arguments.batch,
        "dtype": arguments.dtype,
        "components": components,
        "cache_bytes": {**dataclasses.asdict(cache), "total": cache.total},
        "training_activation_bytes": activation_bytes(config, tokens, ratio, bytes_per_value=size),
        "table1": [dataclasses.asdict(row) for row in table1(config, tokens, ratio)],
    }


def print_figures(arguments: argparse.Namespace) -> int:
    """Prints the tables, or with --json one object.

    Raises:
        UserError: no such configuration, or a figure out of range.
    """
    config = read_config(arguments.config)
    if arguments.batch < 1 or arguments.images < 0:
        raise UserError("--batch must be 1 or more and --images must not be negative")
    try:
        found = figures(config, arguments)
    except ValueError as error:
        raise UserError(str(error)) from error
    if arguments.json:
        print(json.dumps(found, indent=2))
        return 0
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 110
    console.print(_components(found))
    console.print(_memory(found), soft_wrap=True)
    if arguments.table1:
        console.print(_table1(config, found))
        if config.text.width_of_concepts != config.text.hidden_size:
            console.print(
                "E, C and D have the same heads here: a wider C saves as much as row 1.",
                soft_wrap=True,
            )
    return 0


def short(value: float) -> str:
    """`1.23 G` and the like, three digits."""
    for unit, size in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g}"


def _components(found: dict[str, Any]) -> Table:
    table = Table(
        title=f"{found['tokens']:,} tokens, R = {found['ratio']:g}; decoding at that context, "
        f"{found['batch']} rows, {found['dtype']}; FLOPs and bytes a token",
        title_justify="left",
    )
    table.add_column("component")
    names = ("parameters", "active", "FLOPs", "maps", "decoding FLOPs", "decoding bytes")
    for name in names:
        table.add_column(name, justify="right")
    components = found["components"]
    sums = {key: sum(c[key] for c in components.values()) for key in components["encoder"]}
    for name, values in [*components.items(), ("all", sums)]:
        if any(values.values()):
            style = "bold" if name == "all" else None
            table.add_row(name, *(short(value) for value in values.values()), style=style)
    return table


def _memory(found: dict[str, Any]) -> str:
    cache, kept = found["cache_bytes"], found["training_activation_bytes"]
    return (
        f"cache: {short(cache['total'])}B (tokens {short(cache['tokens'])}B, concepts "
        f"{short(cache['concepts'])}B, state {short(cache['state'])}B); activations kept for a "
        f"backward pass, estimate: {short(sum(kept.values()))}B"
    )


def _table1(config: ConceptMoEVLConfig, found: dict[str, Any]) -> Table:
    text = config.text
    looped = len(text.concept_schedule) - text.concept_layers
    table = Table(
        title=f"Table 1: the concept model's maps (FLOPs) and cache (values), "
        f"L = {text.concept_layers}, L_loop = {looped}, R = {found['ratio']:g}, "
        f"N = {found['tokens']:,}",
        title_justify="left",
    )
    for name, justify in (
        ("strategy", "left"),
        ("attention maps", "left"),
        ("FLOPs", "right"),
        ("÷", "right"),
        ("KV cache", "left"),
        ("values", "right"),
        ("÷ ", "right"),
    ):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    base = found["table1"][0]
    for row in found["table1"]:
        maps, cache = row["map_flops"], row["cache_values"]
        saved = [
            f"{base[key] / row[key]:.3g}" if row[key] else "-"
            for key in ("map_flops", "cache_values")
        ]
        table.add_row(
            row["name"], row["maps"], short(maps), saved[0], row["cache"], short(cache), saved[1]
        )
    return table
