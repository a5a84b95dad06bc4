"""What a conversion costs before any training: logits without chunking, perplexity by ratio.

The source and the converted model are loaded one after the other, in float32. Thresholds are exact
quantiles of p on the very texts that perplexity is measured on, so that the ratio asked for is the
one that is reached.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.utils import logging as transformers_logging

from conceptmoe_vl.asking import load_pretrained
from conceptmoe_vl.calibration import ProbabilityMeter, calibration_table
from conceptmoe_vl.conversion.converting import REPORT
from conceptmoe_vl.conversion.families import read_source
from conceptmoe_vl.conversion.vocabulary import load_tokenizer
from conceptmoe_vl.errors import UserError

LIMIT = 1e-4
# Logits of the source that are kept for the comparison: 256 MB.
_KEPT_LOGITS = 1 << 26


@dataclasses.dataclass(frozen=True)
class RatioFigures:
    """One ratio. `reached`: tokens per concept that the texts had; `perplexity` of their tokens.

    Both are None where forced boundaries alone are more.
    """

    ratio: float
    reached: float | None
    perplexity: float | None


@dataclasses.dataclass(frozen=True)
class Losslessness:
    """What `compare` found.

    Attributes:
        source, model: the folders. tokens: predicted tokens.
        compared_tokens: those whose logits were compared, over the tokens that the source knows.
        largest_difference, mean_difference: of logits, without chunking.
        same_choice: share of compared tokens whose best prediction is the same.
        source_perplexity: of the original. ratios: the converted model as it is configured.
    """

    source: str
    model: str
    tokens: int
    compared_tokens: int
    largest_difference: float
    mean_difference: float
    same_choice: float
    source_perplexity: float
    ratios: list[RatioFigures]

    @property
    def is_lossless(self) -> bool:
        return self.largest_difference < LIMIT


def compare(
    source: Path,
    model: Path,
    texts: Sequence[Path],
    ratios: Sequence[float] = (1.0, 1.1, 1.25, 1.5, 2.0),
    tokens: int = 8192,
    window: int = 1024,
) -> Losslessness:
    """Compares a source with its conversion.

    Args:
        texts: UTF-8 files. ratios: tokens per concept, each 1 or more.
        tokens: read at most so many. window: tokens of a document; texts are cut into such.

    Raises:
        UserError: a folder holds no model, the texts cannot be read or are too short, or a number
            is out of range.
    """
    check_request(texts, ratios, tokens, window)
    read_source(source)
    tokenizer = load_tokenizer(model)
    windows = _windows(tokenizer, texts, tokens, window)
    transformers_logging.disable_progress_bar()
    with torch.inference_mode():
        original = _load_source(source)
        kept, source_loss = _source_figures(original, windows, _source_tokens(model))
        del original
        converted, _ = load_pretrained(model, "cpu")
        with as_source(converted):
            differences = _differences(converted, windows, kept)
        rows = _ratio_figures(converted, windows, sorted(ratios))
    predicted = sum(len(ids) - 1 for ids in windows)
    return Losslessness(
        source=str(source),
        model=str(model),
        tokens=predicted,
        **differences,
        source_perplexity=math.exp(source_loss / predicted),
        ratios=rows,
    )


def check_request(texts: Sequence[Path], ratios: Sequence[float], tokens: int, window: int) -> None:
    """Refuses what `compare` cannot do, before a model is loaded or written.

    Raises:
        UserError: a text cannot be read, or a number is out of range.
    """
    if window < 2 or tokens < 2:
        raise UserError(f"--tokens {tokens} and --window {window}: give 2 or more")
    if not ratios or any(not 1 <= ratio < math.inf for ratio in ratios):
        raise UserError(f"--ratios {list(ratios)}: give numbers of 1 or more")
    for path in texts:
        _read_text(path)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"'{path}' cannot be read as UTF-8 text: {error}") from error


def _differences(model: Any, windows: list[Tensor], kept: list[Tensor]) -> dict[str, Any]:
    """Fields of `Losslessness` that compare logits; one window's at a time is in memory.

    Args:
        kept: the source's logits of the first windows.
    """
    largest, total, same, compared, entries = 0.0, 0.0, 0, 0, 0
    for theirs, ids in zip(kept, windows, strict=False):
        ours = model(input_ids=ids[None]).logits[0, :, : theirs.shape[1]]
        apart = (ours - theirs).abs()
        # unlike max() of numbers, it keeps what is not one
        largest = torch.maximum(torch.tensor(largest), apart.max()).item()
        total += apart.sum(dtype=torch.float64).item()
        same += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
        compared, entries = compared + len(ids), entries + theirs.numel()
    return {
        "compared_tokens": compared,
        "largest_difference": largest,
        "mean_difference": total / entries,
        "same_choice": same / compared,
    }


def _windows(tokenizer: Any, texts: Sequence[Path], tokens: int, window: int) -> list[Tensor]:
    """Ids of the texts, cut into documents that each begin as the tokenizer begins a text."""
    before = list(tokenizer("")["input_ids"])
    windows: list[Tensor] = []
    left = tokens
    for path in texts:
        # What is typed in a text stays text, and a long text is read no further than it is used.
        text = _read_text(path)[: 16 * left]
        ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        step = window - len(before)
        for start in range(0, min(len(ids), left), max(step, 1)):
            part = ids[start : min(start + step, left)]
            if len(before) + len(part) > 1:
                windows.append(torch.tensor(before + part))
        left -= min(len(ids), left)
        if left <= 0:
            break
    if not windows:
        raise UserError(f"{', '.join(map(str, texts))}: less than two tokens; give longer texts")
    return windows


def _load_source(folder: Path) -> Any:
    kind = json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"]
    loader = AutoModelForImageTextToText if kind == "qwen3_vl_moe" else AutoModelForCausalLM
    try:
        model = loader.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise UserError(
            f"the checkpoint in '{folder}' cannot be loaded: {' '.join(str(error).split())[:300]}"
        ) from error
    return model.eval()


def _source_tokens(model: Path) -> int | None:
    """Tokens of the source's tokenizer, by the conversion's report; None without one."""
    try:
        return json.loads((model / REPORT).read_text(encoding="utf-8"))["source_tokens"]
    except (OSError, ValueError, KeyError):
        return None


def _source_figures(
    model: Any, windows: list[Tensor], known: int | None
) -> tuple[list[Tensor], float]:
    """Logits of the first windows over the source's tokens, and the summed loss of all.

    Args:
        known: tokens of the source; padding rows behind them may have been given to added tokens.
    """
    kept: list[Tensor] = []
    entries, loss = 0, 0.0
    for ids in windows:
        logits = model(input_ids=ids[None]).logits[0].float()
        loss += F.cross_entropy(logits[:-1], ids[1:], reduction="sum").item()
        if not kept or entries + logits.numel() <= _KEPT_LOGITS:
            kept.append(logits[:, :known].clone())
            entries += logits.numel()
    return kept, loss


@contextlib.contextmanager
def as_source(model: Any) -> Iterator[None]:
    """The model as its source was: no chunking, no loops, the source's experts per concept."""
    chunk, text = model.config.chunk, model.config.text
    concept = model.language_model.concept
    plain = {"router": "none", "concept_residual": "delta"}
    before = {name: getattr(chunk, name) for name in plain}
    schedule = concept.schedule
    try:
        for name, value in plain.items():
            setattr(chunk, name, value)
        concept.schedule = list(range(len(concept.layers)))
        for layer in concept.layers:
            layer.mlp.num_experts_per_tok = text.num_experts_per_tok
        yield
    finally:
        for name, value in before.items():
            setattr(chunk, name, value)
        concept.schedule = schedule
        for layer in concept.layers:
            layer.mlp.num_experts_per_tok = text.experts_per_concept


