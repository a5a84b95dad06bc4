"""Matched configurations against the real model, torch's counter, and trying everything."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.inference_models import PatternChunk
from conceptmoe_vl import ConceptMoEVLForConditionalGeneration, experts, modeling
from conceptmoe_vl.errors import UserError
from conceptmoe_vl.plan_remedies import remedies
from conceptmoe_vl.plan_search import (
    FLOPS_LIMIT,
    PARAMETER_LIMIT,
    changed,
    compare,
    loop_spans,
)
from conceptmoe_vl.planning import PURPOSES, baseline_of, plan
from tests.flop_counting import flops_of
from tests.tiny import make_document, packed, tiny_config

RATIOS = [Fraction(3, 2), Fraction(2), Fraction(16, 9), Fraction(4)]
TOKENS = 144  # a whole number of concepts at each of them
# Fine enough that every strategy has a match at R = 2.
FINE = {
    "encoder_layers": 1,
    "concept_layers": 8,
    "decoder_layers": 1,
    "num_experts": 64,
    "num_experts_per_tok": 12,
    "moe_intermediate_size": 8,
}
PLAIN = {"router": "none", "concept_residual": "delta", "joint_decoding_layers": 0}


@pytest.fixture(autouse=True)
def plain_products(monkeypatch):
    """Of few rows a product is taken twice for speed; what the formulas count is taken once."""
    for module in (experts, modeling):
        monkeypatch.setattr(module, "FEW_ROWS", 0)


def plain_moe(**text):
    return tiny_config(vision=None, text=text, **PLAIN)


@st.composite
def baselines(draw):
    heads = draw(st.sampled_from([(2, 1), (4, 2), (3, 3)]))
    experts = draw(st.integers(6, 40))
    return plain_moe(
        hidden_size=draw(st.sampled_from([32, 48, 64])),
        encoder_layers=draw(st.integers(0, 2)),
        concept_layers=draw(st.integers(1, 6)),
        decoder_layers=draw(st.integers(0, 3)),
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        head_dim=8,
        num_experts=experts,
        num_experts_per_tok=draw(st.integers(1, experts // 3)),
        num_shared_experts=draw(st.integers(0, 1)),
        moe_intermediate_size=draw(st.sampled_from([8, 16, 40])),
        tie_word_embeddings=draw(st.booleans()),
    )


def counted(config, ratio):
    """(parameters, FLOPs a token without maps and head) of the real model."""
    with torch.device("meta"):
        parameters = ConceptMoEVLForConditionalGeneration(config).num_parameters()
    model = ConceptMoEVLForConditionalGeneration(config).eval()
    if config.chunk.router != "none":
        model.language_model.chunk = PatternChunk(config.chunk, config.text.hidden_size, ratio)
    inputs = packed([make_document([TOKENS])])
    concepts = TOKENS if config.chunk.router == "none" else TOKENS / ratio
    outputs = []
    rest, _ = flops_of(lambda: outputs.append(model(**inputs)))
    assert int(outputs[0].chunks.boundary_mask.sum()) == concepts
    head = 2 * config.text.vocab_size * config.text.hidden_size
    return parameters, rest / TOKENS - head


@given(
    base=baselines(),
    ratio=st.sampled_from(RATIOS),
    purpose=st.sampled_from(["scratch", "conversion"]),
    data=st.data(),
)
@settings(max_examples=15, deadline=None, derandomize=True)
def test_figures_of_a_plan_are_the_real_models(base, ratio, purpose, data):
    strategy = data.draw(st.sampled_from(PURPOSES[purpose]))
    found = plan(base, float(ratio), strategy, purpose)
    pairs = [counted(found.baseline, ratio), counted(found.config, ratio)]
    assert tuple(parameters for parameters, _ in pairs) == found.match.parameters
    assert [flops for _, flops in pairs] == pytest.approx(found.match.flops, rel=1e-5)


@pytest.mark.parametrize(
    ("purpose", "strategy"),
    [(purpose, strategy) for purpose, all_ in PURPOSES.items() for strategy in all_],
)
def test_every_strategy_has_a_match_that_the_real_model_confirms(purpose, strategy):
    found = plan(plain_moe(**FINE), 2, strategy, purpose, joint_layers=0)
    (parameters, flops), (theirs, cost) = (
        counted(config, Fraction(2)) for config in (found.baseline, found.config)
    )
    assert found.match.is_matched
    assert abs(theirs / parameters - 1) <= PARAMETER_LIMIT
    assert abs(cost / flops - 1) <= FLOPS_LIMIT
    text, plain = found.config.text, found.baseline.text
    if strategy == "experts":
        assert text.experts_per_concept > plain.num_experts_per_tok
        assert text.concept_loops == []
    if strategy == "loops":
        # About half of the saving goes into passes, the other half into experts.
        assert len(text.concept_schedule) / text.concept_layers == pytest.approx(1.5, abs=0.1)
        alone = plan(plain_moe(**FINE), 2, "experts", purpose, joint_layers=0).config.text
        assert plain.num_experts_per_tok < text.experts_per_concept < alone.experts_per_concept
    if strategy == "width":
        assert text.concept_hidden_size / text.hidden_size == pytest.approx(math.sqrt(2), rel=0.15)
        assert text.experts_of_concepts < plain.num_experts


def test_conversion_keeps_every_pretrained_parameter():
    base = plain_moe(**FINE)
    for strategy in PURPOSES["conversion"]:
        found = plan(base, 1.5, strategy, "conversion")
        with torch.device("meta"):
            before, after = (
                ConceptMoEVLForConditionalGeneration(config).state_dict()
                for config in (found.baseline, found.config)
            )
        assert {name: t.shape for name, t in after.items() if name in before} == {
            name: t.shape for name, t in before.items()
        }
        assert all("chunk" in name or "joint" in name for name in after.keys() - before.keys())
        chunk = found.config.chunk
        assert (chunk.concept_residual, chunk.merge, chunk.router) == (
            "delta",
            "boundary",
            "cosine",
        )


SMALL = [
    {"hidden_size": 32, "concept_layers": 4, "num_experts": 12, "num_experts_per_tok": 3},
    {"hidden_size": 48, "concept_layers": 6, "num_experts": 9, "num_experts_per_tok": 2},
    {"hidden_size": 64, "concept_layers": 3, "num_experts": 10, "num_experts_per_tok": 4},
]


def everything(base, ratio, strategy, purpose):
    """Every configuration of a strategy."""
    text = base.text
    start = plan(base, ratio, "loops", purpose).config  # its chunk section
    start = changed(start, {"concept_loops": [], "concept_num_experts_per_tok": None})
    numbers = [text.num_experts]
    if purpose == "scratch":
        numbers = list(range(text.num_experts_per_tok, 2 * text.num_experts + 1))
    widths, spans, least = [None], [[]], text.num_experts_per_tok
    if strategy == "loops":
        most = math.ceil(text.concept_layers * (ratio - 1)) + 1
        spans = [loop_spans(text.concept_layers, extra) for extra in range(1, most + 1)]
    if strategy == "width":
        widths = range((text.hidden_size // 8 + 1) * 8, int(2 * ratio * text.hidden_size) + 1, 8)
        numbers, least = range(1, text.num_experts + 1), 1
    for width, number, span in itertools.product(widths, numbers, spans):
        for chosen in range(least, number + 1):
            fields = {
                "concept_hidden_size": width,
                "concept_num_experts": number,
                "concept_num_experts_per_tok": chosen,
                "concept_loops": span,
            }
            yield changed(start, fields)


@pytest.mark.parametrize("small", range(len(SMALL)))
@pytest.mark.parametrize("ratio", [1.5, 2.0])
@pytest.mark.parametrize(
    ("purpose", "strategy"),
    [(purpose, strategy) for purpose, all_ in PURPOSES.items() for strategy in all_],
)
def test_the_search_misses_no_match(small, ratio, purpose, strategy):
    base = plain_moe(**SMALL[small])
    found = plan(base, ratio, strategy, purpose)
    matches = [compare(base, other) for other in everything(base, ratio, strategy, purpose)]
    assert found.match.is_matched == any(match.is_matched for match in matches)
    if purpose == "conversion" and not found.match.is_matched:
        # Nothing is nearer by more than the tenth of a limit that a smaller change is worth.
        assert found.match.worst <= min(match.worst for match in matches) + 0.1


def test_auto_takes_the_papers_strategy_and_says_why():
    base = plain_moe(**FINE)
    scratch = plan(base, 2, joint_layers=0)
    assert (scratch.strategy, "widens the concept model" in scratch.reason) == ("width", True)
    conversion = plan(base, 2, purpose="conversion", joint_layers=0)
    assert (conversion.strategy, "rules out width" in conversion.reason) == ("loops", True)
    # A single concept layer cannot be passed one and a half times.
    shallow = plain_moe(**{**FINE, "concept_layers": 1})
    single = plan(shallow, 1.4, purpose="conversion", joint_layers=0)
    assert single.strategy == "experts"
    assert single.reason.endswith("loops missed the limits")


def test_a_chunking_base_stands_for_its_plain_moe():
    """Planning from a plan's own configuration gives the plan again, and keeps its chunking."""
    base = plain_moe(**FINE)
    found = plan(base, 1.5, "width", joint_layers=0)
    again = plan(found.config, 1.5, "width", joint_layers=0)
    assert again.match == found.match
    assert again.config.to_dict() == found.config.to_dict()
    chunk = {"image_mode": "grid", "target_ratios": [1, 3], "target_ratio": 3}
    kept = plan(changed(found.config, chunk=chunk), 1.5, "experts").config.chunk
    assert (kept.image_mode, kept.target_ratio, kept.target_ratios) == ("grid", 1.5, None)


