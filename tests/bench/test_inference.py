"""`bench.inference` end to end at tiny sizes: matched models, exact pattern, refusal, files."""

from __future__ import annotations

import json
from fractions import Fraction

import pytest
import torch

from bench import inference
from bench.component_profile import PARTS
from bench.figure5 import PAPER, PAPER_LENGTHS
from bench.inference_invariants import check_invariants
from bench.inference_models import (
    BASELINE,
    PEER,
    SHAPES,
    VARIANTS,
    boundary_pattern,
    make_contestants,
    matching,
    plain_config,
    variant_config,
)
from bench.inference_runs import Decoding, cache_need, concepts_at
from bench.timing import Clock, alternate
from conceptmoe_vl.cache import KeyValueStore
from conceptmoe_vl.flops import count_parameters, forward_flops
from conceptmoe_vl.memory import cache_bytes

TWO = ["1L-top24-R2", "1.25L-top11-R1.5"]
ONE = ["1L-top24-R2"]


@pytest.fixture(scope="module")
def contestants():
    return make_contestants(SHAPES["tiny"])


def test_all_contestants_are_there(contestants):
    assert list(contestants) == [BASELINE, *VARIANTS, PEER]
    assert set(PAPER["prefill"]) == set(PAPER["decode"]) == set(VARIANTS)
    for what, by_name in PAPER.items():
        assert all(len(bars) == len(PAPER_LENGTHS[what]) for bars in by_name.values())


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name", VARIANTS)
def test_configurations_are_matched(shape, name):
    """Names are literal; parameters within 0.5 %; FLOPs a token within 2 % in the layers of C, as
    the paper's numbers give them, and 4 % in all, with chunking and joint decoding.
    """
    variant, config = VARIANTS[name], variant_config(shape, VARIANTS[name])
    text = config.text
    passes, ratio = float(variant.passes), float(variant.ratio)
    assert name == f"{passes:g}L-top{text.experts_per_concept}-R{ratio:g}"
    assert len(text.concept_schedule) == shape.concept * variant.passes
    assert config.chunk.target_ratio == ratio
    plain = plain_config(shape)
    assert plain.text.experts_per_concept == 8
    counts = [sum(p.total for p in count_parameters(c).values()) for c in (config, plain)]
    assert counts[0] == pytest.approx(counts[1], rel=0.005)
    flops = [forward_flops(c, 6 * 256) for c in (config, plain)]
    deep = [f["concept"].rest for f in flops]
    assert deep[0] == pytest.approx(deep[1], rel=0.02)
    whole = [sum(c.rest for c in f.values()) - f["head"].rest for f in flops]
    assert whole[0] == pytest.approx(whole[1], rel=0.04)


def test_counts_are_the_models(contestants):
    rows = matching(contestants)
    assert rows[BASELINE]["flops_per_token_to_baseline"] == 1
    assert contestants[BASELINE].config.text == plain_config(SHAPES["tiny"]).text
    for name, row in rows.items():
        assert row["parameters"] == contestants[name].model.num_parameters()
    peer = sum(p.numel() for p in contestants[PEER].model.parameters())
    assert peer == rows[BASELINE]["parameters"]