def _ratio_figures(model: Any, windows: list[Tensor], ratios: list[float]) -> list[RatioFigures]:
    chunk = model.config.chunk
    if chunk.router == "none":
        return [_at(model, windows, 1.0)]
    if chunk.router == "fixed":
        return [_at(model, windows, ratio) for ratio in ratios]
    meter = ProbabilityMeter()
    with meter.watch(model):
        whole = _at(model, windows, 1.0)
    above = [ratio for ratio in ratios if ratio > 1]
    chunk.calibration = calibration_table(meter.distributions(), tuple(above))
    thresholds = dict(zip(above, chunk.calibration["all"], strict=True))
    return [whole] * (1 in ratios) + [
        RatioFigures(ratio, None, None) if thresholds[ratio] is None else _at(model, windows, ratio)
        for ratio in above
    ]


def _at(model: Any, windows: list[Tensor], ratio: float) -> RatioFigures:
    loss, boundaries, tokens = 0.0, 0, 0
    for ids in windows:
        out = model(input_ids=ids[None], labels=ids[None], return_logits=False, compression=ratio)
        loss += out.lm_loss.item() * (len(ids) - 1)
        boundaries += int(out.chunks.boundary_mask.sum())
        tokens += len(ids)
    predicted = tokens - len(windows)
    return RatioFigures(ratio, tokens / boundaries, math.exp(loss / predicted))


def write_report(report: Losslessness, path: Path) -> None:
    """Writes the figures as JSON.

    Raises:
        UserError: the file cannot be written.
    """
    values = {**dataclasses.asdict(report), "lossless": report.is_lossless}
    try:
        path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"'{path}' cannot be written: {error.strerror or error}") from error


def print_report(report: Losslessness) -> None:
    """Prints the figures as a table."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    verdict = "the same function" if report.is_lossless else f"NOT the same (limit {LIMIT:g})"
    console.print(
        f"without chunking: {verdict}; logits of {report.compared_tokens:,} tokens differ by "
        f"{report.largest_difference:.1e} at most, {report.mean_difference:.1e} on average; "
        f"{report.same_choice:.2%} have the same best token",
        soft_wrap=True,
    )
    table = Table(title=f"perplexity of {report.tokens:,} tokens", title_justify="left")
    for name in ("ratio", "reached", "perplexity", "times the source's"):
        table.add_column(name, justify="right")
    table.add_row("source", "-", f"{report.source_perplexity:.2f}", "1.00")
    for row in report.ratios:
        if row.perplexity is None or row.reached is None:
            table.add_row(f"{row.ratio:g}", "-", "out of reach", "-")
            continue
        times = row.perplexity / report.source_perplexity
        table.add_row(
            f"{row.ratio:g}", f"{row.reached:.3f}", f"{row.perplexity:.2f}", f"{times:.2f}"
        )
    console.print(table)
