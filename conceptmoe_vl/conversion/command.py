"""`conceptmoe-vl convert`, `export` and `losslessness`. Imports no torch before a command runs."""

from __future__ import annotations

import argparse
import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import conceptmoe_vl_runtime
from conceptmoe_vl.errors import UserError

_CONVERT = (
    "Turns a checkpoint of Qwen3-MoE, OLMoE, Mixtral, Qwen2-MoE or Qwen3-VL-MoE (its language "
    "model), or a dense Llama, Mistral, Qwen2 or Qwen3 whose MLPs become experts, into a "
    "ConceptMoE-VL model that starts as the same function at ratio 1."
)
_EXPORT = "Writes a model with chunk.router none as a Qwen3-MoE checkpoint of transformers."
_LOSSLESSNESS = (
    "Compares a source and its conversion on texts of yours: largest difference of the logits "
    "without chunking, and perplexity at several ratios."
)
RATIOS = (1.0, 1.1, 1.25, 1.5, 2.0)
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_SMALLEST_SHARD = 10**3


def add_commands(commands: Any) -> None:
    """Adds the three commands to those of `conceptmoe-vl`."""
    parser = commands.add_parser(
        "convert", help="turn a checkpoint into a ConceptMoE-VL model", description=_CONVERT
    )
    _add_convert_arguments(parser)
    parser.set_defaults(run=convert)
    parser = commands.add_parser("export", help="turn a model back", description=_EXPORT)
    parser.add_argument("model", metavar="MODEL", help="model folder")
    parser.add_argument("out", metavar="OUT", help="folder to write; must not exist")
    parser.add_argument("--format", choices=["qwen3_moe"], required=True, help="family to write")
    _add_shard_argument(parser)
    parser.set_defaults(run=export)
    parser = commands.add_parser(
        "losslessness", help="compare a source and its conversion", description=_LOSSLESSNESS
    )
    parser.add_argument("source", metavar="SOURCE", help="folder of the original checkpoint")
    parser.add_argument("model", metavar="CONVERTED", help="folder that convert has written")
    parser.add_argument("texts", nargs="+", metavar="TEXT", help="UTF-8 text files")
    parser.add_argument("--json", metavar="FILE", help="write the figures there as well")
    _add_report_arguments(parser)
    parser.set_defaults(run=losslessness)


def _add_convert_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("source", metavar="SOURCE", help="folder of a checkpoint: config.json and safetensors")
    add("out", metavar="OUT", help="folder to write; must not exist")
    add("--encoder-layers", type=int, metavar="N", help="layers of E (default: an eighth of all)")
    add("--decoder-layers", type=int, metavar="N", help="layers of D (default: an eighth of all)")
    add("--joint-layers", type=int, metavar="N", help="last layers of D that read the concept")
    add("--ratio", type=float, metavar="R", help="tokens per concept to train for (default: 2)")
    add("--plan", metavar="FILE.yaml", help="depths, loops, experts per concept of a plan")
    add("--residual", choices=["delta", "add"], help="chunk.concept_residual (default: delta)")
    add(
        "--ema",
        action=argparse.BooleanOptionalAction,
        help="smooth concepts by their confidence, eq. 5 (default: not)",
    )
    add(
        "--merge",
        choices=["boundary", "sum", "mean"],
        help="how tokens become a concept (default: boundary)",
    )
    add(
        "--router",
        choices=["cosine", "linear", "fixed", "none"],
        help="what decides boundaries (default: cosine)",
    )
    add("--experts", type=int, metavar="E", help="copies of a dense MLP (default: 8)")
    add("--experts-per-token", type=int, metavar="K", help="of them per token (default: 2)")
    add("--vision", metavar="TIMM_NAME", help="attach this vision tower and a new projector")
    add("--image-size", type=int, metavar="PIXELS", help="edge of its images (default: 224)")
    add("--vision-pretrained", action="store_true", help="load timm's weights of the tower")
    add("--tokenizer", metavar="DIR", help="folder of the tokenizer (default: SOURCE)")
    add("--seed", type=int, default=0, metavar="N", help="of random new weights (default: 0)")
    _add_shard_argument(parser)
    add("--report", nargs="+", metavar="TEXT", help="compare both on these text files afterwards")
    _add_report_arguments(parser)


def _add_shard_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--max-shard-size",
        default="5GB",
        metavar="SIZE",
        help="largest file of weights, such as 500MB (default: %(default)s)",
    )


def _add_report_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ratios",
        type=float,
        nargs="+",
        default=list(RATIOS),
        metavar="R",
        help="ratios to report (default: %(default)s)",
    )
    parser.add_argument(
        "--tokens", type=int, default=8192, metavar="N", help="tokens to read (default: 8192)"
    )
    parser.add_argument(
        "--window", type=int, default=1024, metavar="N", help="tokens read at once (default: 1024)"
    )


