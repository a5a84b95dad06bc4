"""Merging, smoothing and plugging back against loops, values and gradients; Figure 1 literally."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conceptmoe_vl.chunk import Boundaries, TokenKinds
from conceptmoe_vl.concepts import (
    ConceptMap,
    OpenChunks,
    doublings_for,
    map_concepts,
    merge_tokens,
    plug_back,
    smooth,
)
from conceptmoe_vl.layout import PackedLayout
from tests.reference import chunking as ref

CPU = torch.device("cpu")
WIDTH = 6
MERGES = ["sum", "boundary", "mean"]


def text_boundaries(masks, prob=None):
    """Boundaries, kinds and layout of text documents, given as lists of booleans."""
    mask = torch.tensor([b for own in masks for b in own])
    prob = mask.float() if prob is None else prob
    kinds = TokenKinds(torch.zeros_like(mask), torch.zeros_like(mask), None)
    layout = PackedLayout.from_lengths([len(own) for own in masks], CPU)
    return Boundaries(prob, mask, None, None), kinds, layout


def test_figure_1_literally():
    """Boundaries at 1, 3 and 6: c_1 = h_1, c_2 = h_2 + h_3, c_3 = h_4 + h_5 + h_6, h_7 is open."""
    h = torch.randn(7, WIDTH)
    boundaries, kinds, layout = text_boundaries([[n in (1, 3, 6) for n in range(1, 8)]])
    concepts = map_concepts(boundaries, kinds, layout, "boundary")
    c, _ = merge_tokens(h, concepts, "sum")
    torch.testing.assert_close(c[0], h[0])
    torch.testing.assert_close(c[1], h[1] + h[2])
    torch.testing.assert_close(c[2], h[3] + h[4] + h[5])
    assert c.shape == (3, WIDTH)
    assert (concepts.boundary_M + 1).tolist() == [1, 3, 6]
    # Each token reads the last concept closed at or before it.
    assert (concepts.read_T + 1).tolist() == [1, 1, 2, 2, 2, 3, 3]
    assert concepts.layout.positions_T.tolist() == [0, 2, 5]
    by_index = map_concepts(boundaries, kinds, layout, "index")
    assert by_index.layout.positions_T.tolist() == [0, 1, 2]
    z = plug_back(torch.zeros(7, WIDTH), c, boundaries, concepts)
    for n, m in enumerate([0, 0, 1, 1, 1, 2, 2]):
        assert torch.equal(z[n], c[m])


MASKS = st.lists(
    st.lists(st.booleans(), min_size=0, max_size=7).map(lambda rest: [True, *rest]),
    min_size=1,
    max_size=4,
)


@pytest.mark.parametrize("merge", MERGES)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(masks=MASKS, seed=st.integers(0, 10**6))
def test_merge_smooth_and_plug_back_equal_reference(merge, masks, seed):
    """The whole path of random documents, the gradients to states and to every p included."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(map(len, masks))
    h = torch.randn(total, WIDTH, generator=generator, requires_grad=True)
    prob = torch.rand(total, generator=generator)
    prob[[sum(map(len, masks[:g])) for g in range(len(masks))]] = 1.0
    prob.requires_grad_()
    weights = torch.randn(total, WIDTH, generator=generator)
    boundaries, kinds, layout = text_boundaries(masks, prob)
    concepts = map_concepts(boundaries, kinds, layout, "boundary")
    c, _ = merge_tokens(h, concepts, merge)
    smoothed = smooth(c.tanh(), prob[concepts.boundary_M], concepts, None, None)
    z = plug_back(h, smoothed, boundaries, concepts)
    (z * weights).sum().backward()

    h2, prob2 = h.detach().double().requires_grad_(), prob.detach().double().requires_grad_()
    expected, start = [], 0
    for own in masks:
        part = slice(start, start + len(own))
        text = ["text"] * len(own)
        parent = [None, *range(len(own) - 1)]
        found = ref.find_concepts(own, text, parent)
        value = ref.merge_tokens(h2[part], found, merge).tanh()
        before = ref.predecessors(found, text, parent)
        u = ref.smooth(value, prob2[part][found.position], before)
        expected.append(ref.plug_back(h2[part], prob2[part], own, u, found.of_token))
        start += len(own)
    expected = torch.cat(expected)
    (expected * weights.double()).sum().backward()
    torch.testing.assert_close(z.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(h.grad.double(), h2.grad, atol=1e-4, rtol=1e-4)
    free = torch.ones(total, dtype=torch.bool)
    free[layout.starts] = False  # p is the constant 1 there
    torch.testing.assert_close(prob.grad.double()[free], prob2.grad[free], atol=1e-4, rtol=1e-4)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(size=st.integers(1, 40), seed=st.integers(0, 10**6), small=st.booleans())
def test_smoothing_on_any_forest(size, seed, small):
    """Random forests; p may be as small as 0.001, as training noise allows: the scan must not stop
    early.
    """
    generator = torch.Generator().manual_seed(seed)
    before = [None] + [
        None
        if torch.rand((), generator=generator) < 0.2
        else int(torch.randint(m, (), generator=generator))
        for m in range(1, size)
    ]
    prob = torch.rand(size, generator=generator) * (0.01 if small else 1.0) + 0.001
    prob = prob.clamp(max=1.0)
    for m, up in enumerate(before):
        if up is None:
            prob[m] = 1.0
    value = torch.randn(size, WIDTH, generator=generator)
    weights = torch.randn(size, WIDTH, generator=generator)
    previous = torch.tensor([m if up is None else up for m, up in enumerate(before)])
    layout = PackedLayout.from_lengths([size], CPU)
    index = torch.arange(size)
    concepts = ConceptMap(index, index, index, previous, layout, 0)
    a, p = value.clone().requires_grad_(), prob.clone().requires_grad_()
    out = smooth(a, p, concepts, None, None)
    (out * weights).sum().backward()
    b, q = value.double().requires_grad_(), prob.double().requires_grad_()
    expected = ref.smooth(b, q, before)
    (expected * weights.double()).sum().backward()
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(a.grad.double(), b.grad, atol=1e-4, rtol=1e-4)
    free = torch.tensor([up is not None for up in before])
    torch.testing.assert_close(p.grad.double()[free], q.grad[free], atol=1e-3, rtol=1e-3)


def test_five_doublings_are_exact_for_deterministic_boundaries():
    """1 - p is at most one half where p >= 0.5, and 2^-32 is below float32."""
    size = 300
    value, prob = torch.randn(size, WIDTH), torch.full((size,), 0.5)
    prob[0] = 1.0
    index = torch.arange(size)
    layout = PackedLayout.from_lengths([size], CPU)
    concepts = ConceptMap(index, index, index, (index - 1).clamp(min=0), layout, 0)
    expected = ref.smooth(value.double(), prob.double(), [None, *range(size - 1)])
    for doublings in (5, doublings_for(concepts, True), None):
        out = smooth(value, prob, concepts, None, doublings)
        torch.testing.assert_close(out.double(), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("merge", MERGES)
@settings(max_examples=30, deadline=None, derandomize=True)
@given(data=st.data(), masks=MASKS)
def test_open_chunks_carry_over_between_calls(merge, data, masks):
    """A document given in two pieces makes the same concepts as in one, wherever it is cut."""
    h = [torch.randn(len(own), WIDTH) for own in masks]
    cuts = [data.draw(st.integers(1, len(own))) for own in masks]
    whole, kinds, layout = text_boundaries(masks)
    expected, _ = merge_tokens(torch.cat(h), map_concepts(whole, kinds, layout, "index"), merge)

    state = OpenChunks(torch.zeros(len(masks), WIDTH), torch.zeros(len(masks)))
    made: list = [[] for _ in masks]
    past = (0,) * len(masks)
    for start, stop in ((lambda c: 0, lambda c: c), (lambda c: c, lambda c: 99)):
        own = [m[start(c) : stop(c)] for m, c in zip(masks, cuts, strict=True)]
        part = torch.cat([x[start(c) : stop(c)] for x, c in zip(h, cuts, strict=True)])
        if not len(part):
            continue
        boundaries, kinds, layout = text_boundaries(own)
        concepts = map_concepts(boundaries, kinds, layout, "index", past)
        c_MD, state = merge_tokens(part, concepts, merge, state)
        past = tuple(a + b for a, b in zip(past, concepts.layout.lengths, strict=True))
        for g, rows in enumerate(c_MD.split(concepts.layout.lengths)):
            made[g].append(rows)
    torch.testing.assert_close(torch.cat([rows for g in made for rows in g]), expected)
