"""What a wrong source, option or disk gets: one clear line, and nothing half-written."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from conceptmoe_vl import cli
from conceptmoe_vl.conversion import converting, writing
from conceptmoe_vl.conversion.converting import (
    convert,
    plan_conversion,
    write_conversion,
    written_beside,
)
from conceptmoe_vl.conversion.settings import ConversionSettings
from conceptmoe_vl.errors import UserError
from tests.checkpoints import make_source, save_source


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Folders of a sharded Qwen3-MoE and of a dense Llama."""
    root = tmp_path_factory.mktemp("sources")
    moe = save_source(make_source("Qwen3Moe"), root / "moe", max_shard_size="60KB")
    return {"moe": moe, "dense": save_source(make_source("Llama"), root / "dense")}


@pytest.fixture
def source(made, tmp_path):
    """A copy of the sharded one, to be spoilt."""
    return shutil.copytree(made["moe"], tmp_path / "source")


def spoil_config(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def refused(folder, tmp_path, **settings) -> str:
    """The line that a conversion is refused with; nothing is left beside the source."""
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError) as caught:
        convert(folder, tmp_path / "out", ConversionSettings(**settings))
    assert sorted(tmp_path.rglob("*")) == before
    line = str(caught.value)
    assert "\n" not in line
    return line


FAMILIES = [
    ({"model_type": "deepseek_v2"}, "type 'deepseek_v2', which cannot be converted: its latent"),
    ({"model_type": "gpt2"}, "type 'gpt2', which cannot be converted: its layers are not known; "),
    ({"model_type": None}, "type None"),
    ({"hidden_act": "gelu"}, "its hidden_act is 'gelu'"),
    ({"mlp_only_layers": [0]}, "its mlp_only_layers is [0], and every layer here has experts"),
    ({"decoder_sparse_step": 2}, "its decoder_sparse_step is 2"),
    ({"use_sliding_window": True, "sliding_window": 64}, "its sliding_window is 64"),
    (
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        "its rope_type is 'dynamic'; known are linear, llama3, yarn",
    ),
    (
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        "rotates only a part of each head",
    ),
    ({"quantization_config": {"quant_method": "fp8"}}, "is quantised"),
    ({"num_hidden_layers": 3}, "holds 27 tensors that this family's layers do not have"),
    ({"num_hidden_layers": 5}, "holds no tensor model.layers.4.input_layernorm.weight"),
    ({"num_attention_heads": 2}, "has the shape [48, 32], but config.json gives [24, 32]"),
    ({"moe_intermediate_size": 8}, "gate_proj.weight"),
    ({"num_local_experts": 7}, "has the shape [6, 32], but config.json gives [7, 32]"),
    ({"vocab_size": 999}, "has the shape [320, 32], but config.json gives [999, 32]"),
    ({"hidden_size": "32"}, "refused by transformers: Validation error for field 'hidden_size'"),
    ({"head_dim": 13}, "is refused by transformers"),
    ({"rope_parameters": {"rope_type": "yarn"}}, "is refused by transformers"),
    ({"model_type": ["qwen3_moe"]}, "type ['qwen3_moe'], which cannot be converted"),
]


@pytest.mark.parametrize(("values", "message"), FAMILIES, ids=lambda v: str(v)[:40])
def test_what_the_configuration_says(values, message, source, tmp_path):
    spoil_config(source, **values)
    assert message in refused(source, tmp_path)


def test_clip_qkv_and_mlp_bias(tmp_path):
    olmoe = save_source(make_source("Olmoe", clip_qkv=8.0), tmp_path / "olmoe")
    assert "its clip_qkv is 8.0" in refused(olmoe, tmp_path)
    llama = save_source(make_source("Llama", mlp_bias=True), tmp_path / "llama")
    assert "its mlp_bias is True" in refused(llama, tmp_path)


def test_missing_folder_and_configuration(tmp_path):
    assert "there is no folder" in refused(tmp_path / "absent", tmp_path)
    (tmp_path / "empty").mkdir()
    assert "holds no config.json" in refused(tmp_path / "empty", tmp_path)
    (tmp_path / "empty" / "config.json").write_text("{")
    assert "no readable JSON" in refused(tmp_path / "empty", tmp_path)


def test_missing_shard(source, tmp_path):
    shard = sorted(source.glob("*.safetensors"))[1]
    shard.unlink()
    assert f"shard '{shard}' is missing" in refused(source, tmp_path)


@pytest.mark.parametrize("left", [0, 5, 3000])
def test_truncated_shard(source, left, tmp_path):
    shard = sorted(source.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:left])
    assert f"'{shard}' cannot be read" in refused(source, tmp_path)


