"""A plan's YAML, as `conceptmoe-vl plan` writes it, decides what conversion may decide."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import yaml

from conceptmoe_vl import ConceptMoEVLConfig, ConceptMoEVLForConditionalGeneration, cli
from conceptmoe_vl.conversion.converting import convert
from conceptmoe_vl.conversion.losslessness import as_source
from conceptmoe_vl.conversion.settings import ConversionSettings, read_plan
from conceptmoe_vl.planning import changed
from tests.checkpoints import foreign_tokenizer, make_source, save_source, source_logits


def plan_of(folder, path, **fields):
    """The whole sections of a converted model's configuration, with planned fields of `text`."""
    config = changed(ConceptMoEVLConfig.from_pretrained(folder), fields)
    model = {name: dataclasses.asdict(getattr(config, name)) for name in ("text", "chunk")}
    path.write_text(yaml.safe_dump({"model": {**model, "vision": None}}))
    return path


@pytest.mark.parametrize("family", ["Qwen3Moe", "Llama"])
def test_from_conversion_to_plan_to_conversion(family, tmp_path):
    source = make_source(family)
    folder = save_source(source, tmp_path / "source")
    settings = ConversionSettings(ratio=1.5, joint_layers=1)
    convert(folder, tmp_path / "first", settings)
    fields = {"concept_loops": [[0, 1, 2]], "concept_num_experts_per_tok": 4}
    if family == "Llama":
        fields |= {"num_experts": 5, "num_experts_per_tok": 1, "concept_num_experts": 7}
    plan = plan_of(tmp_path / "first", tmp_path / "plan.yaml", **fields)
    convert(folder, tmp_path / "second", ConversionSettings(plan=read_plan(plan)))
    model = ConceptMoEVLForConditionalGeneration.from_pretrained(tmp_path / "second").eval()
    for name, value in fields.items():
        assert getattr(model.config.text, name) == value
    assert model.config.chunk.target_ratio == 1.5
    assert model.config.chunk.joint_decoding_layers == 1
    ids = torch.randint(2, 300, (1, 40))
    known = len(foreign_tokenizer())
    with torch.no_grad(), as_source(model):
        ours = model(input_ids=ids).logits[..., :known]
    assert (ours - source_logits(source, ids)[..., :known]).abs().max() < 1e-4


def test_options_come_before_the_plan(tmp_path):
    folder = save_source(make_source("Olmoe"), tmp_path / "source")
    convert(folder, tmp_path / "first", ConversionSettings())
    plan = plan_of(tmp_path / "first", tmp_path / "plan.yaml")
    words = ["convert", folder, tmp_path / "second", "--plan", plan, "--encoder-layers", 0]
    words += ["--decoder-layers", 2, "--merge", "sum", "--residual", "add", "--ratio", 3, "--ema"]
    assert cli.main([str(word) for word in words]) == 0
    config = ConceptMoEVLConfig.from_pretrained(tmp_path / "second")
    text, chunk = config.text, config.chunk
    assert (text.encoder_layers, text.concept_layers, text.decoder_layers) == (0, 2, 2)
    assert (chunk.merge, chunk.concept_residual, chunk.target_ratio) == ("sum", "add", 3)
    assert chunk.ema


def test_defaults(tmp_path):
    """An eighth of the layers each for E and D; `delta`, `boundary`, no EMA, no joint layers."""
    folder = save_source(make_source("Olmoe", num_hidden_layers=16), tmp_path / "source")
    convert(folder, tmp_path / "out")
    config = ConceptMoEVLConfig.from_pretrained(tmp_path / "out")
    text, chunk = config.text, config.chunk
    assert (text.encoder_layers, text.concept_layers, text.decoder_layers) == (2, 12, 2)
    assert (chunk.router, chunk.merge, chunk.concept_residual) == ("cosine", "boundary", "delta")
    assert (chunk.joint_decoding_layers, chunk.init, chunk.target_ratio) == (0, "identity", 2.0)
    assert not chunk.ema
