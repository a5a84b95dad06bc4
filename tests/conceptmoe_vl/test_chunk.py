"""The chunk module against loops over tokens: probabilities, decisions, parents, gradients,
noise.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conceptmoe_vl.chunk import Boundaries, ChunkModule, ImagePatches, TokenKinds, sharpen
from conceptmoe_vl.concepts import map_concepts
from conceptmoe_vl.configuration import ChunkConfig
from conceptmoe_vl.layout import PackedLayout
from tests.reference import chunking as ref

CPU = torch.device("cpu")
WIDTH = 8
ROUTERS = ["cosine", "linear", "fixed", "none"]


def describe(parts):
    """Kinds and grids of one document of parts: an integer is text, a pair an image with its
    marks.
    """
    kinds, grids = [], []
    for part in parts:
        if isinstance(part, int):
            kinds += ["text"] * part
        else:
            grids.append((len(kinds) + 1, *part))
            kinds += ["mark", *["patch"] * (part[0] * part[1]), "mark"]
    return kinds, grids


def token_kinds(documents, grid_mode):
    """`TokenKinds` and the layout of described documents, by loops."""
    image, forced, tokens, rows, columns, widths, start = [], [], [], [], [], [], 0
    longest = 0
    for kinds, grids in documents:
        image += [kind == "patch" for kind in kinds]
        forced += [ref.is_forced(n, kinds, grids, grid_mode) for n in range(len(kinds))]
        for first, height, width in grids:
            longest = max(longest, height * width)
            for patch in range(height * width):
                tokens.append(start + first + patch)
                rows.append(patch // width)
                columns.append(patch % width)
                widths.append(width)
        start += len(kinds)
    patches = None
    if tokens:
        patches = ImagePatches(*(torch.tensor(x) for x in (tokens, rows, columns, widths)), longest)
    layout = PackedLayout.from_lengths([len(kinds) for kinds, _ in documents], CPU)
    return TokenKinds(torch.tensor(image), torch.tensor(forced), patches), layout


def make_module(router, grid_mode, neighborhood=4, noise="none", **options):
    config = ChunkConfig(
        router=router,
        image_mode="grid" if grid_mode else "sequential",
        neighborhood=neighborhood,
        noise=noise,
        **options,
    )
    module = ChunkModule(config, WIDTH)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    return module


def reference_boundaries(module, states, documents, grid_mode, neighborhood):
    """Reference boundaries of every document, and its float64 leaf weights by parameter name."""
    leaf = {n: p.detach().double().requires_grad_() for n, p in module.named_parameters()}
    found, start = [], 0
    for kinds, grids in documents:
        found.append(
            ref.find_boundaries(
                states[start : start + len(kinds)],
                kinds,
                grids,
                module.config.router,
                grid_mode=grid_mode,
                neighborhood=neighborhood,
                w_q=leaf.get("q_proj.weight"),
                w_k=leaf.get("k_proj.weight"),
                w=leaf["score.weight"][0] if "score.weight" in leaf else None,
                bias=leaf.get("score.bias"),
                target_ratio=module.config.target_ratio,
            )
        )
        start += len(kinds)
    return found, leaf


DOCUMENTS = [describe(p) for p in ([3, (2, 3), 4], [1], [(3, 2), (1, 4), (2, 2)], [5])]


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize(("grid_mode", "neighborhood"), [(False, 4), (True, 4), (True, 8)])
def test_boundaries_equal_reference_with_every_gradient(router, grid_mode, neighborhood):
    kinds, layout = token_kinds(DOCUMENTS, grid_mode)
    module = make_module(router, grid_mode, neighborhood, target_ratio=1.7).eval()
    h = torch.randn(layout.total, WIDTH, requires_grad=True)
    out = module(h, kinds, layout)
    weights = torch.randn(layout.total)

    states = h.detach().double().requires_grad_()
    found, leaf = reference_boundaries(module, states, DOCUMENTS, grid_mode, neighborhood)
    prob = torch.cat([b.prob for b in found])
    torch.testing.assert_close(out.probability_T.double(), prob, atol=1e-6, rtol=1e-5)
    assert out.probability_T.dtype == torch.float32
    assert out.mask_T.tolist() == ref.decide(prob)
    if grid_mode:
        parents, start = [], 0
        for boundaries, (doc_kinds, _) in zip(found, DOCUMENTS, strict=True):
            for n, kind in enumerate(doc_kinds):
                if kind == "patch":
                    up = boundaries.parent[n]
                    parents.append(start + (n if up is None else up))
            start += len(doc_kinds)
        if router != "none":
            assert out.parent_P.tolist() == parents
    if router in ("cosine", "linear"):
        (out.probability_T * weights).sum().backward()
        (prob * weights.double()).sum().backward()
        torch.testing.assert_close(h.grad.double(), states.grad, atol=1e-5, rtol=1e-4)
        for name, parameter in module.named_parameters():
            torch.testing.assert_close(
                parameter.grad.double(), leaf[name].grad, atol=1e-4, rtol=1e-4
            )


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(
        st.lists(
            st.one_of(st.integers(1, 4), st.tuples(st.integers(1, 3), st.integers(1, 3))),
            min_size=1,
            max_size=4,
        ),
        min_size=1,
        max_size=3,
    ),
    st.booleans(),
    st.sampled_from([4, 8]),
    st.integers(0, 10**6),
)
def test_any_boundaries_make_the_reference_concepts(parts, grid_mode, neighborhood, seed):
    """Random structures and random decisions: membership, psi and pi equal the loops."""
    documents = [describe(p) for p in parts]
    kinds, layout = token_kinds(documents, grid_mode)
    generator = torch.Generator().manual_seed(seed)
    module = make_module("cosine", grid_mode, neighborhood).eval()
    h = torch.randn(layout.total, WIDTH, generator=generator)
    decided = module(h, kinds, layout)
    mask = (torch.rand(layout.total, generator=generator) < 0.4) | kinds.forced_T
    decided = Boundaries(decided.probability_T, mask, decided.parent_P, decided.key_TD)
    mapped = map_concepts(decided, kinds, layout, "boundary")

    found, _ = reference_boundaries(module, h.double(), documents, grid_mode, neighborhood)
    start, first = 0, 0
    for boundaries, (doc_kinds, _) in zip(found, documents, strict=True):
        n = len(doc_kinds)
        own = mask[start : start + n].tolist()
        concepts = ref.find_concepts(own, doc_kinds, boundaries.parent, grid_mode=grid_mode)
        count = len(concepts.position)
        assert (mapped.boundary_M[first : first + count] - start).tolist() == concepts.position
        assert (mapped.read_T[start : start + n] - first).tolist() == concepts.of_token
        for m, members in enumerate(concepts.members):
            for t in members:
                assert mapped.merged_into_T[start + t] == first + m
        inside = {t for members in concepts.members for t in members}
        for t in set(range(n)) - inside:
            assert mapped.merged_into_T[start + t] >= mapped.count
        before = ref.predecessors(concepts, doc_kinds, boundaries.parent, grid_mode=grid_mode)
        for m, up in enumerate(before):
            if up is not None and not boundaries.forced[concepts.position[m]]:
                assert mapped.previous_M[first + m] - first == up
        start, first = start + n, first + count
    assert mapped.count == first


def test_last_patch_of_a_row_is_never_compared_with_the_next_row():
    """In a grid of 2 x 2 patch (1, 0) sees only (0, 0) and, with 8 neighbours, (0, 1) by up-
    right.
    """
    documents = [describe([(2, 2)])]
    kinds, layout = token_kinds(documents, True)
    h = torch.zeros(6, WIDTH)
    h[:, 0] = 1
    h[2] = h[3] = torch.eye(WIDTH)[1]
    module = make_module("cosine", True, 4)
    for projection in (module.q_proj, module.k_proj):
        torch.nn.init.eye_(projection.weight)
    assert module.eval()(h, kinds, layout).probability_T[3] == 0.5
    module.config.neighborhood = 8
    assert module(h, kinds, layout).probability_T[3] == 0


@pytest.mark.parametrize("tau", [1.0, 4.0, 6.0])
def test_sharpened_probabilities(tau):
    p = torch.tensor([0.0, 1e-7, 0.1, 0.4999, 0.5, 0.7, 1.0])
    expected = torch.tensor([ref.sharpen(float(x), tau) for x in p])
    torch.testing.assert_close(sharpen(p, tau), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("noise", ["bernoulli", "gaussian"])
def test_noise_flips_in_training_only_and_never_a_forced_boundary(noise):
    documents = [describe([2000])] + [describe([(2, 2), 1])] * 50
    kinds, layout = token_kinds(documents, False)
    module = make_module("cosine", False, noise=noise, sigma=0.3)
    h = torch.randn(layout.total, WIDTH)
    quiet = module.eval()(h, kinds, layout)
    assert torch.equal(quiet.mask_T, quiet.probability_T >= 0.5)
    noisy = module.train()(h, kinds, layout)
    assert torch.equal(noisy.probability_T, quiet.probability_T)
    assert noisy.mask_T[kinds.forced_T].all()
    assert (noisy.mask_T != quiet.mask_T).any()
    if noise == "bernoulli":
        free = ~kinds.forced_T
        expected = torch.tensor([ref.sharpen(float(p), 6.0) for p in quiet.probability_T[free]])
        spread = (expected * (1 - expected)).sum().sqrt()
        assert (noisy.mask_T[free].sum() - expected.sum()).abs() < 5 * spread


def test_probability_is_clamped_and_safe_at_both_ends():
    """Equal neighbours give p = 0, opposite ones p = 1, and a zero state stays finite."""
    kinds, layout = token_kinds([describe([4])], False)
    module = make_module("cosine", False, noise="bernoulli")
    for projection in (module.q_proj, module.k_proj):
        torch.nn.init.eye_(projection.weight)
    h = torch.randn(1, WIDTH).repeat(4, 1) * torch.tensor([1.0, 1.0, -1.0, 0.0])[:, None]
    h.requires_grad_()
    out = module.train()(h, kinds, layout)
    torch.testing.assert_close(
        out.probability_T, torch.tensor([1.0, 0.0, 1.0, 0.5]), atol=1e-6, rtol=0
    )
    assert (out.probability_T >= 0).all()
    assert (out.probability_T <= 1).all()
    out.probability_T.sum().backward()
    assert torch.isfinite(h.grad).all()
