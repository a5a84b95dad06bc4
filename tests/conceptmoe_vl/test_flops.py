"""Parameters, FLOPs and bytes from a configuration against the real model and torch's counter."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conceptmoe_vl import ConceptMoEVLForConditionalGeneration, experts, modeling
from conceptmoe_vl.chunk import TokenKinds
from conceptmoe_vl.flops import (
    COMPONENTS,
    Flops,
    count_concepts,
    count_parameters,
    decoding_cost,
    forward_flops,
)
from conceptmoe_vl.layout import PackedLayout
from conceptmoe_vl.memory import activation_bytes, cache_bytes
from tests.flop_counting import flops_of
from tests.tiny import (
    NATIVE_VISION,
    PLAIN_VISION,
    TILES_VISION,
    make_document,
    packed,
    randomize,
    tiny_config,
    tiny_model,
)

CONVOLUTIONAL = {
    "model": "conceptmoe_vit_conv",
    "model_args": {"embed_dim": 16, "depth": 2, "num_heads": 2, "stem_blocks": 1},
    "image_size": 32,
    "downsample": 2,
}
# Module of the real model that holds each component's parameters.
MODULES = {
    "vision": "vision",
    "projector": "projector",
    "embedding": "embed_tokens",
    "encoder": "language_model.encoder",
    "concept": "language_model.concept",
    "decoder": "language_model.decoder",
}


@pytest.fixture(autouse=True)
def plain_products(monkeypatch):
    """Of few rows a product is taken twice for speed; what the formulas count is taken once."""
    for module in (experts, modeling):
        monkeypatch.setattr(module, "FEW_ROWS", 0)


@st.composite
def configurations(draw, with_vision: bool = True):
    """Every option that changes a count."""
    layers = draw(st.integers(1, 4))
    first = draw(st.integers(0, layers - 1))
    decoder = draw(st.integers(0, 3))
    heads = draw(st.sampled_from([(2, 1), (4, 2), (3, 3)]))
    experts, concept_experts = draw(st.integers(2, 6)), draw(st.integers(2, 8))
    chunk = {
        "router": draw(st.sampled_from(["cosine", "linear", "fixed", "none"])),
        "concept_residual": draw(st.sampled_from(["add", "delta"])),
        "merge": draw(st.sampled_from(["sum", "boundary", "mean"])),
        "joint_decoding_layers": draw(st.integers(0, decoder)),
        "target_ratio": draw(st.sampled_from([1.5, 2, 3])),
    }
    if chunk["router"] in ("cosine", "linear") and draw(st.booleans()):
        chunk["target_ratios"] = [1, chunk["target_ratio"], 5]
        chunk["ratio_scope"] = draw(st.sampled_from(["global", "modality"]))
    shared = draw(st.integers(0, 2))
    text = {
        "hidden_size": draw(st.sampled_from([16, 32])),
        "concept_hidden_size": draw(st.sampled_from([None, 32, 48])),
        "encoder_layers": draw(st.integers(0, 2)),
        "concept_layers": layers,
        "decoder_layers": decoder,
        "concept_loops": draw(st.sampled_from([[], [[first, layers - 1, 2]], [[0, first, 3]]])),
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": 8,
        "qk_norm": draw(st.booleans()),
        "qk_norm_over": draw(st.sampled_from(["head", "all_heads"])),
        "attention_bias": draw(st.sampled_from(["none", "qkv", "all"])),
        "num_experts": experts,
        "num_experts_per_tok": draw(st.integers(1, experts)),
        "concept_num_experts": concept_experts,
        "concept_num_experts_per_tok": draw(st.integers(1, concept_experts)),
        "num_shared_experts": shared,
        "shared_intermediate_size": draw(st.sampled_from([None, 20])) if shared else None,
        "shared_expert_gate": bool(shared) and draw(st.booleans()),
        "moe_intermediate_size": draw(st.sampled_from([8, 24])),
        "tie_word_embeddings": draw(st.booleans()),
    }
    kinds = (
        [None, PLAIN_VISION, TILES_VISION, NATIVE_VISION, CONVOLUTIONAL] if with_vision else [None]
    )
    vision = draw(st.sampled_from(kinds))
    if vision is not None:
        vision = {**vision, "projector": draw(st.sampled_from(["linear", "mlp"]))}
    return tiny_config(text=text, vision=vision, **chunk)


def total(flops: dict[str, Flops]) -> tuple[float, float]:
    summed = sum(flops.values(), Flops())
    return summed.rest, summed.maps


@given(config=configurations())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_parameters_are_the_models(config):
    with torch.device("meta"):
        model = ConceptMoEVLForConditionalGeneration(config)
    counts = count_parameters(config)
    assert tuple(counts) == COMPONENTS
    assert sum(count.total for count in counts.values()) == model.num_parameters()
    for component, name in MODULES.items():
        if component in ("vision", "projector") and config.vision is None:
            assert counts[component].total == 0
            continue
        module = model.get_submodule(name)
        assert counts[component].total == sum(p.numel() for p in module.parameters()), component
    # What is not active are the experts that a token does not pass.
    idle = sum(
        (own.num_experts - block.num_experts_per_tok)
        * (own.gate_up_proj[0].numel() + own.down_proj[0].numel())
        for block in model.modules()
        if (own := getattr(block, "experts", None)) is not None
    )
    assert sum(c.total - c.active for c in counts.values()) == idle


@given(config=configurations(with_vision=False), tokens=st.integers(1, 20))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_forward_flops_are_the_counters(config, tokens):
    model = ConceptMoEVLForConditionalGeneration(config)
    randomize(model)
    inputs = packed([make_document([tokens])])
    concepts = int(model.eval()(**inputs).chunks.boundary_mask.sum())
    counted = flops_of(lambda: model(**inputs))
    assert total(forward_flops(config, tokens, concepts=concepts)) == counted


@pytest.mark.parametrize("vision", [PLAIN_VISION, TILES_VISION, NATIVE_VISION, CONVOLUTIONAL])
@pytest.mark.parametrize("projector", ["linear", "mlp"])
def test_flops_of_images(vision, projector):
    """The tower's and the projector's share, for square, tiled, native and downsampled images."""
    config = tiny_config(vision={**vision, "projector": projector})
    model = ConceptMoEVLForConditionalGeneration(config)
    native = config.vision.size_policy == "native"
    if native:
        edge = int(config.vision.max_patches**0.5)
        document = make_document([3, (edge, edge), 2], native=True)
        inputs = packed([document], native=True)
        pixels = (inputs["pixel_values"], [[edge, edge]])
        pixels += (inputs["patch_coord"], inputs["patch_valid"])
    else:
        size = config.vision.image_size
        side = size // model.vision.patch_size // config.vision.downsample
        tiles = config.vision.size_policy == "tiles"
        grids = [[side, side], [2 * side, 2 * side]] if tiles else [[side, side]]
        pixels = (torch.randn(5 if tiles else 1, 3, size, size), grids)
    counted = flops_of(lambda: model.projector(model.vision(*pixels)))
    flops = forward_flops(config, 64, images=1)
    assert total({"v": flops["vision"], "p": flops["projector"]}) == counted
    doubled = forward_flops(config, 128, images=2)
    assert doubled["vision"].total == 2 * flops["vision"].total


def test_logits_and_ratio():
    config = tiny_config(vision=None, target_ratio=2)
    one, all_ = forward_flops(config, 12, logits=1), forward_flops(config, 12)
    assert all_["head"].rest == 12 * one["head"].rest
    # Three quarters of the concepts' maps go with the ratio, and half of their other products.
    half, whole = forward_flops(config, 12, 2)["concept"], forward_flops(config, 12, 1)["concept"]
    assert whole.maps == 4 * half.maps
    assert whole.rest == 2 * half.rest
    assert [count_concepts(config, 12, ratio) for ratio in (1, 1.5, 2, 5)] == [12, 8, 6, 3]
    plain = tiny_config(vision=None, router="none")
    assert count_concepts(plain, 12, 3) == 12


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokens": 0}, "tokens is 0"),
        ({"tokens": 8, "ratio": 0.5}, "ratio is 0.5"),
        ({"tokens": 8, "images": 1}, "text-only"),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises(ValueError, match=message):
        forward_flops(tiny_config(vision=None), **arguments)


def test_more_image_tokens_than_tokens_are_refused():
    with pytest.raises(ValueError, match="have 18 tokens, but tokens is 10"):
        forward_flops(tiny_config(), 10, images=2)


STEPS = [
    {"router": "none", "concept_residual": "delta", "joint_decoding_layers": 0},
    {"router": "fixed", "target_ratio": 2, "joint_decoding_layers": 0},
]


@pytest.mark.parametrize("chunk", STEPS, ids=["none", "fixed"])
@pytest.mark.parametrize("rows", [1, 3])
def test_decoding_flops_are_the_counters(chunk, rows):
    """The products of two steps in a row, of which at R = 2 one fires: twice a token's cost."""
    text = {"concept_hidden_size": 48, "concept_layers": 2, "concept_loops": [[0, 1, 2]]}
    model = tiny_model(vision=None, text=text, **chunk)
    ids = torch.randint(5, 64, (rows, 12))
    with torch.no_grad():
        cache = model(ids[:, :10], use_cache=True).cache
    counted = flops_of(lambda: [model(ids[:, i : i + 1], cache=cache) for i in (10, 11)])
    costs = decoding_cost(model.config, 10, rows=rows)
    rest = sum(cost.flops.rest for cost in costs.values())
    assert 2 * rows * rest == counted[0]
    if chunk["router"] == "none":
        maps = [
            sum(c.flops.maps for c in decoding_cost(model.config, n, rows=rows).values())
            for n in (10, 11)
        ]
        text = model.config.text
        per_position = 4 * text.num_attention_heads * text.head_dim
        layers = text.encoder_layers + text.decoder_layers + len(text.concept_schedule)
        assert maps == [per_position * layers * n for n in (11, 12)]


