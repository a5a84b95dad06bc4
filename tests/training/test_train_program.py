"""train.py from shards to a loadable model, resumed, interrupted, and with a user's mistakes."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoProcessor

import train
from conceptmoe_vl import cli
from conceptmoe_vl.errors import UserError
from conceptmoe_vl.training import Trainer, World, load_run_config
from conceptmoe_vl.training import distributed as processes
from conceptmoe_vl.training.build import build_model
from data_pipelines import DataConfig, build_stream
from data_pipelines.sampling import is_held_out
from tests.data_pipelines.conftest import make_processor

COLOURS = {"red": (220, 30, 30), "green": (30, 200, 60), "blue": (40, 60, 230)}


def add_member(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))


def write_shard(path, samples: int) -> None:
    """Pictures of one colour with a question, every fourth sample text alone."""
    rng = np.random.default_rng(0)
    with tarfile.open(path, "w") as tar:
        for number in range(samples):
            name = list(COLOURS)[number % 3]
            question = [{"type": "text", "text": f"what colour is number {number}?"}]
            if number % 4:
                noise = rng.integers(-20, 20, (24, 24, 3))
                pixels = np.clip(np.array(COLOURS[name]) + noise, 0, 255).astype(np.uint8)
                file = io.BytesIO()
                Image.fromarray(pixels).save(file, "PNG")
                add_member(tar, f"s{number:04d}.img0.png", file.getvalue())
                question.insert(0, {"type": "image"})
            messages = [
                {"role": "user", "content": question},
                {"role": "assistant", "content": name},
            ]
            record = {"messages": messages, "source": "text" if number % 4 == 0 else "pictures"}
            add_member(tar, f"s{number:04d}.json", json.dumps(record).encode())


def write_config(tmp_path: Path) -> Path:
    """A run of a tiny model on shards of 24 samples, by plain torch."""
    write_shard(tmp_path / "train-000000.tar", 24)
    values = {
        "run_dir": str(tmp_path / "run"),
        "model": {
            "tokenizer": {"vocab_size": 300},
            "text": {
                "hidden_size": 32,
                "encoder_layers": 1,
                "concept_layers": 1,
                "decoder_layers": 1,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "num_experts": 4,
                "moe_intermediate_size": 16,
            },
            "chunk": {"image_mode": "grid"},
            "vision": {
                "model": "conceptmoe_vit_conv",
                "model_args": {"embed_dim": 32, "depth": 1, "num_heads": 2},
                "image_size": 24,
            },
        },
        "data": {"shards": str(tmp_path / "train-*.tar"), "tokens_per_batch": 128},
        "training": {"engine": "torch", "device": "cpu", "max_steps": 4, "log_every": 1},
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


@pytest.fixture
def config_file(tmp_path):
    return write_config(tmp_path)


@pytest.fixture(autouse=True)
def _handlers():
    """Puts signal handlers back."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


def program(config_file, *overrides: str) -> int:
    return train.main(["--config", str(config_file), *overrides])


