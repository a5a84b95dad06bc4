"""`conceptmoe-vl plan`: what it prints, writes, draws and refuses."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json

import pytest
import yaml

from conceptmoe_vl.cli import main
from conceptmoe_vl.flops import decoding_cost, forward_flops
from conceptmoe_vl.flops_report import read_config
from conceptmoe_vl.plan_report import break_even, read_base, savings, write_plan
from conceptmoe_vl.planning import plan
from conceptmoe_vl.training.config import load_run_config
from tests.checkpoints import LAYERS, make_source, make_vl_source, save_source
from tests.tiny import tiny_config

# Every strategy has a match at R = 2 (tests/conceptmoe_vl/test_planning.py).
TEXT = {
    **{"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1},
    **{"encoder_layers": 1, "concept_layers": 8, "decoder_layers": 1, "num_experts": 64},
    **{"num_experts_per_tok": 12, "moe_intermediate_size": 8},
}
PLAIN = {"router": "none"}


@pytest.fixture
def base(tmp_path):
    path = tmp_path / "base.yaml"
    run = {
        "run_dir": "runs/base",
        "model": {"tokenizer": {"vocab_size": 300}, "text": TEXT, "chunk": PLAIN, "vision": None},
        "data": {"shards": "data/train-*.tar"},
        "training": {"max_steps": 3},
    }
    path.write_text(yaml.safe_dump(run))
    return str(path)


def run_json(capsys, *arguments, status=0):
    assert main(["plan", *arguments, "--json"]) == status
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("strategy", ["experts", "loops", "width"])
def test_table_1_and_savings_are_the_counts(base, capsys, strategy):
    found = run_json(capsys, base, "--strategy", strategy, "--joint-layers", "0")
    config = tiny_config(vision=None, text=TEXT)
    made = plan(read_config(base), 2, strategy, joint_layers=0)
    passed = len(made.config.text.concept_schedule) / 8
    # Table 1; a wider C keeps its heads here and saves as much as more experts.
    assert found["concept_maps_divided_by"] == pytest.approx(4 / passed)
    assert found["concept_cache_divided_by"] == pytest.approx(2 / passed)
    assert found["parameters"] == list(made.match.parameters)
    assert found["matched"] is True
    rows = found["savings"]
    assert [row["tokens"] for row in rows] == [2**n for n in range(10, 21)]
    for row in rows:
        costs = [
            sum(f.total for f in forward_flops(c, row["tokens"], logits=1).values())
            for c in (made.baseline, made.config)
        ]
        assert row["prefill_flops"] == costs
        read = decoding_cost(made.config, row["tokens"], bytes_per_value=2).values()
        assert row["decoding_bytes"][1] == sum(cost.bytes for cost in read)
    # At a million tokens attention is all, in E and D too, which stay as they are.
    layers, total = 8 / 4 * passed + 2, config.text.concept_layers + 2
    assert rows[-1]["prefill_flops"][0] / rows[-1]["prefill_flops"][1] == pytest.approx(
        total / layers, rel=0.02
    )


@functools.cache
def planned(strategy):
    return plan(read_config("configs/paper/MoE-A2.5B-90B.yaml"), 2, strategy)


@pytest.mark.parametrize("strategy", ["experts", "loops", "width"])
@pytest.mark.parametrize("rows", [1, 16])
def test_break_even(strategy, rows):
    """Dearer a tenth before it and cheaper a tenth behind it, or never dearer."""
    made = planned(strategy)

    def dearer(name, tokens):
        if name == "prefill":
            ours, theirs = (
                sum(f.total for f in forward_flops(c, tokens, logits=1).values())
                for c in (made.config, made.baseline)
            )
        else:
            ours, theirs = (
                sum(
                    x.bytes for x in decoding_cost(c, tokens, rows=rows, bytes_per_value=2).values()
                )
                for c in (made.config, made.baseline)
            )
        return ours > theirs

    for name, tokens in break_even(made, rows).items():
        assert tokens is not None
        # Even numbers, which R = 2 divides without a rest.
        assert not dearer(name, 2 * round(0.55 * tokens) + 2)
        assert tokens == 1 or dearer(name, 2 * round(0.45 * tokens) - 2)


def test_cheaper_decoding_with_a_longer_context():
    made = planned("experts")
    ratios = [s.decoding_bytes[0] / s.decoding_bytes[1] for s in savings(made)]
    assert ratios == sorted(ratios)


def test_out_is_a_runs_file(base, tmp_path, capsys):
    """It keeps the run's other sections, counts what the plan counts, and plans as itself again."""
    out = tmp_path / "new" / "plan.yaml"
    arguments = ["--strategy", "loops", "--joint-layers", "0"]
    found = run_json(capsys, base, *arguments, "--out", str(out))
    run = load_run_config(out)
    assert (run.data, run.training.max_steps) == ({"shards": "data/train-*.tar"}, 3)
    assert run.model.text["concept_loops"] == found["changes"]["text.concept_loops"][1]
    assert main(["flops", str(out), "--json"]) == 0
    counted = json.loads(capsys.readouterr().out)["components"].values()
    assert sum(c["parameters"] for c in counted) == found["parameters"][1]
    # Another strategy takes back what the first one set.
    run_json(capsys, str(out), "--strategy", "experts", "--joint-layers", "0", "--out", str(out))
    text = yaml.safe_load(out.read_text())["model"]["text"]
    assert "concept_loops" not in text
    assert text["concept_num_experts_per_tok"] > run.model.text["concept_num_experts_per_tok"]