def test_bytes_of_decoding():
    """Every weight that a token reads, once; with as many rows as experts nearly every expert."""
    config = tiny_config(vision=None, router="none", joint_decoding_layers=0)
    counts = count_parameters(config)
    costs = decoding_cost(config, 9)
    for stage in ("encoder", "concept", "decoder", "head"):
        assert costs[stage].weight_bytes == 4 * counts[stage].active
    many = decoding_cost(config, 9, rows=64)
    assert 64 * many["concept"].weight_bytes == pytest.approx(4 * counts["concept"].total)
    # Keys and values of ten positions read, and of one written.
    key = config.text.num_key_value_heads * config.text.head_dim
    assert costs["encoder"].cache_bytes == 2 * key * 4 * 11
    sparse = decoding_cost(tiny_config(vision=None, target_ratio=2), 40)["concept"]
    assert sparse.cache_bytes == 2 * key * 4 * (40 / 2 + 1 + 1) / 2


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_experts_that_a_step_reads(rows):
    """The mean over all ways in which some rows can choose K of E experts each."""
    experts, chosen = 4, 2
    text = {"num_experts": experts, "num_experts_per_tok": chosen}
    config = tiny_config(vision=None, text=text, router="none", joint_decoding_layers=0)
    choices = list(itertools.combinations(range(experts), chosen))
    steps = list(itertools.product(choices, repeat=rows))
    distinct = sum(len(set().union(*step)) for step in steps) / len(steps)
    counts = count_parameters(config)["concept"]
    expert = (counts.total - counts.active) / (experts - chosen)
    read = counts.active + (distinct - chosen) * expert
    step_bytes = rows * decoding_cost(config, 9, rows=rows)["concept"].weight_bytes
    assert step_bytes == pytest.approx(4 * read)


