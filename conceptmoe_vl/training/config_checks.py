"""What the fields of the `training` section may be, and which of them others leave without effect.

A setting that would be ignored is refused: a run of days must not differ from what its
configuration says. Values that equal the default pass, as the resolved configuration holds all.
"""

from __future__ import annotations

from typing import Any

from conceptmoe_vl.field_checks import refuse_idle

from .checks import require, require_known, require_number
from .loggers import LOGGERS
from .parts import LAYER_STACKS, PARTS, RATED_PARTS, layer_range

_MOST_THREADS = 4096  # torch aborts where the system gives no more


def check_training(config: Any) -> None:
    """Raises `UserError` for the first wrong or idle value of a `TrainingConfig`."""
    _check_choices(config)
    _check_numbers(config)
    _check_parts(config)
    _check_checkpoints(config)
    require_known(config.loggers, LOGGERS, "training.loggers")
    twice = len(set(config.loggers)) < len(config.loggers)
    require(not twice, f"training.loggers is {config.loggers}; name each once")
    require_known(config.logger_options, config.loggers, "training.logger_options")
    _check_effect(config)


def _check_choices(config: Any) -> None:
    for name, choices in (
        ("engine", ("deepspeed", "torch")),
        ("device", ("auto", "cpu", "cuda")),
        ("precision", ("bfloat16", "float32")),
        ("schedule", ("cosine", "wsd")),
        ("activation_checkpointing", (False, True, "selective")),
    ):
        value = getattr(config, name)
        require(value in choices, f"training.{name} is {value!r}; choose one of {list(choices)}")


def _check_numbers(config: Any) -> None:
    require(
        config.max_steps is not None or config.max_minutes is not None,
        "the run has no end: set training.max_steps or training.max_minutes",
    )
    for name in ("max_steps", "max_minutes", "timeout_minutes", "peak_flops"):
        value = getattr(config, name)
        require(value is None or value > 0, f"training.{name} is {value}; it must be above 0")
    for name in ("gradient_accumulation_steps", "log_every", "max_nonfinite_steps"):
        value = getattr(config, name)
        require(value >= 1, f"training.{name} is {value}; it must be 1 or more")
    for name in (
        *("learning_rate", "weight_decay", "gradient_clipping"),
        *("checkpoint_every", "keep_checkpoints", "keep_every"),
    ):
        value = getattr(config, name)
        require(value >= 0, f"training.{name} is {value}; it must not be negative")
    for name in ("warmup_fraction", "decay_fraction", "final_learning_rate"):
        value = getattr(config, name)
        require(0 <= value <= 1, f"training.{name} is {value}; give 0 to 1")
    require(
        len(config.betas) == 2
        and all(isinstance(beta, (int, float)) and 0 <= beta < 1 for beta in config.betas),
        f"training.betas is {config.betas}; give two numbers from 0 to below 1",
    )
    require_number(config.epsilon, "training.epsilon", 0, inclusive=False)
    for name, most in (("seed", 2**32 - 1), ("threads", _MOST_THREADS)):
        value = getattr(config, name)
        require(0 <= value <= most, f"training.{name} is {value}; give 0 to {most}")


def _check_parts(config: Any) -> None:
    require_known(config.part_learning_rates, RATED_PARTS, "training.part_learning_rates")
    for part, rate in config.part_learning_rates.items():
        require_number(rate, f"training.part_learning_rates.{part}", 0)
    require_known(config.freeze, PARTS, "training.freeze")
    require_known(config.freeze_layers, LAYER_STACKS, "training.freeze_layers")
    for stack, layers in config.freeze_layers.items():
        require(
            layer_range(layers) is not None,
            f"training.freeze_layers.{stack} is {layers!r}; give the number of first layers, "
            "or [first, last]",
        )


def _check_checkpoints(config: Any) -> None:
    status = config.stopped_exit_status
    require(
        status is None or 1 <= status <= 255,
        f"training.stopped_exit_status is {status}; give 1 to 255",
    )
    require(
        not config.keep_every
        or (config.checkpoint_every > 0 and config.keep_every % config.checkpoint_every == 0),
        f"training.keep_every is {config.keep_every}, but checkpoints are written every "
        f"{config.checkpoint_every} steps (training.checkpoint_every); give a multiple",
    )


def _check_effect(config: Any) -> None:
    for idle, name, because in (
        (
            config.engine == "torch",
            "deepspeed",
            "training.engine is torch; set training.engine=deepspeed",
        ),
        (
            config.schedule != "wsd",
            "decay_fraction",
            f"training.schedule is {config.schedule}; set training.schedule=wsd",
        ),
        (
            config.keep_checkpoints == 0,
            "keep_every",
            "training.keep_checkpoints is 0, which keeps all; set how many newest ones to keep",
        ),
    ):
        if idle:
            refuse_idle(config, "training", (name,), because)