def test_an_index_that_lies(source, tmp_path):
    path = source / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    names = sorted(index["weight_map"].values())
    index["weight_map"]["model.norm.weight"] = names[0]
    path.write_text(json.dumps(index))
    assert "does not hold model.norm.weight" in refused(source, tmp_path)
    path.write_text("[]")
    assert "is no index of shards" in refused(source, tmp_path)


@pytest.mark.parametrize("where", ["../", "{folder}/", "a/../../"])
def test_an_index_that_leaves_its_folder(where, source, tmp_path):
    path = source / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    name = index["weight_map"]["model.norm.weight"]
    shutil.copy(source / name, tmp_path)
    index["weight_map"]["model.norm.weight"] = where.format(folder=tmp_path) + name
    path.write_text(json.dumps(index))
    assert "which is not in its folder" in refused(source, tmp_path)


def test_the_links_of_a_hubs_cache(made, tmp_path):
    snapshot = tmp_path / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    blobs = shutil.copytree(made["moe"], tmp_path / "blobs")
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    convert(snapshot, tmp_path / "linked")
    convert(made["moe"], tmp_path / "plain")
    ours, theirs = (load_file(tmp_path / n / "model.safetensors") for n in ("linked", "plain"))
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())


def test_one_file_goes_before_an_index(source, tmp_path):
    """As in transformers."""
    save_file({"model.embed_tokens.weight": torch.ones(320, 32)}, source / "model.safetensors")
    assert "holds no tensor model.layers.0" in refused(source, tmp_path)


def test_other_weights_than_safetensors(source, tmp_path):
    for path in source.glob("*.safetensors*"):
        path.unlink()
    assert "name the folder of a whole checkpoint" in refused(source, tmp_path)
    (source / "pytorch_model.bin").touch()
    assert "but pytorch_model.bin; load it with transformers" in refused(source, tmp_path)


def test_tensors_of_another_shape_dtype_or_name(made, tmp_path):
    folder = shutil.copytree(made["dense"], tmp_path / "source")
    path = folder / "model.safetensors"
    weights = load_file(path)
    spoilt = {
        "has the shape [31], but config.json gives [32]": {
            "model.norm.weight": torch.ones(31),
        },
        "is F64; only F32, BF16, F16 are converted": {
            "model.norm.weight": torch.ones(32, dtype=torch.float64)
        },
        "1 tensors that this family's layers do not have, the first is model.extra": {
            "model.extra": torch.ones(1)
        },
        "are of BF16 and F32; they must share one dtype": {
            "model.layers.0.mlp.gate_proj.weight": torch.ones(24, 32, dtype=torch.bfloat16)
        },
        "embed_tokens.weight in": {"model.embed_tokens.weight": torch.tensor(1.0)},
        "ties the head to the embedding (tie_word_embeddings), but holds another lm_head": {
            "lm_head.weight": torch.ones(320, 32)
        },
    }
    for message, tensors in spoilt.items():
        save_file({**weights, **tensors}, path, {"format": "pt"})
        assert message in refused(folder, tmp_path)


def test_a_head_and_buffers_that_tied_files_hold_all_the_same(made, tmp_path):
    folder = shutil.copytree(made["dense"], tmp_path / "source")
    path = folder / "model.safetensors"
    extra = {
        "lm_head.weight": load_file(path)["model.embed_tokens.weight"],
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
    }
    save_file({**load_file(path), **extra}, path, {"format": "pt"})
    convert(folder, tmp_path / "out")
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")


@pytest.mark.parametrize("rows", [310, 640])
def test_a_head_of_other_rows_than_the_embedding(rows, tmp_path):
    folder = save_source(make_source("Qwen3Moe"), tmp_path / "source")
    path = folder / "model.safetensors"
    save_file({**load_file(path), "lm_head.weight": torch.ones(rows, 32)}, path, {"format": "pt"})
    assert f"lm_head.weight in '{path}' has the shape [{rows}, 32]" in refused(folder, tmp_path)


def test_a_vocabulary_smaller_than_the_tokenizer(source, tmp_path):
    small = save_source(make_source("Llama", vocab_size=290), tmp_path / "small")
    line = refused(small, tmp_path)
    assert "the tokenizer has 300 tokens with ids up to 299, but the embedding in" in line
    path = source / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    last = max(tokenizer["model"]["vocab"].items(), key=lambda item: item[1])[0]
    tokenizer["model"]["vocab"][last] = 400
    path.write_text(json.dumps(tokenizer))
    assert "300 tokens with ids up to 400, but" in refused(source, tmp_path)


