"""Low-rank adapters by peft: trained beside frozen weights, merged into the exported model.

`y = W x + alpha / rank * B (A x)` with B zero at first (LoRA, arXiv 2106.09685). peft wraps the
projections of attention; fused experts are one parameter, which it adapts as
`W_E + alpha / rank * B_E A_E` (`target_parameters`): every expert has its own A and B.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from conceptmoe_vl.errors import UserError
from conceptmoe_vl.field_checks import refuse_idle

from .checks import require, require_known
from .parts import MODULES, part_of

TARGETS = ("attention", "experts")
WHOLE = ("vision", "projector", "chunk", "embedding")
_NAME = "default"  # peft's name of an only adapter, which is left out in its files


@dataclasses.dataclass
class LoraSection:
    """Adapters that are trained instead of the weights they stand beside; needs peft.

    Fields:
        rank: of an adapter's two matrices; 0: no adapters, everything is trained.
        alpha: adapters count alpha / rank times; None: twice the rank.
        dropout: of an adapter's input, 0 to below 1; on attention alone.
        targets: attention (its four projections in E, C and D) | experts (the routed ones).
        train_whole: parts of which all weights are trained beside the adapters: vision, projector,
            chunk, embedding. Parts that the model has not are left out.
    """

    rank: int = 0
    alpha: float | None = None
    dropout: float = 0.0
    targets: list = dataclasses.field(default_factory=lambda: list(TARGETS))
    train_whole: list = dataclasses.field(default_factory=lambda: ["projector", "chunk"])

    def __post_init__(self) -> None:
        require(self.rank >= 0, f"training.lora.rank is {self.rank}; it must not be negative")
        require(
            self.alpha is None or self.alpha > 0,
            f"training.lora.alpha is {self.alpha}; it must be above 0",
        )
        require(
            0 <= self.dropout < 1,
            f"training.lora.dropout is {self.dropout}; give 0 to below 1",
        )
        require_known(self.targets, TARGETS, "training.lora.targets")
        require_known(self.train_whole, WHOLE, "training.lora.train_whole")
        require(bool(self.targets), f"training.lora.targets is empty; name some of {TARGETS}")
        require(
            not self.dropout or "experts" not in self.targets,
            f"training.lora.dropout is {self.dropout}, which adapters of experts cannot have; set "
            "it to 0, or training.lora.targets to [attention]",
        )
        if not self.rank:
            because = "training.lora.rank is 0; set it"
            names = ("alpha", "dropout", "targets", "train_whole")
            refuse_idle(self, "training.lora", names, because)


def _peft_config(section: LoraSection, **fields: Any) -> Any:
    """peft's configuration of the section.

    Raises:
        UserError: peft is not installed.
    """
    if importlib.util.find_spec("peft") is None:
        raise UserError(
            "training.lora needs peft, which is not installed: pip install conceptmoe-vl[lora], or "
            "set training.lora.rank to 0"
        )
    from peft import LoraConfig

    attention = r"language_model\..*\.self_attn\.[qkvo]_proj"
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    return LoraConfig(
        r=section.rank,
        lora_alpha=section.alpha or 2 * section.rank,
        lora_dropout=section.dropout,
        target_modules=attention if "attention" in section.targets else [],
        target_parameters=experts if "experts" in section.targets else None,
        **fields,
    )


def add_adapters(model: Any, section: LoraSection) -> None:
    """Wraps the targets in place, and freezes all but adapters and the parts `train_whole`.

    Raises:
        UserError: peft is not installed.
    """
    config = _peft_config(section)
    from peft import LoraModel

    LoraModel(model, config, _NAME)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(part_of(name) in ("lora", *section.train_whole))


def merge_adapters(model: Any, weights: dict[str, Tensor], section: LoraSection) -> Any:
    """A model without adapters, on CPU, whose weights have them added.

    Args:
        model: one that `add_adapters` has changed; it stays as it is, as do the weights.
        weights: its full weights by name.
    """
    config = _peft_config(section)
    from peft import LoraModel

    with torch.device("meta"):
        merged = type(model)(model.config)
    adapted = LoraModel(merged, config, _NAME, low_cpu_mem_usage=True)
    merged.load_state_dict(weights, assign=True)
    adapted.merge_and_unload(safe_merge=True)
    merged.generation_config = model.generation_config
    return merged


def save_adapters(
    model: Any, weights: dict[str, Tensor], section: LoraSection, folder: Path
) -> None:
    """Writes adapters and the parts trained whole into a folder that `PeftModel` loads.

    Args:
        model: one that `add_adapters` has changed. weights: its full weights by name.
    """
    whole = [module for part in section.train_whole for module in MODULES[part]]
    present = {piece for name in weights for piece in name.split(".")}
    config = _peft_config(
        section,
        modules_to_save=[module for module in whole if module in present] or None,
        base_model_name_or_path=model.name_or_path or None,
        inference_mode=True,
    )
    config.save_pretrained(str(folder))
    kept = {
        f"base_model.model.{name.replace(f'.{_NAME}.', '.')}": tensor.clone()
        for name, tensor in weights.items()
        if part_of(name) in ("lora", *section.train_whole)
    }
    save_file(kept, folder / "adapter_model.safetensors", metadata={"format": "pt"})
