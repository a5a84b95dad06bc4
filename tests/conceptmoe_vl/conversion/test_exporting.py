"""Round trips bit for bit, and what Qwen3-MoE cannot express."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from conceptmoe_vl import ConceptMoEVLForConditionalGeneration, cli
from conceptmoe_vl.conversion.converting import convert
from conceptmoe_vl.conversion.exporting import plan_export, write_export
from conceptmoe_vl.conversion.settings import ConversionSettings
from conceptmoe_vl.errors import UserError
from conceptmoe_vl.processing import build_processor
from conceptmoe_vl.tokenizing import SPECIAL_TOKENS, train_tokenizer
from tests.checkpoints import (
    TEMPLATE,
    foreign_tokenizer,
    make_source,
    make_vl_source,
    save_source,
    source_logits,
)
from tests.tiny import tiny_config, tiny_model

PLAIN = {"router": "none", "concept_residual": "delta", "joint_decoding_layers": 0}


def weights_in(folder) -> dict[str, torch.Tensor]:
    return {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(
        a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a
    )


def save_with_special_tokens(source, folder, one_by_one=True, **saving):
    """A checkpoint whose tokenizer has all marks, as Qwen's have: conversion adds no row."""
    save_source(source, folder, one_by_one, **saving)
    tokenizer = foreign_tokenizer()
    tokenizer.add_tokens(list(SPECIAL_TOKENS), special_tokens=True)
    tokenizer.pad_token = SPECIAL_TOKENS[0]
    tokenizer.save_pretrained(folder)
    return folder


VARIANTS = [
    {},
    {"tie_word_embeddings": True, "attention_bias": True},
    {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e4, "factor": 3.0}},
]


@pytest.mark.parametrize("one_by_one", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fields", VARIANTS, ids=["plain", "tied_biases", "rope"])
def test_there_and_back_is_the_source_bit_for_bit(fields, dtype, one_by_one, tmp_path):
    """Names, values and dtypes are those that transformers publishes, whatever it was read from."""
    source = make_source("Qwen3Moe", **fields).to(dtype)
    published = save_with_special_tokens(source, tmp_path / "published")
    folder = published
    if not one_by_one:
        folder = save_with_special_tokens(source, tmp_path / "fused", one_by_one=False)
    convert(folder, tmp_path / "out", ConversionSettings(router="none", max_shard_bytes=50_000))
    write_export(plan_export(tmp_path / "out"), tmp_path / "back", 40_000)
    assert same(weights_in(tmp_path / "back"), weights_in(published))
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    ids = torch.randint(2, 300, (2, 40))
    again = AutoModelForCausalLM.from_pretrained(published)
    assert torch.equal(source_logits(back, ids), source_logits(again, ids))
    for name in ("hidden_size", "head_dim", "num_experts", "rope_parameters", "attention_bias"):
        assert getattr(back.config, name) == getattr(source.config, name), name
    assert back.dtype == dtype
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "back")
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer.get_vocab() == AutoTokenizer.from_pretrained(folder).get_vocab()
    convert(tmp_path / "back", tmp_path / "again", ConversionSettings(router="none"))
    assert same(weights_in(tmp_path / "again"), weights_in(tmp_path / "out"))


def test_only_the_rows_of_added_tokens_differ(tmp_path):
    source = make_source("Qwen3Moe")
    folder = save_source(source, tmp_path / "source")
    convert(folder, tmp_path / "out", ConversionSettings(router="none"))
    write_export(plan_export(tmp_path / "out"), tmp_path / "back", 10**9)
    ours, theirs = weights_in(tmp_path / "back"), weights_in(folder)
    known = len(foreign_tokenizer())
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        kept = [row for row in range(320) if not known <= row < known + len(SPECIAL_TOKENS)]
        assert torch.equal(ours.pop(name)[kept], theirs.pop(name)[kept])
    assert same(ours, theirs)