GENERATION = ["{", "[]", '{"eos_token_id": ["</s>"]}', '{"eos_token_id": [1, null]}']


@pytest.mark.parametrize("text", GENERATION)
def test_damaged_settings_of_generation(text, source, tmp_path):
    (source / "generation_config.json").write_text(text)
    assert "generation_config.json" in refused(source, tmp_path)


def test_no_tokenizer(source, tmp_path):
    for path in source.glob("tokenizer*"):
        path.unlink()
    assert "holds no tokenizer" in refused(source, tmp_path)
    (source / "tokenizer.json").write_text("{}")
    assert "cannot be loaded" in refused(source, tmp_path)


OPTIONS = [
    ({"encoder_layers": 3, "decoder_layers": 1}, "has 4 layers, of which E is to have 3 and D 1"),
    ({"encoder_layers": -1}, "E is to have -1"),
    ({"joint_layers": 2}, "chunk.joint_decoding_layers is 2"),
    ({"ratio": 0.5}, "chunk.target_ratio is 0.5"),
    ({"experts": 4}, "are for dense models"),
    ({"image_size": 64}, "need --vision"),
    ({"ratio": math.inf}, "chunk.target_ratio is inf"),
    ({"vision": "no_such_model"}, "is no timm model"),
    ({"vision": "resnet18"}, "vision.model 'resnet18' does not take these arguments"),
    ({"seed": 2**62}, "--seed is 4611686018427387904; give a number of 0 to"),
    ({"seed": -1}, "--seed is -1"),
    ({"plan": {"text": {"concept_hidden_size": 48}}}, "the plan says text.concept_hidden_size 48"),
    ({"plan": {"text": {"hidden_size": 64}}}, "says text.hidden_size 64, but this source has 32"),
    ({"plan": {"text": {"concept_num_experts": 9}}}, "the plan says text.concept_num_experts 9"),
    ({"plan": {"text": {"concept_num_experts_per_tok": 9}}}, "concept_num_experts_per_tok is 9"),
    ({"plan": {"text": {"concept_layer": 1}}}, "nearest known key is 'concept_layers'"),
    ({"plan": {"text": {"encoder_layers": 1, "concept_layers": 9, "decoder_layers": 1}}}, "11"),
    ({"plan": {"text": {}, "chunk": {"merg": "sum"}}}, "nearest known key is 'merge'"),
]


@pytest.mark.parametrize(("settings", "message"), OPTIONS, ids=lambda v: str(v)[:40])
def test_wrong_options(settings, message, made, tmp_path):
    assert message in refused(made["moe"], tmp_path, **settings)


def test_what_exists_is_not_overwritten(made, tmp_path):
    (tmp_path / "out").mkdir()
    assert "exists already" in refused(made["moe"], tmp_path)
    with pytest.raises(UserError, match="exists already"):
        convert(made["moe"], made["moe"])


@pytest.mark.parametrize("after", [1, 40_000, 150_000])
def test_a_disk_that_fills_up_while_writing(after, made, tmp_path, monkeypatch):
    """The fault is where the kernel would report it: in the call that writes."""
    left, write = after, os.write

    def limited(file, content):
        nonlocal left
        done = write(file, content)
        left -= done
        if left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return done

    monkeypatch.setattr(writing.os, "write", limited)
    line = refused(made["moe"], tmp_path, max_shard_bytes=100_000)
    assert "No space left on device; make room, or write elsewhere" in line


