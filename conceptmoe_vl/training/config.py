"""The configuration of a run: one YAML file with the sections model, data, training and evaluation.

Notable:
- `extends: other.yaml` lays a file over another one (`read_yaml`);
- `key=value` overrides take dotted paths (`training.max_steps=10`), also into `model.text` and
  `data`;
- an unknown key at any level is an error that names the nearest known one;
- `data` stays a mapping here, because this package must not import `data_pipelines`: the program
  that builds the stream hands it to `DataConfig`, which checks it in the same way;
- the resolved configuration is saved with the run as `config.yaml` and is itself a valid input.
"""

from __future__ import annotations

import dataclasses
import sys
import types
import typing
from pathlib import Path
from typing import Any

from conceptmoe_vl.errors import UserError
from conceptmoe_vl.field_checks import refuse_idle
from conceptmoe_vl.sections import SECTIONS

from .checks import require as _require
from .checks import require_fields as _require_fields
from .checks import require_known as _require_known
from .chunk_schedule import ChunkSchedule
from .config_checks import check_training
from .health import SpikeConfig
from .lora import LoraSection
from .watch import WatchConfig
from .yaml_io import parse_yaml, read_yaml, write_yaml


@dataclasses.dataclass
class TokenizerSection:
    """Where the tokenizer comes from.

    Fields:
        path: folder of a saved processor or tokenizer; None trains one on the training shards'
            texts.
        vocab_size: entries of a trained tokenizer, special tokens included (fewer if the texts hold
            fewer).
        max_samples: shard samples that a trained tokenizer reads at most.
    """

    path: str | None = None
    vocab_size: int = 8192
    max_samples: int = 20000

    def __post_init__(self) -> None:
        if self.path is not None:
            because = "model.tokenizer.path names a saved tokenizer; set that to null"
            refuse_idle(self, "model.tokenizer", ("vocab_size", "max_samples"), because)


@dataclasses.dataclass
class ModelSection:
    """The model of the run.

    Fields:
        init_from: folder of a saved model to start from; `text`, `chunk` and `vision` then override
            single fields of its configuration (None: start from random weights).
        tokenizer: see `TokenizerSection`; not used with `init_from`, whose processor is taken.
        text, chunk, vision: fields of `ConceptMoEVLConfig`; `vision: null` is a text-only model.
            When `text.vocab_size` is absent it is the tokenizer's length, rounded up to a multiple
            of 64.
        generation: settings saved as `generation_config.json` in the exported model: fields of
            transformers' `GenerationConfig`.
    """

    init_from: str | None = None
    tokenizer: TokenizerSection = dataclasses.field(default_factory=TokenizerSection)
    text: dict = dataclasses.field(default_factory=dict)
    chunk: dict = dataclasses.field(default_factory=dict)
    vision: dict | None = None
    generation: dict = dataclasses.field(
        default_factory=lambda: {"max_new_tokens": 64, "do_sample": False}
    )

    def __post_init__(self) -> None:
        path = self.tokenizer.path
        _require(
            self.init_from is None or path is None,
            f"model.tokenizer.path is {path}, which has no effect: model.init_from brings its own "
            "tokenizer; leave one of them out",
        )
        for section in SECTIONS:
            if getattr(self, section) is not None:
                _require_fields(section, getattr(self, section))


