"""Parts of the model and the optimiser's groups."""

from __future__ import annotations

import pytest
import torch

from conceptmoe_vl.errors import UserError
from conceptmoe_vl.training.config import TrainingConfig
from conceptmoe_vl.training.parameters import (
    GuardedAdamW,
    build_optimizer,
    parameter_groups,
    part_of,
    summarise_parts,
)
from conceptmoe_vl.training.preparing import freeze
from tests.tiny import tiny_model


def names_by_part(model) -> dict[str, list[str]]:
    parts: dict[str, list[str]] = {}
    for name, _ in model.named_parameters():
        parts.setdefault(part_of(name), []).append(name)
    return parts


def test_every_part_is_found_in_a_real_model():
    parts = names_by_part(tiny_model(text={"num_shared_experts": 1, "concept_hidden_size": 48}))
    assert set(parts) == {"vision", "projector", "chunk", "embedding", "experts", "rest"}
    assert set(parts["embedding"]) == {"embed_tokens.weight", "lm_head.weight"}
    assert all(name.startswith("vision.") for name in parts["vision"])
    assert any("joint" in name for name in parts["chunk"])
    assert any("to_concept" in name for name in parts["chunk"])
    assert any(".gate." in name for name in parts["experts"])
    assert any(".shared." in name for name in parts["experts"])
    assert all("norm" in name or "self_attn" in name for name in parts["rest"])


def test_groups_hold_every_trained_parameter_once():
    model = tiny_model(text={"tie_word_embeddings": True})
    groups = parameter_groups(model, TrainingConfig(max_steps=1))
    grouped = [id(parameter) for group in groups for parameter in group["params"]]
    assert len(grouped) == len(set(grouped))
    assert set(grouped) == {id(parameter) for parameter in model.parameters()}


def test_norms_biases_and_embeddings_do_not_decay():
    model = tiny_model()
    decays = {
        id(parameter): group["weight_decay"]
        for group in parameter_groups(model, TrainingConfig(max_steps=1, weight_decay=0.3))
        for parameter in group["params"]
    }
    for name, parameter in model.named_parameters():
        plain = parameter.ndim < 2 or part_of(name) == "embedding" or "pos_embed" in name
        assert decays[id(parameter)] == (0.0 if plain else 0.3), name


def test_rates_by_part_and_frozen_parts():
    model = tiny_model()
    config = TrainingConfig(max_steps=1, learning_rate=1.0, part_learning_rates={"chunk": 0.25})
    freeze(model, TrainingConfig(max_steps=1, freeze=["vision"]))
    rates = {group["name"].split(",")[0]: group["lr"] for group in parameter_groups(model, config)}
    assert rates == {"projector": 1, "chunk": 0.25, "experts": 1, "embedding": 1, "rest": 1}
    table = {part.part: part for part in summarise_parts(model, config)}
    assert table["vision"].trainable == 0
    assert table["vision"].parameters > 0
    assert table["chunk"].learning_rate == 0.25


def test_a_rate_for_a_part_that_is_not_trained_is_refused():
    config = TrainingConfig(max_steps=1, part_learning_rates={"projector": 0.1})
    with pytest.raises(UserError, match="'projector', but no such parameter is trained"):
        parameter_groups(tiny_model(vision=None), config)


def test_cancelled_step_changes_nothing():
    model = tiny_model(vision=None)
    optimizer = build_optimizer(model, TrainingConfig(max_steps=1))
    assert isinstance(optimizer, GuardedAdamW)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, torch.nan)
    optimizer.cancel_next = True
    optimizer.step()
    assert not optimizer.state
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, old)