def test_a_disk_too_full_to_begin(made, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(writing.shutil, "disk_usage", lambda _: usage)
    assert "has 0.0 GB free, but the weights take" in refused(made["moe"], tmp_path)


def test_a_processor_that_cannot_be_saved_leaves_nothing(made, tmp_path, monkeypatch):
    conversion = plan_conversion(made["moe"], ConversionSettings())

    def fails(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(type(conversion.processor), "save_pretrained", fails)
    assert "cannot be written: No space left on device" in refused(made["moe"], tmp_path)


def test_what_a_killed_conversion_left_is_no_obstacle(made, tmp_path):
    (tmp_path / ".out.writing").mkdir()
    (tmp_path / ".out.writing" / "model.safetensors").touch()
    convert(made["moe"], tmp_path / "out")
    assert not (tmp_path / ".out.writing").exists()


def test_a_folder_that_another_process_is_writing(made, tmp_path):
    with written_beside(tmp_path / "out") as folder:
        (folder / "half").touch()
        line = r"another process is writing '.*out'; wait for it, or name another folder"
        with pytest.raises(UserError, match=line):
            convert(made["moe"], tmp_path / "out")
        assert (folder / "half").exists()
    with pytest.raises(UserError, match="exists already"):
        convert(made["moe"], tmp_path / "out")
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "half"]


def test_a_folder_that_was_claimed_too_late(tmp_path, monkeypatch):
    lock = converting.fcntl.flock

    def late(held, how):
        (tmp_path / ".out.writing").rename(tmp_path / "out")  # the other process has just ended
        lock(held, how)

    monkeypatch.setattr(converting.fcntl, "flock", late)
    with (
        pytest.raises(UserError, match="another process is writing"),
        written_beside(tmp_path / "out"),
    ):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("inner", ["out", "deeper/../out", "../source/out"])
def test_a_folder_within_its_own_source(source, inner):
    with pytest.raises(UserError, match=r"lies inside '.*source', which is read"):
        convert(source, source / inner)
    assert not (source / "out").exists()


def test_calls_that_read_and_write_less_than_asked_for(made, tmp_path, monkeypatch):
    convert(made["moe"], tmp_path / "a")
    read, write = os.pread, os.write
    monkeypatch.setattr(writing.os, "pread", lambda f, n, start: read(f, min(n, 100), start))
    monkeypatch.setattr(writing.os, "write", lambda f, content: write(f, content[:77]))
    convert(made["moe"], tmp_path / "b")
    monkeypatch.undo()
    a, b = ((tmp_path / name / "model.safetensors").read_bytes() for name in "ab")
    assert a == b


def test_a_source_that_shrinks_while_it_is_read(source, tmp_path):
    conversion = plan_conversion(source, ConversionSettings())
    for path in source.glob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(UserError, match="became shorter"):
        write_conversion(conversion, tmp_path / "out", 10**9)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source"]


def run(*words, capsys) -> tuple[int, str, str]:
    status = cli.main([str(word) for word in words])
    out, err = capsys.readouterr()
    return status, out, err


def test_the_command(made, tmp_path, capsys):
    plan = tmp_path / "plan.yaml"
    plan.write_text(yaml.safe_dump({"model": {"text": {"concept_loops": [[0, 1, 2]]}}}))
    words = ("convert", made["moe"], tmp_path / "out", "--plan", plan, "--encoder-layers", 1)
    status, out, err = run(*words, "--max-shard-size", "50KB", "--ratio", 1.5, capsys=capsys)
    assert (status, err) == (0, "")
    assert "layers of E, C, D: 1 + 2 + 1; 6 experts, 2 per token" in out
    assert "chat template: the source's" in out
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["text"]["concept_loops"] == [[0, 1, 2]]
    assert config["chunk"]["target_ratio"] == 1.5
    assert config["dtype"] == "float32"
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 3
    status, out, err = run("convert", made["moe"], tmp_path / "out", capsys=capsys)
    assert status == 2
    assert err.startswith("error: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("size", ["", "5", "0GB", "5TB", "big", "-5GB"])
def test_wrong_shard_sizes(size, made, tmp_path, capsys):
    words = ("convert", made["moe"], tmp_path / "out", f"--max-shard-size={size}")
    status, _, err = run(*words, capsys=capsys)
    assert status == 2
    assert "give a size such as 500MB" in err
    assert not (tmp_path / "out").exists()


def test_a_plan_that_is_none(made, tmp_path, capsys):
    plan = tmp_path / "plan.yaml"
    plan.write_text("chunk: {}\n")
    words = ("convert", made["moe"], tmp_path / "out", "--plan")
    assert "has no section 'text'" in run(*words, plan, capsys=capsys)[2]
    status, _, err = run(*words, tmp_path / "absent.yaml", capsys=capsys)
    assert status == 2
    assert "absent.yaml" in err


@pytest.mark.parametrize("words", [["absent.txt"], ["config.json", "--ratios", "0.5"]], ids=str)
def test_a_report_that_cannot_be_is_refused_before_the_conversion(
    words, made, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(made["moe"])
    status, _, err = run(
        "convert", made["moe"], tmp_path / "out", "--report", *words, capsys=capsys
    )
    assert (status, err.count("\n")) == (2, 1)
    assert not (tmp_path / "out").exists()


def test_a_tower_whose_weights_cannot_be_fetched(made, tmp_path, monkeypatch):
    def offline(*_, **__):
        raise OSError("no connection")

    monkeypatch.setattr("timm.create_model", offline)
    settings = {"vision": "test_vit", "image_size": 32, "vision_pretrained": True}
    assert "no connection" in refused(made["moe"], tmp_path, **settings)
