"""The optimiser over the parts of a model: learning rates, weight decay, and a summary."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import nn

from conceptmoe_vl.errors import UserError

from .config import TrainingConfig
from .parts import RATED_PARTS, part_of


def _is_decayed(name: str, parameter: nn.Parameter) -> bool:
    """Matrices decay; norms, biases and other vectors, and embeddings do not."""
    return parameter.ndim >= 2 and part_of(name) != "embedding" and "pos_embed" not in name


@dataclasses.dataclass(frozen=True)
class PartSummary:
    """One line of the table at a run's start: counts of parameters and the peak learning rate."""

    part: str
    parameters: int
    trainable: int
    learning_rate: float


def parameter_groups(model: nn.Module, config: TrainingConfig) -> list[dict]:
    """AdamW's groups: one for every part and kind of weight decay that has parameters.

    Each group has `params`, `lr`, `peak_lr` (the schedule scales it), `weight_decay` and `name`.

    Raises:
        UserError: `part_learning_rates` names a part that this model has no trained parameters of.
    """
    groups: dict[tuple[str, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups.setdefault((part_of(name), _is_decayed(name, parameter)), []).append(parameter)
    for part in config.part_learning_rates:
        if not any(part == present for present, _ in groups):
            raise UserError(
                f"training.part_learning_rates names '{part}', but no such parameter is trained"
            )
    result = []
    for part, decayed in sorted(groups, key=lambda key: (RATED_PARTS.index(key[0]), not key[1])):
        rate = config.part_learning_rates.get(part, config.learning_rate)
        result.append(
            {
                "params": groups[part, decayed],
                "lr": rate,
                "peak_lr": rate,
                "weight_decay": config.weight_decay if decayed else 0.0,
                "name": f"{part}{'' if decayed else ', no decay'}",
            }
        )
    return result


def summarise_parts(model: nn.Module, config: TrainingConfig) -> Iterator[PartSummary]:
    """The parts that the model has, in a fixed order."""
    for part in RATED_PARTS:
        chosen = [
            parameter for name, parameter in model.named_parameters() if part_of(name) == part
        ]
        if chosen:
            rate = config.part_learning_rates.get(part, config.learning_rate)
            trainable = sum(_size(parameter) for parameter in chosen if parameter.requires_grad)
            yield PartSummary(part, sum(map(_size, chosen)), trainable, rate if trainable else 0.0)


def _size(parameter: nn.Parameter) -> int:
    return getattr(parameter, "ds_numel", parameter.numel())  # ZeRO-3 leaves an empty tensor behind


class GuardedAdamW(torch.optim.AdamW):
    """AdamW whose next step can be cancelled.

    DeepSpeed's ZeRO optimisers run their whole step (norm, clipping, gathering of weights) around
    the inner optimiser's. When the loss of a step was not finite, `cancel_next` makes that inner
    part do nothing, so weights and moments stay as they were, in every ZeRO stage alike.
    """

    cancel_next: bool = False

    def step(self, closure=None):  # type: ignore[override]
        if self.cancel_next:
            return None
        return super().step(closure)


def build_optimizer(model: nn.Module, config: TrainingConfig) -> GuardedAdamW:
    """AdamW over the model's groups, fused (one pass over each tensor; CPU and CUDA have it)."""
    return GuardedAdamW(
        parameter_groups(model, config),
        lr=config.learning_rate,
        betas=tuple(config.betas),
        eps=config.epsilon,
        fused=True,
    )