@dataclasses.dataclass
class TrainingConfig:
    """The optimiser, its schedule, the engine, and what is kept.

    Fields:
        engine: deepspeed (any number of processes, ZeRO 0 to 3) | torch (one process, no DeepSpeed
            needed).
        deepspeed: path of a DeepSpeed JSON file, or its contents as a mapping; None means ZeRO
            stage 0.
        device: auto | cpu | cuda.
        precision: bfloat16 (autocast around the forward pass; parameters, gradients and optimiser
            stay float32) | float32.
        seed: of weights, sampling in the model, and, plus the rank, of every process.
        max_steps: optimiser steps of the run; None: no limit.
        max_minutes: minutes of training after which the run ends cleanly; None: no limit. The
            schedule then follows the clock, so that such a run is NOT reproducible bit for bit.
        gradient_accumulation_steps: micro-batches of each process in one optimiser step.
        keep_batch: a resumed run keeps the batch of a step: other processes share the micro-batches
            of its checkpoint, whatever `gradient_accumulation_steps` is; off: the configured ones
            hold from there on.
        learning_rate: peak rate of AdamW.
        part_learning_rates: peak rates of single parts, by name: vision, projector, chunk, experts,
            embedding, rest, lora; the others take `learning_rate`.
        freeze: parts that are not trained.
        freeze_layers: layers that are not trained, counted from 0, by stack (vision, encoder,
            concept, decoder): a number N is the first N, `[first, last]` a range with both ends.
            The first N of vision take the patch embedding along.
        lora: adapters that are trained instead of the language model; off by default.
        weight_decay: on matrices alone (not on norms, biases and embeddings).
        betas, epsilon: of AdamW.
        gradient_clipping: largest norm of the whole gradient; 0 does not clip.
        schedule: cosine | wsd (warm-up, stable, then linear decay).
        warmup_fraction, decay_fraction: shares of the run; `decay_fraction` is used by wsd alone.
        final_learning_rate: share of the peak rate that is left at the end.
        chunk_schedule: ratio warm-up and other values of `model.chunk` that move along the run.
        watch: when the run warns of its ratio, its router and idle experts.
        loggers: where metrics go beside metrics.jsonl: tensorboard, wandb, trackio.
        logger_options: keyword arguments of each logger's start, by its name.
        log_every: steps between two lines of metrics.jsonl; the first step is always logged, and
            the last one of a run that ends by steps.
        checkpoint_every: steps between two checkpoints; 0 writes one at the end of the run alone.
        checkpoint_at_end: write a resumable checkpoint when the run ends.
        keep_checkpoints: newest checkpoints that are kept; 0 keeps all.
        keep_every: steps between checkpoints that are kept for good, a multiple of
            `checkpoint_every`; 0: none.
        stopped_exit_status: exit status of a run that a signal has ended (with a checkpoint);
            None: 128 and the signal's number, 143 for SIGTERM.
        resume: auto (newest checkpoint of the run's folder, if any) | never | path of a checkpoint.
        max_nonfinite_steps: optimiser steps in a row with a loss or gradient that is not finite
            (each is skipped and counted) after which the run stops.
        spike_guard: when a loss that spikes takes the run back to a checkpoint; off by default.
        activation_checkpointing: recompute in the backward pass to save memory: true (whole layers)
            | selective (all but matrix products and attention; whole blocks of the vision tower).
        threads: torch threads of each process on CPU; 0 leaves torch's choice.
        timeout_minutes: how long a process waits for the others before it ends with an error.
        peak_flops: FLOP/s that one process's device could do, for the model FLOPs utilisation;
            None: from a table of GPUs, or measured at the start.
    """

    engine: str = "deepspeed"
    deepspeed: str | dict | None = None
    device: str = "auto"
    precision: str = "bfloat16"
    seed: int = 0
    max_steps: int | None = None
    max_minutes: float | None = None
    gradient_accumulation_steps: int = 1
    keep_batch: bool = True
    learning_rate: float = 1e-3
    part_learning_rates: dict = dataclasses.field(default_factory=dict)
    freeze: list = dataclasses.field(default_factory=list)
    freeze_layers: dict = dataclasses.field(default_factory=dict)
    lora: LoraSection = dataclasses.field(default_factory=LoraSection)
    weight_decay: float = 0.1
    betas: list = dataclasses.field(default_factory=lambda: [0.9, 0.95])
    epsilon: float = 1e-8
    gradient_clipping: float = 1.0
    schedule: str = "cosine"
    warmup_fraction: float = 0.03
    decay_fraction: float = 0.2
    final_learning_rate: float = 0.0
    chunk_schedule: ChunkSchedule = dataclasses.field(default_factory=ChunkSchedule)
    watch: WatchConfig = dataclasses.field(default_factory=WatchConfig)
    loggers: list = dataclasses.field(default_factory=list)
    logger_options: dict = dataclasses.field(default_factory=dict)
    log_every: int = 10
    checkpoint_every: int = 0
    checkpoint_at_end: bool = True
    keep_checkpoints: int = 2
    keep_every: int = 0
    stopped_exit_status: int | None = None
    resume: str = "auto"
    max_nonfinite_steps: int = 10
    spike_guard: SpikeConfig = dataclasses.field(default_factory=SpikeConfig)
    activation_checkpointing: bool | str = False
    threads: int = 0
    timeout_minutes: float = 30.0
    peak_flops: float | None = None

    def __post_init__(self) -> None:
        check_training(self)


