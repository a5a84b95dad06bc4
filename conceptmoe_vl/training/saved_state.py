"""Whole tensors of a checkpoint, by name, whatever engine and number of processes wrote it.

Every parameter is a row of pieces, one-dimensional views into the checkpoint's files, which are
mapped into memory: what is not asked for is not read. Where DeepSpeed 0.19 keeps the pieces:

| stage | file | pieces |
| --- | --- | --- |
| 0 | `mp_rank_00_model_states.pt` | whole tensors, the optimiser's by number |
| 1, 2 | `zero_pp_rank_R_*_optim_states.pt` | `param_slice_mappings`: where in a group's vector |
| 3 | that, and `zero_pp_rank_R_*_model_states.pt` | a share of each parameter, one behind another |

DeepSpeed's own `ds_to_universal` reads the same places; it writes all of them once more to disk,
and what it writes loads into the same kind of stage alone.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from conceptmoe_vl.errors import UserError

from .distributed import require_deepspeed

WEIGHT, MOMENTS = "weight", ("exp_avg", "exp_avg_sq")


@dataclasses.dataclass(frozen=True)
class SavedTensor:
    """A parameter or buffer.

    Fields:
        shape: the full one.
        pieces: by kind (`weight`, and of trained parameters the moments of Adam), in order.
        step: steps that the optimiser has made with it.
    """

    shape: tuple[int, ...]
    pieces: Mapping[str, list[torch.Tensor]]
    step: float = 0.0

    def part(self, kind: str, start: int, numel: int) -> torch.Tensor:
        """`numel` elements of the flat tensor from `start` on; zeros of moments not yet made."""
        if kind not in self.pieces:
            return torch.zeros(numel)
        found, at = [], 0
        for piece in self.pieces[kind]:
            first, last = max(start - at, 0), min(start + numel - at, piece.numel())
            if first < last:
                found.append(piece[first:last])
            at += piece.numel()
        return found[0] if len(found) == 1 else torch.cat([torch.empty(0), *found])

    def whole(self, kind: str = WEIGHT) -> torch.Tensor:
        """The full tensor."""
        return self.part(kind, 0, math.prod(self.shape)).view(self.shape)


@dataclasses.dataclass(frozen=True)
class SavedState:
    """Fields: trained parameters, and frozen ones and buffers, by name."""

    trained: dict[str, SavedTensor]
    fixed: dict[str, SavedTensor]

    def __getitem__(self, name: str) -> SavedTensor:
        return self.trained[name] if name in self.trained else self.fixed[name]

    def __contains__(self, name: str) -> bool:
        return name in self.trained or name in self.fixed


def read_state(folder: Path, manifest: Mapping[str, Any]) -> SavedState:
    """What `Engine.save` wrote into `folder`.

    Args:
        manifest: of the checkpoint: engine, zero_stage and world_size.

    Raises:
        UserError: the files are not those of such an engine, or a tensor has not its full shape.
    """
    engine, stage, processes = (manifest[key] for key in ("engine", "zero_stage", "world_size"))
    try:
        if engine == "torch":
            state = _read(folder / "state.pt", weights_only=True)
            read = _of_whole_tensors(state["module"], state["optimizer"], state["trained"])
        else:
            require_deepspeed(torch.device("cpu"))
            read = _of_deepspeed(folder, stage, processes)
    except (KeyError, IndexError, FileNotFoundError) as error:
        raise UserError(
            f"cannot take {folder} apart ({error!r}); resume with engine {engine}, ZeRO stage "
            f"{stage} and {processes} processes, which wrote it"
        ) from error
    _require_whole(read, folder)
    return read


def _read(path: Path, weights_only: bool = False) -> dict[str, Any]:
    # DeepSpeed's files hold objects of its own.
    return torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)


def _of_whole_tensors(
    module: dict[str, torch.Tensor], optimizer: dict[str, Any], trained: list[str]
) -> SavedState:
    parameters = {}
    for number, name in enumerate(trained):
        own = optimizer["state"].get(number, {})
        parameters[name] = SavedTensor(
            tuple(module[name].shape),
            {WEIGHT: [module[name].view(-1)]} | _moments(own),
            float(own.get("step", 0)),
        )
    return SavedState(parameters, _fixed(module, parameters))


def _fixed(module: dict[str, torch.Tensor], trained: Iterable[str]) -> dict[str, SavedTensor]:
    return {
        name: SavedTensor(tuple(tensor.shape), {WEIGHT: [tensor.reshape(-1)]})
        for name, tensor in module.items()
        if name not in trained
    }


def _moments(state: dict[str, Any], start: int = 0, numel: int | None = None) -> dict[str, list]:
    return {
        kind: [state[kind].view(-1)[start : None if numel is None else start + numel]]
        for kind in MOMENTS
        if kind in state
    }


def _of_deepspeed(folder: Path, stage: int, processes: int) -> SavedState:
    if stage == 0:
        state = _read(folder / "mp_rank_00_model_states.pt")
        return _of_whole_tensors(state["module"], state["optimizer"], state["trained"])
    optimizers = [
        _read(_only(folder, f"*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"))[
            "optimizer_state_dict"
        ]
        for rank in range(processes)
    ]
    if stage < 3:
        module = _read(folder / "mp_rank_00_model_states.pt")["module"]
        return _of_stage_1_and_2(module, optimizers)
    models = [
        _read(_only(folder, f"*zero_pp_rank_{rank}_mp_rank_00_model_states.pt"))
        for rank in range(processes)
    ]
    return _of_stage_3(models, optimizers)


def _only(folder: Path, pattern: str) -> Path:
    found = list(folder.glob(pattern))
    if len(found) != 1:
        raise FileNotFoundError(folder / pattern)
    return found[0]


class _Pieces:
    """Collects the pieces of parameters, rank after rank."""

    def __init__(self) -> None:
        self._pieces: dict[str, dict[str, list[torch.Tensor]]] = {}
        self._steps: dict[str, float] = {}

    def add(
        self, name: str, vector: torch.Tensor, state: dict[str, Any], start: int, numel: int
    ) -> None:
        kinds = {WEIGHT: [vector[start : start + numel]]} | _moments(state, start, numel)
        for kind, pieces in kinds.items():
            self._pieces.setdefault(name, {}).setdefault(kind, []).extend(pieces)
        self._steps[name] = float(state.get("step", 0))

    def tensors(self, shapes: Mapping[str, Iterable[int]]) -> dict[str, SavedTensor]:
        return {
            name: SavedTensor(tuple(shapes[name]), pieces, self._steps[name])
            for name, pieces in self._pieces.items()
        }


def _of_stage_1_and_2(
    module: dict[str, torch.Tensor], optimizers: list[dict[str, Any]]
) -> SavedState:
    pieces = _Pieces()
    for saved in optimizers:
        states = saved["base_optimizer_state"]["state"]
        for number, mapping in enumerate(saved["param_slice_mappings"]):
            vector = saved["single_partition_of_fp32_groups"][number]
            for name, place in mapping.items():
                pieces.add(name, vector, states.get(number, {}), place.start, place.numel)
    trained = pieces.tensors({name: tensor.shape for name, tensor in module.items()})
    return SavedState(trained, _fixed(module, trained))


def _of_stage_3(models: list[dict[str, Any]], optimizers: list[dict[str, Any]]) -> SavedState:
    pieces = _Pieces()
    ranks, shapes = len(models), models[0]["param_shapes"]
    for rank, saved in enumerate(optimizers):
        states = saved["optimizer_state_dict"]["state"]
        for number, vector in enumerate(saved["fp32_flat_groups"]):
            start = 0
            for name, shape in shapes[number].items():
                share, numel = _share(shape, rank, ranks)
                pieces.add(name, vector, states.get(number, {}), start, numel)
                start += share
    trained = pieces.tensors({name: shape for group in shapes for name, shape in group.items()})
    fixed = {}
    for name, shape in (models[0].get("frozen_param_shapes") or {}).items():
        parts = [
            model["frozen_param_fragments"][name].view(-1)[: _share(shape, rank, ranks)[1]]
            for rank, model in enumerate(models)
        ]
        fixed[name] = SavedTensor(tuple(shape), {WEIGHT: parts})
    buffers = {name: models[0]["module"][name] for name in models[0]["buffer_names"]}
    return SavedState(trained, {**fixed, **_fixed(buffers, ())})


def _share(shape: Iterable[int], rank: int, ranks: int) -> tuple[int, int]:
    """Elements of a parameter that each rank keeps, with and without padding."""
    numel = math.prod(shape)
    share = -(-numel // ranks)
    return share, max(0, min(share, numel - rank * share))


def _require_whole(state: SavedState, folder: Path) -> None:
    for name, tensor in {**state.trained, **state.fixed}.items():
        for kind, pieces in tensor.pieces.items():
            found, wanted = sum(piece.numel() for piece in pieces), math.prod(tensor.shape)
            if found != wanted:
                raise UserError(
                    f"{kind} of {name} in {folder} has {found} elements instead of {wanted} "
                    f"{tensor.shape}; the checkpoint is not whole: take another one"
                )
