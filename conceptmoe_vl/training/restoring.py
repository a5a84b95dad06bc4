"""Puts the tensors of a checkpoint into an engine of another layout than the one that wrote it.

Weights, Adam's moments and its number of steps are set; hyperparameters stay those of the
configuration, and the learning rate follows from the step. Each process reads its own share of the
optimiser's state.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from conceptmoe_vl.errors import UserError

from .export import expected_shapes
from .saved_state import MOMENTS, WEIGHT, SavedState


def names_in_order(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Names of the parameters that an optimiser trains, numbered as in its `state_dict`."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]


def require_fitting(model: nn.Module, trained: list[str], saved: SavedState) -> None:
    """Raises unless a checkpoint has just this model's tensors, and the same ones are trained.

    Raises:
        UserError: names the first ones that differ.
    """
    other = sorted(set(trained) ^ set(saved.trained))
    if other:
        raise UserError(
            f"the checkpoint has {len(saved.trained)} trained parameters, this run has "
            f"{len(trained)} (first other one: {other[0]}); set training.freeze back, or start a "
            "new run from its weights: conceptmoe-vl consolidate, then model.init_from"
        )
    shapes = expected_shapes(model)
    wanted = {name: shapes[name] for name, _ in model.named_parameters()}
    wanted |= {name: tuple(tensor.shape) for name, tensor in _persistent_buffers(model).items()}
    for name, shape in wanted.items():
        found = saved[name].shape if name in saved else "missing"
        if found != shape:
            raise UserError(f"{name} is {found} in the checkpoint and {shape} in this run's model")


def _persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    names = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in names}


@torch.no_grad()
def restore_whole(model: nn.Module, optimizer: torch.optim.Optimizer, saved: SavedState) -> None:
    """Where every process has all of the model and of the optimiser: plain torch, ZeRO 0."""
    trained = names_in_order(model, optimizer)
    require_fitting(model, trained, saved)
    _copy_weights(model, saved)
    parameters = dict(model.named_parameters())
    for name in trained:
        state = optimizer.state[parameters[name]]
        _prepare_moments(state, parameters[name], saved.trained[name].step)
        for kind in MOMENTS:
            state[kind].copy_(saved.trained[name].whole(kind))


def _copy_weights(model: nn.Module, saved: SavedState) -> None:
    for name, tensor in [*model.named_parameters(), *_persistent_buffers(model).items()]:
        tensor.copy_(saved[name].whole())


def _prepare_moments(state: dict[str, Any], like: torch.Tensor, step: float) -> None:
    """Makes Adam's state of a tensor where it has made no step, as torch's fused one wants it."""
    for kind in MOMENTS:
        state.setdefault(kind, torch.zeros_like(like, requires_grad=False))
    state["step"] = torch.tensor(step, dtype=torch.float32, device=like.device)


@torch.no_grad()
def restore_stage_1_and_2(zero: Any, model: nn.Module, saved: SavedState) -> None:
    """Collective. `zero` is DeepSpeed's optimiser of these stages."""
    require_fitting(model, [zero.param_names[p] for g in zero.bit16_groups for p in g], saved)
    _copy_weights(model, saved)
    for vector, parameters in zip(
        zero.single_partition_of_fp32_groups, zero.bit16_groups, strict=True
    ):
        step = max(saved.trained[zero.param_names[parameter]].step for parameter in parameters)
        state = zero.optimizer.state[vector]
        _prepare_moments(state, vector, step)
        for parameter in parameters:
            if parameter._hp_mapping is None:
                continue  # no part of it is kept by this process
            own = parameter._hp_mapping.lp_fragment_address
            place = parameter._hp_mapping.get_hp_fragment_address()
            tensor = saved.trained[zero.param_names[parameter]]
            for kind, target in ((WEIGHT, vector), *((kind, state[kind]) for kind in MOMENTS)):
                part = tensor.part(kind, own.start, own.numel)
                target[place.start : place.start + place.numel].copy_(part)


def restore_stage_3(deepspeed: Any, zero: Any, model: nn.Module, saved: SavedState) -> None:
    """Collective. `zero` is DeepSpeed's optimiser of this stage; rank 0 hands the weights out."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    require_fitting(model, [names[p] for group in zero.fp16_groups for p in group], saved)
    zero.checkpoint_event_prologue()
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            if dist.get_rank() == 0:
                parameter.data.copy_(saved[name].whole())
    zero.checkpoint_event_epilogue()
    with torch.no_grad():
        for name, buffer in _persistent_buffers(model).items():
            buffer.copy_(saved[name].whole())
        for vector, parameters in zip(
            zero.fp32_partitioned_groups_flat, zero.fp16_groups, strict=True
        ):
            _restore_share(zero, vector, [(p, saved.trained[names[p]]) for p in parameters])


def _restore_share(zero: Any, vector: torch.Tensor, parameters: list[tuple[Any, Any]]) -> None:
    """This process's share of a group's parameters, one after another in `vector`."""
    state = zero.optimizer.state[vector]
    _prepare_moments(state, vector, max(tensor.step for _, tensor in parameters))
    for parameter, tensor in parameters:
        _, place, share = zero.grad_position[zero.get_param_id(parameter)]
        start = share * dist.get_rank()
        numel = max(0, min(share, parameter.ds_numel - start))
        for kind, target in ((WEIGHT, vector), *((kind, state[kind]) for kind in MOMENTS)):
            target[place : place + numel].copy_(tensor.part(kind, start, numel))
