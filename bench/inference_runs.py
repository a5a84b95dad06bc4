"""What `bench.inference` runs: prefills, and decoding steps from a cache filled with noise."""

from __future__ import annotations

import copy
from collections.abc import Callable
from fractions import Fraction
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, Qwen3MoeForCausalLM

from bench.inference_models import Contestant
from conceptmoe_vl.cache import ConceptCache
from conceptmoe_vl.layout import PackedLayout
from conceptmoe_vl.memory import cache_bytes

# The keyword under which this transformers takes the peer's cache.
PEER_CACHE = (
    "cache" if "cache" in signature(Qwen3MoeForCausalLM.forward).parameters else "past_key_values"
)


def random_ids(contestant: Contestant, rows: int, tokens: int) -> Tensor:
    device = next(contestant.model.parameters()).device
    return torch.randint(0, contestant.config.text.vocab_size, (rows, tokens), device=device)


def concepts_at(tokens: int, ratio: Fraction) -> int:
    return -(-tokens * ratio.denominator // ratio.numerator)


def prefill(contestant: Contestant, ids: Tensor) -> Callable[[], Any]:
    """A prefill of `ids` `[B, N]` into a new cache, logits of the last token alone."""

    def run() -> Any:
        with torch.no_grad():
            return contestant.model(input_ids=ids, logits_to_keep=1, use_cache=True)

    return run


def held_bytes(cache: Any) -> dict[str, int]:
    """Bytes of keys and values that a cache holds, from its tensors: of tokens and of concepts."""
    if isinstance(cache, DynamicCache):
        tensors = [t for layer in cache.layers for t in (layer.keys, layer.values)]
        return {"tokens": sum(t.numel() * t.element_size() for t in tensors), "concepts": 0}

    def held(stores: list, lengths: tuple[int, ...]) -> int:
        each = [s.keys.shape[1] * s.keys.shape[3] * s.keys.element_size() for s in stores]
        return 2 * sum(each) * sum(lengths)

    tokens = held([*cache.encoder, *cache.decoder], cache.token_lengths)
    return {"tokens": tokens, "concepts": held(cache.concept, cache.concept_lengths)}


class Decoding:
    """Steps of a batch whose rows hold `context` tokens each; every run starts from there again.

    The keys and values of the context are noise, written into the cache's buffers by its own
    `append`: a prefill of 64k tokens for every row would take hours and change no timing.

    Args:
        contestant: the model. rows, context, steps: rows, tokens each holds, steps of one run.
    """

    def __init__(self, contestant: Contestant, rows: int, context: int, steps: int) -> None:
        self.model = contestant.model
        self.steps = random_ids(contestant, rows, steps).split(1, dim=1)
        self.is_peer = contestant.is_peer
        if self.is_peer:
            self.cache: Any = _peer_cache(contestant, rows, context)
            self.held = [(layer.keys, layer.values) for layer in self.cache.layers]
        else:
            self.cache = _concept_cache(contestant, rows, context, steps)
            self.start = _position(self.cache)
        self.bytes = held_bytes(self.cache)

    def __call__(self) -> None:
        self._rewind()
        name = PEER_CACHE if self.is_peer else "cache"
        arguments = {name: self.cache, "use_cache": True, "logits_to_keep": 1}
        with torch.no_grad():
            for ids in self.steps:
                self.model(input_ids=ids, **arguments)

    def _rewind(self) -> None:
        if self.is_peer:  # its steps made new tensors
            for layer, (keys, values) in zip(self.cache.layers, self.held, strict=True):
                layer.keys, layer.values = keys, values
            return
        for name, value in self.start.items():
            setattr(self.cache, name, copy.deepcopy(value))


def _position(cache: ConceptCache) -> dict[str, Any]:
    names = ("token_lengths", "concept_lengths", "padded_length", "chunk")
    return {name: copy.deepcopy(getattr(cache, name)) for name in names}


def _peer_cache(contestant: Contestant, rows: int, context: int) -> DynamicCache:
    text, weight = contestant.config.text, next(contestant.model.parameters())
    cache = DynamicCache()
    shape = (rows, text.num_key_value_heads, context, text.head_dim)
    for layer in range(contestant.model.config.num_hidden_layers):
        keys, values = (
            torch.empty(shape, device=weight.device, dtype=weight.dtype).normal_() for _ in "kv"
        )
        cache.update(keys, values, layer)
    return cache


def _concept_cache(contestant: Contestant, rows: int, context: int, steps: int) -> ConceptCache:
    """A cache after `context` tokens in every row, with room for `steps` more."""
    cache = ConceptCache(contestant.config)
    with torch.no_grad():  # one token sets up what the chunk module carries
        contestant.model(
            input_ids=random_ids(contestant, rows, 1), cache=cache, use_cache=True, logits_to_keep=1
        )
    concepts = concepts_at(context, contestant.ratio)
    for stores, length in (
        ([*cache.encoder, *cache.decoder], context),
        (cache.concept, concepts),
    ):
        _append_noise(stores, rows, length + steps)
    cache.token_lengths = (context,) * rows
    cache.concept_lengths = (concepts,) * rows
    cache.padded_length = context
    return cache


def _append_noise(stores: list, rows: int, length: int) -> None:
    """Fills every row of the stores up to `length`; each holds one position already."""
    like = stores[0].keys
    layout = PackedLayout.from_lengths(
        [length - 1] * rows, like.device, past_lengths=(1,) * rows, rows=tuple(range(rows))
    )
    shape = (rows * (length - 1), like.shape[1], like.shape[3])
    noise = torch.empty(shape, device=like.device, dtype=like.dtype).normal_()
    for store in stores:
        store.append(noise, noise, layout)


def to_device(contestants: dict[str, Contestant], device: str, dtype: torch.dtype) -> None:
    for contestant in contestants.values():
        contestant.model.to(device, dtype)


def cache_need(contestant: Contestant, rows: int, context: int, value: int) -> int:
    """Bytes that a run takes at that context.

    Ours: what the cache holds and the quarter more that it reserves. The peer's steps make new
    tensors of every layer, while the context's wait for the next run, and hold a layer a third time
    while they copy it.
    """
    config = contestant.config
    need = cache_bytes(
        config, context, float(contestant.ratio), rows=rows, bytes_per_value=value
    ).total
    if not contestant.is_peer:
        return need + need // 4
    return 2 * need + need // config.num_hidden_layers