CACHES = [
    {"router": "none", "concept_residual": "delta", "joint_decoding_layers": 0},
    {"router": "fixed", "target_ratio": 2, "concept_residual": "delta"},
    {"router": "fixed", "target_ratio": 4, "joint_decoding_layers": 0},
]


@pytest.mark.parametrize("chunk", CACHES, ids=["none", "delta", "add"])
def test_cache_bytes_are_the_tensors(chunk):
    """Exactly what a cache holds: 1 / R of the baseline's at the level of concepts."""
    text = {"concept_layers": 2, "concept_loops": [[0, 0, 2]]}
    model = tiny_model(vision=None, text=text, **chunk)
    tokens, rows = 128, 3
    with torch.no_grad():
        cache = model(torch.randint(5, 64, (rows, tokens)), use_cache=True).cache

    def held(stores, lengths):
        positions = sum(lengths)
        sizes = {s.keys.shape[1] * s.keys.shape[3] * s.keys.element_size() for s in stores}
        assert len(sizes) == 1
        return len(stores) * 2 * positions * sizes.pop()

    # Router `fixed` closes at every R-th token; the document's first one is forced besides.
    ratio = rows * tokens / sum(cache.concept_lengths)
    expected = cache_bytes(model.config, tokens, ratio, rows=rows)
    assert expected.tokens == held([*cache.encoder, *cache.decoder], cache.token_lengths)
    assert expected.concepts == held(cache.concept, cache.concept_lengths)
    plain = tiny_config(vision=None, text=text, router="none")
    whole = cache_bytes(plain, tokens, rows=rows).concepts
    ratio = chunk.get("target_ratio", 1)
    assert cache_bytes(model.config, tokens, rows=rows).concepts * ratio == whole


