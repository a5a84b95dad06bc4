"""The compute dial: thresholds, learned and calibrated, and what they keep true."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conceptmoe_vl import ConceptMoEVLForConditionalGeneration
from conceptmoe_vl.chunk import Boundaries
from conceptmoe_vl.compression import recentre
from conceptmoe_vl.configuration import ChunkConfig
from conceptmoe_vl.layout import PackedLayout
from conceptmoe_vl.losses import auxiliary_losses
from tests.reference import losses as ref
from tests.tiny import FIRST_TEXT, PAD, make_document, packed, padded, tiny_model

CPU = torch.device("cpu")
SEVERAL = {"target_ratios": [1, 1.5, 2, 3]}


def documents():
    parts = ([12, "image", 9], [30], ["image", "image", 7], [1])
    return [make_document(p, seed) for seed, p in enumerate(parts)]


def table(model, ratios=(1.5, 2.0, 3.0)):
    """A calibration by exact quantiles of the model's own p on `documents()`."""
    found = []
    handle = model.language_model.chunk.register_forward_hook(
        lambda module, inputs, output: found.append(output.raw_T)
    )
    with torch.no_grad():
        model(**packed(documents()))
    handle.remove()
    ordered = found[0].sort(descending=True).values
    thresholds = [float(ordered[math.floor(len(ordered) / ratio) - 1]) for ratio in ratios]
    return {"ratios": list(ratios), **dict.fromkeys(("all", "text", "image"), thresholds)}


@settings(max_examples=200, deadline=None, derandomize=True)
@given(p=st.floats(0, 1, width=32), threshold=st.floats(0.0625, 0.9375, width=32))
def test_recentred_odds_are_divided_by_the_thresholds(p, threshold):
    moved = recentre(torch.tensor([p]), torch.tensor(threshold)).item()
    if p in (0, 1):
        assert moved == p
        return
    odds = p / (1 - p) / (threshold / (1 - threshold))
    assert moved == pytest.approx(odds / (1 + odds), abs=1e-5)
    if abs(p - threshold) > 1e-5:
        assert (moved > 0.5) == (p > threshold)


def test_threshold_zero_makes_every_probability_one():
    p = torch.tensor([0.0, 1e-30, 0.4, 1.0], requires_grad=True)
    moved = recentre(p, torch.tensor(0.0))
    assert torch.equal(moved, torch.ones(4))
    moved.sum().backward()
    assert torch.equal(p.grad, torch.zeros(4))


@pytest.mark.parametrize("router", ["cosine", "linear", "fixed"])
def test_compression_one_makes_every_token_a_boundary(router):
    model = tiny_model(router=router, image_mode="grid")
    with torch.no_grad():
        out = model(**packed(documents()), compression=1)
    assert out.chunks.boundary_mask.all()
    assert out.chunks.ratio == 1
    total = len(out.chunks.boundary_mask)
    assert torch.equal(out.chunks.concept_index, torch.arange(total))


def test_fixed_router_takes_any_ratio():
    model = tiny_model(router="fixed", vision=None)
    with torch.no_grad():
        out = model(**packed([make_document([60])]), compression=4)
    assert out.chunks.ratio == pytest.approx(60 / 15, abs=0.3)


def test_calibrated_ratio_is_reached_and_the_default_is_untouched():
    model = tiny_model(init="random", image_mode="grid", neighborhood=8)
    with torch.no_grad():
        before = model(**packed(documents()))
        model.config.chunk.calibration = table(model)
        after = model(**packed(documents()))
        assert torch.equal(before.logits, after.logits)
        for ratio in (1.5, 2.0, 3.0):
            out = model(**packed(documents()), compression=ratio)
            assert out.chunks.ratio.item() == pytest.approx(ratio, rel=0.05)
            boundary = out.chunks.boundary_mask
            assert (out.chunks.boundary_prob[boundary] >= 0.5 - 1e-6).all()
            assert (out.chunks.boundary_prob[~boundary] <= 0.5 + 1e-6).all()
        loose = model(**packed(documents()), compression=1.2).chunks.ratio
        assert 1 <= loose < 1.5


