"""What must hold of the very models that `bench.inference` times, before it times them."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from bench.inference_models import Contestant
from bench.inference_runs import PEER_CACHE, concepts_at, held_bytes, random_ids
from conceptmoe_vl.cache import ConceptCache

TOLERANCE = 1e-4  # largest difference of logits, as in the tests of the invariants


def check_invariants(contestants: dict[str, Contestant], tokens: int) -> list[str]:
    """What is wrong with these very models, in float32, at a shortened context; empty: nothing.

    Invariant 4: prefill and steps give the full pass, and rows of a batch what they give alone.
    The pattern holds exactly N / R boundaries, the concepts' cache 1 / R of a token level's.
    """
    faults = []
    for contestant in contestants.values():
        checks = [_check_steps, _check_batch]
        if not contestant.is_peer:
            checks.append(_check_ratio)
        for check in checks:
            fault = check(contestant, tokens)
            if fault:
                faults.append(f"{contestant.name}: {fault}")
    return faults


def _logits(contestant: Contestant, ids: Tensor, mask: Tensor | None, cache: Any) -> Tensor:
    name = PEER_CACHE if contestant.is_peer else "cache"
    with torch.no_grad():
        return contestant.model(
            input_ids=ids, attention_mask=mask, use_cache=True, **{name: cache}
        ).logits


def _new_cache(contestant: Contestant) -> Any:
    return DynamicCache() if contestant.is_peer else ConceptCache(contestant.config)


def _check_steps(contestant: Contestant, tokens: int) -> str | None:
    ids, cache = random_ids(contestant, 1, tokens), _new_cache(contestant)
    contestant.from_row(0)
    full = _logits(contestant, ids, None, _new_cache(contestant))
    cuts = [0, tokens // 2, *range(tokens // 2 + 1, tokens + 1)]
    pieces = [
        _logits(contestant, ids[:, start:stop], None, cache)
        for start, stop in itertools.pairwise(cuts)
    ]
    off = (torch.cat(pieces, 1) - full).abs().max().item()
    return None if off < TOLERANCE else f"prefill and steps differ from the full pass by {off:.1e}"


def _check_batch(contestant: Contestant, tokens: int) -> str | None:
    """Three rows of different lengths, padded on the left, six steps."""
    steps = 6
    lengths = [tokens, tokens - 3, tokens // 2]
    ids = random_ids(contestant, 3, tokens + steps)
    mask = torch.ones_like(ids)
    for row, length in enumerate(lengths):
        mask[row, : tokens - length] = 0
    contestant.from_row(0)
    together = _with_steps(contestant, ids, mask, tokens)
    worst = 0.0
    for row, length in enumerate(lengths):
        contestant.from_row(row)
        own = slice(tokens - length, None)
        alone = _with_steps(contestant, ids[row : row + 1, own], None, length)
        worst = max(worst, (together[row] - alone[0]).abs().max().item())
    contestant.from_row(0)
    return None if worst < TOLERANCE else f"rows of a batch differ from single ones by {worst:.1e}"


def _with_steps(contestant: Contestant, ids: Tensor, mask: Tensor | None, prompt: int) -> Tensor:
    """Logits `[B, steps + 1, V]` of the prompt's last token and of every step."""
    cache, out = _new_cache(contestant), []
    for start, stop in [(0, prompt), *((i, i + 1) for i in range(prompt, ids.shape[1]))]:
        seen = None if mask is None else mask[:, :stop]
        out.append(_logits(contestant, ids[:, start:stop], seen, cache)[:, -1])
    return torch.stack(out, 1)


def _check_ratio(contestant: Contestant, tokens: int) -> str | None:
    with torch.no_grad():
        out = contestant.model(random_ids(contestant, 1, tokens), use_cache=True)
    wanted = concepts_at(tokens, contestant.ratio)
    found = int(out.chunks.boundary_mask.sum())
    if found != wanted:
        return f"{tokens} tokens have {found} boundaries, the pattern holds {wanted}"
    held = held_bytes(out.cache)
    text = contestant.config.text
    levels = text.encoder_layers + text.decoder_layers
    expected = held["tokens"] // (levels * tokens) * len(text.concept_schedule) * wanted
    if held["concepts"] != expected:
        return f"the cache holds {held['concepts']} bytes of concepts, {expected} are 1 / R"
    return None