@pytest.mark.parametrize("chunk", CACHES, ids=["none", "delta", "add"])
def test_state_bytes_are_the_tensors(chunk):
    for router in {chunk["router"], "cosine"} if chunk["router"] != "none" else {"none"}:
        model = tiny_model(vision=None, **{**chunk, "router": router})
        with torch.no_grad():
            state = model(torch.randint(5, 64, (3, 20)), use_cache=True).cache.chunk
        tensors = [state.last_key_GD, state.smoothed_GD]
        if state.open_chunks is not None:
            tensors += [state.open_chunks.sum_GD, state.open_chunks.count_G]
        held = sum(t.numel() * t.element_size() for t in tensors if t is not None)
        assert cache_bytes(model.config, 20, rows=3).state == held


@pytest.mark.parametrize(("shared", "gate"), [(0, False), (2, False), (1, True)])
@pytest.mark.parametrize("qk_norm", [True, False])
def test_activation_estimate(shared, gate, qk_norm):
    """Within a tenth of what autograd saves in the layers, weights left out."""
    text = {
        "encoder_layers": 3,
        "concept_layers": 3,
        "decoder_layers": 3,
        "hidden_size": 64,
        "moe_intermediate_size": 48,
        "num_shared_experts": shared,
        "shared_expert_gate": gate,
        "qk_norm": qk_norm,
    }
    model = tiny_model(vision=None, text=text, router="none", joint_decoding_layers=0)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, int] = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor)  # so that no address is used twice
        return tensor

    kept: list[torch.Tensor] = []
    tokens = 256
    x_TD = model.embed_tokens(torch.randint(5, 64, (tokens,)))
    forced = torch.zeros(tokens, dtype=torch.bool)
    layout = PackedLayout.from_lengths([tokens], x_TD.device)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = model.language_model(x_TD, layout, TokenKinds(forced, forced, None))
    assert out.hidden_TD.requires_grad
    estimate = sum(activation_bytes(model.config, tokens).values())
    assert estimate == pytest.approx(sum(saved.values()), rel=0.1)
