"""Invariants 1 to 4 of the design over routers x merges x residuals x image modes (float32, CPU).

The tolerance 1e-4 is the design's; logits here have a standard deviation of about 1.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.combos import ALL, cut_is_allowed, decode, documents_for, every_combination, model_of
from tests.tiny import (
    FIRST_TEXT,
    VOCAB,
    Document,
    logits_of,
    make_document,
    packed,
    padded,
    tiny_model,
)

TOLERANCE = {"atol": 1e-4, "rtol": 0.0}


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected, **TOLERANCE)


@every_combination
def test_invariant_1_causality(combo):
    """Every text token and every image is changed in turn; all variants run in one packed batch."""
    model, document = model_of(combo), max(documents_for(combo), key=lambda d: len(d.ids))
    variants, firsts = [document], [len(document.ids)]
    for j, token in enumerate(document.ids):
        if token >= FIRST_TEXT:
            other = FIRST_TEXT + (token - FIRST_TEXT + 7) % (VOCAB - FIRST_TEXT)
            variants.append(document.changed((*document.ids[:j], other, *document.ids[j + 1 :])))
            firsts.append(j)
    for k, (first, _, _) in enumerate(document.grids):
        pixels = list(document.pixels)
        pixels[k] = -pixels[k]
        variants.append(Document(document.ids, tuple(pixels), document.grids))
        firsts.append(first)
    base, *others = logits_of(model, variants)
    for first, logits in zip(firsts[1:], others, strict=True):
        assert_close(logits[:first], base[:first])
        assert (logits[first:] - base[first:]).abs().max() > 1e-3


@every_combination
def test_invariant_2_packing(combo):
    model, documents = model_of(combo), documents_for(combo)
    with torch.no_grad():
        together = model(**packed(list(documents)))
        start = 0
        for document in documents:
            alone = model(**packed([document]))
            part = slice(start, start + len(document.ids))
            assert_close(together.logits[part], alone.logits)
            assert torch.equal(together.chunks.boundary_mask[part], alone.chunks.boundary_mask)
            assert_close(together.chunks.boundary_prob[part], alone.chunks.boundary_prob)
            start += len(document.ids)


@every_combination
@pytest.mark.parametrize("side", ["left", "right"])
def test_invariant_3_padding(combo, side):
    """Logits, chunking and every statistic of a padded batch are those of the packed documents."""
    model, documents = model_of(combo), list(documents_for(combo))
    inputs = padded(documents, side, extra=3)
    with torch.no_grad():
        expected = model(**packed(documents, labels=True))
        labels = torch.where(inputs["input_ids"] >= FIRST_TEXT, inputs["input_ids"], -100)
        out = model(**inputs, labels=labels)
    assert_close(out.logits[inputs["attention_mask"].bool()], expected.logits)
    assert torch.equal(out.chunks.boundary_mask, expected.chunks.boundary_mask)
    assert torch.equal(out.chunks.cu_seqlens, expected.chunks.cu_seqlens)
    assert torch.equal(out.supervised_positions, expected.supervised_positions)
    for name in ("loss", "lm_loss", "ratio_loss", "balance_loss", "router_z_loss"):
        torch.testing.assert_close(
            getattr(out, name), getattr(expected, name), atol=1e-6, rtol=1e-6
        )
    for stage, load in expected.expert_load.items():
        torch.testing.assert_close(out.expert_load[stage], load)


def check_decoding(model, documents, cuts, native=False):
    with torch.no_grad():
        full = model(**packed(documents, native=native))
    lengths = [len(document.ids) for document in documents]
    logits, boundaries = decode(model, documents, cuts, native)
    for row, whole in enumerate(full.logits.split(lengths)):
        assert_close(logits[row], whole)
    for row, whole in enumerate(full.chunks.boundary_mask.split(lengths)):
        assert torch.equal(boundaries[row], whole)


def stepwise(document, prefix):
    """Offsets of a prefill (moved out of an image) and single steps, images whole."""
    length = len(document.ids)
    while not cut_is_allowed(document, prefix):
        prefix += 1
    steps = [n for n in range(prefix + 1, length) if cut_is_allowed(document, n)]
    return [0, prefix, *steps, length] if prefix < length else [0, length]


@every_combination
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_invariant_4_decoding(combo, share):
    """Prefill of a part of every row, then one token after the other, rows of different length
    together.
    """
    documents = list(documents_for(combo))
    cuts = [stepwise(d, max(1, int(share * len(d.ids)))) for d in documents]
    check_decoding(model_of(combo), documents, cuts)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.data())
def test_invariant_4_any_pieces(data):
    """Random combination, rows, and cuts: pieces of any length, also several images in one
    piece.
    """
    combo = data.draw(st.sampled_from(ALL))
    part = st.integers(1, 5)
    if combo[3] == "tiles":
        part = st.one_of(part, st.sampled_from(["image", ("tiles", 1, 2)]))
    elif combo[3] != "text":
        part = st.one_of(part, st.just("image"))
    documents = [
        make_document(
            data.draw(st.lists(part, min_size=1, max_size=3)), data.draw(st.integers(0, 99))
        )
        for _ in range(data.draw(st.integers(1, 3)))
    ]
    cuts = []
    for document in documents:
        inner = st.sets(st.integers(1, len(document.ids)), max_size=6)
        chosen = {n for n in data.draw(inner) if cut_is_allowed(document, n)}
        cuts.append([0, *sorted(chosen - {len(document.ids)}), len(document.ids)])
    check_decoding(model_of(combo), documents, cuts)


def structures(images):
    """Parts of one to four documents, texts and images in any order."""
    parts = st.lists(st.one_of(st.integers(1, 4), images), min_size=1, max_size=4)
    return st.lists(parts, min_size=1, max_size=4)


NATIVE_IMAGES = st.tuples(st.integers(1, 3), st.integers(1, 4))
TILED_IMAGES = st.sampled_from(["image", ("tiles", 1, 2), ("tiles", 3, 1), ("tiles", 2, 2)])
SHARED = {}


@pytest.mark.parametrize("mode", ["sequential", "grid4", "grid8"])
@pytest.mark.parametrize("vision", ["native", "tiles"])
@settings(max_examples=20, deadline=None, derandomize=True)
@given(data=st.data(), seed=st.integers(0, 999), side=st.sampled_from(["left", "right"]))
def test_random_structures_of_images(vision, mode, data, seed, side):
    """Image first, image last, images in a row, grids of different shape, single tokens: packed =
    alone = padded.
    """
    native = vision == "native"
    parts = data.draw(structures(NATIVE_IMAGES if native else TILED_IMAGES))
    if (vision, mode) not in SHARED:
        grid, neighborhood = mode.startswith("grid"), 8 if mode == "grid8" else 4
        SHARED[vision, mode] = tiny_model(
            vision=vision, image_mode="grid" if grid else "sequential", neighborhood=neighborhood
        )
    model = SHARED[vision, mode]
    documents = [make_document(p, seed + i, native=native) for i, p in enumerate(parts)]
    together = logits_of(model, documents, native=native)
    inputs = padded(documents, side, extra=seed % 3, native=native)
    with torch.no_grad():
        rows = model(**inputs).logits
    for row, (document, logits) in enumerate(zip(documents, together, strict=True)):
        assert_close(logits, logits_of(model, [document], native=native)[0])
        assert_close(rows[row][inputs["attention_mask"][row].bool()], logits)


def test_empty_documents_count_nowhere():
    """An empty text between two documents changes nothing, and is no document for the losses."""
    model = model_of(("cosine", "sum", "add", "text"))
    documents = list(documents_for(("cosine", "sum", "add", "text")))
    with torch.no_grad():
        expected = model(**packed(documents, labels=True))
        out = model(
            **packed([Document(()), documents[0], Document(()), *documents[1:]], labels=True)
        )
    assert_close(out.logits, expected.logits)
    torch.testing.assert_close(out.loss, expected.loss)


def test_documents_stay_apart_bit_for_bit():
    """R12: changing one token of the first document leaves all others as they are, to the
    last bit.
    """
    combo = ("cosine", "sum", "add", "grid4")
    model, documents = model_of(combo), list(documents_for(combo))
    before = logits_of(model, documents)
    ids = list(documents[0].ids)
    ids[1] = FIRST_TEXT + (ids[1] - FIRST_TEXT + 1) % (VOCAB - FIRST_TEXT)
    after = logits_of(model, [documents[0].changed(ids), *documents[1:]])
    assert not torch.equal(before[0], after[0])
    for a, b in zip(before[1:], after[1:], strict=True):
        assert torch.equal(a, b)
