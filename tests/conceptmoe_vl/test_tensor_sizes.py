"""No tensor of T x T or T x V entries at a long prefill, with and without cache, in any pieces."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.tiny import FIRST_TEXT, VOCAB, make_document, padded, tiny_model

LENGTH = 4096
# With 64 entries of vocabulary and width 32 everything that is linear in T stays far below T x 256.
WIDE = 4096


class Largest(TorchDispatchMode):
    """Entries of the largest tensor (by its storage) that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.entries, self.operation = 0, ""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                held = leaf.untyped_storage().nbytes() // leaf.element_size()
                if held > self.entries:
                    self.entries, self.operation = held, f"{func} {tuple(leaf.shape)}"
        return out


def prompt(length=LENGTH):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(FIRST_TEXT, VOCAB, (1, length), generator=generator)


@pytest.mark.parametrize("router", ["cosine", "fixed", "none"])
@pytest.mark.parametrize(
    "pieces", [None, [LENGTH], [1024] * 4, [2048, 2048], [5, 4091], [4095, 1], [4000, 96]]
)
def test_no_entry_for_every_pair_of_tokens(router, pieces):
    """`pieces` None: without a cache."""
    model, ids = tiny_model(vision=None, router=router), prompt()
    largest, cache, start = Largest(), None, 0
    with torch.no_grad(), largest:
        for length in pieces or [LENGTH]:
            piece = ids[:, start : start + length]
            out = model(
                input_ids=piece, cache=cache, use_cache=pieces is not None, logits_to_keep=1
            )
            cache, start = out.cache, start + length
    assert largest.entries < LENGTH * LENGTH // 8, largest.operation


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("pieces", [1, 3])
def test_no_logits_of_all_tokens(use_cache, pieces):
    """A vocabulary far wider than the model: only the wanted positions have logits."""
    model = tiny_model(vision=None, text={"vocab_size": WIDE, "tie_word_embeddings": True})
    ids = prompt(1026)
    largest, cache = Largest(), None
    with torch.no_grad(), largest:
        for piece in ids.chunk(pieces if use_cache else 1, dim=1):
            out = model(input_ids=piece, cache=cache, use_cache=use_cache, logits_to_keep=1)
            cache = out.cache
    assert out.logits.shape == (1, 1, WIDE)
    assert largest.entries < 1026 * WIDE // 8, largest.operation


def test_generate_asks_for_the_last_logits_alone():
    model = tiny_model(vision=None, text={"vocab_size": WIDE})
    documents = [make_document([700], 1), make_document([300], 2)]
    largest = Largest()
    with largest:
        model.generate(**padded(documents), max_new_tokens=3, eos_token_id=None, pad_token_id=0)
    assert largest.entries < 1000 * WIDE // 8, largest.operation
