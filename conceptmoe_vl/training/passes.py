"""How much more than the forward pass a training step computes, by component of the model.

A backward pass costs one forward pass for the gradient of the inputs, where anything at or before
them is trained, and one for that of the weights, where they are. An attention map has two inputs
and no weight: it costs two as soon as a gradient passes.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator
from typing import Any

from torch import nn

from conceptmoe_vl.flops import COMPONENTS

from .parts import layer_of, part_of

# In the order of computation.
_MODULES = {
    "vision": "vision.",
    "projector": "projector.",
    "embedding": "embed_tokens.",
    "encoder": "language_model.encoder.",
    "chunk": "language_model.chunk.",
    "concept": "language_model.concept.",
    "dechunk": "language_model.from_concept.",
    "decoder": "language_model.decoder.",
    "head": "lm_head.",
}
assert tuple(_MODULES) == COMPONENTS
_EXPERTS = ".experts."


@dataclasses.dataclass(frozen=True)
class Passes:
    """Forward passes that forward and backward together cost, 1 to 3.

    Fields:
        rest: of products by weights. maps: of attention maps.
    """

    rest: float = 1.0
    maps: float = 1.0


@dataclasses.dataclass
class _Piece:
    """A layer, or what stands before, between or behind layers.

    Fields:
        learns: whether anything of it is trained. work, trained: weights that a token passes, and
            those of them that are trained. times: how often it is passed. is_layer: it has maps.
    """

    learns: bool = False
    work: float = 0.0
    trained: float = 0.0
    times: int = 1
    is_layer: bool = False


def passes(model: Any) -> dict[str, Passes]:
    """By component, of the project's own model before an engine has taken it.

    Adapters on experts are added to their matrices, which therefore have a gradient; those on
    attention are so small that they count for nothing.
    """
    pieces = _pieces(model)
    result, reached = {}, False
    for component in COMPONENTS:
        rest = work = maps = layers = 0.0
        for piece in pieces[component].values():
            reached = reached or piece.learns
            work += piece.times * piece.work
            rest += piece.times * (piece.work * (1 + reached) + piece.trained)
            layers += piece.times * piece.is_layer
            maps += piece.times * piece.is_layer * (1 + 2 * reached)
        result[component] = Passes(
            rest / work if work else 1.0 + reached, maps / layers if layers else 1.0 + 2 * reached
        )
    # Perhaps tied to the embedding, whose name it then goes by.
    head_is_trained = model.get_output_embeddings().weight.requires_grad
    return {**result, "head": Passes(1.0 + reached + head_is_trained)}


def _pieces(model: Any) -> dict[str, dict[Any, _Piece]]:
    """By component and place, in the order of computation."""
    text = model.config.text
    chosen = {"concept": text.experts_per_concept}
    adapted = {
        name.partition(_EXPERTS)[0]
        for name, _ in model.named_parameters()
        if part_of(name) == "lora" and _EXPERTS in name
    }
    pieces: dict[str, dict[Any, _Piece]] = collections.defaultdict(dict)
    for component, name, parameter in _named(model):
        where = layer_of(name)
        piece = pieces[component].setdefault(where, _Piece())
        piece.is_layer = where is not None and where[1] >= 0
        if where is not None and where[0] == "concept":
            piece.times = text.concept_schedule.count(where[1])
        piece.learns = piece.learns or parameter.requires_grad
        if part_of(name) == "lora" or not name.endswith(("weight", "_proj")) or parameter.dim() < 2:
            continue
        work, trained = float(parameter.numel()), parameter.requires_grad
        if _EXPERTS in name:
            work *= chosen.get(component, text.num_experts_per_tok) / parameter.shape[0]
            trained = trained or name.partition(_EXPERTS)[0] in adapted
        piece.work += work
        piece.trained += work * trained
    return pieces


def _named(model: nn.Module) -> Iterator[tuple[str, str, nn.Parameter]]:
    """Component, name and parameter."""
    for name, parameter in model.named_parameters():
        for component, prefix in _MODULES.items():
            if name.startswith(prefix):
                yield component, name, parameter
