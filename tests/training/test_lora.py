"""Adapters: what is trained, exact resume, and the exported model and adapter."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close

from conceptmoe_vl import ConceptMoEVLForConditionalGeneration, cli
from conceptmoe_vl.errors import UserError
from conceptmoe_vl.training import Trainer, TrainingConfig, World, load_run_config
from conceptmoe_vl.training import lora as lora_module
from conceptmoe_vl.training.lora import LoraSection, add_adapters
from conceptmoe_vl.training.parts import part_of
from tests.tiny import logits_of, make_document, tiny_model
from tests.training.synthetic import SyntheticStream
from tests.training.test_train_program import program, write_config

peft = pytest.importorskip("peft")

TEXT = {"num_shared_experts": 1, "decoder_layers": 2}
DOCUMENTS = [make_document(["image", 12]), make_document([9], seed=1)]


def make_model(**arguments):
    return tiny_model(text=TEXT, image_mode="grid", **arguments)


def make_trainer(tmp_path, model=None, **fields) -> Trainer:
    config = TrainingConfig(
        engine="torch",
        device="cpu",
        max_steps=6,
        learning_rate=1e-2,
        **{"precision": "float32", "lora": LoraSection(rank=4), **fields},
    )
    world = World(0, 1, 0, torch.device("cpu"))
    return Trainer(model or make_model(), SyntheticStream(), config, tmp_path, world)


def test_new_adapters_change_no_logit():
    model = make_model()
    expected = logits_of(model, DOCUMENTS)
    add_adapters(model, LoraSection(rank=4))
    for found, wanted in zip(logits_of(model.eval(), DOCUMENTS), expected, strict=True):
        assert_close(found, wanted, atol=1e-5, rtol=0)


def test_adapters_and_whole_parts_learn_and_all_else_stays(tmp_path, capsys):
    trainer = make_trainer(tmp_path, part_learning_rates={"lora": 0.02})
    before = {name: tensor.clone() for name, tensor in trainer.engine.module.state_dict().items()}
    for _ in range(3):
        trainer.step()
    after = trainer.engine.module.state_dict()
    changed = {name for name, old in before.items() if not torch.equal(after[name], old)}
    parts = ("lora", "projector", "chunk")
    assert changed == {name for name in before if part_of(name) in parts}
    adapted = {name.split(".lora_")[0] for name in changed if part_of(name) == "lora"}
    layer = "language_model.concept.layers.0"
    assert {f"{layer}.self_attn.{x}_proj" for x in "qkvo"} < adapted
    assert {f"{layer}.mlp.experts", f"{layer}.mlp.experts.base_layer"} < adapted
    assert len(adapted) == 4 * 6  # layers
    table = capsys.readouterr().err
    assert "lora" in table
    assert "0.02" in table
    assert "adapters of rank 4 on attention, experts" in table
    assert "trained whole beside them: projector, chunk" in table


@pytest.mark.parametrize("targets", [["attention"], ["experts"], ["attention", "experts"]])
def test_export_merges_and_the_adapter_gives_the_same_on_its_base(tmp_path, targets):
    base = make_model()
    base.save_pretrained(tmp_path / "base")
    lora = LoraSection(rank=4, alpha=3, targets=targets)
    trainer = make_trainer(tmp_path / "run", make_model(), lora=lora)
    for _ in range(3):
        trainer.step()
    trainer.export()
    trained = trainer.engine.module.eval()
    expected = logits_of(trained, DOCUMENTS)
    merged = ConceptMoEVLForConditionalGeneration.from_pretrained(tmp_path / "run/model").eval()
    assert not any("lora" in name or "base_layer" in name for name in merged.state_dict())
    adapted = peft.PeftModel.from_pretrained(base, str(tmp_path / "run/adapter")).eval()
    for name, model in (("merged", merged), ("adapter", adapted)):
        for found, wanted in zip(logits_of(model, DOCUMENTS), expected, strict=True):
            assert_close(found, wanted, atol=1e-4, rtol=0, msg=lambda m, name=name: f"{name}: {m}")
    plain = logits_of(make_model(), DOCUMENTS)
    assert max((a - b).abs().max() for a, b in zip(plain, expected, strict=True)) > 1e-2
    # The run goes on with its adapters after an export.
    assert "lora" in {part_of(name) for name, _ in trained.named_parameters()}


def test_resume_is_exact(tmp_path):
    straight = make_trainer(tmp_path / "straight")
    expected = [straight.step() for _ in range(4)]
    stopped = make_trainer(tmp_path / "stopped")
    for _ in range(2):
        stopped.step()
    stopped.save_checkpoint()
    resumed = make_trainer(tmp_path / "stopped")
    assert resumed.resume()
    for wanted in expected[2:]:
        found = resumed.step()
        assert [found[key] for key in ("step", "loss", "grad_norm")] == [
            wanted[key] for key in ("step", "loss", "grad_norm")
        ]


def test_autocast_and_recomputation_give_finite_losses(tmp_path):
    losses = []
    for number, checkpointing in enumerate((False, True)):
        trainer = make_trainer(
            tmp_path / str(number), precision="bfloat16", activation_checkpointing=checkpointing
        )
        losses.append([trainer.step()["loss"] for _ in range(2)])
    assert losses[0] == losses[1]
    assert torch.tensor(losses).isfinite().all()


def test_frozen_layers_have_no_trained_adapters(tmp_path):
    trainer = make_trainer(tmp_path, freeze_layers={"decoder": [0, 0]}, freeze=["chunk"])
    trained = {n for n, p in trainer.engine.module.named_parameters() if p.requires_grad}
    assert not any(name.startswith("language_model.decoder.layers.0.") for name in trained)
    assert {part_of(name) for name in trained} == {"lora", "projector"}


def test_peft_that_is_missing_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(lora_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs peft.*pip install conceptmoe-vl\[lora\]"):
        make_trainer(tmp_path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rank": -1}, "must not be negative"),
        ({"alpha": 0}, "must be above 0"),
        ({"targets": ["attn"]}, "the nearest known key is 'attention'"),
        ({"targets": []}, "targets is empty"),
        ({"train_whole": ["rest"]}, "unknown configuration key 'training.lora.train_whole.rest'"),
        ({"dropout": 0.1}, "adapters of experts cannot have"),
        ({"dropout": 1.0, "targets": ["attention"]}, "give 0 to below 1"),
    ],
)
def test_wrong_values_are_refused(fields, message):
    with pytest.raises(UserError, match=message):
        LoraSection(**{"rank": 4, **fields})


def test_random_weights_are_refused(tmp_path):
    values = {
        "run_dir": "run",
        "model": {},
        "data": {"shards": "x.tar"},
        "training": {"max_steps": 1, "lora": dataclasses.asdict(LoraSection(rank=2))},
    }
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(values))
    with pytest.raises(UserError, match=r"name a trained model in model\.init_from"):
        load_run_config(path)
    assert load_run_config(path, ["training.lora.rank=0"]).training.lora.rank == 0


def test_consolidation_merges_adapters_and_writes_them_alone(tmp_path, capsys):
    """The same files as the run's own export: model and adapter."""
    config_file = write_config(tmp_path)
    assert program(config_file, "training.max_steps=1") == 0
    base, run = tmp_path / "base", tmp_path / "adapted"
    (tmp_path / "run" / "model").rename(base)
    lora = "training.lora={rank: 2, train_whole: [projector, embedding]}"
    options = (f"model.init_from={base}", f"run_dir={run}", "training.max_steps=2", lora)
    assert program(config_file, *options) == 0
    checkpoint, out = str(run / "checkpoints" / "step-2"), tmp_path / "out"
    assert cli.main(["consolidate", checkpoint, str(out), "--adapter"]) == 0
    for found, wanted in ((out / "adapter", run / "adapter"), (out, run / "model")):
        names = {path.name for path in wanted.iterdir()}
        assert {path.name for path in found.iterdir()} - {"adapter"} == names
        for path in wanted.glob("*.json"):
            assert json.loads((found / path.name).read_text()) == json.loads(path.read_text())
        (name,) = (path.name for path in wanted.glob("*.safetensors"))
        weights, expected = load_file(found / name), load_file(wanted / name)
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[each], expected[each]) for each in expected)
    plain = str(tmp_path / "run" / "checkpoints" / "step-1")
    assert cli.main(["consolidate", plain, str(tmp_path / "a"), "--adapter"]) == 2
    assert "has no adapters (training.lora); leave --adapter out" in capsys.readouterr().err
    assert not (tmp_path / "a").exists()