def metrics(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").open()]


@pytest.mark.parametrize(
    ("fields", "tokens"), [({}, 9), ({"size_policy": "tiles", "image_size": 16}, 20)]
)
def test_from_shards_to_a_model_that_answers(config_file, tmp_path, fields, tokens):
    held_out = [f"evaluation.data.shards={tmp_path / 'train-*.tar'}", "evaluation.batches=2"]
    vision = [f"model.vision.{name}={value}" for name, value in fields.items()]
    assert program(config_file, *held_out, *vision) == 0
    run = tmp_path / "run"
    assert [line["step"] for line in metrics(run)] == [1, 2, 3, 4]
    assert set(metrics(run)[-1]["lm_loss_by_source"]) <= {"text", "pictures"}
    assert len((run / "evaluation.jsonl").read_text().splitlines()) == 1
    model = AutoModelForImageTextToText.from_pretrained(run / "model")
    processor = AutoProcessor.from_pretrained(run / "model")
    part = {"type": "image", "image": Image.new("RGB", (24, 24), COLOURS["red"])}
    messages = [{"role": "user", "content": [part, {"type": "text", "text": "what colour?"}]}]
    inputs = processor.apply_chat_template(messages, add_generation_prompt=True)
    assert (inputs["input_ids"] == processor.image_token_id).sum() == tokens
    out = model.generate(**inputs, max_new_tokens=2, do_sample=False)
    assert out.shape[1] > inputs["input_ids"].shape[1]
    assert load_run_config(run / "config.yaml").model.text["vocab_size"] % 64 == 0


def test_the_same_command_again_trains_no_further(config_file, tmp_path):
    assert program(config_file) == 0
    before = metrics(tmp_path / "run")
    assert program(config_file) == 0
    assert metrics(tmp_path / "run") == before
    assert program(config_file, "training.max_steps=5") == 0
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("workers", [0, 1])
def test_resume_gives_the_unbroken_run(config_file, tmp_path, workers):
    def trainer(name: str) -> Trainer:
        overrides = [f"run_dir={tmp_path / name}", f"data.num_workers={workers}"]
        world = processes.start("torch", "cpu")
        return train.build_trainer(load_run_config(config_file, overrides), world)

    straight = trainer("straight")
    expected = [straight.step() for _ in range(6)]
    stopped = trainer("stopped")
    for _ in range(3):
        stopped.step()
    stopped.save_checkpoint()
    resumed = trainer("stopped")
    found = [resumed.step() for _ in range(3)]
    for name in ("step", "loss", "grad_norm", "samples", "tokens", "epoch"):
        assert [line[name] for line in found] == [line[name] for line in expected[3:]], name


def test_a_finite_run_delivers_every_sample_and_goes_on_with_more_epochs(config_file, tmp_path):
    """The last step has one micro-batch of five, and is taken."""
    options = ("training.max_steps=999", "training.gradient_accumulation_steps=5")
    assert program(config_file, *options, "data.epochs=1") == 0
    counts = metrics(tmp_path / "run")[-1]["delivered_by_source"]
    assert {name: count["samples"] for name, count in counts.items()} == {"pictures": 18, "text": 6}
    assert counts["pictures"]["images"] == 18
    assert metrics(tmp_path / "run")[-1]["samples"] == 24
    assert program(config_file, *options, "data.epochs=3") == 0
    last = metrics(tmp_path / "run")[-1]
    assert last["samples"] == 72
    assert {count["samples"] for count in last["delivered_by_source"].values()} == {18, 54}
    tokens = [count["tokens"] for count in last["delivered_by_source"].values()]
    assert sum(tokens) == last["tokens"]


def test_named_sources_with_weights_and_a_held_out_split(config_file, tmp_path):
    write_shard(tmp_path / "other-000000.tar", 6)
    values = yaml.safe_load(config_file.read_text())
    values["data"] = {
        "sources": [
            {"name": "large", "shards": str(tmp_path / "train-*.tar"), "weight": 1},
            {"name": "small", "shards": str(tmp_path / "other-*.tar"), "weight": {0: 1, 99: 2}},
        ],
        "tokens_per_batch": 128,
        "held_out": 0.3,
    }
    values["evaluation"] = {"data": {"split": "held_out"}, "batches": 2, "every": 2}
    config_file.write_text(yaml.safe_dump(values))
    assert program(config_file) == 0
    run = tmp_path / "run"
    assert set(metrics(run)[-1]["lm_loss_by_source"]) == {"large", "small"}
    assert set(metrics(run)[-1]["delivered_by_source"]) == {"large", "small"}
    evaluations = [json.loads(line) for line in (run / "evaluation.jsonl").open()]
    assert [line["step"] for line in evaluations] == [2, 4]
    assert len({line["supervised_tokens"] for line in evaluations}) == 1  # the same batches
    other = f"evaluation.data={{shards: {tmp_path / 'other-*.tar'}}}"
    assert program(config_file, other, f"run_dir={tmp_path / 'other'}") == 0


def test_held_out_samples_count_once(config_file, tmp_path):
    split = {"shards": str(tmp_path / "train-*.tar"), "held_out": 0.3, "split": "held_out"}
    options = ("data.held_out=0.3", "evaluation.data.split=held_out", "evaluation.batches=99")
    assert program(config_file, *options) == 0
    processor = AutoProcessor.from_pretrained(tmp_path / "run" / "model")
    batches = list(build_stream(DataConfig(**split, epochs=1), processor))
    (line,) = (json.loads(line) for line in (tmp_path / "run" / "evaluation.jsonl").open())
    assert 0 < sum(len(batch.keys) for batch in batches) < 24
    assert line["supervised_tokens"] == sum(batch.num_supervised for batch in batches)


def test_every_rank_comes_to_the_held_out_samples_of_a_mixture(config_file, tmp_path):
    """One sample of 24 is held out, at a place that in shards' order one of two ranks never has."""
    keys = [f"s{number:04d}" for number in range(24)]
    shares = (number / 1000 for number in range(1, 1000))
    share = next(share for share in shares if any(is_held_out(key, share) for key in keys))
    source = f"{{name: a, shards: {tmp_path / 'train-*.tar'}, weight: 1}}"
    data = f"data={{sources: [{source}], held_out: {share}, tokens_per_batch: 128}}"
    overrides = [data, "evaluation.data.split=held_out", "evaluation.batches=2"]
    config = load_run_config(config_file, overrides)
    for rank in range(2):
        world = World(rank, 2, rank, torch.device("cpu"))
        batches = train.held_out_batches(config, make_processor(), world)
        found = [[batch.keys for batch in batches()] for _ in range(2)]
        assert found[0] == found[1]
        assert len(found[0]) == 2


def test_ctrl_c_saves_and_the_next_run_goes_on(config_file, tmp_path, monkeypatch):
    original = Trainer.step

    def interrupted(self):
        if self.step_number == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return original(self)

    monkeypatch.setattr(Trainer, "step", interrupted)
    assert program(config_file) == 128 + signal.SIGINT
    assert not (tmp_path / "run" / "model").exists()
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2]
    monkeypatch.setattr(Trainer, "step", original)
    assert program(config_file) == 0
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.max_step=1", "the nearest known key is 'max_steps'"),
        ("data.shard=x", "the nearest known key is 'shards'"),
        ("model.text.hiden_size=32", "the nearest known key is 'hidden_size'"),
        ("model.vision.model=no_such_vit", "no_such_vit"),
        ("model.text.vocab_size=10", "but the tokenizer has"),
        ("model.tokenizer.vocab_size=10", "section 'model.tokenizer': tokenizer vocab_size is 10"),
        ("model.init_from=/no/such/folder", "which is no folder"),
        ("data.shards=/no/such-*.tar", "/no/such-*.tar"),
        ("data.shards=3", "data.shards is 3; name tar files"),
        ("evaluation.data.shards=/no/held-*.tar", "no file matches '/no/held-*.tar'"),
        ("model.vision=null", "this model takes no images (vision: null)"),
        ("model.tokenizer={path: /}", "which is no folder of a saved tokenizer"),
        ("model.init_from=/", "which is no folder of a saved model"),
        (
            "training={engine: deepspeed, max_steps: 1, device: cpu, "
            "deepspeed: {zero_optimization: {stage: 2, stages: 1}}}",
            "training.deepspeed: 'stages' (DeepSpeedZeroConfig) is 1: Extra inputs",
        ),
        ("training.deepspeed=zero2.json", "which has no effect: training.engine is torch"),
        ("data.max_shift=2", "data.max_shift is 2, which has no effect: data.augment is none"),
        ("model.chunk.sigma=0.5", "model.chunk.sigma is 0.5, which has no effect: chunk.noise is"),
        ("model.generation.max_new_token=9", "the nearest known key is 'max_new_tokens'"),
        ("model.generation.max_new_tokens=-1", "model.generation cannot be used: `max_new_tokens`"),
        ("model.generation.eos_token_id=x", "eos_token_id is 'x'; give a token's number"),
        ("model.generation.temperature=0.5", "model.generation cannot be used: GenerationConfig"),
        ("run_dir=/dev/null/run", "cannot write /dev/null/run"),
    ],
)
def test_mistakes_give_one_line_and_status_2(config_file, tmp_path, capsys, override, message):
    assert program(config_file, override) == 2
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ")
    assert message in error


