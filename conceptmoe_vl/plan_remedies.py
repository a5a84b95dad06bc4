"""What to change where no configuration is matched: single fields first, then two at a time.

Every remedy was tried: the same search with the field changed has a match.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from conceptmoe_vl.configuration import ChunkConfig, ConceptMoEVLConfig
from conceptmoe_vl.plan_search import changed, flops_per_token
from conceptmoe_vl.planning import PURPOSES, Plan, plan

_MOST = 3  # remedies named


@dataclasses.dataclass(frozen=True)
class _Change:
    """`kind`: what two changes must not share. options: of `plan`; text, chunk: fields of BASE."""

    kind: str
    words: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    text: dict[str, Any] = dataclasses.field(default_factory=dict)
    chunk: dict[str, Any] = dataclasses.field(default_factory=dict)


def remedies(
    base: ConceptMoEVLConfig, missed: Plan, options: dict[str, Any], asked: str
) -> list[str]:
    """Changes that lead to a match, in words, three at most; empty where none of them does.

    Args:
        missed: the nearest plan. options: the keyword arguments of `plan` that gave it, without
            strategy and purpose. asked: the strategy asked for, or auto.
    """
    changes = list(_changes(missed, asked))
    for count in (1, 2):
        found = []
        for some in itertools.combinations(changes, count):
            kinds = {change.kind for change in some}
            if len(kinds) == count and _helps(base, missed, options, asked, some):
                found.append(" and ".join(change.words for change in some))
                if len(found) == _MOST:
                    break
        if found:
            return found
    return []


def _helps(
    base: ConceptMoEVLConfig,
    missed: Plan,
    options: dict[str, Any],
    asked: str,
    changes: tuple[_Change, ...],
) -> bool:
    settings: dict[str, Any] = {"ratio": missed.ratio, "strategy": asked, **options}
    twin = base
    for change in changes:
        settings |= change.options
        chunk = change.chunk
        if chunk and twin.chunk.router == "none":
            twin = changed(twin)
            twin.chunk = ChunkConfig()
        twin = changed(twin, change.text, chunk)
    return plan(twin, purpose=missed.purpose, **settings).match.is_matched


def _changes(missed: Plan, asked: str) -> Iterator[_Change]:
    text, chunk = missed.baseline.text, missed.config.chunk
    if asked != "auto":
        for strategy in PURPOSES[missed.purpose]:
            if strategy != asked:
                given = {"strategy": strategy, "loops": None, "width": None}
                yield _Change("strategy", f"--strategy {strategy}", given)
    ratio = _fitting_ratio(missed)
    if ratio is not None:
        yield _Change("ratio", f"--ratio {ratio:g}", {"ratio": ratio})
    for joint in reversed(range(chunk.joint_decoding_layers)):
        # The most layers first: without joint decoding the paper loses 1.3 points.
        yield _Change("joint", f"--joint-layers {joint}", {"joint_layers": joint})
    if chunk.router == "cosine" and missed.match.parameter_miss > 0:
        yield _Change("router", "chunk.router linear", chunk={"router": "linear"})
    if missed.purpose == "scratch":
        for parts in (2, 4):
            if text.moe_intermediate_size % (8 * parts) == 0:
                fields = {
                    "num_experts": text.num_experts * parts,
                    "num_experts_per_tok": text.num_experts_per_tok * parts,
                    "moe_intermediate_size": text.moe_intermediate_size // parts,
                }
                words = ", ".join(f"text.{name} {value}" for name, value in fields.items())
                yield _Change("experts", f"a baseline of finer experts ({words})", text=fields)


def _fitting_ratio(missed: Plan) -> float | None:
    """The ratio at which the same fields cost what the baseline costs, to three decimals."""
    ours = flops_per_token(missed.config, missed.ratio)
    # FLOPs are linear in 1 / R.
    far = flops_per_token(missed.config, 2 * missed.ratio)
    slope = (ours - far) * 2 * missed.ratio
    fixed = ours - slope / missed.ratio
    wanted = missed.match.flops[0] - fixed
    ratio = round(slope / wanted, 3) if wanted > 0 and slope > 0 else None
    return ratio if ratio is not None and 1 < ratio < 2 * missed.ratio else None
