"""What a model goes through before its first step: freezing of parts and layers, recomputation."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from torch import nn

from conceptmoe_vl.errors import UserError

from .config import TrainingConfig, layer_range
from .parameters import part_of

_LAYER = re.compile(
    r"^(?:vision\.model\.blocks|language_model\.(encoder|concept|decoder)\.layers)\.(\d+)\."
)
# What stands behind the blocks of a tower, so that freezing its first blocks leaves it alone.
_BEHIND_BLOCKS = re.compile(r"^vision\.model\.(norm|fc_norm|attn_pool|head)\b")


def prepare_model(model: Any, config: TrainingConfig) -> None:
    """Sets what is trained and what is recomputed in the backward pass.

    Raises:
        UserError: see `freeze`.
    """
    freeze(model, config)
    if config.activation_checkpointing:
        # Under the name of either transformers version.
        enable = getattr(model, "activation_checkpointing_enable", None)
        (enable or model.gradient_checkpointing_enable)()


def layer_of(name: str) -> tuple[str, int] | None:
    """Stack and number of the layer that a parameter of this dotted name is in.

    What stands before a tower's blocks (patches, positions, class tokens) has the number -1; what
    is in no layer gives None.
    """
    match = _LAYER.match(name)
    if match is not None:
        return match[1] or "vision", int(match[2])
    before_blocks = name.startswith("vision.model.") and not _BEHIND_BLOCKS.match(name)
    return ("vision", -1) if before_blocks else None


def freeze(model: nn.Module, config: TrainingConfig) -> None:
    """Ends training of `freeze` and `freeze_layers`, and of running statistics in frozen norms.

    Raises:
        UserError: the model has no such parameters or layers, or nothing is left to train.
    """
    for part in config.freeze:
        _freeze(
            (parameter for name, parameter in model.named_parameters() if part_of(name) == part),
            f"training.freeze names '{part}', but this model has no such parameters",
        )
    for stack, layers in config.freeze_layers.items():
        _freeze_layers(model, stack, layers)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        layers = f" and freeze_layers {config.freeze_layers}" if config.freeze_layers else ""
        raise UserError(f"training.freeze {config.freeze}{layers} leaves nothing to train")
    _keep_statistics(model)


def _freeze(parameters: Iterable[nn.Parameter], otherwise: str) -> None:
    chosen = list(parameters)
    if not chosen:
        raise UserError(otherwise)
    for parameter in chosen:
        parameter.requires_grad_(False)


def _freeze_layers(model: nn.Module, stack: str, layers: Any) -> None:
    limits = layer_range(layers)
    assert limits is not None  # TrainingConfig has checked it
    first, last = limits
    numbered = [(layer_of(name), parameter) for name, parameter in model.named_parameters()]
    depth = 1 + max((where[1] for where, _ in numbered if where and where[0] == stack), default=-1)
    if last >= depth:
        raise UserError(
            f"training.freeze_layers.{stack} is {layers}, but this model has {depth} layers there "
            f"(0 to {depth - 1})"
            if depth
            else f"training.freeze_layers names '{stack}', but this model has no layers there"
        )
    wanted = set(range(first, last + 1)) | (set() if isinstance(layers, list) else {-1})
    _freeze(
        (p for where, p in numbered if where and where[0] == stack and where[1] in wanted),
        f"training.freeze_layers.{stack} is {layers}, which has no parameters",
    )


def _keep_statistics(model: nn.Module) -> None:
    """Lets frozen batch norms run on their statistics, as in evaluation, instead of moving them.

    Plain ViTs have none; hybrid ones of timm (vit_base_resnet26d_224) do.
    """
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            own = list(module.parameters())
            if own and not any(parameter.requires_grad for parameter in own):
                # `train()` is called anew after every evaluation.
                module.register_forward_pre_hook(lambda norm, _: norm.eval() and None)


def describe_frozen_layers(config: TrainingConfig) -> str:
    """`vision 0-5, encoder 0`: what the table at the start says; empty where nothing is."""
    ranges = {stack: layer_range(layers) for stack, layers in config.freeze_layers.items()}
    return ", ".join(
        f"{stack} {limits[0]}" + (f"-{limits[1]}" if limits[1] > limits[0] else "")
        for stack, limits in ranges.items()
        if limits is not None
    )