def test_a_run_killed_before_its_first_checkpoint_starts_anew(config_file, tmp_path, monkeypatch):
    """Only by the same command: another configuration must not clear the lines of a run."""
    step = Trainer.step

    def killed_in_the_third(self):
        if self.step_number == 2:
            raise KeyboardInterrupt
        return step(self)

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "step", killed_in_the_third)
        assert program(config_file) == 128 + signal.SIGINT
    first = metrics(tmp_path / "run")
    assert [line["step"] for line in first] == [1, 2]
    assert program(config_file, "training.learning_rate=1e-5") == 2
    assert metrics(tmp_path / "run") == first
    (tmp_path / "run" / "checkpoints" / ".writing-step-2").mkdir(parents=True)  # the first, killed
    assert program(config_file) == 0
    lines = metrics(tmp_path / "run")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert [line["loss"] for line in lines[:2]] == [line["loss"] for line in first]


def test_a_run_killed_while_it_replaced_a_folder_goes_on(config_file, tmp_path, capsys):
    assert program(config_file) == 0
    run, folder = tmp_path / "run", tmp_path / "run" / "checkpoints"
    (folder / "step-4").rename(folder / ".step-4.old")  # between the two renamings
    shutil.copytree(run / "model", run / ".model.old")  # behind the second one
    assert program(config_file, "training.max_steps=6") == 0
    assert "step-4 is back: a killed run had put it aside" in capsys.readouterr().err
    assert [line["step"] for line in metrics(run)] == [1, 2, 3, 4, 5, 6]
    assert not list(run.rglob(".*"))


