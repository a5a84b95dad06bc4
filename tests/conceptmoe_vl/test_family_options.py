"""What converted families ask of the layers: rope scaling, and refusals of the `text` section.

Biases, the norm over all heads and the gated shared expert are held against the reference model in
`test_reference.py`, and against transformers' own models in `conversion/`.
"""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from conceptmoe_vl.layers import rotary_table
from tests.tiny import make_document, packed, tiny_config, tiny_model

SCALINGS = {
    "none": None,
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "yarn_mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "mscale": 0.7,
        "mscale_all_dim": 1.3,
        "beta_fast": 16,
        "truncate": False,
    },
}


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("theta", [1e4, 5e5])
def test_angles_are_transformers_to_the_last_bit(name, theta):
    scaling = SCALINGS[name]
    rope = {"rope_type": "default", **(scaling or {}), "rope_theta": theta}
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=4, max_position_embeddings=4096, rope_parameters=rope
    )
    positions = torch.tensor([0, 1, 2, 7, 63, 1000, 4095])
    x = torch.zeros(1, len(positions), 64)
    cos, sin = LlamaRotaryEmbedding(config)(x, positions[None])
    ours = rotary_table(positions, 16, theta, scaling)
    assert torch.equal(ours[0][:, 0], cos[0, :, :8])
    assert torch.equal(ours[1][:, 0], sin[0, :, :8])


def test_scaling_reaches_every_stack_and_trains():
    """Also after inference mode, which must not leave tensors behind that autograd refuses."""
    options = {"router": "none", "concept_residual": "delta", "vision": None}
    text = {"rope_scaling": SCALINGS["yarn"]}
    scaled, plain = tiny_model(text=text, **options), tiny_model(**options)
    inputs = packed([make_document([9])], labels=True)
    with torch.inference_mode():
        out = scaled(**inputs)
        assert not torch.allclose(out.logits, plain(**inputs).logits, atol=1e-3)
    out = scaled.train()(**inputs)
    out.loss.backward()
    for stack in ("encoder", "concept", "decoder"):
        layer = getattr(scaled.language_model, stack).layers[0]
        assert layer.self_attn.q_proj.weight.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ({"qk_norm_over": "layer"}, r"text.qk_norm_over is 'layer'; choose one of"),
        ({"attention_bias": "yes"}, r"text.attention_bias is 'yes'; choose one of"),
        ({"shared_expert_gate": True}, r"shared_expert_gate is True, but text.num_shared_experts"),
        ({"shared_intermediate_size": 8}, r"shared_intermediate_size is 8, but"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, r"rope_scaling.rope_type is 'dynamic'"),
        ({"rope_scaling": {"rope_type": "linear"}}, r"rope_scaling.factor is None; linear scaling"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2, "fator": 3}},
            r"key 'text.rope_scaling.fator'; the nearest known key is 'factor'",
        ),
        ({"rope_theta": 0}, r"text.rope_theta is 0; give a number above 0"),
        ({"balance_loss_weight": -1}, r"balance_loss_weight is -1; give a number of 0 or more"),
        ({"rms_norm_eps": float("nan")}, r"text.rms_norm_eps is nan; give a number above 0"),
        ({"head_dim": 0}, r"text.head_dim is 0; give a number of 1 or more"),
        ({"concept_loops": [1]}, r"text.concept_loops holds 1; each entry is \[first"),
    ],
)
def test_refusals(text, message):
    with pytest.raises(ValueError, match=message):
        tiny_config(text=text, vision=None)


@pytest.mark.parametrize(
    ("chunk", "vision", "message"),
    [
        ({"ratio_loss_weight": float("inf")}, None, "ratio_loss_weight is inf; give a number of 0"),
        ({"tau": 0.5}, None, "chunk.tau is 0.5; give a number of 1 or more"),
        ({}, {"mean": [0.5]}, r"vision.mean is \[0.5\]; give three numbers: red, green, blue"),
    ],
)
def test_refusals_of_other_sections(chunk, vision, message):
    with pytest.raises(ValueError, match=message):
        tiny_config(vision=vision, **chunk)