@pytest.mark.parametrize("kind", ["folder", "sections"])
def test_out_from_a_model_folder_and_from_sections(tmp_path, capsys, kind):
    config = tiny_config(text=TEXT, **{**PLAIN, "joint_decoding_layers": 0})
    source = tmp_path / "base"
    if kind == "folder":
        config.save_pretrained(source)
    else:
        source = tmp_path / "base.yaml"
        source.write_text(yaml.safe_dump({"text": TEXT, "chunk": PLAIN, "vision": None}))
    out = tmp_path / "plan.yaml"
    arguments = [str(source), "--strategy", "experts", "--joint-layers", "0", "--out", str(out)]
    assert main(["plan", *arguments]) == 0
    planned = read_config(str(out))
    made = plan(read_config(str(source)), 2, "experts", joint_layers=0).config
    assert (planned.text, planned.chunk, planned.vision) == (made.text, made.chunk, made.vision)
    assert "breaks even" in capsys.readouterr().out


@pytest.mark.parametrize("family", ["Qwen3Moe", "Qwen2Moe", "Qwen3VLMoe", "Llama"])
def test_another_familys_checkpoint(family, tmp_path, capsys):
    """Its config.json alone is enough; the plan counts what convert makes of it by that plan."""
    make = make_vl_source if family == "Qwen3VLMoe" else functools.partial(make_source, family)
    source = save_source(make(), tmp_path / "source")
    out = tmp_path / "plan.yaml"
    base = read_base(str(source / "config.json"), 1, 2)
    assert base.text.concept_layers == LAYERS - 3
    made = plan(base, 1.5, "loops", "conversion", loops=1)
    write_plan(made, str(source), out)
    converted = tmp_path / "converted"
    assert main(["convert", str(source), str(converted), "--plan", str(out)]) == 0
    ours, theirs = made.config, read_config(str(converted))
    assert theirs.text == dataclasses.replace(ours.text, vocab_size=theirs.text.vocab_size)
    assert theirs.chunk == ours.chunk
    capsys.readouterr()
    # So few experts come in steps too large for a match.
    found = run_json(capsys, str(source), "--for", "conversion", status=1)
    assert found["matched"] is False


def test_another_familys_refusal(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"model_type": "deepseek_v2"}')
    assert main(["plan", str(tmp_path)]) == 2
    assert "latent attention" in capsys.readouterr().err


def test_tables(base, capsys):
    assert main(["plan", base, "--for", "conversion", "--joint-layers", "0"]) == 0
    text = capsys.readouterr().out
    for words in (
        "strategy loops: pretrained layers keep their shapes",
        "text.concept_loops",
        "against the baseline",
        "attention maps ÷ R² L / (L + L_loop) =",
        "1M",
        "breaks even: prefill FLOPs",
    ):
        assert words in text


def test_no_match_is_status_1_with_a_remedy_that_works(tmp_path, capsys):
    out = tmp_path / "plan.yaml"
    arguments = ["configs/easy_vqa.yaml", "--out", str(out)]
    assert main(["plan", *arguments]) == 1
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert "nearest has -0.29% parameters (limit 0.5%) and -1.23% FLOPs (limit 1%)" in captured.err
    assert "not matched; the nearest is strategy width" in captured.out
    assert not out.exists()
    remedy = captured.err.partition("this is matched: ")[2].partition(";")[0].split()
    assert remedy[0] == "--ratio"
    assert main(["plan", *arguments, *remedy]) == 0
    assert out.exists()


def test_plot(base, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "figures" / "plan.png"
    arguments = ["plan", base, "--strategy", "width", "--joint-layers", "0", "--plot"]
    assert main([*arguments, str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert list(path.parent.iterdir()) == [path]


def test_plot_mistakes(base, tmp_path, capsys, monkeypatch):
    arguments = ["plan", base, "--strategy", "width", "--joint-layers", "0", "--plot"]
    if importlib.util.find_spec("matplotlib"):
        assert main([*arguments, str(tmp_path / "plan.xyz")]) == 2
        assert "cannot draw" in capsys.readouterr().err
        assert [path.name for path in tmp_path.iterdir()] == ["base.yaml"]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main([*arguments, str(tmp_path / "plan.png")]) == 2
    assert "--plot needs matplotlib; pip install" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.yaml"], "there is no file 'nowhere.yaml'"),
        (["BASE", "--ratio", "1"], "the ratio is 1; give"),
        (["BASE", "--batch", "0"], "--batch is 0"),
        (["BASE", "--for", "conversion", "--strategy", "width"], "choose experts or loops"),
        (["BASE", "--encoder-layers", "9"], "leave at least one for the concept model"),
        (["BASE", "--joint-layers", "0", "--out", "/dev/null/x.yaml"], "cannot write the plan"),
    ],
)
def test_mistakes_are_one_line(base, capsys, arguments, message):
    words = [base if word == "BASE" else word for word in arguments]
    assert main(["plan", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
