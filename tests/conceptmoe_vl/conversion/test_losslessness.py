"""The report on what a conversion costs, against plain computations."""

from __future__ import annotations

import json
import math

import pytest
import torch
import torch.nn.functional as F

from conceptmoe_vl import cli
from conceptmoe_vl.asking import load_pretrained
from conceptmoe_vl.conversion.converting import convert
from conceptmoe_vl.conversion.losslessness import as_source, compare, print_report
from conceptmoe_vl.conversion.settings import ConversionSettings
from conceptmoe_vl.errors import UserError
from tests.checkpoints import foreign_tokenizer, make_source, save_source

TEXT = "the quick brown fox jumps over the lazy dog; what is in the picture? " * 12


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Source model, its folder, its conversion's folder and a text file."""
    root = tmp_path_factory.mktemp("pair")
    source = make_source("Qwen2Moe", vocab_size=300)
    folder = save_source(source, root / "source")
    convert(folder, root / "out", ConversionSettings(joint_layers=1))
    (root / "text.txt").write_text(TEXT)
    return source, folder, root / "out", root / "text.txt"


def test_the_figures(pair):
    source, folder, out, text = pair
    report = compare(folder, out, [text], ratios=(2, 1, 1.25), tokens=200, window=64)
    assert report.is_lossless
    assert 0 < report.mean_difference < report.largest_difference < 1e-4
    assert report.same_choice == 1
    ids = torch.tensor(foreign_tokenizer()(TEXT)["input_ids"][:200])
    losses = []
    with torch.no_grad():
        for part in ids.split(64):
            logits = source(input_ids=part[None]).logits[0, :-1]
            losses.append(F.cross_entropy(logits, part[1:], reduction="none"))
    assert report.tokens == 196
    assert report.compared_tokens == 200
    assert report.source_perplexity == pytest.approx(torch.cat(losses).mean().exp().item(), 1e-5)
    assert [row.ratio for row in report.ratios] == [1, 1.25, 2]
    for row in report.ratios:
        assert row.reached == pytest.approx(200 / round(200 / row.ratio), rel=0.02)
    # The six rows of new tokens take a share of the probability: perplexity rises by it.
    assert report.source_perplexity < report.ratios[0].perplexity < 1.5 * report.source_perplexity
    assert len({row.perplexity for row in report.ratios}) == 3


def test_a_difference_is_found(pair, tmp_path):
    """Another router weight in one layer is another function."""
    _, folder, out, text = pair
    model, processor = load_pretrained(out, "cpu")
    with torch.no_grad():
        model.language_model.concept.layers[0].mlp.gate.weight.mul_(3)
    model.save_pretrained(tmp_path / "spoilt")
    processor.save_pretrained(tmp_path / "spoilt")
    report = compare(folder, tmp_path / "spoilt", [text], ratios=(1.0,), tokens=60)
    assert not report.is_lossless
    assert report.largest_difference > 1e-3


def test_what_is_no_number_is_a_difference(pair, tmp_path):
    _, folder, out, text = pair
    model, processor = load_pretrained(out, "cpu")
    with torch.no_grad():
        model.language_model.norm.weight[0] = math.nan
    model.save_pretrained(tmp_path / "spoilt")
    processor.save_pretrained(tmp_path / "spoilt")
    report = compare(folder, tmp_path / "spoilt", [text], ratios=(1.0,), tokens=60, window=30)
    assert math.isnan(report.largest_difference)
    assert not report.is_lossless


