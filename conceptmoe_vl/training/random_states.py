"""The random generators of a process: seeded, kept in checkpoints, restored."""

from __future__ import annotations

import random

import numpy as np
import torch


def random_state(device: torch.device) -> dict:
    """States of the random generators of this process, in types that
    `torch.load(weights_only=True)` reads.
    """
    kind, keys, position, has_gauss, cached = np.random.get_state()  # noqa: NPY002  (the global one, as libraries use it)
    state = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (kind, keys.tolist(), position, has_gauss, cached),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict, device: torch.device) -> None:
    """Restores what `random_state` returned."""
    torch.set_rng_state(state["torch"].cpu())
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])  # noqa: NPY002
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)


def set_seed(seed: int) -> None:
    """Seeds python, numpy and torch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    torch.manual_seed(seed)