@pytest.mark.parametrize("ratio", [Fraction(2), Fraction(3, 2), Fraction(1), Fraction(7, 3)])
def test_pattern_is_exact(ratio):
    """Any first N places hold N / R boundaries, rounded up; far places are exact too."""
    mask = boundary_pattern(torch.arange(200), ratio)
    counts = mask.long().cumsum(0).tolist()
    assert counts == [-(-(n + 1) * ratio.denominator // ratio.numerator) for n in range(200)]
    period = ratio.numerator
    far = boundary_pattern(torch.arange(10**12 * period, 10**12 * period + 3 * period), ratio)
    assert torch.equal(far, mask[: 3 * period])


@pytest.mark.parametrize("name", TWO)
def test_rows_close_concepts_in_different_steps(contestants, name):
    model, ratio = contestants[name].model, contestants[name].ratio
    with torch.no_grad():
        out = model(torch.randint(0, 64, (6, 12)), use_cache=True)
        steps = [
            model(torch.randint(0, 64, (6, 1)), cache=out.cache).chunks.boundary_mask
            for _ in range(6)
        ]
    fired = torch.stack(steps)
    assert (fired.sum(0) == int(6 / ratio)).all()
    assert (fired.sum(1) == int(6 / ratio)).all()
    # p is what the projections say, but at least one half where a boundary stands.
    chunks = out.chunks
    assert (chunks.boundary_prob[chunks.boundary_mask] >= 0.5).all()
    assert ((chunks.boundary_prob > 0) & (chunks.boundary_prob < 0.5)).any()


@pytest.mark.parametrize("name", [BASELINE, *TWO])
def test_a_filled_cache_holds_what_is_said(contestants, name):
    contestant = contestants[name]
    decoding = Decoding(contestant, rows=3, context=96, steps=6)
    expected = cache_bytes(contestant.config, 96, float(contestant.ratio), rows=3)
    assert decoding.bytes == {"tokens": expected.tokens, "concepts": expected.concepts}
    for _ in range(2):  # every run starts from the context again
        decoding()
        assert decoding.cache.token_lengths == (102,) * 3
        grown = decoding.cache.concept_lengths
        assert grown == (concepts_at(96, contestant.ratio) + 6 / contestant.ratio,) * 3


def test_memory_that_a_run_needs(contestants):
    """What is counted beforehand holds what the run's tensors really take."""
    rows, context, steps = 2, 1200, 6
    for name, contestant in contestants.items():
        run = Decoding(contestant, rows, context, steps)
        run()
        cache = run.cache
        if run.is_peer:
            tensors = [t for layer in cache.layers for t in (layer.keys, layer.values)]
            tensors += [t for held in run.held for t in held]
        else:
            stores = [*cache.encoder, *cache.concept, *cache.decoder]
            tensors = [t for store in stores for t in (store.keys, store.values)]
        taken = sum(t.numel() * t.element_size() for t in tensors)
        need = cache_need(contestant, rows, context + steps, 4)
        assert 0.9 * need <= taken <= 1.02 * need, name


def test_alternation(monkeypatch):
    """Each of a variant's runs is paired with the baseline's before and after it."""
    order: list[str] = []
    clock = Clock("cpu")
    seconds = {"base": iter([4.0, 2.0, 6.0]), "ours": iter([1.5, 1.0]), "other": iter([3.0, 8.0])}

    def timed(run):
        order.append(run())
        return next(seconds[order[-1]])

    monkeypatch.setattr(clock, "seconds", timed)
    variants = {"ours": lambda: "ours", "other": lambda: "other"}
    found, last = alternate(clock, lambda: "base", variants, repeats=2)
    assert order == ["base", "ours", "other", "base", "ours", "other", "base"]
    pairs = found["ours"]
    assert found["other"].speedup == 0.75
    assert (pairs.speedup, pairs.baseline, pairs.variant, pairs.count) == (3.0, 4.0, 1.25, 2)
    assert last == 6.0


ARGUMENTS = ["--shape", "tiny", "--threads", "1", "--repeats", "1", "--check-tokens", "12"]


def test_program(tmp_path, capsys):
    out = tmp_path / "bench"
    options = [
        "--lengths",
        "64",
        "128",
        "--batch",
        "1",
        "3",
        "--models",
        *TWO,
        PEER,
        "--steps",
        "6",
    ]
    assert inference.main([*ARGUMENTS, "--out", str(out), *options]) == 0
    results = json.loads((out / "results.json").read_text())
    assert results["complete"] is True
    assert results["invariants"] == "green"
    cells = results["cells"]
    assert len(cells) == 3 * 2 * (1 + 2)
    for cell in cells:
        assert cell["milliseconds"] > 0
        assert cell["measured_over_predicted"] == cell["speedup"] / cell["predicted"]
    concepts = {
        c["model"]: c["concept_cache_bytes"]
        for c in cells
        if c["what"] == "prefill" and c["length"] == 128
    }
    # Keys and values of 12 layers, one head of 16, float32: 1 / R of them at the level of concepts.
    whole = 12 * 2 * 16 * 4 * 128
    assert concepts["1L-top24-R2"] == whole / 2
    assert {row["length"] for row in results["profile"]} == {64, 128}
    for row in results["profile"]:
        times = dict(row["milliseconds"])
        total = times.pop("total")
        assert sum(times.values()) == pytest.approx(total)
        assert set(times) == {*PARTS, "rest"}
    for name in TWO:
        assert set(results["break_even"][name]) == {"measured", "predicted", "by_profile"}
    assert (out / "figure5.png").read_bytes()[:4] == b"\x89PNG"
    assert not list(out.glob(".*"))
    text = capsys.readouterr().out
    assert "measured/predicted" in text
    assert "break-even length" in text


def test_refuses_while_an_invariant_is_red(tmp_path, monkeypatch, capsys):
    """Keys that go wrong once a cache has a past: steps no longer give the full pass."""
    right = KeyValueStore.append

    def wrong(self, k_TNH, v_TNH, layout):
        return right(self, k_TNH, v_TNH * (1.5 if layout.has_past else 1.0), layout)

    monkeypatch.setattr(KeyValueStore, "append", wrong)
    out = tmp_path / "bench"
    options = ["--lengths", "64", "--models", *ONE]
    assert inference.main([*ARGUMENTS, "--out", str(out), *options]) == 1
    captured = capsys.readouterr()
    assert "1L-top24-R2: prefill and steps differ from the full pass" in captured.err
    assert "red" in captured.err
    assert not (out / "results.json").exists()


def test_refuses_another_ratio_and_rows_that_depend_on_each_other(contestants, monkeypatch):
    name = "1L-top24-R2"
    chunk = contestants[name].model.language_model.chunk
    monkeypatch.setattr(chunk, "ratio", Fraction(3))
    (fault,) = check_invariants({name: contestants[name]}, 12)
    assert fault == f"{name}: 12 tokens have 4 boundaries, the pattern holds 6"
    monkeypatch.undo()

    monkeypatch.setattr(type(contestants[name]), "from_row", lambda self, row: None)
    (fault,) = check_invariants({name: contestants[name]}, 12)
    assert "rows of a batch differ from single ones" in fault


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "8"], "multiple of 6"),
        (["--lengths", "1"], "--lengths must be 2 or more"),
        (["--batch", "0"], "--batch"),
        (["--check-tokens", "4"], "--check-tokens is 4"),
    ],
)
def test_wrong_options(tmp_path, capsys, options, message):
    with pytest.raises(SystemExit) as stop:
        inference.main([*ARGUMENTS, "--out", str(tmp_path), *options])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_cells_beyond_the_memory_are_skipped(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("bench.inference_cells._free_bytes", lambda device: 0)
    options = ["--lengths", "64", "--models", *ONE, "--what", "decode", "--batch", "2"]
    assert inference.main([*ARGUMENTS, "--out", str(tmp_path), *options]) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["cells"] == []
    assert "GiB" in results["skipped"][0]["reason"]
    assert "skipped" in capsys.readouterr().out