@pytest.mark.parametrize("ratio", [1, 1.5, 3.0])
def test_stepwise_decoding_equals_the_full_pass_at_any_compression(ratio):
    """Invariant 4 with the dial turned, ragged rows."""
    model = tiny_model(init="random", image_mode="grid")
    model.config.chunk.calibration = table(model)
    texts = [make_document([n], n) for n in (21, 9, 15)]
    with torch.no_grad():
        for document in texts:
            full = model(**packed([document]), compression=ratio).logits
            ids = torch.tensor([document.ids])
            out = model(input_ids=ids[:, :4], use_cache=True, compression=ratio)
            logits = [out.logits[0]]
            for n in range(4, ids.shape[1]):
                out = model(input_ids=ids[:, n : n + 1], cache=out.cache, compression=ratio)
                logits.append(out.logits[0])
            torch.testing.assert_close(torch.cat(logits), full, atol=1e-4, rtol=0)


def test_generate_takes_another_compression_in_every_turn():
    """A conversation goes on in the same cache with another budget, as one full pass would."""
    model = tiny_model(init="random", image_mode="grid")
    model.config.chunk.calibration = table(model)
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": PAD, "eos_token_id": None}
    first = padded([documents()[0]])
    out = model.generate(**first, **options, compression=1.5, return_dict_in_generate=True)
    cache = out.past_key_values
    assert cache.token_lengths[0] > cache.concept_lengths[0]
    before = cache.concept_lengths[0]
    ids = torch.cat((out.sequences, torch.full((1, 4), FIRST_TEXT + 3)), dim=1)
    images = {k: v for k, v in first.items() if k in ("pixel_values", "image_grid_hw")}
    arguments = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **images}
    more = model.generate(**arguments, **options, compression=1, past_key_values=cache)
    assert more.shape[1] == ids.shape[1] + 5
    # the second turn's tokens (4 typed, the last of the first turn, 4 of its own) are all concepts
    assert cache.concept_lengths[0] - before == 9


def test_modality_scope_has_a_threshold_for_each():
    model = tiny_model(init="random", image_mode="grid", ratio_scope="modality")
    model.config.chunk.calibration = {
        "ratios": [2.0],
        "all": [0.9],
        "text": [0.0001],
        "image": [0.9999],
    }
    with torch.no_grad():
        out = model(**packed(documents()), compression=2)
    assert out.chunks.ratio_by_modality["text"] == pytest.approx(1, abs=0.05)
    assert out.chunks.ratio_by_modality["image"] > 4


@pytest.mark.parametrize(
    ("fields", "compression", "words"),
    [
        ({}, 1.5, "calibrate"),
        ({}, 0.5, "1 or more"),
        ({}, "2", "1 or more"),
        ({}, float("nan"), "1 or more"),
        ({"router": "none"}, 2, "router is none"),
        (
            {
                "calibration": {
                    "ratios": [2, 9],
                    "all": [0.5, None],
                    "text": [0.5, 1],
                    "image": [0, 1],
                }
            },
            5,
            "1 to 2",
        ),
    ],
)
def test_unreachable_compressions_are_refused(fields, compression, words):
    model = tiny_model(**fields)
    with pytest.raises(ValueError, match=words):
        model(**packed(documents()), compression=compression)


def test_the_trained_ratio_needs_no_calibration():
    model = tiny_model(target_ratio=2.5)
    with torch.no_grad():
        plain = model(**packed(documents()))
        asked = model(**packed(documents()), compression=2.5)
    assert torch.equal(plain.logits, asked.logits)


@pytest.mark.parametrize("scope", ["global", "modality"])
@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=5).filter(lambda x: sum(x) > 0),
    seed=st.integers(0, 10**6),
)
def test_ratio_loss_of_drawn_ratios_equals_the_reference(scope, lengths, seed):
    generator = torch.Generator().manual_seed(seed)
    total, ratios = sum(lengths), [1, 1.5, 2.0, 4]
    prob = torch.rand(total, generator=generator, requires_grad=True)
    mask = torch.rand(total, generator=generator) < 0.5
    image = torch.rand(total, generator=generator) < 0.5
    drawn = torch.randint(4, (len(lengths),), generator=generator)
    out = auxiliary_losses(
        ChunkConfig(target_ratio=2.0, target_ratios=ratios, ratio_scope=scope),
        Boundaries(prob, mask, None, None, target_G=drawn),
        image,
        PackedLayout.from_lengths(lengths, CPU),
        [],
        across_ranks=False,
    )
    out.ratio.backward()
    q = prob.detach().double().requires_grad_()
    expected = ref.ratio_loss_of_drawn(
        list(q.split(lengths)),
        [x.tolist() for x in mask.split(lengths)],
        [x.tolist() for x in image.split(lengths)],
        [ratios[i] for i in drawn.tolist()],
        scope == "modality",
    )
    assert out.ratio.item() == pytest.approx(
        float(expected.detach() if torch.is_tensor(expected) else expected), abs=1e-5
    )
    if torch.is_tensor(expected):
        expected.backward()
        torch.testing.assert_close(prob.grad.double(), q.grad, atol=1e-5, rtol=1e-5)
    for ratio, measured in out.ratio_by_target.items():
        tokens = [n for n, i in zip(lengths, drawn.tolist(), strict=True) if ratios[i] == ratio]
        assert (measured == 0) == (sum(tokens) == 0) or measured > 0