def test_consolidate_writes_what_the_run_has_exported(config_file, tmp_path, capsys):
    assert program(config_file) == 0
    checkpoint, out = tmp_path / "run" / "checkpoints" / "step-4", tmp_path / "out"
    assert cli.main(["consolidate", str(checkpoint), str(out)]) == 0
    written, exported = (
        {path.name for path in (f.iterdir())} for f in (out, tmp_path / "run/model")
    )
    assert written == exported
    weights, expected = (
        load_file(folder / "model.safetensors") for folder in (out, tmp_path / "run/model")
    )
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    capsys.readouterr()
    shutil.copytree(checkpoint, tmp_path / "elsewhere" / "a" / "step-4")
    for arguments, message in (
        ((checkpoint, out), "exists already; name another folder"),
        ((tmp_path / "run" / "model", tmp_path / "new"), "is no complete checkpoint"),
        (
            (tmp_path / "elsewhere" / "a" / "step-4", tmp_path / "new"),
            "must lie in its run's folder",
        ),
    ):
        assert cli.main(["consolidate", *map(str, arguments)]) != 0
        assert message in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_learned_thresholds_start_at_the_calibration_of_init_from(config_file, tmp_path):
    assert program(config_file, "training.max_steps=1") == 0
    path = tmp_path / "run" / "model" / "config.json"
    values = json.loads(path.read_text())
    table = {name: [0.1, 0.4] for name in ("all", "text", "image")}
    values["chunk"]["calibration"] = {"ratios": [1.2, 3.0], **table}
    path.write_text(json.dumps(values))
    config = load_run_config(config_file, [f"model.init_from={path.parent}"])
    config.model.text, config.model.vision = {}, None
    config.model.chunk |= {"target_ratios": [1, 2, 3], "target_ratio": 3.0}
    model = build_model(config, AutoProcessor.from_pretrained(path.parent))
    found = torch.sigmoid(-10 * model.language_model.chunk.dial.shift)
    assert found.tolist() == pytest.approx([0.5, 0.3, 0.4])
    assert model.config.chunk.calibration is None


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.text.concept_layers=3", "has no language_model.concept.layers.1."),
        ("model.text.decoder_layers=0", "has language_model.decoder.layers.0."),
        ("model.vision.model_args.depth=3", "has no vision.model.blocks.1."),
        ("model.chunk.router=linear", None),
        ("model.chunk.joint_decoding_layers=1", None),
    ],
)
def test_init_from_of_another_network_is_refused(config_file, tmp_path, override, message):
    """R17: no layer is new or dropped without a word; what chunking adds may be new."""
    assert program(config_file, "training.max_steps=1") == 0
    folder = tmp_path / "run" / "model"
    config = load_run_config(config_file, [f"model.init_from={folder}", override])
    processor = AutoProcessor.from_pretrained(folder)
    if message is None:
        build_model(config, processor)
        return
    with pytest.raises(UserError, match=re.escape(message)):
        build_model(config, processor)


