"""The whole model against the float64 reference: logits, chunking, all losses and all gradients."""

from __future__ import annotations

import pytest
import torch

from tests.combos import documents_for, embeddings_of_images, every_combination, model_of
from tests.reference.forward import ReferenceModel, reference_losses
from tests.tiny import FIRST_TEXT, make_document, packed, tiny_model

# Float32 against float64 over three layers; measured differences are below 3e-6.
LOGITS = {"atol": 5e-5, "rtol": 1e-4}


def compare_forward(model, documents, native=False):
    """Logits, p, b, psi and, as lists, what both sides computed."""
    with torch.no_grad():
        out = model(**packed(documents, labels=True, native=native))
    reference = ReferenceModel(model)
    with torch.no_grad():
        results = [
            reference.forward(document, embeddings_of_images(model, document, native))
            for document in documents
        ]
        labels = [[i if i >= FIRST_TEXT else -100 for i in document.ids] for document in documents]
        losses = reference_losses(reference, results, documents, labels)
    torch.testing.assert_close(
        out.logits.double(), torch.cat([r.logits for r in results]), **LOGITS
    )
    prob = torch.cat([r.prob for r in results])
    torch.testing.assert_close(out.chunks.boundary_prob.double(), prob, atol=1e-5, rtol=1e-4)
    assert out.chunks.boundary_mask.tolist() == [b for r in results for b in r.boundary]
    read, first = [], 0
    for r in results:
        read += [first + m for m in r.of_token]
        first += len(r.positions)
    assert out.chunks.concept_index.tolist() == read
    for name, expected in losses.items():
        torch.testing.assert_close(
            getattr(out, name).double(),
            expected,
            atol=2e-5,
            rtol=1e-4,
            msg=lambda m, n=name: f"{n}: {m}",
        )
    measured = len(prob) / sum(sum(r.boundary) for r in results)
    assert out.chunks.ratio.item() == pytest.approx(measured, rel=1e-5)
    return out, results


@every_combination
def test_every_combination(combo):
    compare_forward(model_of(combo), list(documents_for(combo))[:2])


VARIANTS = {
    "plain": {},
    "index": {"concept_positions": "index"},
    "no_ema": {"ema": False, "concept_residual": "delta"},
    "no_joint": {"joint_decoding_layers": 0, "concept_residual": "delta"},
    "two_joint_of_three": {"joint_decoding_layers": 2, "text": {"decoder_layers": 3}},
    "no_qk_norm": {"text": {"qk_norm": False, "num_key_value_heads": 2}},
    "shared_experts": {"text": {"num_shared_experts": 2, "norm_topk_prob": False}},
    "qwen2_moe": {
        "text": {
            "qk_norm": False,
            "attention_bias": "qkv",
            "num_shared_experts": 1,
            "shared_intermediate_size": 24,
            "shared_expert_gate": True,
        }
    },
    "olmoe": {
        "text": {"qk_norm_over": "all_heads", "attention_bias": "all", "num_key_value_heads": 2}
    },
    "loops": {"text": {"concept_layers": 3, "concept_loops": [[1, 2, 2]]}},
    "wider": {"text": {"concept_hidden_size": 48}},
    "wider_delta": {"text": {"concept_hidden_size": 48}, "concept_residual": "delta"},
    "more_experts": {"text": {"concept_num_experts": 6, "concept_num_experts_per_tok": 3}},
    "tied": {"text": {"tie_word_embeddings": True}},
    "no_encoder": {"text": {"encoder_layers": 0}},
    "ratio_1.5": {"router": "fixed", "target_ratio": 1.5},
    "ratio_3": {"router": "fixed", "target_ratio": 3},
    "modality": {"ratio_scope": "modality", "image_target_ratio": 4.0, "text_target_ratio": 1.5},
    "sample": {"ratio_scope": "sample"},
}


