"""Golden losses: the first 20 training losses of a tiny model, stored in
tests/golden/tiny_losses.json.

After a change that is meant to alter them, write them anew:
    python -m tests.conceptmoe_vl.test_golden
"""

from __future__ import annotations

import json
import pathlib

import pytest
import torch

from tests.tiny import make_document, packed, tiny_model

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "tiny_losses.json"
STEPS = 20
RUNS = {
    "cosine_grid": {"image_mode": "grid", "neighborhood": 8},
    "delta_sequential": {"concept_residual": "delta", "merge": "mean", "router": "linear"},
    "baseline": {"router": "none", "concept_residual": "delta", "joint_decoding_layers": 0},
}
# Weights perturbed by 1e-6 of their size, as other kernels and orders of summation do, move these
# losses by less than 5e-6 (measured over 10 perturbations of every run). Twenty times that leaves
# room for other versions of torch and timm, and is far below what a changed formula does.
TOLERANCE = 1e-4


def train(name: str, perturbation: float = 0.0, seed: int = 0) -> list[dict[str, float]]:
    """Total, language and ratio loss of every step, noise included: two documents a step, one with
    an image.
    """
    model = tiny_model(**RUNS[name]).train()
    if perturbation:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + perturbation * torch.randn(parameter.shape, generator=generator))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    torch.manual_seed(7)
    losses = []
    for step in range(STEPS):
        documents = [make_document([6, "image", 8], step % 3), make_document([12], 100 + step % 3)]
        out = model(**packed(documents, labels=True))
        out.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append({k: out[k].item() for k in ("loss", "lm_loss", "ratio_loss", "balance_loss")})
    return losses


@pytest.mark.parametrize("name", RUNS)
def test_first_losses_are_the_stored_ones(name):
    stored = json.loads(GOLDEN.read_text())[name]
    assert len(stored) == STEPS
    for step, (found, expected) in enumerate(zip(train(name), stored, strict=True)):
        assert found == pytest.approx(expected, rel=TOLERANCE, abs=TOLERANCE), f"step {step}"
    assert stored[-1]["lm_loss"] < stored[0]["lm_loss"]


def write() -> None:
    """Stores the losses of every run."""
    torch.set_num_threads(1)
    rounded = {
        name: [{key: round(value, 6) for key, value in step.items()} for step in train(name)]
        for name in RUNS
    }
    GOLDEN.write_text(json.dumps(rounded, indent=1) + "\n")


if __name__ == "__main__":
    write()
