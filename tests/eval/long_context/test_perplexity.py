"""The loss by position: against whole logits, in pieces, in batches, and what is written."""

from __future__ import annotations

import math

import pytest
import torch

from conceptmoe_vl.asking import load_pretrained
from conceptmoe_vl.errors import UserError
from eval.long_context.perplexity import (
    Window,
    bucket_edges,
    cut_windows,
    document_prefix,
    load_texts,
    measure,
    window_losses,
)
from tests.model_folder import save_model_folder

TEXTS = {
    "a.txt": "The color of the shape is red and there is a circle. " * 20,
    "b.txt": "Is it blue? No, what shape it is nobody knows so far! " * 9,
    "c.txt": "short",
}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return load_pretrained(save_model_folder(tmp_path_factory.mktemp("run") / "model"), "cpu")


@pytest.fixture(scope="module")
def windows(loaded):
    return cut_windows(TEXTS, loaded[1], 100, most=3)[0]


@torch.no_grad()
def whole_losses(model, prefix, window, compression=None):
    """From all logits of one packed document."""
    ids = torch.tensor([*prefix, *window.ids])
    offsets = torch.tensor([0, len(ids)], dtype=torch.int32)
    logits = model(input_ids=ids, cu_seqlens=offsets, compression=compression).logits
    each = torch.nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="none")
    return each[len(prefix) - 1 :]


@pytest.mark.parametrize("compression", [None, 1.0])
@pytest.mark.parametrize("piece", [7, 64, 4096])
def test_losses_are_those_of_whole_logits(loaded, windows, piece, compression):
    model, processor = loaded
    prefix = document_prefix(processor)
    losses, concepts = window_losses(model, prefix, windows, compression, piece)
    assert losses.shape == (len(windows), 100)
    for row, window in zip(losses, windows, strict=True):
        expected = whole_losses(model, prefix, window, compression)
        torch.testing.assert_close(row, expected, atol=2e-5, rtol=1e-4)
    tokens = len(windows) * (100 + len(prefix))
    assert concepts == tokens if compression == 1.0 else 0 < concepts <= tokens


def test_without_a_prefix_the_first_token_has_no_loss(loaded, windows):
    losses, _ = window_losses(loaded[0], [], windows[:1])
    assert losses.isnan().sum() == 1
    assert losses[0, 0].isnan()


def test_all_logits_are_never_made(loaded, windows):
    model, processor = loaded
    shapes = []
    handle = model.lm_head.register_forward_hook(
        lambda _m, inputs, out: shapes.append((inputs, out))
    )
    window_losses(model, document_prefix(processor), windows[:1])
    handle.remove()
    made = [out.numel() for inputs, out in shapes if len(inputs) == 1]
    assert made == [model.config.text.vocab_size]  # those of the last position


def test_windows_cover_the_documents(loaded):
    processor = loaded[1]
    windows, short = cut_windows(TEXTS, processor, 100, most=3)
    names = [window.document for window in windows]
    assert short == 1
    assert names.count("a.txt") == 3
    assert "c.txt" not in names
    ids = processor.tokenizer(TEXTS["a.txt"])["input_ids"]
    assert [*windows[0].ids, *windows[1].ids, *windows[2].ids] == ids[:300]


def test_no_document_is_long_enough(loaded):
    with pytest.raises(UserError, match=r"none of 3 documents has 100000 tokens"):
        cut_windows(TEXTS, loaded[1], 100_000, most=3)


def test_buckets_double():
    assert bucket_edges(100) == [(1, 16), (17, 32), (33, 64), (65, 100)]
    assert bucket_edges(16) == [(1, 16)]
    assert bucket_edges(5) == [(1, 5)]
    assert bucket_edges(131072)[-1] == (65537, 131072)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_means_by_position(loaded, windows, batch_size):
    model, processor = loaded
    curve = measure(model, processor, windows, batch_size)
    prefix = document_prefix(processor)
    each = torch.stack([whole_losses(model, prefix, window) for window in windows])
    for bucket in curve.buckets:
        expected = float(each[:, bucket.first - 1 : bucket.last].mean())
        assert bucket.loss.value == pytest.approx(expected, rel=1e-4)
        low, high = bucket.loss.interval
        assert low <= bucket.loss.value <= high
        assert bucket.to_json()["perplexity"] == pytest.approx(math.exp(bucket.loss.value))
    assert 1 <= curve.ratio < 50


def test_intervals_are_over_documents(loaded):
    model, processor = loaded
    ids = processor.tokenizer("red " * 100)["input_ids"][:32]
    same = [Window("one", ids)] * 6
    curve = measure(model, processor, same, batch_size=6)
    # One document, seen often, says nothing about others.
    assert all(bucket.loss.interval is None for bucket in curve.buckets)


def test_texts_of_a_folder(tmp_path):
    (tmp_path / "x.txt").write_text("Words.")
    (tmp_path / "y.txt").write_text(" \n")
    assert load_texts(str(tmp_path)) == {"x.txt": "Words."}