def test_the_language_model_of_qwen3_vl_moe_becomes_a_qwen3_moe(tmp_path):
    source = make_vl_source()
    folder = save_with_special_tokens(source, tmp_path / "source")
    convert(folder, tmp_path / "out", ConversionSettings(router="none"))
    write_export(plan_export(tmp_path / "out"), tmp_path / "back", 10**9)
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    ids = torch.randint(2, 300, (1, 40))
    difference = (source_logits(back, ids) - source_logits(source, ids)).abs().max()
    assert difference < 1e-4


def test_a_trained_plain_model_is_exported(tmp_path):
    """Of this project's own making: its tokenizer, loops of no kind, uneven stages."""
    tokenizer = train_tokenizer(["what is it?"], 300)
    text = {"encoder_layers": 2, "decoder_layers": 0, "vocab_size": 300, "norm_topk_prob": False}
    model = tiny_model(vision=None, text=text, **PLAIN)
    model.save_pretrained(tmp_path / "model")
    build_processor(model.config, tokenizer).save_pretrained(tmp_path / "model")
    words = ["export", str(tmp_path / "model"), str(tmp_path / "back"), "--format", "qwen3_moe"]
    assert cli.main(words) == 0
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    ids = torch.randint(5, 300, (2, 30))
    with torch.no_grad():
        ours = model(input_ids=ids).logits
    torch.testing.assert_close(source_logits(back, ids), ours, atol=1e-4, rtol=0)
    assert cli.main(words) == 2  # it exists now


@pytest.mark.parametrize(
    ("text", "chunk", "vision", "message"),
    [
        ({}, {"router": "cosine"}, None, "its chunk.router is 'cosine', that family needs 'none'"),
        ({}, {"concept_residual": "add"}, None, "its chunk.concept_residual is 'add'"),
        ({}, {"joint_decoding_layers": 1}, None, "its chunk.joint_decoding_layers is 1"),
        ({"concept_loops": [[0, 0, 2]]}, {}, None, "its text.concept_loops is [[0, 0, 2]]"),
        ({"concept_hidden_size": 48}, {}, None, "its text.concept_hidden_size is 48"),
        ({"concept_num_experts": 6}, {}, None, "its text.concept_num_experts is 6"),
        ({"concept_num_experts_per_tok": 3}, {}, None, "concept_num_experts_per_tok is 3"),
        ({"num_shared_experts": 1}, {}, None, "its text.num_shared_experts is 1"),
        ({"qk_norm": False}, {}, None, "its text.qk_norm is False"),
        ({"qk_norm_over": "all_heads"}, {}, None, "its text.qk_norm_over is 'all_heads'"),
        ({"attention_bias": "qkv"}, {}, None, "its text.attention_bias is 'qkv'"),
        ({}, {}, "plain", "its vision is 'vit_tiny_patch16_224', that family needs None"),
    ],
)
def test_refusals(text, chunk, vision, message, tmp_path):
    tokenizer = train_tokenizer(["what is it?"], 300)
    text = {"vocab_size": 300, **text}
    config = tiny_config(vision=vision, text=text, **{**PLAIN, **chunk})
    ConceptMoEVLForConditionalGeneration(config).save_pretrained(tmp_path / "model")
    build_processor(config, tokenizer).save_pretrained(tmp_path / "model")
    with pytest.raises(UserError) as caught:
        plan_export(tmp_path / "model")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_folders_that_hold_no_such_model(tmp_path):
    folder = save_source(make_source("Llama"), tmp_path / "source")
    with pytest.raises(UserError, match="model of type 'llama'"):
        plan_export(folder)
    convert(folder, tmp_path / "out", ConversionSettings(router="none"))
    with pytest.raises(UserError, match="qk_norm is False"):
        plan_export(tmp_path / "out")
    (tmp_path / "out" / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="cannot be loaded"):
        plan_export(tmp_path / "out")
