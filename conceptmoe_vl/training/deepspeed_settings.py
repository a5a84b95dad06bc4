"""The DeepSpeed configuration of a run: what a user gave, checked, and what the trainer adds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from conceptmoe_vl.errors import UserError

from .checks import require_known
from .config import TrainingConfig

# What the trainer itself sets from the `training` section: one place for each setting.
_OWNED = {
    "train_batch_size": "data.tokens_per_batch",
    "train_micro_batch_size_per_gpu": "data.tokens_per_batch",
    "gradient_accumulation_steps": "training.gradient_accumulation_steps",
    "gradient_clipping": "training.gradient_clipping",
    "optimizer": "training.learning_rate and its neighbours",
    "scheduler": "training.schedule",
    "torch_autocast": "training.precision",
    "bf16": "training.precision",
    "bfloat16": "training.precision",
    "fp16": "training.precision",
    "amp": "training.precision",
    "activation_checkpointing": "training.activation_checkpointing",
    "dataloader_drop_last": "data",
}


class _Recorded(dict):
    """A mapping that remembers which keys it was asked for, and so do those within.

    Args:
        is_section: whoever goes through all of its keys knows them all. (At the top DeepSpeed looks
            for single keys among them.)
    """

    def __init__(self, values: dict, is_section: bool = False) -> None:
        super().__init__(
            {k: _Recorded(v, True) if isinstance(v, dict) else v for k, v in values.items()}
        )
        self.asked: set[str] = set()
        self._is_section = is_section

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def keys(self) -> Any:
        self._look_through()
        return super().keys()

    def items(self) -> Any:
        self._look_through()
        return super().items()

    def __iter__(self) -> Iterator[str]:
        self._look_through()
        return super().__iter__()

    def __deepcopy__(self, memo: dict) -> _Recorded:
        return self

    def _look_through(self) -> None:
        if self._is_section:
            self.asked.update(super().keys())


def read_deepspeed_config(given: str | dict | None) -> dict:
    """A DeepSpeed configuration from a JSON path or a mapping; None means ZeRO stage 0.

    Raises:
        UserError: the file is no JSON, or sets what the `training` section sets.
    """
    if given is None:
        return {}
    if isinstance(given, str):
        try:
            values = json.loads(Path(given).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise UserError(f"cannot read the DeepSpeed configuration {given}: {error}") from error
        where = given
    else:
        values, where = given, "training.deepspeed"
    if not isinstance(values, dict):
        raise UserError(
            f"{where} holds {type(values).__name__}; a DeepSpeed configuration is a mapping"
        )
    for key, owner in _OWNED.items():
        if values.get(key, "auto") != "auto":
            raise UserError(
                f"{where} sets '{key}', which this project sets from {owner}; remove it there"
            )
    return {key: value for key, value in values.items() if key not in _OWNED}


def zero_stage(config: TrainingConfig) -> int:
    """ZeRO stage of the run, 0 to 3.

    Raises:
        UserError: the stage is none of these.
    """
    if config.engine != "deepspeed":
        return 0
    zero = read_deepspeed_config(config.deepspeed).get("zero_optimization", {})
    if not isinstance(zero, dict):
        raise UserError(
            f"zero_optimization is {zero!r} in the DeepSpeed configuration; give a mapping, as "
            "{stage: 2}"
        )
    stage = zero.get("stage", 0)
    if stage not in (0, 1, 2, 3) or isinstance(stage, bool):
        raise UserError(
            f"zero_optimization.stage is {stage!r} in the DeepSpeed configuration; choose 0, 1, 2 "
            "or 3"
        )
    return stage


def deepspeed_config(config: TrainingConfig) -> dict:
    """The complete configuration for `deepspeed.initialize`."""
    values = read_deepspeed_config(config.deepspeed)
    values.update(
        # A micro-batch is one packed row of tokens, whatever number of samples is in it.
        train_micro_batch_size_per_gpu=1,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        # Stage 0 leaves whole gradients on every rank; the engine clips them and reports their
        # norm.
        gradient_clipping=config.gradient_clipping if zero_stage(config) else 0.0,
    )
    if config.precision == "bfloat16":
        # An empty list of "safe" modules keeps the exchange of gradients and weights in float32.
        values["torch_autocast"] = {
            "enabled": True,
            "dtype": "bfloat16",
            "lower_precision_safe_modules": [],
        }
    values.setdefault("zero_allow_untested_optimizer", True)  # the optimiser is a subclass of AdamW
    # Offloaded, too, the optimiser is torch's fused AdamW: DeepSpeed's own needs a compiler.
    values.setdefault("zero_force_ds_cpu_optimizer", False)
    values.setdefault("steps_per_print", 2**31)
    return values


def require_understood(values: dict) -> None:
    """Raises unless DeepSpeed knows all keys; it ignores others at the top and in some sections.

    Which ones it knows it says itself, by asking for them.

    Raises:
        UserError: names the nearest key to the first unknown one, or the first refused value.
    """
    import pydantic  # of DeepSpeed's configuration
    from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError

    recorded = _Recorded(values)
    try:
        DeepSpeedConfig(recorded)
    except pydantic.ValidationError as error:
        raise UserError(_refused(error)) from error
    except (DeepSpeedConfigError, ValueError, TypeError, AttributeError, AssertionError) as error:
        said = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"training.deepspeed: {said}; correct it, or leave it out") from error
    require_known(values, recorded.asked, "training.deepspeed")
    for name in values:
        section = dict.__getitem__(recorded, name)
        if isinstance(section, _Recorded) and section.asked:
            require_known(values[name], section.asked, f"training.deepspeed.{name}")


def _refused(error: Any) -> str:
    """The first value of a configuration that DeepSpeed refuses, in one line."""
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"]))
    return (
        f"training.deepspeed: '{where}' ({error.title}) is {first['input']!r}: {first['msg']}; "
        "correct it, or leave it out"
    )
