"""What a model goes through before its first step: adapters, freezing, recomputation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from conceptmoe_vl.errors import UserError
from conceptmoe_vl.layers import Stack
from conceptmoe_vl.recomputation import keep_products

from .config import TrainingConfig
from .lora import add_adapters
from .parts import layer_of, layer_range, part_of
from .random_states import set_seed


def prepare_model(model: Any, config: TrainingConfig) -> None:
    """Sets what is trained and what is recomputed in the backward pass.

    Raises:
        UserError: see `add_adapters` and `freeze`.
    """
    if config.lora.rank:
        set_seed(config.seed)  # adapters start the same on every rank
        add_adapters(model, config.lora)
    freeze(model, config)
    if config.activation_checkpointing:
        recompute(model, selective=config.activation_checkpointing == "selective")


def recompute(model: Any, selective: bool) -> None:
    """Activation checkpointing of every layer of E, C and D and every block of the tower.

    Args:
        selective: layers keep the results of matrix products and attention; blocks do not.
    """
    # Under the name of either transformers version.
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)()
    for module in model.modules():
        if isinstance(module, Stack):
            module.recompute_contexts = keep_products if selective else None


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
                module.register_forward_pre_hook(_as_in_evaluation)


def _as_in_evaluation(module: nn.Module, _inputs: Any) -> None:
    module.eval()


def describe_choice(config: TrainingConfig) -> list[str]:
    """Lines for below the table at the start: frozen layers and adapters, where there are any."""
    lines = []
    ranges = {stack: layer_range(layers) for stack, layers in config.freeze_layers.items()}
    if ranges:
        named = (
            f"{stack} {limits[0]}" + (f"-{limits[1]}" if limits[1] > limits[0] else "")
            for stack, limits in ranges.items()
            if limits is not None
        )
        lines.append(f"frozen layers: {', '.join(named)}")
    if config.lora.rank:
        lines.append(
            f"adapters of rank {config.lora.rank} on {', '.join(config.lora.targets)}; trained "
            f"whole beside them: {', '.join(config.lora.train_whole) or 'nothing'}"
        )
    return lines
