"""Figures of the chunking from traced prompts, each with a bootstrap interval over the prompts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from conceptmoe_vl.chunk_trace import IMAGE, MODALITIES, ChunkTrace
from eval.statistics import estimate
from eval.tasks import Question, RatioOfSums, Scored

SIZE_BINS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
"""First sizes of the bins of the distribution of chunk sizes; the last one is open."""

P_BINS = 20


@dataclasses.dataclass(frozen=True)
class Traced:
    """A question with the chunking of its prompt.

    Attributes:
        task: its task's name. kinds: kind of every token (`words.kinds_of`). score: of the answer
            at the same compression; None where it was not asked.
        evidence: `[T]` bool, tokens that the answer can be read from; None where unknown.
    """

    task: str
    question: Question
    trace: ChunkTrace
    kinds: Sequence[str]
    score: float | None = None
    evidence: np.ndarray | None = None


def ratio_by(
    traced: Iterable[Traced], groups: Callable[[Traced], Mapping[str, np.ndarray]]
) -> dict[str, dict[str, Any]]:
    """Tokens per concept of groups of tokens.

    Args:
        groups: prompt -> `[T]` bool of each group that it has tokens of.

    Returns:
        By group, in order of first appearance: `tokens`, `ratio`, `interval_95`, and `confidence`,
        the mean |p - 1/2| of boundaries that are not forced.
    """
    sums: dict[str, list[tuple[str, float, float, float, float]]] = {}
    for item in traced:
        trace = item.trace
        free = ~trace.is_forced
        distance = np.abs(trace.probability - 0.5)
        for name, chosen in groups(item).items():
            if chosen.any():
                row = (
                    _cluster(item),
                    float(chosen.sum()),
                    float(trace.is_boundary[chosen].sum()),
                    float(distance[chosen & free].sum()),
                    float((chosen & free).sum()),
                )
                sums.setdefault(name, []).append(row)
    return {name: _ratio_figures(rows) for name, rows in sums.items()}


def _ratio_figures(rows: list[tuple[str, float, float, float, float]]) -> dict[str, Any]:
    figures = estimate(
        [
            Scored(Question(str(i), [], (), details={"cluster": row[0], "row": row}), "", 0.0)
            for i, row in enumerate(rows)
        ],
        RatioOfSums(_parts, np.positive),  # no shares, also where all are 1
    )
    ratio, confidence = figures["ratio"], figures["confidence"]
    return {
        "tokens": int(sum(row[1] for row in rows)),
        "ratio": ratio.value,
        "interval_95": ratio.interval and list(ratio.interval),
        "confidence": confidence.value,
    }


def _parts(sample: Scored) -> dict[str, tuple[float, float]]:
    _, tokens, concepts, distance, free = sample.question.details["row"]
    return {"ratio": (tokens, concepts), "confidence": (distance, free)}


def _cluster(item: Traced) -> str:
    """Prompts about one image are no independent ones."""
    return f"{item.task}/{item.question.details.get('cluster', item.question.key)}"


def by_modality(item: Traced) -> dict[str, np.ndarray]:
    return {"all": item.trace.of(None)} | {name: item.trace.of(name) for name in MODALITIES}


def by_task(item: Traced) -> dict[str, np.ndarray]:
    return {item.task: item.trace.of(None)}


def by_kind(item: Traced) -> dict[str, np.ndarray]:
    return {f"{item.task}: {item.question.kind or 'all'}": item.trace.of(None)}


def by_source(item: Traced) -> dict[str, np.ndarray]:
    """By `details["source"]`, where the data name one."""
    source = item.question.details.get("source")
    return {} if source is None else {str(source): item.trace.of(None)}


def by_position(item: Traced) -> dict[str, np.ndarray]:
    """By place in the prompt, in stretches that double: 0 to 15, 16 to 31, 32 to 63, …"""
    place = np.arange(len(item.trace.ids))
    found, low, high = {}, 0, 16
    while low < len(place):
        found[f"{low} to {high - 1}"] = (place >= low) & (place < high)
        low, high = high, 2 * high
    return found


def by_token_kind(item: Traced) -> dict[str, np.ndarray]:
    kinds = np.array(item.kinds)
    return {str(kind): kinds == kind for kind in np.unique(kinds)}


def merged_tokens(traced: Sequence[Traced]) -> dict[str, dict[str, float]]:
    """By kind of token: shares that end a chunk and are alone in theirs, and mean chunk size."""
    rows: dict[str, list[np.ndarray]] = {}
    for item in traced:
        size = item.trace.size_of_token()
        closed = item.trace.concept >= 0
        table = np.stack((item.trace.is_boundary, (size == 1) & closed, size), 1).astype(float)
        for kind, chosen in by_token_kind(item).items():
            rows.setdefault(kind, []).append(table[chosen])
    found = {}
    for kind, parts in sorted(rows.items(), key=lambda entry: -sum(map(len, entry[1]))):
        table = np.concatenate(parts)
        ends, alone, size = table.mean(0).tolist()
        found[kind] = {
            "tokens": len(table),
            "ends_a_chunk": ends,
            "alone": alone,
            "mean_chunk_size": size,
        }
    return found


def size_distribution(traced: Sequence[Traced]) -> dict[str, list[int]]:
    """Concepts of each size (`SIZE_BINS`), by modality."""
    found = {}
    for modality in MODALITIES:
        sizes = [
            item.trace.sizes()[item.trace.modality_of_concept() == (modality == IMAGE)]
            for item in traced
        ]
        edges = [*SIZE_BINS, np.inf]
        found[modality] = np.histogram(np.concatenate(sizes), bins=edges)[0].tolist()
    return found


def probability_distribution(traced: Sequence[Traced]) -> dict[str, list[int]]:
    """Tokens by p, in equal bins from 0 to 1, by modality; forced boundaries left out."""
    found = {}
    for modality in MODALITIES:
        parts = [
            item.trace.probability[item.trace.of(modality) & ~item.trace.is_forced]
            for item in traced
        ]
        found[modality] = np.histogram(np.concatenate(parts), bins=P_BINS, range=(0, 1))[0].tolist()
    return found


def score_by_evidence(traced: Sequence[Traced]) -> list[dict[str, Any]]:
    """Scores by the mean chunk size of the tokens that the answer can be read from.

    Returns:
        For each range of sizes with questions: `from`, `to` (None: open), `questions`, `score`,
        `interval_95`.
    """
    edges = (1.0, 1.5, 2.0, 3.0, 4.0, 8.0, 16.0)
    groups: dict[int, list[Traced]] = {}
    for item in traced:
        if item.score is None or item.evidence is None or not item.evidence.any():
            continue
        size = float(item.trace.size_of_token()[item.evidence].mean())
        groups.setdefault(int(np.searchsorted(edges, size, side="right")) - 1, []).append(item)
    rows = []
    for number, items in sorted(groups.items()):
        scored = [Scored(item.question, "", item.score or 0.0) for item in items]
        figure = estimate(scored, RatioOfSums(lambda sample: {"score": (sample.score, 1.0)}))
        rows.append(
            {
                "from": edges[number],
                "to": edges[number + 1] if number + 1 < len(edges) else None,
                "questions": len(items),
                "score": figure["score"].value,
                "interval_95": figure["score"].interval and list(figure["score"].interval),
            }
        )
    return rows


def summarise(traced: Sequence[Traced]) -> dict[str, Any]:
    """Everything above, ready for JSON."""
    views = {
        "modality": by_modality,
        "task": by_task,
        "kind": by_kind,
        "source": by_source,
        "position": by_position,
    }
    return {
        "prompts": len(traced),
        "tokens": sum(len(item.trace.ids) for item in traced),
        "ratio_by": {name: ratio_by(traced, view) for name, view in views.items()},
        "chunk_sizes": {"bins_from": list(SIZE_BINS), **size_distribution(traced)},
        "probabilities": probability_distribution(traced),
        "merged_tokens": merged_tokens(traced),
        "score_by_evidence": score_by_evidence(traced),
    }