@dataclasses.dataclass
class EvaluationSection:
    """Loss on held-out data during training; the training stream's state is not touched.

    Fields:
        data: fields of the data section that differ for the held-out data (at least `shards`,
            `sources` or `split`); None: none.
        every: optimiser steps between two evaluations; 0 evaluates at the end of the run alone.
        batches: most packed batches of each process in one evaluation.
    """

    data: dict | None = None
    every: int = 0
    batches: int = 8

    def __post_init__(self) -> None:
        where = ("shards", "sources", "split")
        _require(
            self.data is None or any(name in self.data for name in where),
            f"evaluation.data is {self.data}, which would be the training data; give it one of "
            f"{', '.join(where)}",
        )
        _require(
            self.data is not None or not self.every,
            f"evaluation.every is {self.every}, but there is no held-out data; set "
            "evaluation.data, or leave it out",
        )
        if self.data is None:
            because = "there is no held-out data; set evaluation.data"
            refuse_idle(self, "evaluation", ("batches",), because)
        _require(self.batches >= 1, f"evaluation.batches is {self.batches}; it must be 1 or more")
        _require(self.every >= 0, f"evaluation.every is {self.every}; it must not be negative")


@dataclasses.dataclass
class RunConfig:
    """A whole run.

    Fields:
        run_dir: folder that the run writes (docs/training.md lists what).
        model, data, training, evaluation: see the sections' classes.
    """

    run_dir: str
    model: ModelSection
    data: dict
    training: TrainingConfig
    evaluation: EvaluationSection = dataclasses.field(default_factory=EvaluationSection)

    def __post_init__(self) -> None:
        _require(bool(self.run_dir.strip()), f"run_dir is {self.run_dir!r}; name a folder")
        _require(
            not self.training.lora.rank or self.model.init_from is not None,
            f"training.lora.rank is {self.training.lora.rank}, but the frozen weights would be "
            "random; name a trained model in model.init_from",
        )

    def to_dict(self) -> dict:
        return dataclasses.asdict(self)

    def save(self, path: str | Path) -> None:
        """Writes the resolved configuration as YAML, whole or not at all."""
        write_yaml(path, self.to_dict())


def _convert(value: Any, annotation: Any, where: str) -> Any:
    """`value` as the type of a dataclass field: sections are built, integers may stand for
    floats.
    """
    if dataclasses.is_dataclass(annotation):
        return from_mapping(annotation, value, where)
    kinds = (
        typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    )
    if value is None and type(None) in kinds:
        return None
    for kind in kinds:
        if kind is float and isinstance(value, (int, float)) and not isinstance(value, bool):
            _require(
                abs(value) <= sys.float_info.max,  # nor nan
                f"configuration key '{where}' is {value}; give a finite number",
            )
            return float(value)
        if isinstance(value, kind) and not (isinstance(value, bool) and kind is not bool):
            return value
    names = " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds)
    raise UserError(f"configuration key '{where}' is {value!r}; its type is {names}")


def from_mapping(kind: Any, values: Any, where: str) -> Any:
    """An instance of the dataclass `kind` from a mapping of its fields.

    Args:
        where: dotted path of the section, for messages ("" at the top).

    Raises:
        UserError: an unknown key (the nearest known one is named), a missing one, or a wrong type.
    """
    _require(
        isinstance(values, dict),
        f"configuration section '{where or 'top level'}' is {values!r}; give a mapping",
    )
    hints = typing.get_type_hints(kind)
    _require_known(values, hints, where or "config")
    prefix = f"{where}." if where else ""
    for field in dataclasses.fields(kind):
        absent = (
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        )
        _require(
            field.name in values or not absent,
            f"configuration key '{prefix}{field.name}' is missing; give it",
        )
    return kind(**{key: _convert(value, hints[key], prefix + key) for key, value in values.items()})


def apply_overrides(values: dict, overrides: list[str]) -> dict:
    """`values` with `dotted.key=value` overrides applied; values are read as YAML.

    Raises:
        UserError: an override has no `=`, is no YAML, or goes through a key that is no section.
    """
    for override in overrides:
        path, equals, text = override.partition("=")
        _require(
            bool(equals and path.strip()),
            f"'{override}' is no override; write key=value, as training.max_steps=10",
        )
        keys = path.strip().split(".")
        section = values
        for depth, key in enumerate(keys[:-1], start=1):
            if section.get(key) is None:
                section[key] = {}
            section = section[key]
            _require(
                isinstance(section, dict),
                f"override '{override}': '{'.'.join(keys[:depth])}' is {section!r}, not a section",
            )
        section[keys[-1]] = parse_yaml(text, f"override '{override}'")
    return values


def load_run_config(path: str | Path, overrides: list[str] | None = None) -> RunConfig:
    """The run of a YAML file, with overrides applied.

    Raises:
        UserError: see `read_yaml`, `apply_overrides` and `from_mapping`.
    """
    values = apply_overrides(read_yaml(path), list(overrides or []))
    return from_mapping(RunConfig, values, "")
