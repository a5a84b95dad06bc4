"""configs/paper: each counts what its name says and is matched to its baseline."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from conceptmoe_vl import ConceptMoEVLForConditionalGeneration
from conceptmoe_vl.flops import count_parameters
from conceptmoe_vl.flops_report import read_config
from conceptmoe_vl.plan_search import compare
from conceptmoe_vl.planning import baseline_of, plan
from conceptmoe_vl.training.config import load_run_config

FOLDER = Path("configs/paper")
FILES = sorted(FOLDER.glob("*.yaml"))
NAME = re.compile(
    r"(Concept)?(?P<base>MoE(-VL)?-A(?P<active>[\d.]+)B-(?P<total>\d+)B)(-(?P<kind>.+))?"
)
APART = ("embedding", "head", "vision", "projector")  # what the names leave out
# What the names after the sizes and PAPER.md say: ratio, width, passes, experts per concept.
VARIANTS = {
    "ConceptMoE-A0.5B-12B": (16 / 9, 4 / 3, 1, None),
    "ConceptMoE-A1B-24B": (16 / 9, 4 / 3, 1, None),
    "ConceptMoE-VL-A2.5B-60B": (2, 1.5, 1, None),
    "ConceptMoE-A2.5B-90B-top15": (1.5, 1, 1, 15),
    "ConceptMoE-A2.5B-90B-top11-loop8": (1.5, 1, None, 11),
    "ConceptMoE-A10B-300B-2L-top8-R2": (2, 1, 2, 8),
    "ConceptMoE-A10B-300B-1.5L-top13-R2": (2, 1, 1.5, 13),
    "ConceptMoE-A10B-300B-1L-top24-R2": (2, 1, 1, 24),
    "ConceptMoE-A10B-300B-1L-top16-R1.5": (1.5, 1, 1, 16),
    "ConceptMoE-A10B-300B-1.25L-top11-R1.5": (1.5, 1, 1.25, 11),
}


def named(path):
    match = NAME.fullmatch(path.stem)
    assert match, path
    return match


def test_all_are_there():
    assert {path.stem for path in FILES if path.stem.startswith("Concept")} == set(VARIANTS)
    assert {named(path)["base"] for path in FILES} == {
        path.stem for path in FILES if not path.stem.startswith("Concept")
    }


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_counts_what_its_name_says(path):
    config, name = read_config(str(path)), named(path)
    counts = count_parameters(config)
    config.image_token_id, config.vision_start_token_id, config.vision_end_token_id = 0, 1, 2
    with torch.device("meta"):
        model = ConceptMoEVLForConditionalGeneration(config)
    assert model.num_parameters() == sum(count.total for count in counts.values())
    body = [count for component, count in counts.items() if component not in APART]
    assert sum(c.total for c in body) / 1e9 == pytest.approx(float(name["total"]), rel=0.03)
    if config.chunk.router == "none":  # else what is active per token depends on the ratio
        assert sum(c.active for c in body) / 1e9 == pytest.approx(float(name["active"]), rel=0.03)


@pytest.mark.parametrize("name", VARIANTS)
def test_matched_to_its_baseline(name):
    path = FOLDER / f"{name}.yaml"
    config = read_config(str(path))
    base = read_config(str(FOLDER / f"{named(path)['base']}.yaml"))
    assert compare(base, config).is_matched
    # The same layers in the same places, and nothing else changed.
    assert baseline_of(config).text == base.text
    assert config.vision == base.vision


@pytest.mark.parametrize("name", VARIANTS)
def test_settings_are_the_papers(name):
    config = read_config(str(FOLDER / f"{name}.yaml"))
    text, chunk = config.text, config.chunk
    ratio, width, passes, experts = VARIANTS[name]
    assert chunk.target_ratio == ratio
    assert text.width_of_concepts == width * text.hidden_size
    if passes is None:
        assert len(text.concept_schedule) - text.concept_layers == 8
    else:
        assert len(text.concept_schedule) == passes * text.concept_layers
    assert experts in (None, text.experts_per_concept)
    assert (text.encoder_layers, text.decoder_layers, text.num_experts_per_tok) == (4, 4, 8)
    assert (chunk.joint_decoding_layers, chunk.tau, chunk.ratio_loss_weight) == (4, 6, 0.03)
    assert (chunk.router, chunk.noise, chunk.concept_residual) == ("cosine", "bernoulli", "add")
    assert (config.vision is not None) == ("-VL-" in name)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_trains_with_a_folder_data_and_an_end(path):
    overrides = ["run_dir=runs/paper", "data.shards=data/train-*.tar", "training.max_steps=10"]
    run = load_run_config(path, overrides)
    assert run.model.text["hidden_size"] == read_config(str(path)).text.hidden_size


@pytest.mark.parametrize(
    ("name", "ratio", "strategy", "purpose"),
    [
        ("MoE-A0.5B-12B", 16 / 9, "width", "scratch"),
        ("MoE-A1B-24B", 16 / 9, "width", "scratch"),
        ("MoE-VL-A2.5B-60B", 2, "width", "scratch"),
        ("MoE-A2.5B-90B", 1.5, "experts", "conversion"),
        ("MoE-A2.5B-90B", 1.5, "loops", "conversion"),
        ("MoE-A10B-300B", 2, "experts", "conversion"),
    ],
)
def test_plan_finds_the_papers_strategy(name, ratio, strategy, purpose):
    base = read_config(str(FOLDER / f"{name}.yaml"))
    found = plan(base, ratio, strategy, purpose)
    assert found.match.is_matched
    if strategy == "experts":
        assert found.config.text.experts_per_concept == (15 if ratio == 1.5 else 24)
    if strategy == "loops":
        theirs = read_config(str(FOLDER / "ConceptMoE-A2.5B-90B-top11-loop8.yaml"))
        assert found.config.text == theirs.text