def shard_bytes(size: str) -> int:
    """Bytes of a size such as 500MB.

    Raises:
        UserError: it is no size, or too small for a file of weights.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]B)?", size.strip().upper())
    number = float(found[1]) * _UNITS[found[2] or ""] if found else 0
    if number < _SMALLEST_SHARD:
        raise UserError(f"--max-shard-size is '{size}'; give a size such as 500MB or 5GB")
    return int(number)


@contextlib.contextmanager
def _progress(total: int, what: str) -> Iterator[Callable[[int], object]]:
    """A bar on a terminal's standard error; nothing elsewhere."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    console = Console(stderr=True)
    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    shown = console.is_terminal
    with Progress(
        *columns, TimeRemainingColumn(), console=console, disable=not shown, transient=True
    ) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.advance(task, done)


def convert(arguments: argparse.Namespace) -> int:
    """Converts a checkpoint and says what became of it.

    Raises:
        UserError: see `conceptmoe_vl.conversion.converting`.
    """
    conceptmoe_vl_runtime.setup(quiet=True)
    from conceptmoe_vl.conversion.converting import (
        check_target,
        plan_conversion,
        write_conversion,
    )
    from conceptmoe_vl.conversion.settings import ConversionSettings, read_plan

    settings = ConversionSettings(
        encoder_layers=arguments.encoder_layers,
        decoder_layers=arguments.decoder_layers,
        joint_layers=arguments.joint_layers,
        ratio=arguments.ratio,
        router=arguments.router,
        merge=arguments.merge,
        residual=arguments.residual,
        ema=arguments.ema,
        experts=arguments.experts,
        experts_per_token=arguments.experts_per_token,
        plan=read_plan(Path(arguments.plan)) if arguments.plan else {},
        vision=arguments.vision,
        image_size=arguments.image_size,
        vision_pretrained=arguments.vision_pretrained,
        seed=arguments.seed,
        max_shard_bytes=shard_bytes(arguments.max_shard_size),
        tokenizer=Path(arguments.tokenizer) if arguments.tokenizer else None,
    )
    source, target = Path(arguments.source), Path(arguments.out)
    check_target(target, source)
    if arguments.report:
        from conceptmoe_vl.conversion.losslessness import check_request

        texts = [Path(text) for text in arguments.report]
        check_request(texts, arguments.ratios, arguments.tokens, arguments.window)
    conversion = plan_conversion(source, settings)
    with _progress(conversion.bytes, "converting") as advance:
        write_conversion(conversion, target, settings.max_shard_bytes, advance)
    print(_summary(conversion, target))
    if not arguments.report:
        return 0
    return _report(source, target, arguments.report, arguments, target / "losslessness.json")


def _summary(conversion: Any, target: Path) -> str:
    report, text = conversion.report, conversion.config.text
    added = ", ".join(report["added_tokens"]) or "none"
    chosen = f"{text.num_experts} experts, {text.num_experts_per_tok} per token"
    if text.experts_per_concept != text.num_experts_per_tok:
        chosen += f" and {text.experts_per_concept} per concept"
    template = report["chat_template_note"]
    return "\n".join(
        (
            f"{target}: {conversion.bytes / 1e9:.2f} GB from {report['family']}"
            + (", its MLPs copied into experts" if report["upcycled"] else ""),
            "layers of E, C, D: " + " + ".join(map(str, report["layers"])) + f"; {chosen}",
            f"added tokens: {added}; rows of the embedding: {report['rows']}",
            "chat template: " + (f"this project's ({template})" if template else "the source's"),
        )
    )


def losslessness(arguments: argparse.Namespace) -> int:
    """Prints how a conversion differs from its source.

    Raises:
        UserError: see `conceptmoe_vl.conversion.losslessness`.
    """
    conceptmoe_vl_runtime.setup(quiet=True)
    target = Path(arguments.json) if arguments.json else None
    source, model = Path(arguments.source), Path(arguments.model)
    return _report(source, model, arguments.texts, arguments, target)


def _report(
    source: Path, model: Path, texts: list[str], arguments: argparse.Namespace, target: Path | None
) -> int:
    from conceptmoe_vl.conversion.losslessness import compare, print_report, write_report

    report = compare(
        source,
        model,
        [Path(t) for t in texts],
        arguments.ratios,
        arguments.tokens,
        arguments.window,
    )
    print_report(report)
    if target is not None:
        write_report(report, target)
    return 0


def export(arguments: argparse.Namespace) -> int:
    """Writes a model as a checkpoint of another family.

    Raises:
        UserError: see `conceptmoe_vl.conversion.exporting`.
    """
    conceptmoe_vl_runtime.setup(quiet=True)
    from conceptmoe_vl.conversion.converting import check_target
    from conceptmoe_vl.conversion.exporting import plan_export, write_export

    target = Path(arguments.out)
    check_target(target, Path(arguments.model))
    planned = plan_export(Path(arguments.model))
    with _progress(planned.bytes, "exporting") as advance:
        write_export(planned, target, shard_bytes(arguments.max_shard_size), advance)
    print(f"{target}: {planned.bytes / 1e9:.2f} GB as {arguments.format}")
    return 0
