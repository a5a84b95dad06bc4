"""`conceptmoe-vl flops` and the paper's Table 1."""

from __future__ import annotations

import json
from math import sqrt

import pytest
import yaml

from conceptmoe_vl.cli import main
from conceptmoe_vl.flops import count_parameters, forward_flops
from conceptmoe_vl.flops_report import read_config, table1
from conceptmoe_vl.memory import cache_bytes
from tests.tiny import tiny_config, tiny_model

N = 4096


def of_strategy(ratio, **text):
    """(FLOPs of the concept model's maps, values in its cache) of a configuration."""
    config = tiny_config(vision=None, text={"concept_layers": 4, **text}, target_ratio=ratio)
    return forward_flops(config, N)["concept"].maps, cache_bytes(config, N).concepts / 4


@pytest.mark.parametrize("ratio", [2, 4, 16])
def test_the_counts_are_table_1s_formulas(ratio):
    """Exactly, for the baseline, for more experts and for loops."""
    plain = tiny_config(vision=None, text={"concept_layers": 4}, router="none")
    maps, cache = forward_flops(plain, N)["concept"].maps, cache_bytes(plain, N).concepts / 4
    layers, query, key = 4, 32, 16  # L, N_heads H, N_kv H
    assert (maps, cache) == (4 * layers * query * N**2, 2 * layers * key * N)
    assert of_strategy(ratio, concept_num_experts_per_tok=4) == (maps / ratio**2, cache / ratio)
    loops = {"concept_loops": [[1, 2, 2]], "concept_num_experts_per_tok": 3}
    passed = (4 + 2) / 4
    assert of_strategy(ratio, **loops) == (maps * passed / ratio**2, cache * passed / ratio)


def test_table1_rows():
    text = {"concept_layers": 4, "concept_loops": [[1, 2, 2]]}
    config = tiny_config(vision=None, text=text, target_ratio=4)
    rows = table1(config, N)
    base = rows[0]
    saved = [(base.map_flops / r.map_flops, base.cache_values / r.cache_values) for r in rows]
    assert saved == [(1, 1), (16, 4), (16 / 1.5, 4 / 1.5), (4**1.5, sqrt(4))]
    # The row of the configuration's own strategy is what the counts say.
    assert rows[2].map_flops == forward_flops(config, N)["concept"].maps
    assert rows[2].cache_values == cache_bytes(config, N).concepts / 4
    # A wider C keeps its heads here and saves as much as row 1.
    wide = tiny_config(
        vision=None, text={"concept_layers": 4, "concept_hidden_size": 64}, target_ratio=4
    )
    assert forward_flops(wide, N)["concept"].maps == rows[1].map_flops


def test_command_on_a_run_configuration(capsys):
    assert main(["flops", "configs/easy_vqa.yaml", "--json", "--tokens", "100"]) == 0
    found = json.loads(capsys.readouterr().out)
    config = read_config("configs/easy_vqa.yaml")
    assert found["ratio"] == 2
    for name, count in count_parameters(config).items():
        assert found["components"][name]["parameters"] == count.total
    assert main(["flops", "configs/easy_vqa.yaml", "--table1", "--images", "2"]) == 0
    text = capsys.readouterr().out
    assert "(L + L_loop) d N² / R²" in text
    assert "encoder" in text
    assert "cache:" in text


def test_command_on_a_model_folder(tmp_path, capsys):
    model = tiny_model()
    model.config.save_pretrained(tmp_path)
    assert main(["flops", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    counts = sum(c["parameters"] for c in found["components"].values())
    assert counts == model.num_parameters()


@pytest.mark.parametrize(
    ("content", "arguments", "message"),
    [
        (None, [], "there is no file"),
        ({"data": {}}, [], "describes no model"),
        ({"model": {"text": {"hidden_sise": 8}}}, [], "nearest known key is 'hidden_size'"),
        ({"text": {}}, ["--tokens", "0"], "tokens is 0"),
        ({"text": {}}, ["--ratio", "0.5"], "ratio is 0.5"),
        ({"text": {}}, ["--batch", "0"], "--batch must be 1"),
        ({"text": {}}, ["--images", "3"], "text-only"),
    ],
)
def test_mistakes_are_one_line(tmp_path, capsys, content, arguments, message):
    path = tmp_path / "model.yaml"
    if content is not None:
        path.write_text(yaml.safe_dump(content))
    assert main(["flops", str(path), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("content", ["{", '{"model_type": "llama"}'])
def test_foreign_json_is_refused(tmp_path, capsys, content):
    (tmp_path / "config.json").write_text(content)
    assert main(["flops", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
