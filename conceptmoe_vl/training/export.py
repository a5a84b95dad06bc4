"""The final model folder: what `from_pretrained` loads, written beside, checked, then renamed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers.utils import logging as transformers_logging

from conceptmoe_vl.generation_settings import changed_generation

from .lora import LoraSection, merge_adapters, save_adapters
from .run_files import replace_folder

ADAPTER = "adapter"  # folder of what `PeftModel` loads


def expected_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Full shape of every parameter, also where ZeRO-3 has left an empty tensor in its place."""
    return {
        name: tuple(getattr(parameter, "ds_shape", parameter.shape))
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }


def saved_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors in a folder's safetensors files, read from their headers."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (safe_open is no mapping)
                shapes[name] = tuple(file.get_slice(name).get_shape())
    return shapes


def check_saved(model: Any, folder: Path) -> None:
    """Raises unless every parameter was saved at its full shape (tied ones once).

    Raises:
        RuntimeError: names the first tensors that are missing or have another shape.
    """
    expected, saved = expected_shapes(model), saved_shapes(folder)
    tied = (
        set(getattr(model, "_tied_weights_keys", None) or {})
        if model.config.tie_word_embeddings
        else set()
    )
    wrong = [
        f"{name} {saved.get(name, 'missing')} instead of {shape}"
        for name, shape in expected.items()
        if saved.get(name) != shape and not (name in tied and name not in saved)
    ]
    if wrong:
        raise RuntimeError(f"the exported model in {folder} is not whole: {'; '.join(wrong[:5])}")


def export_model(
    model: Any,
    weights: dict[str, torch.Tensor],
    target: Path,
    processor: Any = None,
    generation: dict | None = None,
) -> None:
    """Writes `target` whole: weights (safetensors), configuration, generation settings, processor.

    Args:
        weights: full weights by name, as `Engine.gather_weights` gives on rank 0.
        generation: fields of the generation configuration.
    """
    beside = _new_folder(target)
    before = model.generation_config
    model.generation_config = changed_generation(before, generation, "model.generation")
    transformers_logging.disable_progress_bar()  # the reporter speaks of the export
    model.save_pretrained(beside, state_dict=weights)
    if processor is not None:
        processor.save_pretrained(beside)
    check_saved(model, beside)
    replace_folder(beside, target)


def export_merged(
    model: Any,
    weights: dict[str, torch.Tensor],
    target: Path,
    lora: LoraSection,
    processor: Any = None,
    generation: dict | None = None,
) -> None:
    """`export_model`, with adapters (if there are any) merged, and by themselves in `adapter/`.

    Args:
        lora: what the model was prepared with; that folder stands beside `target`.
    """
    if lora.rank:
        adapter = target.with_name(ADAPTER)
        beside = _new_folder(adapter)
        save_adapters(model, weights, lora, beside)
        replace_folder(beside, adapter)
        model = merge_adapters(model, weights, lora)
        weights = model.state_dict()
    export_model(model, weights, target, processor, generation)


def _new_folder(target: Path) -> Path:
    beside = target.with_name(f".{target.name}.writing")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    return beside
