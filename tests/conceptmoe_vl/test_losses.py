"""Language, ratio, balance and z losses: references, R13 to R15 and R22 of the field reports, two
ranks.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from conceptmoe_vl.chunk import Boundaries
from conceptmoe_vl.configuration import ChunkConfig
from conceptmoe_vl.layout import PackedLayout
from conceptmoe_vl.losses import auxiliary_losses, chunked_cross_entropy
from conceptmoe_vl.moe import RouterStatistics
from tests.peak_memory import linux
from tests.reference import losses as ref
from tests.tiny import (
    FIRST_TEXT,
    make_document,
    packed,
    tiny_model,
)

CPU = torch.device("cpu")


class LargestTensor(TorchDispatchMode):
    """Remembers the number of entries of the largest tensor that any operation returned."""

    def __init__(self):
        super().__init__()
        self.entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor):
                self.entries = max(self.entries, x.numel())
        return out


# --- cross entropy ------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [0, 1, 70, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunked_cross_entropy_equals_plain(rows, dtype, monkeypatch):
    """Several chunks (64 rows each here), the last one ragged; value and both gradients."""
    monkeypatch.setattr("conceptmoe_vl.losses._LOGIT_ENTRIES", 64 * 50)
    h = torch.randn(rows, 16, requires_grad=True)
    weight = torch.randn(50, 16, requires_grad=True)
    target = torch.randint(0, 50, (rows,))
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        total, each = chunked_cross_entropy(h, weight, target)
    (total * 0.7).backward()
    h2, weight2 = (x.detach().clone().requires_grad_() for x in (h, weight))
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        expected = F.cross_entropy(F.linear(h2, weight2).float(), target, reduction="none")
    (expected.sum() * 0.7).backward()
    # bfloat16 holds 8 bits: a logit gradient up to 1 is rounded by 2^-9, summed over 300 rows.
    tolerance = (
        {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.05, "rtol": 0.02}
    )
    torch.testing.assert_close(each, expected.detach(), **tolerance)
    torch.testing.assert_close(total, expected.sum(), **tolerance)
    torch.testing.assert_close(h.grad, h2.grad, **tolerance)
    torch.testing.assert_close(weight.grad, weight2.grad, **tolerance)
    assert total.dtype == each.dtype == torch.float32
    assert not each.requires_grad


@pytest.mark.parametrize("size", [30.0, 300.0, 3e4])
def test_cross_entropy_of_models_that_are_sure(size):
    """Logits far apart: most probabilities are nearly or wholly 0, and the loss is large."""
    h = (size * torch.randn(9, 8)).requires_grad_()
    weight = torch.randn(70, 8, requires_grad=True)
    target = torch.randint(0, 70, (9,))
    total, each = chunked_cross_entropy(h, weight, target)
    total.backward()
    h2, weight2 = (x.detach().double().requires_grad_() for x in (h, weight))
    expected = F.cross_entropy(F.linear(h2, weight2), target, reduction="none")
    expected.sum().backward()
    torch.testing.assert_close(each.double(), expected.detach(), atol=1e-5 * size, rtol=1e-5)
    torch.testing.assert_close(h.grad.double(), h2.grad, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(weight.grad.double(), weight2.grad, atol=1e-4 * size, rtol=1e-4)


def long_batch(tokens, length, labelled, vocab):
    ids = torch.randint(FIRST_TEXT, vocab, (tokens,))
    labels = torch.full_like(ids, -100)
    where = torch.randperm(tokens)[:labelled]
    labels[where] = ids[where]
    cu_seqlens = torch.arange(0, tokens + 1, length, dtype=torch.int32)
    return {"input_ids": ids, "labels": labels, "cu_seqlens": cu_seqlens}


@pytest.mark.parametrize("labelled", [100, 4096])
def test_long_rows_never_hold_all_logits(labelled):
    """R14: 16k tokens, vocabulary 32k; nothing comes near the 0.5 G entries of the full logits."""
    vocab, tokens = 32768, 16384
    model = tiny_model(vision=None, text={"vocab_size": vocab}).train()
    batch = long_batch(tokens, 128, labelled, vocab)
    with LargestTensor() as largest:
        out = model(**batch)
        out.loss.backward()
    assert out.logits is None
    assert torch.isfinite(out.loss)
    # The weight's own gradient has vocab x 32 = 1 M entries, a chunk of logits 4 M.
    assert largest.entries <= 0.02 * tokens * vocab


PEAK = """
import torch
from tests.conceptmoe_vl.test_losses import long_batch
from conceptmoe_vl.resident_memory import peak_resident_bytes
from tests.tiny import tiny_model
torch.set_num_threads(1)
torch.manual_seed(0)
model = tiny_model(vision=None, text={"vocab_size": 32768}).train()
model(**long_batch(256, 128, 10, 32768)).loss.backward()
before = peak_resident_bytes()
model(**long_batch(16384, 128, 100, 32768)).loss.backward()
print((peak_resident_bytes() - before) >> 20)
"""


@linux
def test_peak_memory_of_a_long_row():
    """R14: forward and backward take less than a quarter of the 2 GB of full float32 logits."""
    import subprocess
    import sys

    done = subprocess.run(
        [sys.executable, "-c", PEAK], capture_output=True, text=True, check=True, timeout=120
    )
    assert int(done.stdout.split()[-1]) < 0.25 * 2048


def test_prefill_makes_the_logits_of_the_last_position_only():
    vocab, tokens = 32768, 2048
    model = tiny_model(vision=None, text={"vocab_size": vocab})
    ids = torch.randint(FIRST_TEXT, vocab, (1, tokens))
    with torch.no_grad(), LargestTensor() as largest:
        out = model(input_ids=ids, use_cache=True, logits_to_keep=1)
    assert out.logits.shape == (1, 1, vocab)
    assert largest.entries < 0.05 * tokens * vocab


def test_labels_equal_a_shifted_cross_entropy_per_document():
    model = tiny_model()
    documents = [make_document([3, "image", 4]), make_document([6], 1), make_document([1], 2)]
    inputs = packed(documents, labels=True)
    with torch.no_grad():
        out = model(**inputs)
    expected, start = [], 0
    for document in documents:
        n = len(document.ids)
        own = [i if i >= FIRST_TEXT else -100 for i in document.ids]
        expected += [
            loss for _, loss in ref.token_losses(out.logits[start : start + n].double(), own)
        ]
        start += n
    torch.testing.assert_close(
        out.lm_loss_per_token.double(), torch.stack(expected), atol=1e-5, rtol=1e-5
    )
    torch.testing.assert_close(
        out.lm_loss.double(), torch.stack(expected).mean(), atol=1e-5, rtol=1e-5
    )
    chosen = inputs["input_ids"][out.supervised_positions]
    assert (chosen >= FIRST_TEXT).all()
    assert len(chosen) == len(expected)


# --- R13: how the batch is cut --------------------------------------------------------------------

LANGUAGE_ONLY = {
    "ratio_loss_weight": 0.0,
    "noise": "none",
    "text": {"balance_loss_weight": 0.0, "router_z_loss_weight": 0.0},
}


@pytest.mark.parametrize("micro_batches", [8, 4, 2])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_loss_and_gradient_do_not_depend_on_the_cut(micro_batches, as_tensor):
    model = tiny_model(vision=None, **LANGUAGE_ONLY).train()
    lengths = (1, 40, 7, 13, 2, 25, 3, 18)
    documents = [make_document([n + 1], n) for n in lengths]
    whole = model(**packed(documents, labels=True))
    whole.loss.backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    divisor = sum(lengths) / micro_batches
    divisor = torch.tensor(divisor) if as_tensor else divisor
    size = len(documents) // micro_batches
    total = 0.0
    for start in range(0, len(documents), size):
        part = packed(documents[start : start + size], labels=True)
        loss = model(**part, num_items_in_batch=divisor).loss / micro_batches
        loss.backward()
        total += loss.item()
    assert total == pytest.approx(whole.loss.item(), rel=1e-5)
    for name, parameter in model.named_parameters():
        scale = expected[name].abs().max().item()
        torch.testing.assert_close(
            parameter.grad, expected[name], atol=1e-5 * scale + 1e-9, rtol=1e-4
        )


@pytest.mark.parametrize("num_items", [None, 5.0])
def test_a_micro_batch_without_supervision_is_finite(num_items):
    """R13: no NaN, and every parameter still gets a gradient."""
    model = tiny_model().train()
    inputs = packed([make_document([3, "image", 2])], labels=True)
    inputs["labels"].fill_(-100)
    out = model(**inputs, num_items_in_batch=num_items)
    out.loss.backward()
    assert out.lm_loss == 0
    assert len(out.lm_loss_per_token) == 0
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name


# --- ratio loss -----------------------------------------------------------------------------------


def statistics_of(logits, chosen, top_k):
    """`RouterStatistics` of given router logits `[T, E]` and chosen experts `[T, K]`."""
    counts = torch.bincount(chosen.flatten(), minlength=logits.shape[1])
    probability = logits.softmax(-1).sum(0)
    return RouterStatistics(
        counts, probability, logits.logsumexp(-1).square().sum(), len(logits), top_k
    )


@pytest.mark.parametrize("scope", ["global", "modality", "sample"])
@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=4).filter(lambda x: sum(x) > 0),
    seed=st.integers(0, 10**6),
    images=st.floats(0, 1),
)
def test_ratio_loss_equals_reference_with_gradient(scope, lengths, seed, images):
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    prob = torch.rand(total, generator=generator, requires_grad=True)
    mask = torch.rand(total, generator=generator) < 0.5
    image = torch.rand(total, generator=generator) < images
    config = ChunkConfig(
        target_ratio=2.5, ratio_scope=scope, image_target_ratio=4.0, text_target_ratio=1.5
    )
    out = auxiliary_losses(
        config,
        Boundaries(prob, mask, None, None),
        image,
        PackedLayout.from_lengths(lengths, CPU),
        [],
        across_ranks=False,
    )
    out.ratio.backward()
    q = prob.detach().double().requires_grad_()
    kept = [n for n in lengths if n]
    expected = ref.ratio_loss(
        list(q.split(kept)),
        [x.tolist() for x in mask.split(kept)],
        [x.tolist() for x in image.split(kept)],
        scope,
        2.5,
        4.0,
        1.5,
    )
    expected.backward()
    torch.testing.assert_close(out.ratio.double(), expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(prob.grad.double(), q.grad, atol=1e-6, rtol=1e-5)
    for name, chosen in (("image", image), ("text", ~image)):
        if mask[chosen].any():
            measured = chosen.sum() / mask[chosen].sum()
            torch.testing.assert_close(out.ratio_by_modality[name], measured.float())


def test_ratio_loss_is_least_where_the_share_is_the_target():
    """At F = G = 1/R eq. 4 is 1, its smallest value on F = G."""

    def value(g):
        prob = torch.full((1000,), g)
        mask = torch.arange(1000) < g * 1000
        boundaries = Boundaries(prob, mask, None, None)
        layout = PackedLayout.from_lengths([1000], CPU)
        image = torch.zeros(1000, dtype=torch.bool)
        return auxiliary_losses(
            ChunkConfig(target_ratio=4.0), boundaries, image, layout, [], False
        ).ratio.item()

    assert value(0.25) == pytest.approx(1.0, abs=1e-5)
    assert value(0.25) < min(value(0.2), value(0.3))


def test_router_none_has_no_ratio_loss():
    model = tiny_model(router="none").train()
    out = model(**packed([make_document([5, "image"])], labels=True))
    assert out.ratio_loss == 0
    assert out.chunks.ratio == 1
    out.loss.backward()


# --- R15: balance and z loss ----------------------------------------------------------------------


@settings(max_examples=20, deadline=None, derandomize=True)
@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=3), seed=st.integers(0, 10**6))
def test_balance_and_z_loss_equal_reference_with_gradient(sizes, seed):
    """Layers of different sizes: tokens for E and D, concepts for C."""
    generator = torch.Generator().manual_seed(seed)
    logits = [torch.randn(n, 4, generator=generator, requires_grad=True) for n in sizes]
    chosen = [x.topk(2).indices for x in logits]
    routers = [statistics_of(x, c, 2) for x, c in zip(logits, chosen, strict=True)]
    boundaries = Boundaries(torch.ones(1), torch.ones(1, dtype=torch.bool), None, None)
    image, layout = torch.zeros(1, dtype=torch.bool), PackedLayout.from_lengths([1], CPU)
    out = auxiliary_losses(ChunkConfig(), boundaries, image, layout, routers, False)
    (out.balance + 0.5 * out.router_z).backward()
    copies = [x.detach().double().requires_grad_() for x in logits]
    balance = ref.balance_loss(
        [(x.softmax(-1), c.tolist()) for x, c in zip(copies, chosen, strict=True)]
    )
    z = ref.router_z_loss(copies)
    (balance + 0.5 * z).backward()
    torch.testing.assert_close(out.balance.double(), balance, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(out.router_z.double(), z, atol=1e-5, rtol=1e-5)
    for x, copy in zip(logits, copies, strict=True):
        torch.testing.assert_close(x.grad.double(), copy.grad, atol=1e-5, rtol=1e-4)


def balance_of(*routers):
    boundaries = Boundaries(torch.ones(1), torch.ones(1, dtype=torch.bool), None, None)
    layout = PackedLayout.from_lengths([1], CPU)
    return auxiliary_losses(
        ChunkConfig(), boundaries, torch.zeros(1, dtype=torch.bool), layout, list(routers), False
    ).balance.item()


def test_balance_loss_is_one_for_uniform_routing_and_skews_do_not_cancel():
    """R15: 1 for uniform routing, E for one expert; two layers skewed oppositely stay skewed."""
    uniform = statistics_of(torch.zeros(8, 4), torch.arange(8)[:, None] % 4, 1)
    assert balance_of(uniform) == pytest.approx(1.0)
    first, last = (
        torch.tensor([9.0, 0, 0, 0]).repeat(8, 1),
        torch.tensor([0, 0, 0, 9.0]).repeat(8, 1),
    )
    skewed = [statistics_of(x, x.topk(1).indices, 1) for x in (first, last)]
    assert balance_of(*skewed) == pytest.approx(4.0, rel=0.01)


def test_balance_gradient_reaches_every_router():
    """R15, and padding moves nothing: invariant 3 compares the losses of padded batches to 1e-6."""
    model = tiny_model(text={"concept_layers": 2}).train()
    out = model(**packed([make_document([30]), make_document(["image", 4], 1)], labels=True))
    (out.balance_loss + out.router_z_loss).backward()
    gates = {n: p for n, p in model.named_parameters() if n.endswith("mlp.gate.weight")}
    assert len(gates) == 4
    for name, gate in gates.items():
        assert gate.grad.abs().sum() > 0, name