def test_a_start_that_samples_is_exported_without_sampling(config_file, tmp_path):
    """By default a run's model does not sample: transformers would not write both."""
    assert program(config_file, "training.max_steps=1") == 0
    start = tmp_path / "start"
    (tmp_path / "run" / "model").rename(start)
    path = start / "generation_config.json"
    sampling = {"do_sample": True, "temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1}
    path.write_text(json.dumps({**json.loads(path.read_text()), **sampling}))
    run = tmp_path / "next"
    options = (f"model.init_from={start}", f"run_dir={run}", "training.max_steps=1")
    assert program(config_file, *options) == 0
    written = json.loads((run / "model" / "generation_config.json").read_text())
    assert (written["do_sample"], written["repetition_penalty"]) == (False, 1.1)
    assert not {"temperature", "top_k"} & {name for name, value in written.items() if value}
    out = tmp_path / "consolidated"
    assert cli.main(["consolidate", str(run / "checkpoints" / "step-1"), str(out)]) == 0
    assert json.loads((out / "generation_config.json").read_text()) == written


def test_another_model_in_the_same_folder_is_refused(config_file, capsys):
    assert program(config_file) == 0
    assert program(config_file, "model.text.num_experts=8") == 2
    assert "model.text.num_experts is 4, now it is 8" in capsys.readouterr().err


def test_many_processes_need_deepspeed(config_file, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert program(config_file) == 2
    assert "the launcher started 2" in capsys.readouterr().err


def test_missing_deepspeed_is_said_with_the_remedy(monkeypatch):
    monkeypatch.setattr(processes.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install deepspeed, or train with training\.engine"):
        processes.start("deepspeed", "cpu")
    assert isinstance(processes.start("torch", "cpu"), World)


@pytest.mark.distributed
def test_two_ranks_with_uneven_shards_end_together_and_see_every_sample(config_file, tmp_path):
    """21 samples in shards of 7, 3 and 11, two epochs; the run stops on the way and goes on."""
    pytest.importorskip("deepspeed")
    for name, count in (("a", 7), ("b", 3), ("c", 11)):
        write_shard(tmp_path / f"uneven_{name}-000000.tar", count)
    overrides = [f"data.shards={tmp_path / 'uneven_*.tar'}", "data.epochs=2"]
    overrides += ["training.engine=deepspeed", "training.threads=1"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher += ["--nproc_per_node", "2", "train.py", "--config", str(config_file)]
    for steps in (2, 999):
        command = [*launcher, *overrides, f"training.max_steps={steps}"]
        subprocess.run(command, cwd=Path(train.__file__).parent, timeout=400, check=False)
    lines = metrics(tmp_path / "run")
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    counts = lines[-1]["delivered_by_source"]
    assert sum(count["samples"] for count in counts.values()) == lines[-1]["samples"] == 42
    assert (tmp_path / "run" / "model" / "config.json").exists()