@pytest.mark.parametrize("mode", ["sequential", "grid"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_option(variant, mode):
    options = dict(VARIANTS[variant])
    model = tiny_model(image_mode=mode, neighborhood=8, seed=1, **options)
    documents = [make_document([4, "image", 3], 1), make_document([6], 2)]
    compare_forward(model, documents)


@pytest.mark.parametrize("neighborhood", [4, 8])
def test_native_grids_of_different_shape(neighborhood):
    model = tiny_model(vision="native", image_mode="grid", neighborhood=neighborhood)
    parts = ([(2, 4), 3, (1, 5)], [2, (4, 2)], [(1, 1), (3, 1)])
    documents = [make_document(p, seed, native=True) for seed, p in enumerate(parts)]
    compare_forward(model, documents, native=True)


@pytest.mark.parametrize("mode", ["sequential", "grid"])
def test_pictures_in_tiles(mode):
    """Thumbnail and picture are two planes: regions cross the tiles' borders, never the planes'."""
    model = tiny_model(vision="tiles", image_mode=mode)
    parts = ([2, ("tiles", 1, 3), "image", 3], [("tiles", 2, 2), ("tiles", 2, 1)])
    compare_forward(model, [make_document(p, seed) for seed, p in enumerate(parts)])


@pytest.mark.parametrize("downsample", [1, 3])
def test_tokens_of_tiles_stand_in_the_raster_order_of_the_picture(downsample):
    from tests.tiny import TILES_VISION

    vision = {**TILES_VISION, "image_size": 48, "downsample": downsample}
    model, side = tiny_model(vision=vision), 6 // downsample
    squares = torch.randn(8, 3, 48, 48)
    grids = [[side, side], [2 * side, 3 * side], [side, side]]
    with torch.no_grad():
        tokens = model.vision(squares, grids)
        alone = [model.vision(square[None], [[side, side]]) for square in squares]
    torch.testing.assert_close(tokens[: side**2], alone[0])
    torch.testing.assert_close(tokens[-(side**2) :], alone[7])
    plane = tokens[side**2 : -(side**2)].view(2 * side, 3 * side, -1)
    for row in range(2 * side):
        for column in range(3 * side):
            tile = alone[1 + (row // side) * 3 + column // side].view(side, side, -1)
            torch.testing.assert_close(plane[row, column], tile[row % side, column % side])


@pytest.mark.parametrize("cut", [2, 4])
def test_downsampled_image_tokens_are_squares_of_patches(cut):
    """A token of downsample n is the n x n square of patches at its place, rows first."""
    from tests.tiny import PLAIN_VISION

    model = tiny_model(vision={**PLAIN_VISION, "image_size": 8 * 2 * cut, "downsample": cut})
    pixels = torch.randn(1, 3, 16 * cut, 16 * cut)
    with torch.no_grad():
        features = model.vision.model.forward_intermediates(
            pixels, indices=[0], norm=True, output_fmt="NLC", intermediates_only=True
        )[0][0]
        tokens = model.vision(pixels, [[2, 2]])
    for row in range(2):
        for column in range(2):
            parts = [
                features[(row * cut + i) * 2 * cut + column * cut + j]
                for i in range(cut)
                for j in range(cut)
            ]
            torch.testing.assert_close(tokens[row * 2 + column], torch.cat(parts))


GRADIENTS = {
    "cosine": {},
    "delta_mean_grid": {"merge": "mean", "concept_residual": "delta", "image_mode": "grid"},
    "linear_boundary_grid8": {
        "router": "linear",
        "merge": "boundary",
        "image_mode": "grid",
        "neighborhood": 8,
    },
    "wider_loops_sample": {
        "text": {"concept_hidden_size": 48, "concept_layers": 2, "concept_loops": [[0, 1, 2]]},
        "concept_residual": "delta",
        "ratio_scope": "sample",
    },
    "modality_tied_shared": {
        "text": {"tie_word_embeddings": True, "num_shared_experts": 1},
        "ratio_scope": "modality",
        "image_target_ratio": 3.0,
    },
    "shared_gate_biases_wide_norm": {
        "text": {
            "num_shared_experts": 1,
            "shared_expert_gate": True,
            "attention_bias": "all",
            "qk_norm_over": "all_heads",
        }
    },
    "noise": {"noise": "bernoulli", "tau": 2.0, "image_mode": "grid"},
}


@pytest.mark.parametrize("variant", GRADIENTS)
def test_gradients_of_the_total_loss(variant):
    """Every parameter of the language model, in training mode, with the noise's own decisions."""
    options = {"noise": "none", **GRADIENTS[variant]}
    weights = {"balance_loss_weight": 0.1, "router_z_loss_weight": 0.05}
    options["text"] = {**weights, **options.get("text", {})}
    model = tiny_model(ratio_loss_weight=0.5, seed=3, **options).train()
    documents = [make_document([3, "image", 4], 5), make_document([6], 6)]
    out = model(**packed(documents, labels=True))
    out.loss.backward()
    assert out.logits is None

    model.eval()
    reference = ReferenceModel(model)
    lengths = [len(document.ids) for document in documents]
    decided = [x.tolist() for x in out.chunks.boundary_mask.split(lengths)]
    results = [
        reference.forward(document, embeddings_of_images(model, document), own)
        for document, own in zip(documents, decided, strict=True)
    ]
    labels = [[i if i >= FIRST_TEXT else -100 for i in document.ids] for document in documents]
    losses = reference_losses(reference, results, documents, labels)
    losses["loss"].backward()
    torch.testing.assert_close(out.loss.double(), losses["loss"], atol=2e-5, rtol=1e-4)
    for name, parameter in model.named_parameters():
        if name.startswith(("vision.", "projector.")):
            continue
        expected = reference.leaf[name].grad
        expected = torch.zeros_like(reference.leaf[name]) if expected is None else expected
        scale = expected.abs().max().item()
        torch.testing.assert_close(
            parameter.grad.double(),
            expected,
            atol=1e-4 * max(scale, 0.01),
            rtol=1e-3,
            msg=lambda m, n=name: f"{n}: {m}",
        )


def test_gradients_reach_the_vision_tower():
    model = tiny_model(image_mode="grid").train()
    model(**packed([make_document([2, "image", 4])], labels=True)).loss.backward()
    for name, parameter in model.named_parameters():
        if name.startswith(("vision.", "projector.")):
            assert parameter.grad is not None, name
            assert parameter.grad.abs().sum() > 0, name
