"""What a schedule moves in the chunk section: targets, thresholds, noise."""

from __future__ import annotations

import pytest
import torch

from conceptmoe_vl.chunk import Boundaries
from conceptmoe_vl.chunk_values import ChunkValues
from conceptmoe_vl.compression import Budget
from conceptmoe_vl.configuration import ChunkConfig
from conceptmoe_vl.layout import PackedLayout
from conceptmoe_vl.losses import auxiliary_losses
from tests.tiny import make_document, packed, tiny_model

DOCUMENTS = [make_document([9, "image", 6], seed) for seed in range(3)]


def values(**fields) -> ChunkValues:
    return ChunkValues(**{"tau": 6.0, "ratio_loss_weight": 0.03, **fields})


def test_the_share_of_concepts_moves_linearly():
    found = [values(share=share).target(2.0) for share in (0, 0.5, 1)]
    assert found == pytest.approx([1, 1 / 0.75, 2])
    assert values(share=0.25, start=1.5).target(3.0) == pytest.approx(1 / (0.75 / 1.5 + 0.25 / 3))
    assert values(share=0.25, start=1.5).target(1.2) == 1.2  # below the start: does not move
    assert values(share=0.0).loss_target(2.0) == 1.05
    assert values(share=0.0).loss_target(1.02) == 1.02


@pytest.mark.parametrize(
    ("moved", "fields"),
    [
        ({"target_ratio": 4 / 3}, {}),
        ({"target_ratio": 4 / 3}, {"ratio_scope": "sample"}),
        (
            {"image_target_ratio": 1.6, "text_target_ratio": 1.2},
            {"ratio_scope": "modality", "image_target_ratio": 4.0, "text_target_ratio": 1.5},
        ),
        ({"target_ratios": [1, 4 / 3, 1.6]}, {"target_ratios": [1, 2, 4]}),
    ],
)
def test_the_ratio_loss_at_half_a_warm_up_is_that_of_the_moved_targets(moved, fields):
    """1/R half way from 1 to that of 2, 4 and 1.5 is 3/4, 5/8 and 5/6."""
    generator = torch.Generator().manual_seed(0)
    p, mask, image = torch.rand(3, 40, generator=generator)
    drawn = torch.tensor([0, 1, 2]) if "target_ratios" in fields else None
    boundaries = Boundaries(p, mask < 0.5, None, None, target_G=drawn)
    layout = PackedLayout.from_lengths([10, 20, 10], torch.device("cpu"))

    def loss(config: ChunkConfig, now: ChunkValues | None) -> float:
        found = auxiliary_losses(config, boundaries, image < 0.5, layout, [], False, values=now)
        return found.ratio.item()

    before = ChunkConfig(**{"target_ratio": 2.0, **fields})
    if "target_ratios" in moved:  # the default ratio must be among them
        moved = {**moved, "target_ratio": 4 / 3}
    after = ChunkConfig(**{**fields, "target_ratio": 2.0, **moved})
    assert loss(before, values(share=0.5)) == pytest.approx(loss(after, None), rel=1e-5)
    assert loss(before, None) != pytest.approx(loss(after, None), rel=1e-3)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("several", [{}, {"target_ratios": [1, 2, 3]}])
def test_at_threshold_zero_every_token_is_a_boundary(training, several):
    """A warm-up from 1 begins as the network without chunking, in training and in evaluation."""
    model = tiny_model(image_mode="grid", target_ratio=2.0, **several).train(training)
    plain = model(**packed(DOCUMENTS)).chunks
    model.language_model.chunk.schedule = values(share=0.0, threshold=0.0)
    chunks = model(**packed(DOCUMENTS)).chunks
    assert not plain.boundary_mask.all()
    assert chunks.boundary_mask.all()
    assert (chunks.boundary_prob == 1).all()
    assert torch.equal(chunks.boundary_forced, plain.boundary_forced)  # decided all the same
    assert 0 < plain.boundary_forced.sum() < len(plain.boundary_forced)


def test_a_threshold_decides_at_its_place_and_moves_p_to_one_half():
    model = tiny_model(image_mode="grid", noise="none")
    before = model(**packed(DOCUMENTS)).chunks.boundary_prob
    model.language_model.chunk.schedule = values(share=0.5, threshold=0.2)
    after = model(**packed(DOCUMENTS)).chunks
    assert torch.equal(after.boundary_mask, before >= 0.2)
    assert torch.equal(after.boundary_mask, after.boundary_prob >= 0.5)
    assert (before >= 0.2).sum() - (before >= 0.5).sum() > 0


def test_a_compression_that_a_call_asks_for_is_not_moved():
    model = tiny_model(image_mode="grid", target_ratio=2.0)
    expected = model(**packed(DOCUMENTS), compression=2.0).chunks.boundary_mask
    model.language_model.chunk.schedule = values(share=0.0, threshold=0.0)
    found = model(**packed(DOCUMENTS), compression=2.0).chunks.boundary_mask
    assert torch.equal(found, expected)


def test_odds_of_a_learned_and_of_a_scheduled_threshold_multiply():
    learned = torch.tensor([0.0, 0.25, 0.5])
    moved = values(threshold=0.2).move(Budget(learned, 2.0), "cosine").threshold_T
    torch.testing.assert_close(moved, torch.tensor([0.0, 1 / 13, 0.2]))


def test_the_fixed_router_follows_the_target():
    model = tiny_model(router="fixed", target_ratio=4.0, vision=None)
    model.language_model.chunk.schedule = values(share=0.0)
    assert model(**packed([make_document([12])])).chunks.boundary_mask.all()
    model.language_model.chunk.schedule = None
    assert not model(**packed([make_document([12])])).chunks.boundary_mask.all()


def test_tau_and_the_loss_weight_are_those_of_the_schedule():
    """With a huge tau the draw is the decision; lambda 0 leaves the ratio loss out."""
    model = tiny_model(noise="bernoulli").train()
    model.language_model.chunk.schedule = values(tau=1e9, ratio_loss_weight=0.0)
    out = model(**packed(DOCUMENTS, labels=True))
    assert torch.equal(out.chunks.boundary_mask, out.chunks.boundary_prob >= 0.5)
    text = model.config.text
    rest = text.balance_loss_weight * out.balance_loss
    rest = rest + text.router_z_loss_weight * out.router_z_loss
    assert out.loss.item() == pytest.approx((out.lm_loss + rest).item(), rel=1e-6)