def test_layers_are_split_anew():
    base = plain_moe(encoder_layers=0, concept_layers=10, decoder_layers=0)
    found = plan(base, 2, "experts", encoder_layers=2, decoder_layers=3)
    text = found.config.text
    assert (text.encoder_layers, text.concept_layers, text.decoder_layers) == (2, 5, 3)
    assert found.config.chunk.joint_decoding_layers == 3
    assert compare(base, found.baseline).worst == 0
    assert plan(base, 2, "experts").config.chunk.joint_decoding_layers == 0


@pytest.mark.parametrize("layers", [1, 4, 7])
@pytest.mark.parametrize("extra", [1, 3, 4, 9])
def test_loop_spans(layers, extra):
    text = plain_moe(concept_layers=layers).text
    schedule = changed(
        plain_moe(concept_layers=layers), {"concept_loops": loop_spans(layers, extra)}
    )
    passed = schedule.text.concept_schedule
    assert len(passed) == layers + extra
    assert set(passed) == set(text.concept_schedule)
    counts = [passed.count(layer) for layer in range(layers)]
    assert max(counts) - min(counts) <= 1


def test_given_loops_and_width():
    base = plain_moe(**FINE)
    looped = plan(base, 2, "loops", loops=4).config.text
    assert looped.concept_loops == [[2, 5, 2]]
    wide = plan(base, 2, "width", width=48, joint_layers=0)
    assert wide.config.text.concept_hidden_size == 48
    assert abs(wide.match.parameter_miss) <= PARAMETER_LIMIT


