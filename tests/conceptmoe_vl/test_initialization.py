"""How fresh weights start, and that loading a pretrained tower survives it."""

from __future__ import annotations

import pytest
import torch

from conceptmoe_vl import ConceptMoEVLForConditionalGeneration
from tests.tiny import tiny_config


def fresh(**options):
    return ConceptMoEVLForConditionalGeneration(tiny_config(**options))


def test_identity_projections_of_the_cosine_router():
    chunk = fresh(init="identity").language_model.chunk
    assert torch.equal(chunk.q_proj.weight, torch.eye(32))
    assert torch.equal(chunk.k_proj.weight, torch.eye(32))


def test_random_projections_of_the_cosine_router():
    chunk = fresh(init="random").language_model.chunk
    for projection in (chunk.q_proj, chunk.k_proj):
        assert projection.weight.std().item() == pytest.approx(32**-0.5, rel=0.15)


def test_joint_decoding_starts_as_the_plain_layer():
    joint = fresh().language_model.decoder.layers[-1].self_attn.joint
    for projection in (joint.q_proj, joint.k_proj, joint.v_proj):
        assert not projection.weight.any()


def test_text_weights_have_the_configured_deviation():
    model = fresh(text={"initializer_range": 0.05, "hidden_size": 64})
    layer = model.language_model.encoder.layers[0]
    weights = [
        model.embed_tokens.weight,
        model.lm_head.weight,
        layer.self_attn.q_proj.weight,
        layer.mlp.gate.weight,
        layer.mlp.experts.gate_up_proj,
        layer.mlp.experts.down_proj,
    ]
    for weight in weights:
        assert weight.std().item() == pytest.approx(0.05, rel=0.15)
    assert torch.equal(layer.input_layernorm.weight, torch.ones(64))


def test_the_towers_own_weights_are_kept(monkeypatch):
    """timm started or loaded them when it built the tower: a pretrained tower must stay what
    it is.
    """
    import conceptmoe_vl.vision as vision

    build = vision.build_tower

    def filled(config):
        tower = build(config)
        with torch.no_grad():
            for parameter in tower.parameters():
                parameter.fill_(0.5)
        return tower

    monkeypatch.setattr(vision, "build_tower", filled)
    for name, parameter in fresh().vision.named_parameters():
        assert (parameter == 0.5).all(), f"{name} was started again"
