"""Shared fixtures: tiny models with random weights, documents with images, and batches of both."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch


@pytest.fixture(autouse=True)
def _seeded():
    """Every test starts from the same random state and on one thread."""
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture
def text_model():
    """Text-only model, cosine router, evaluation mode."""
    from tests.tiny import tiny_model

    return tiny_model(vision=None)


@pytest.fixture
def image_model():
    """Model with a small ViT, cosine router in grid mode, evaluation mode."""
    from tests.tiny import tiny_model

    return tiny_model(image_mode="grid")