@pytest.mark.parametrize("scope", ["global", "modality"])
def test_training_with_several_ratios_learns_a_threshold_for_each(scope):
    """The ratio loss alone brings every drawn ratio near its target; ratio 1 keeps every token."""
    torch.manual_seed(0)
    model = tiny_model(init="random", image_mode="grid", ratio_scope=scope, tau=6.0, **SEVERAL)
    model.train()
    inputs = packed([make_document([24, "image", 12], seed) for seed in range(12)])
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(250):
        out = model(**inputs)
        optimizer.zero_grad()
        out.ratio_loss.backward()
        optimizer.step()
        assert out.chunks.ratio_by_target[1] in (0, 1)
    assert model.language_model.chunk.dial.shift.grad is not None
    model.eval()
    with torch.no_grad():
        measured = {r: model(**inputs, compression=r).chunks.ratio.item() for r in (1, 1.5, 2, 3)}
    assert measured[1] == 1
    for ratio in (1.5, 2, 3):
        assert measured[ratio] == pytest.approx(ratio, rel=0.25), measured


@pytest.mark.parametrize("scope", ["global", "modality"])
def test_learned_thresholds_start_at_the_calibration(scope):
    fields = {"target_ratios": [1, 1.5, 2], "ratio_scope": scope}
    model = tiny_model(**fields)
    found = table(model)
    between = [threshold - 1e-5 for threshold in found["all"]]  # of the p of two tokens
    image = [0.3, 0.4, 0.5]
    model.config.chunk.calibration = {**found, "all": between, "text": between, "image": image}
    with torch.no_grad():
        wanted = {r: model(**packed(documents()), compression=r).chunks for r in (1, 1.5, 2)}
        model.language_model.chunk.dial.start_at_calibration()
        assert model.config.chunk.calibration is None
        for ratio, expected in wanted.items():
            found = model(**packed(documents()), compression=ratio).chunks
            assert torch.equal(found.boundary_mask, expected.boundary_mask)


def test_a_calibration_that_lacks_a_ratio_starts_nothing():
    model = tiny_model(target_ratios=[1, 2, 4])
    model.config.chunk.calibration = table(model)
    with pytest.raises(ValueError, match="compression=4 lies outside"):
        model.language_model.chunk.dial.start_at_calibration()


def test_several_ratios_survive_saving(tmp_path):
    model = tiny_model(**SEVERAL)
    with torch.no_grad():
        model.language_model.chunk.dial.shift.copy_(torch.tensor([0.0, 0.2, 0.05, -0.1]))
    model.config.chunk.calibration = table(model)
    model.save_pretrained(tmp_path)
    loaded = ConceptMoEVLForConditionalGeneration.from_pretrained(tmp_path)
    assert loaded.config.chunk.calibration == model.config.chunk.calibration
    with torch.no_grad():
        for ratio in (None, 1, 1.5, 3):
            expected, actual = (
                m(**packed(documents()), compression=ratio).logits for m in (model, loaded)
            )
            assert torch.equal(expected, actual)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"target_ratios": []}, "list of numbers"),
        ({"target_ratios": [0.5, 2.0]}, "at least 1"),
        ({"target_ratios": [2, 2]}, "once"),
        ({"target_ratios": [1, 3]}, "must be among"),
        ({"target_ratios": [1, 2], "router": "fixed"}, "cosine and"),
        ({"target_ratios": [1, 2], "ratio_scope": "sample"}, "global or modality"),
        ({"target_ratios": [1, 2], "text_target_ratio": 3.0}, "both modalities"),
        ({"calibration": {"ratio": []}}, "nearest known key"),
        ({"calibration": {"ratios": [3, 2], "all": [0, 0]}}, "rising"),
        ({"calibration": {"ratios": [2], "all": [0.1], "text": [], "image": [0.1]}}, "text needs"),
    ],
)
def test_wrong_fields_are_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        ChunkConfig(**fields)
