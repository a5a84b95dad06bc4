"""Invariant 5 for every family, on random checkpoints that transformers wrote itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conceptmoe_vl import ConceptMoEVLForConditionalGeneration
from conceptmoe_vl.conversion.converting import convert
from conceptmoe_vl.conversion.losslessness import as_source
from conceptmoe_vl.conversion.settings import ConversionSettings
from tests.checkpoints import (
    FAMILIES,
    LAYERS,
    foreign_tokenizer,
    make_source,
    make_vl_source,
    save_source,
    source_logits,
)

KNOWN = len(foreign_tokenizer())
LIMIT = 1e-4  # DESIGN.md, invariant 5
# Shapes and options that a family's configuration may have beside its defaults.
VARIANTS = {
    "Qwen3Moe": [
        {"attention_bias": True, "norm_topk_prob": True},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e4, "factor": 3.0}},
        {"num_experts": 5, "num_experts_per_tok": 5, "tie_word_embeddings": True},
    ],
    "Olmoe": [{"attention_bias": True, "num_key_value_heads": 4}, {"norm_topk_prob": True}],
    "Mixtral": [
        {"head_dim": 6, "num_experts_per_tok": 1},
        {"sliding_window": 512, "hidden_size": 24},
    ],
    "Qwen2Moe": [{"qkv_bias": False}, {"norm_topk_prob": True, "num_key_value_heads": 1}],
    "Llama": [
        {"attention_bias": True, "tie_word_embeddings": False},
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ],
    "Mistral": [{"head_dim": 10}],
    "Qwen2": [{"tie_word_embeddings": True}],
    "Qwen3": [
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        }
    ],
}
CASES = [(family, {}) for family in FAMILIES] + [
    (family, fields) for family, variants in VARIANTS.items() for fields in variants
]
IDS = [f"{family}-{'-'.join(fields) or 'plain'}" for family, fields in CASES]


def load(folder: Path) -> ConceptMoEVLForConditionalGeneration:
    """The converted model; a missing, left-over or misshapen weight is an error."""
    model, info = ConceptMoEVLForConditionalGeneration.from_pretrained(
        folder, output_loading_info=True
    )
    for fault in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not info[fault], (fault, info[fault])
    return model.eval()


def some_ids(rows: int = 2, length: int = 150) -> torch.Tensor:
    return torch.randint(2, KNOWN, (rows, length), generator=torch.Generator().manual_seed(5))


@torch.no_grad()
def difference(model, source, ids) -> float:
    """Largest difference of the logits of tokens that the source knows."""
    ours = model(input_ids=ids).logits[..., :KNOWN]
    theirs = source_logits(source, ids)[..., :KNOWN]
    assert theirs.abs().max() > 1, "logits too small to tell anything"
    return (ours - theirs).abs().max().item()


@pytest.mark.parametrize("one_by_one", [True, False], ids=["one_by_one", "fused"])
@pytest.mark.parametrize(("family", "fields"), CASES, ids=IDS)
def test_a_converted_model_is_its_source(family, fields, one_by_one, tmp_path):
    source = make_source(family, **fields)
    folder = save_source(source, tmp_path / "source", one_by_one)
    convert(folder, tmp_path / "out", ConversionSettings(router="none"))
    model = load(tmp_path / "out")
    assert difference(model, source, some_ids()) < LIMIT
    tied = model.lm_head.weight.data_ptr() == model.embed_tokens.weight.data_ptr()
    assert tied == source.config.tie_word_embeddings


@pytest.mark.parametrize("one_by_one", [True, False], ids=["published", "as_in_memory"])
@pytest.mark.parametrize("width", [16, 8])
def test_the_language_model_of_qwen3_vl_moe(one_by_one, width, tmp_path):
    """Also where 2 F = D and a turned expert matrix has the shape of the right one."""
    source = make_vl_source(moe_intermediate_size=width)
    folder = save_source(source, tmp_path / "source", one_by_one)
    convert(folder, tmp_path / "out", ConversionSettings(router="none"))
    assert difference(load(tmp_path / "out"), source, some_ids()) < LIMIT


DEPTHS = st.tuples(st.integers(0, 2), st.integers(0, 2)).filter(lambda d: sum(d) < LAYERS)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """One MoE and one dense checkpoint, each as (model, folder)."""
    made = {}
    for family in ("Olmoe", "Llama"):
        source = make_source(family)
        folder = save_source(source, tmp_path_factory.mktemp(family) / "source")
        made[family] = (source, folder)
    return made


@given(data=st.data())
@settings(max_examples=25, deadline=None, derandomize=True)
def test_every_setting_keeps_the_function(sources, tmp_path_factory, data):
    """At ratio 1 with `delta`, and without chunking whatever the settings."""
    family = data.draw(st.sampled_from(["Olmoe", "Llama"]))
    source, folder = sources[family]
    encoder, decoder = data.draw(DEPTHS)
    chosen = ConversionSettings(
        encoder_layers=encoder,
        decoder_layers=decoder,
        joint_layers=data.draw(st.integers(0, decoder)),
        router=data.draw(st.sampled_from(["cosine", "linear", "fixed", "none"])),
        merge=data.draw(st.sampled_from([None, "boundary", "sum", "mean"])),
        residual=data.draw(st.sampled_from([None, "delta", "add"])),
        ratio=data.draw(st.sampled_from([None, 1.5, 4.0])),
        experts=data.draw(st.sampled_from([None, 3])) if family == "Llama" else None,
        max_shard_bytes=data.draw(st.sampled_from([10_000, 100_000, 10**9])),
        seed=data.draw(st.integers(0, 3)),
    )
    out = tmp_path_factory.mktemp("out") / "model"
    convert(folder, out, chosen)
    model, ids = load(out), some_ids(1, 40)
    with as_source(model):
        assert difference(model, source, ids) < LIMIT
    if chosen.residual == "add":
        return
    with torch.no_grad():
        whole = model(input_ids=ids, compression=1).logits[..., :KNOWN]
    assert (whole - source_logits(source, ids)[..., :KNOWN]).abs().max() < LIMIT
    if chosen.router == "cosine":
        eye = torch.eye(model.config.hidden_size)
        assert torch.equal(model.language_model.chunk.q_proj.weight, eye)
        assert torch.equal(model.language_model.chunk.k_proj.weight, eye)
    for layer in model.language_model.decoder.layers[decoder - (chosen.joint_layers or 0) :]:
        joint = layer.self_attn.joint
        assert all(not getattr(joint, f"{part}_proj").weight.any() for part in "qkv")


@pytest.mark.parametrize("chosen", [1, 3, 4])
def test_upcycling_is_exact_for_any_number_of_experts_and_any_router(chosen, tmp_path):
    source = make_source("Qwen3")
    folder = save_source(source, tmp_path / "source")
    settings = ConversionSettings(
        router="none",
        experts=4,
        experts_per_token=chosen,
        plan={"text": {"concept_num_experts": 6, "concept_num_experts_per_tok": 5}},
    )
    convert(folder, tmp_path / "out", settings)
    model = load(tmp_path / "out")
    assert model.language_model.concept.layers[0].mlp.experts.down_proj.shape[0] == 6
    assert model.config.text.experts_per_concept == 5
    assert difference(model, source, some_ids()) < LIMIT
    gates = [m.gate.weight for m in model.modules() if hasattr(m, "experts")]
    assert len({tuple(gate.flatten().tolist()) for gate in gates}) == LAYERS
    with torch.no_grad():
        for gate in gates:
            gate.normal_(std=3.0)
    assert difference(model, source, some_ids()) < LIMIT


def test_bfloat16_stays_and_what_is_copied_is_the_sources(tmp_path):
    source = make_source("Mixtral").to(torch.bfloat16)
    folder = save_source(source, tmp_path / "source", max_shard_size="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 3
    convert(folder, tmp_path / "out", ConversionSettings(joint_layers=1, max_shard_bytes=30_000))
    assert (tmp_path / "out" / "model.safetensors.index.json").is_file()
    model = load(tmp_path / "out")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    layers = [
        x
        for s in ("encoder", "concept", "decoder")
        for x in getattr(model.language_model, s).layers
    ]
    for layer, theirs in zip(layers, source.model.layers, strict=True):
        assert torch.equal(layer.mlp.experts.gate_up_proj, theirs.mlp.experts.gate_up_proj)
        assert torch.equal(layer.mlp.experts.down_proj, theirs.mlp.experts.down_proj)
        assert torch.equal(layer.mlp.gate.weight, theirs.mlp.gate.weight)
        assert torch.equal(layer.self_attn.o_proj.weight, theirs.self_attn.o_proj.weight)
    assert torch.equal(model.embed_tokens.weight[:KNOWN], source.model.embed_tokens.weight[:KNOWN])


def test_generation_goes_on_from_a_converted_model(tmp_path):
    """Without chunking, greedy text is the source's."""
    source = make_source("Qwen2Moe")
    folder = save_source(source, tmp_path / "source")
    convert(folder, tmp_path / "out", ConversionSettings(router="none"))
    model, ids = load(tmp_path / "out"), some_ids(1, 12)
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with torch.no_grad():
        ours = model.generate(ids, suppress_tokens=list(range(KNOWN, 320)), **options)
        theirs = source.generate(ids, suppress_tokens=list(range(KNOWN, 320)), **options)
    assert ours.tolist() == theirs.tolist()