def test_a_ratio_out_of_reach(tmp_path, pair, capsys):
    """Every document's first token is a boundary: two-token documents allow no more than 2."""
    _, folder, out, text = pair
    report = compare(folder, out, [text], ratios=(1.5, 3.0), tokens=40, window=2)
    assert report.ratios[0].perplexity is not None
    assert (report.ratios[1].reached, report.ratios[1].perplexity) == (None, None)
    print_report(report)
    assert "out of reach" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("router", "reached"), [("none", [1.0]), ("fixed", [1.0, 2.0]), ("linear", [1.0, 2.0])]
)
def test_every_router(router, reached, pair, tmp_path):
    _, folder, _, text = pair
    convert(folder, tmp_path / "out", ConversionSettings(router=router, residual="add"))
    report = compare(folder, tmp_path / "out", [text], ratios=(1.0, 2.0), tokens=128, window=64)
    assert report.is_lossless
    assert [row.reached for row in report.ratios] == pytest.approx(reached, rel=0.02)
    # `add` counts the residual stream twice where `delta` is the original network.
    delta = compare_residual("delta", router, folder, text, tmp_path)
    assert abs(report.ratios[0].perplexity / delta - 1) > 1e-3


def compare_residual(residual, router, folder, text, tmp_path) -> float:
    """Perplexity at ratio 1."""
    out = tmp_path / residual
    convert(folder, out, ConversionSettings(router=router, residual=residual))
    report = compare(folder, out, [text], ratios=(1.0,), tokens=128, window=64)
    return report.ratios[0].perplexity


def test_as_source_gives_everything_back(tmp_path):
    """Loops and more experts per concept are left out of the comparison, and come back."""
    folder = save_source(make_source("Olmoe"), tmp_path / "source")
    plan = {"text": {"concept_loops": [[0, 1, 2]], "concept_num_experts_per_tok": 3}}
    convert(folder, tmp_path / "out", ConversionSettings(plan=plan, residual="add"))
    (tmp_path / "text").write_text(TEXT)
    assert compare(folder, tmp_path / "out", [tmp_path / "text"], tokens=50).is_lossless
    model, _ = load_pretrained(tmp_path / "out", "cpu")
    ids = torch.randint(5, 300, (1, 20))
    with torch.no_grad():
        before = model(input_ids=ids).logits
        with as_source(model):
            assert not torch.allclose(model(input_ids=ids).logits, before, atol=1e-3)
        assert torch.equal(model(input_ids=ids).logits, before)


def test_the_commands_write_json_and_a_table(pair, tmp_path, capsys):
    _, folder, out, text = pair
    words = ["losslessness", folder, out, text, "--json", tmp_path / "r.json"]
    words += ["--tokens", 64, "--ratios", 1, 1.5]
    assert cli.main([str(word) for word in words]) == 0
    assert "the same function" in capsys.readouterr().out
    values = json.loads((tmp_path / "r.json").read_text())
    assert values["lossless"] is True
    assert [row["ratio"] for row in values["ratios"]] == [1, 1.5]
    words = ["convert", folder, tmp_path / "new", "--report", text, "--tokens", 64]
    assert cli.main([str(word) for word in words]) == 0
    shown = capsys.readouterr().out
    assert "perplexity of 63 tokens" in shown
    saved = json.loads((tmp_path / "new" / "losslessness.json").read_text())
    assert [row["ratio"] for row in saved["ratios"]] == [1, 1.1, 1.25, 1.5, 2]
    assert math.isclose(saved["source_perplexity"], values["source_perplexity"])


def test_what_is_refused(pair, tmp_path):
    _, folder, out, text = pair
    empty, binary = tmp_path / "empty", tmp_path / "binary"
    empty.write_text("")
    binary.write_bytes(b"\xff\xfe\x00")
    for arguments, message in (
        (([tmp_path / "absent"],), "cannot be read as UTF-8 text"),
        (([binary],), "cannot be read as UTF-8 text"),
        (([empty],), "less than two tokens"),
        (([text], [0.5]), "give numbers of 1 or more"),
        (([text], []), "give numbers of 1 or more"),
        (([text], [2.0], 1), "give 2 or more"),
        (([text], [2.0], 100, 1), "give 2 or more"),
    ):
        with pytest.raises(UserError, match=message):
            compare(folder, out, *arguments)
    with pytest.raises(UserError, match="type 'conceptmoe_vl', which cannot be converted"):
        compare(out, out, [text])
    with pytest.raises(UserError, match="describes a model of type 'qwen2_moe'"):
        compare(folder, folder, [text])