@pytest.mark.parametrize("strategy", ["experts", "loops", "width", "auto"])
def test_remedies_are_tried(strategy):
    """Whatever is advised leads to a match when it is done."""
    base = plain_moe(hidden_size=32, concept_layers=2, num_experts=8, moe_intermediate_size=32)
    missed = plan(base, 1.5, strategy)
    assert not missed.match.is_matched
    advice = remedies(base, missed, {}, strategy)
    assert advice
    for words in advice:
        settings, twin = {"ratio": 1.5, "strategy": strategy}, base
        for change in words.split(" and "):
            kind, _, value = change.partition(" ")
            if kind == "a":  # baseline of finer experts (text.a 1, text.b 2)
                fields = [part.split() for part in change[change.index("(") + 1 : -1].split(", ")]
                twin = changed(twin, {name.partition(".")[2]: int(n) for name, n in fields})
            elif kind == "chunk.router":
                twin = changed(twin, chunk={"router": value})
            else:
                read = {"--ratio": float, "--strategy": str}.get(kind, int)
                settings[kind[2:].replace("-", "_")] = read(value)
        assert plan(twin, **settings).match.is_matched, words


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ratio": 1}, "the ratio is 1; give"),
        ({"ratio": float("nan")}, "the ratio is nan"),
        ({"ratio": 1e9}, "the ratio is 1e.09; give the tokens per concept, above 1, at most 100"),
        ({"strategy": "width", "purpose": "conversion"}, "choose experts or loops"),
        ({"strategy": "wider"}, "the strategy is 'wider'; choose one of"),
        ({"purpose": "fun"}, "the purpose is 'fun'"),
        ({"loops": 2}, "--loops belongs to strategy loops"),
        ({"strategy": "loops", "width": 64}, "--width belongs to strategy width"),
        ({"strategy": "loops", "loops": 0}, "--loops is 0"),
        ({"strategy": "loops", "loops": 10**9}, "--loops is 1000000000"),
        ({"strategy": "width", "width": 32}, "--width is 32; give a multiple of 8 above"),
        ({"strategy": "width", "width": 60}, "--width is 60"),
        ({"encoder_layers": 2, "decoder_layers": 1}, "of 3 layers 2 are the encoder's"),
        ({"joint_layers": 2}, "--joint-layers is 2, but the decoder has 1"),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises(UserError, match=message):
        plan(plain_moe(), **{"ratio": 2, **arguments})


@pytest.mark.parametrize(
    "text",
    [{"concept_hidden_size": 64}, {"concept_loops": [[0, 0, 2]]}, {"concept_num_experts": 8}],
)
def test_a_plain_moe_has_the_same_layers_everywhere(text):
    with pytest.raises(UserError, match=f"text.{next(iter(text))} is .* leave the field out"):
        baseline_of(plain_moe(**text))
