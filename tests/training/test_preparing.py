"""Parts and layers that are not trained: what stays bit for bit, what learns, what is refused."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from conceptmoe_vl.errors import UserError
from conceptmoe_vl.training import ModelSection, RunConfig, Trainer, TrainingConfig, World
from conceptmoe_vl.training.build import require_same_model
from conceptmoe_vl.training.chunk_schedule import ChunkSchedule
from conceptmoe_vl.training.lora import LoraSection
from conceptmoe_vl.training.parts import layer_of, part_of
from conceptmoe_vl.training.preparing import freeze
from tests.tiny import PLAIN_VISION, tiny_model
from tests.training.synthetic import SyntheticStream

ALL_BUT_PROJECTOR = ["vision", "chunk", "experts", "embedding", "rest"]
DEEP = {"encoder_layers": 2, "concept_layers": 3, "decoder_layers": 2, "tie_word_embeddings": True}


def config(**fields) -> TrainingConfig:
    return TrainingConfig(
        **{"engine": "torch", "device": "cpu", "precision": "float32", "max_steps": 4, **fields}
    )


def deep_model(**chunk):
    vision = {**PLAIN_VISION, "model_args": {**PLAIN_VISION["model_args"], "depth": 3}}
    return tiny_model(text=DEEP, vision=vision, **chunk)


def train(model, tmp_path, settings: TrainingConfig, steps: int = 3, images: str = "all"):
    """What changed: names of parameters and buffers that are not bit for bit as before."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    world = World(0, 1, 0, torch.device("cpu"))
    trainer = Trainer(model, SyntheticStream(images=images), settings, tmp_path, world)
    losses = [trainer.step()["loss"] for _ in range(steps)]
    assert all(torch.isfinite(torch.tensor(losses)))
    after = trainer.engine.module.state_dict()
    return {name for name, old in before.items() if not torch.equal(after[name], old)}


def frozen(model) -> set[str]:
    return {name for name, p in model.named_parameters() if not p.requires_grad}


def test_projector_alone_leaves_everything_else_bit_equal(tmp_path):
    # target_ratios: learned thresholds; a warm-up moves the ratio all the same.
    model = deep_model(image_mode="grid", target_ratios=[2.0, 4.0])
    settings = config(
        freeze=ALL_BUT_PROJECTOR, weight_decay=0.3, chunk_schedule=ChunkSchedule(ratio_start=1)
    )
    changed = train(model, tmp_path, settings)
    assert changed == {n for n, _ in model.named_parameters() if part_of(n) == "projector"}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_frozen_layers_stay_and_all_others_learn(tmp_path, checkpointing):
    model = deep_model(noise="none")
    layers = {"vision": 2, "encoder": [1, 1], "concept": [0, 1], "decoder": 1}
    settings = config(freeze_layers=layers, activation_checkpointing=checkpointing)
    changed = train(model, tmp_path, settings)
    kept = frozen(model)
    assert changed == {n for n, _ in model.named_parameters(remove_duplicate=False)} - kept
    assert {layer_of(name) for name in kept} == {
        *(("vision", number) for number in (-1, 0, 1)),
        ("encoder", 1),
        *(("concept", number) for number in (0, 1)),
        ("decoder", 0),
    }


def test_first_blocks_take_the_patch_embedding_along_and_a_range_does_not():
    first, ranged = deep_model(), deep_model()
    freeze(first, config(freeze_layers={"vision": 1}))
    freeze(ranged, config(freeze_layers={"vision": [0, 0]}))
    before_blocks = {"cls_token", "pos_embed", "patch_embed.proj.weight", "patch_embed.proj.bias"}
    assert frozen(first) - frozen(ranged) == {f"vision.model.{name}" for name in before_blocks}
    assert not any("vision.model.norm" in name for name in frozen(first))


@pytest.mark.parametrize("part", ["projector", "vision"])
def test_a_batch_without_images_trains_a_vision_part_alone(tmp_path, part):
    """Its gradient is zero, as where another rank has the images; it is no error."""
    parts = [each for each in (*ALL_BUT_PROJECTOR, "projector") if each != part]
    settings = config(freeze=parts, weight_decay=0.0)
    assert train(deep_model(), tmp_path, settings, steps=1, images="none") == set()


def test_statistics_of_frozen_norms_do_not_move(tmp_path):
    """And those of trained ones do, after an evaluation too."""
    for parts, moved in ((["vision"], False), ([], True)):
        model = tiny_model()
        model.vision.model.norm_pre = nn.Sequential(nn.BatchNorm1d(10), nn.Identity())
        changed = train(model, tmp_path / str(moved), config(freeze=parts))
        assert ("vision.model.norm_pre.0.running_mean" in changed) == moved
        assert any("projector" in name for name in changed)


def test_what_a_model_has_not_is_refused_with_what_it_has():
    model = tiny_model(vision=None)
    for fields, message in (
        ({"freeze": ["vision"]}, "'vision', but this model has no such"),
        ({"freeze_layers": {"vision": 1}}, "'vision', but this model has no layers there"),
        ({"freeze_layers": {"concept": 4}}, r"concept is 4, but this model has 1 layers .*0 to 0"),
        ({"freeze_layers": {"concept": [0, 1]}}, r"concept is \[0, 1\], but this model has 1"),
        ({"freeze": ["chunk", "experts", "embedding", "rest"]}, "leaves nothing to train"),
    ):
        with pytest.raises(UserError, match=message):
            freeze(model, config(**fields))


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ({"visoin": 2}, "the nearest known key is 'vision'"),
        ({"encoder": 0}, "training.freeze_layers.encoder is 0; give the number of first layers"),
        ({"encoder": [2, 1]}, r"is \[2, 1\]; give the number of first layers, or \[first, last\]"),
        ({"encoder": "1-2"}, "is '1-2'; give the number"),
        ({"encoder": True}, "is True; give the number"),
    ],
)
def test_layers_that_mean_nothing_are_refused(layers, message):
    with pytest.raises(UserError, match=message):
        config(freeze_layers=layers)


def test_the_table_names_frozen_layers(tmp_path, capsys):
    train(deep_model(), tmp_path, config(freeze_layers={"vision": 2, "concept": [1, 1]}), steps=0)
    assert "frozen layers: vision 0-1, concept 1" in capsys.readouterr().err


def test_a_run_goes_on_with_the_parameters_it_began_to_train(tmp_path):
    def run(**training) -> RunConfig:
        settings = config(**training)
        model = ModelSection(init_from="base", text={"hidden_size": 32})
        return RunConfig(str(tmp_path), model, {"shards": "x.tar"}, settings)

    (tmp_path / "checkpoints/step-1").mkdir(parents=True)
    (tmp_path / "checkpoints/step-1/manifest.json").write_text("{}")
    began = {"freeze": ["vision", "rest"], "freeze_layers": {"encoder": 1}}
    run(**began).save(tmp_path / "config.yaml")
    require_same_model(run(**{**began, "freeze": ["rest", "vision"]}, learning_rate=0.5))
    for changed, message in (
        ({"freeze": ["vision"]}, "training.freeze is ['rest', 'vision'], now it is ['vision']"),
        ({"freeze_layers": {}}, "training.freeze_layers.encoder is 1, now it is 'absent'"),
        ({"lora": LoraSection(rank=2)}, "training.lora.rank is 0, now it is 2"),
    ):
        with pytest.raises(UserError, match=re.escape(message)):
            require_same_model(run(**{**began, **changed}))
