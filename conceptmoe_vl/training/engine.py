"""The engine runs forward, backward and the optimiser's step; one interface, two implementations.

`TorchEngine` is one process without DeepSpeed. `DeepSpeedEngine` is any number of processes, ZeRO 0
to 3. Both compute the same numbers on one process: the loss of a micro-batch is divided by the
micro-batches of a step, gradients are averaged over ranks, the whole gradient is clipped to one
norm.
"""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from conceptmoe_vl.errors import UserError

from .config import TrainingConfig
from .deepspeed_settings import deepspeed_config, require_understood, zero_stage
from .distributed import World, require_deepspeed
from .parameters import GuardedAdamW, build_optimizer
from .restoring import (
    names_in_order,
    restore_stage_1_and_2,
    restore_stage_3,
    restore_whole,
)
from .saved_state import SavedState


class Engine(Protocol):
    """What the trainer needs; `step` returns the gradient's norm before clipping."""

    module: nn.Module
    optimizer: GuardedAdamW
    name: str

    def forward(self, **inputs: Any) -> Any: ...

    def backward(self, loss: torch.Tensor) -> None: ...

    def step(self, cancel: bool) -> float: ...

    def save(self, folder: Path) -> None: ...

    def load(self, folder: Path) -> None:
        """What an engine of the same layout has saved. Exact."""
        ...

    def restore(self, saved: SavedState) -> None:
        """What any engine has saved."""
        ...

    def gather_weights(self) -> dict[str, torch.Tensor] | None: ...


def _clip_and_measure(parameters: list[nn.Parameter], limit: float) -> float:
    """Norm of the whole gradient before it is scaled down to `limit` (0: not scaled)."""
    return float(torch.nn.utils.clip_grad_norm_(parameters, limit if limit > 0 else math.inf))


class TorchEngine:
    """One process, plain torch."""

    name = "torch"

    def __init__(self, model: nn.Module, config: TrainingConfig, world: World) -> None:
        self.module = model.to(world.device)
        self.optimizer = build_optimizer(self.module, config)
        self._config, self._device = config, world.device
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def forward(self, **inputs: Any) -> Any:
        autocast = self._config.precision == "bfloat16"
        with torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=autocast):
            return self.module(**inputs)

    def backward(self, loss: torch.Tensor) -> None:
        (loss / self._config.gradient_accumulation_steps).backward()

    def step(self, cancel: bool) -> float:
        norm = _clip_and_measure(self._trained, self._config.gradient_clipping)
        if not cancel and math.isfinite(norm):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        state = {"module": self.module.state_dict(), "optimizer": self.optimizer.state_dict()}
        state["trained"] = names_in_order(self.module, self.optimizer)
        torch.save(state, folder / "state.pt")

    def load(self, folder: Path) -> None:
        state = torch.load(folder / "state.pt", map_location=self._device, weights_only=True)
        self.module.load_state_dict(state["module"])
        self.optimizer.load_state_dict(state["optimizer"])

    def restore(self, saved: SavedState) -> None:
        restore_whole(self.module, self.optimizer, saved)

    def gather_weights(self) -> dict[str, torch.Tensor] | None:
        return {name: tensor.detach().cpu() for name, tensor in self.module.state_dict().items()}


class DeepSpeedEngine:
    """Any number of processes under DeepSpeed."""

    name = "deepspeed"

    def __init__(self, model: nn.Module, config: TrainingConfig, world: World) -> None:
        deepspeed = require_deepspeed(world.device)
        self._deepspeed, self._config, self._world = deepspeed, config, world
        self.stage = zero_stage(config)
        self.optimizer = build_optimizer(model, config)
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._names = names_in_order(model, self.optimizer)
        level = deepspeed.utils.logger.level
        deepspeed.utils.logger.setLevel(logging.ERROR)  # it warns of every subclass of AdamW
        settings = deepspeed_config(config)
        require_understood(settings)
        self._engine, *_ = deepspeed.initialize(
            model=model, optimizer=self.optimizer, config=settings, dist_init_required=False
        )
        deepspeed.utils.logger.setLevel(level)
        self.module = self._engine.module

    def forward(self, **inputs: Any) -> Any:
        return self._engine(**inputs)

    def backward(self, loss: torch.Tensor) -> None:
        self._engine.backward(loss)
        if not self._engine.is_gradient_accumulation_boundary():
            # counts the micro-batch; the last one of a step is counted by `step`
            self._engine.step()

    def step(self, cancel: bool) -> float:
        if self.stage:
            self.optimizer.cancel_next = cancel
            self._engine.step()
            norm = self._engine.get_global_grad_norm()
            norm = math.nan if norm is None else float(norm)
        else:
            norm = _clip_and_measure(self._trained, self._config.gradient_clipping)
            self.optimizer.cancel_next = cancel or not math.isfinite(norm)
            self._engine.step()
        self.optimizer.cancel_next = False
        return norm

    def save(self, folder: Path) -> None:
        # DeepSpeed's `latest` file would name a folder that is renamed afterwards.
        self._engine.save_checkpoint(
            str(folder.parent), folder.name, {"trained": self._names}, save_latest=False
        )

    def load(self, folder: Path) -> None:
        path, _ = self._engine.load_checkpoint(
            str(folder.parent),
            tag=folder.name,
            load_lr_scheduler_states=False,
            load_module_strict=True,
        )
        if path is None:
            raise UserError(f"DeepSpeed finds no state in {folder}; the checkpoint is damaged")

    def restore(self, saved: SavedState) -> None:
        """Collective."""
        if self.stage == 0:
            restore_whole(self.module, self.optimizer, saved)
        elif self.stage < 3:
            restore_stage_1_and_2(self._engine.optimizer, self.module, saved)
        else:
            restore_stage_3(self._deepspeed, self._engine.optimizer, self.module, saved)

    def gather_weights(self) -> dict[str, torch.Tensor] | None:
        """Collective. Whole weights on rank 0 (on CPU), None elsewhere;
        ZeRO-3 gathers one by one.
        """
        if self.stage < 3:
            if not self._world.is_main:
                return None
            return {
                name: tensor.detach().cpu() for name, tensor in self.module.state_dict().items()
            }
        weights: dict[str, torch.Tensor] = {}
        names: dict[int, str] = {}  # of parameters already gathered: tied ones stay one tensor
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            if names.setdefault(id(parameter), name) != name:
                if self._world.is_main:
                    weights[name] = weights[names[id(parameter)]]
                continue
            with self._deepspeed.zero.GatheredParameters([parameter]):
                if self._world.is_main:
                    weights[name] = parameter.detach().cpu().clone()
        if not self._world.is_main:
            return None
        persistent = self.module.state_dict()
        weights.update(
            {
                name: tensor.cpu().clone()
                for name, tensor in self.module.named_buffers()
                if name in persistent
            }
        )
        return weights


def build_engine(model: nn.Module, config: TrainingConfig, world: World) -> Engine:
    """The engine that `training.engine` names, around a model on any device."""
    return (TorchEngine if config.engine == "torch" else DeepSpeedEngine)(model, config, world)
