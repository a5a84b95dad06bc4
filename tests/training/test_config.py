"""Run configurations: YAML, overrides, and what a mistake gets."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import yaml

from conceptmoe_vl import ConceptMoEVLConfig
from conceptmoe_vl.errors import UserError
from conceptmoe_vl.training import ModelSection
from conceptmoe_vl.training.config import (
    TrainingConfig,
    apply_overrides,
    from_mapping,
    load_run_config,
)
from conceptmoe_vl.training.deepspeed_settings import (
    deepspeed_config,
    read_deepspeed_config,
    require_understood,
    zero_stage,
)
from conceptmoe_vl.training.idle_settings import check_effect
from conceptmoe_vl.training.yaml_io import parse_yaml, write_yaml
from data_pipelines.config import DataConfig

ROOT = Path(__file__).resolve().parents[2]
MINIMAL = {"run_dir": "r", "model": {}, "data": {"shards": "x"}, "training": {"max_steps": 5}}


@pytest.fixture
def path(tmp_path):
    def write(values: dict | str) -> Path:
        file = tmp_path / "run.yaml"
        file.write_text(values if isinstance(values, str) else yaml.safe_dump(values))
        return file

    return write


def test_resolved_configuration_is_a_valid_input(path, tmp_path):
    config = load_run_config(
        path(MINIMAL), ["training.learning_rate=3e-4", "model.text.concept_loops=[[0, 1, 2]]"]
    )
    assert config.training.learning_rate == 3e-4
    assert config.model.text == {"concept_loops": [[0, 1, 2]]}
    config.save(tmp_path / "out" / "config.yaml")
    assert load_run_config(tmp_path / "out" / "config.yaml") == config


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.max_step=3", r"'training.max_step'; the nearest known key is 'max_steps'"),
        ("trainin.max_steps=3", r"'config.trainin'; the nearest known key is 'training'"),
        ("model.tokenizer.vocabsize=3", "nearest known key is 'vocab_size'"),
        # before anything is compared with a run that is there
        ("model.chunk.targt_ratio=4", "nearest known key is 'target_ratio'"),
        ("model.text.hidden_size=wide", "hidden_size"),
        ("training.max_steps=many", "'training.max_steps' is 'many'; its type is int or null"),
        ("training.checkpoint_at_end=1", "its type is bool"),
        ("training.log_every=true", "its type is int"),
        ("training.learning_rate=-1", "must not be negative"),
        ("training.engine=jax", "choose one of"),
        ("training.part_learning_rates.visio=1e-4", "nearest known key is 'vision'"),
        ("training.freeze=[visio]", "nearest known key is 'vision'"),
        ("training.max_steps.x=1", "is 5, not a section"),
        ("training.max_steps=null", "the run has no end"),
        ("training.max_steps", "is no override; write key=value"),
        ("training.betas=[0.9", "is no valid YAML"),
        ("training=3", "give a mapping"),
        ("training.learning_rate=.inf", "is inf; give a finite number"),
        ("training.watch={ratio_band: .nan}", "'training.watch.ratio_band' is nan; give a finite"),
        ("training.betas=[a, b]", "give two numbers from 0"),
        ("training.epsilon=0", "training.epsilon is 0.0; give a number above 0"),
        ("training.seed=99999999999999999999", "give 0 to 4294967295"),
        ("training.threads=-1", "training.threads is -1; give 0 to"),
        ("training.part_learning_rates.vision=fast", "vision is 'fast'; give a number of 0"),
        ("training.part_learning_rates.vision=-1", "vision is -1; give a number of 0 or more"),
        ("training.part_learning_rates.vision=.nan", "vision is nan; give a number of 0 or more"),
        (
            "training.chunk_schedule={tau_start: 2, tau_fraction: 0}",
            "tau_start is 2.0, which has no effect: tau_fraction is 0",
        ),
        ("evaluation.every=5", "is 5, but there is no held-out data; set evaluation.data"),
        ("evaluation.data={num_workers: 0}", "which would be the training data"),
        ("evaluation.batches=5", "has no effect: there is no held-out data; set evaluation.data"),
        ("training={max_steps: 1, engine: torch, deepspeed: x.json}", "training.engine is torch"),
        (
            "training.lora.alpha=4",
            "training.lora.alpha is 4.0, which has no effect: training.",
        ),
        ("training.lora={targets: [attention]}", "training.lora.targets is ['attention'], which"),
        ("run_dir=''", "run_dir is ''; name a folder"),
        ("training.loggers=[wandb, wandb]", "training.loggers is ['wandb', 'wandb']; name each"),
        ("training.decay_fraction=0.5", "has no effect: training.schedule is cosine"),
        (
            "training={max_steps: 1, checkpoint_every: 2, keep_every: 4, keep_checkpoints: 0}",
            "training.keep_every is 4, which has no effect: training.keep_checkpoints is 0",
        ),
        ("training.spike_guard.steps=5", "has no effect: training.spike_guard.rollbacks is 0"),
        ("training.chunk_schedule.ratio_fraction=0.5", "no effect: there is no ratio_start"),
        ("training.chunk_schedule.threshold_start=0.1", "no effect: there is no ratio_start"),
        ("training.watch={idle_lines: 0, least_expert_load: 0.1}", "training.watch.idle_lines is"),
        ("model.tokenizer={path: x, vocab_size: 99}", "has no effect: model.tokenizer.path names"),
        ("model={init_from: a, tokenizer: {path: b}}", "no effect: model.init_from brings its own"),
    ],
)
def test_mistakes_are_one_line_that_names_the_key(path, override, message):
    with pytest.raises(UserError, match=message.replace("[", r"\[")) as caught:
        load_run_config(path(MINIMAL), [override])
    assert "\n" not in str(caught.value)


def test_missing_section_and_file(path, tmp_path):
    with pytest.raises(UserError, match="'run_dir' is missing"):
        load_run_config(path({"model": {}, "data": {}, "training": {"max_steps": 1}}))
    with pytest.raises(UserError, match="cannot read the configuration"):
        load_run_config(tmp_path / "absent.yaml")
    with pytest.raises(UserError, match="not a mapping"):
        load_run_config(path("- 1\n"))


def test_a_file_extends_another(tmp_path):
    """Mappings are merged at any depth, all else is replaced; the path starts from the file."""
    (tmp_path / "sub").mkdir()
    base = {**MINIMAL, "data": {"shards": "x", "seed": 3}, "training": {"max_steps": 5, "seed": 4}}
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(base))
    (tmp_path / "middle.yaml").write_text(
        "extends: base.yaml\n"
        "model:\n"
        "  text: {rope_scaling: {rope_type: linear, factor: 2}, concept_loops: [[0, 0, 2]]}\n"
    )
    child = tmp_path / "sub" / "child.yaml"
    child.write_text(
        "extends: ../middle.yaml\nrun_dir: other\n"
        "model: {text: {rope_scaling: {factor: 4}, concept_loops: [[1, 1, 2]]}}\n"
        "training: {max_steps: null, max_minutes: 2}\n"
    )
    config = load_run_config(child)
    assert (config.run_dir, config.data) == ("other", {"shards": "x", "seed": 3})
    scaling = {"rope_type": "linear", "factor": 4}
    assert config.model.text == {"rope_scaling": scaling, "concept_loops": [[1, 1, 2]]}
    training = config.training
    assert (training.max_steps, training.max_minutes, training.seed) == (None, 2.0, 4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("extends: run.yaml\n", "extends itself"),
        ("extends: absent.yaml\n", "cannot read the configuration .*absent.yaml"),
        ("extends: [a.yaml]\n", "name one YAML file"),
    ],
)
def test_mistakes_in_extending(path, text, message):
    with pytest.raises(UserError, match=message):
        load_run_config(path(text))


def test_what_cannot_be_written_leaves_nothing(tmp_path):
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError, match="directory"):
        write_yaml(tmp_path / "taken", {"a": 1})
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


@pytest.mark.parametrize("text", ["3e-4", "3.0e-4", "3E-4", "+3e-4"])
def test_exponents_are_numbers(text):
    assert parse_yaml(text, "test") == 3e-4


def test_a_key_given_twice_is_an_error():
    with pytest.raises(UserError, match="'a' is given twice at line 2"):
        parse_yaml("a: 1\na: 2\n", "test")


def test_overrides_make_sections_that_are_absent():
    assert apply_overrides({"a": None}, ["a.b.c=1"]) == {"a": {"b": {"c": 1}}}


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.name)
def test_shipped_configurations_are_valid(path):
    from conceptmoe_vl.training.build import _model_config

    config = load_run_config(path)
    ids = {"image_token_id": 4, "vision_start_token_id": 3, "vision_end_token_id": 5}
    check_effect(config.model, _model_config(config.model, ids))
    DataConfig.from_mapping(config.data)


@pytest.mark.parametrize(
    "file", sorted((ROOT / "configs/deepspeed").glob("*")), ids=lambda p: p.name
)
def test_shipped_deepspeed_configurations(file):
    pytest.importorskip("deepspeed")
    config = TrainingConfig(max_steps=1, deepspeed=str(file))
    assert zero_stage(config) == int(re.findall(r"\d", file.name)[0])
    require_understood(deepspeed_config(config))


@pytest.mark.parametrize("zero", [2, {"stage": True}, {"stage": 4}])
def test_what_is_no_zero_stage_is_refused(zero):
    with pytest.raises(UserError, match=r"zero_optimization(\.stage)? is .* in the DeepSpeed conf"):
        zero_stage(TrainingConfig(max_steps=1, deepspeed={"zero_optimization": zero}))


def test_deepspeed_settings_that_training_owns_are_refused():
    with pytest.raises(UserError, match=r"sets 'bf16', which this project sets from training.prec"):
        read_deepspeed_config({"bf16": {"enabled": True}})
    values = read_deepspeed_config({"gradient_clipping": "auto", "wall_clock_breakdown": False})
    assert values == {"wall_clock_breakdown": False}
    with pytest.raises(UserError, match="stage is 4"):
        zero_stage(TrainingConfig(max_steps=1, deepspeed={"zero_optimization": {"stage": 4}}))


def test_bfloat16_keeps_communication_in_float32():
    values = deepspeed_config(TrainingConfig(max_steps=1, gradient_accumulation_steps=3))
    assert values["torch_autocast"]["lower_precision_safe_modules"] == []
    assert values["gradient_accumulation_steps"] == 3


def test_every_idle_setting_passes_at_its_default():
    """A resolved configuration holds all fields; it is a valid input."""
    config = TrainingConfig(max_steps=1, engine="torch")
    assert from_mapping(TrainingConfig, dataclasses.asdict(config), "training") == config


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_shift": 3}, "data.max_shift is 3, which has no effect: data.augment is none"),
        (
            {"on_error": "skip", "max_skips": 9},
            "data.max_skips is 9, which has no effect: data.o",
        ),
        ({"max_skips": 9, "max_skip_share": 0.5}, "no effect: data.max_skips is 9; set that to"),
    ],
)
def test_idle_settings_of_the_data_are_refused(values, message):
    with pytest.raises(UserError, match=message):
        DataConfig.from_mapping({"shards": "x", **values})
    # what another section lays over them is no mistake of theirs
    assert DataConfig.from_mapping({"shards": "y"}, values).shards == ["y"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"shuffle": "no"}, "data.shuffle is 'no'; its type is bool"),
        ({"held_out": None}, "data.held_out is None; its type is float"),
        ({"max_skip_share": "1%"}, "data.max_skip_share is '1%'; its type is float"),
    ],
)
def test_types_of_the_data_section(values, message):
    with pytest.raises(UserError, match=message):
        DataConfig.from_mapping({"shards": "x", **values})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"chunk": {"tau": 2, "noise": "none"}}, "model.chunk.tau is 2, .* chunk.noise is none"),
        ({"chunk": {"sigma": 0.3}}, "chunk.sigma is 0.3, .* chunk.noise is bernoulli"),
        ({"chunk": {"image_target_ratio": 4}}, "ratio_scope is global, not modality; set that"),
        ({"chunk": {"neighborhood": 8}}, "chunk.image_mode is sequential; set that, or leave it"),
        ({"chunk": {"router": "linear", "init": "random"}}, "chunk.init is 'random', .* is linear"),
        ({"text": {"qk_norm": False, "qk_norm_over": "all_heads"}}, "text.qk_norm is false"),
        (
            {"vision": {"max_tiles": 3}},
            "size_policy is fixed, not tiles; set that, or leave",
        ),
    ],
)
def test_idle_settings_of_the_model_are_refused(fields, message):
    section, ids = ModelSection(**fields), {"image_token_id": 4, "vision_start_token_id": 3}
    config = ConceptMoEVLConfig(**fields, **ids, vision_end_token_id=5)
    with pytest.raises(UserError, match=message):
        check_effect(section, config)


def test_the_plain_network_keeps_the_section_of_the_one_it_is_compared_with():
    chunk = {"router": "none", "tau": 3.0, "image_target_ratio": 4.0, "noise": "none"}
    check_effect(ModelSection(chunk=chunk), ConceptMoEVLConfig(chunk=chunk))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"zero_optimisation": {"stage": 2}}, "nearest known key is 'zero_optimization'"),
        ({"communication_data_type": "int7"}, "training.deepspeed: Invalid communication_data_ty"),
        ({"zero_optimization": {"stages": 2}}, r"'stages' \(DeepSpeedZeroConfig\) is 2: Extra inp"),
        ({"checkpoint": {"tag_validatio": "Warn"}}, "nearest known key is 'tag_validation'"),
        ({"data_types": {"grad_acum_dtype": "fp32"}}, "nearest known key is 'grad_accum_dtype'"),
        ({"elasticity": {}}, "training.deepspeed: Elastic training has been removed"),
    ],
)
def test_deepspeed_settings_that_it_would_ignore_are_refused(values, message):
    pytest.importorskip("deepspeed")
    with pytest.raises(UserError, match=message) as caught:
        require_understood({"train_micro_batch_size_per_gpu": 1, **values})
    assert "\n" not in str(caught.value)


def test_deepspeed_settings_that_it_knows_pass():
    pytest.importorskip("deepspeed")
    sections = {
        "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu", "pin_memory": True}},
        "checkpoint": {"tag_validation": "Warn", "parallel_write": {"pipeline_stage": False}},
        "data_types": {"grad_accum_dtype": "fp32"},
        "comms_logger": {"enabled": True, "verbose": False, "prof_all": True, "debug": False},
        "flops_profiler": {"enabled": False, "profile_step": 1, "module_depth": -1},
        "csv_monitor": {"enabled": False, "output_path": "x", "job_name": "y"},
        "aio": {"block_size": 1048576, "queue_depth": 8, "overlap_events": True},
        "compile": {"deepcompile": False},
        "communication_data_type": "fp32",
        "wall_clock_breakdown": False,
    }
    require_understood({"train_micro_batch_size_per_gpu": 1, **sections})
