"""A model folder from a training checkpoint of any engine and ZeRO stage, on a CPU, in one process.

Notable:
- a tensor is put together from the files of all ranks when it is written, so that writing takes the
  memory of the largest tensor; the optimiser's moments are not read;
- adapters are merged, which takes the memory of the model;
- the folder is loaded, compared with the checkpoint bit for bit and run on a few tokens before it
  gets its name; that takes the memory of the model.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig
from transformers.utils import logging as transformers_logging

from conceptmoe_vl.configuration import ConceptMoEVLConfig
from conceptmoe_vl.conversion.converting import (
    GENERATION,
    check_target,
    read_generation,
    written_beside,
)
from conceptmoe_vl.conversion.reading import DTYPES, VALUE_BYTES
from conceptmoe_vl.conversion.writing import Computed, NewTensor, write_weights
from conceptmoe_vl.errors import UserError
from conceptmoe_vl.generation_settings import changed_generation
from conceptmoe_vl.processing import ConceptMoEVLProcessor

from .build import model_config
from .config import ModelSection, RunConfig, load_run_config
from .distributed import World
from .export import ADAPTER
from .lora import LoraSection, add_adapters, merge_adapters, save_adapters
from .run_files import read_manifest
from .saved_state import WEIGHT, SavedState, SavedTensor, read_state
from .verification import damage_of

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_PROBE = 16  # tokens of the forward pass of the finished model


def consolidate(
    checkpoint: Path, out: Path, max_shard_bytes: int = 5 * 10**9, adapter: bool = False
) -> None:
    """Writes the model of `RUN/checkpoints/step-N` as a folder for `from_pretrained`.

    Configuration and processor are those that the run has written beside its checkpoints. Adapters
    (`training.lora`) are merged.

    Args:
        adapter: write the adapters alone too, to `out/adapter`, which `PeftModel` loads.

    Raises:
        UserError: no checkpoint, a damaged one, one of another model, `out` exists, or `adapter` is
            asked of a run without adapters.
    """
    check_target(out, checkpoint)
    damage = damage_of(checkpoint, World(0, 1, 0, torch.device("cpu")))
    if damage is not None:
        raise UserError(damage)
    run, processor = _run_of(checkpoint)
    config = model_config(run.model, processor)
    generation, lora = _generation_of(run.model, config), run.training.lora
    saved = read_state(checkpoint / "engine", read_manifest(checkpoint))
    if adapter and not lora.rank:
        raise UserError(f"{checkpoint} has no adapters (training.lora); leave --adapter out")
    also = None
    if lora.rank:
        model, weights = adapted_model(saved, config, lora, run.model.init_from)
        saved = merged_state(model, weights, lora)
        if adapter:
            also = functools.partial(_add_adapter, model, weights, lora)
    write_model(saved, config, out, processor, generation, max_shard_bytes, also)


def _add_adapter(
    model: nn.Module, weights: dict[str, torch.Tensor], lora: LoraSection, folder: Path
) -> None:
    (folder / ADAPTER).mkdir()
    save_adapters(model, weights, lora, folder / ADAPTER)


def _run_of(checkpoint: Path) -> tuple[RunConfig, ConceptMoEVLProcessor]:
    folder = checkpoint.absolute().parents[1]
    for name in ("config.yaml", "processor"):
        if not (folder / name).exists():
            raise UserError(
                f"{folder / name} is missing: a checkpoint must lie in its run's folder, as "
                "RUN/checkpoints/step-N"
            )
    run = load_run_config(folder / "config.yaml")
    if run.model.init_from is not None and not Path(run.model.init_from).is_dir():
        raise UserError(
            f"the run's model.init_from is {run.model.init_from}, which is no folder here; its "
            "config.json is needed: put it back, or run this where the run was"
        )
    return run, ConceptMoEVLProcessor.from_pretrained(folder / "processor")


def _generation_of(section: ModelSection, config: ConceptMoEVLConfig) -> GenerationConfig:
    """As the run's own export has it: that of `init_from`, changed by the section's."""
    before = GenerationConfig.from_model_config(config)
    if section.init_from is not None and (Path(section.init_from) / GENERATION).is_file():
        before = read_generation(Path(section.init_from))
    return changed_generation(before, section.generation, "model.generation")


def adapted_model(
    saved: SavedState, config: ConceptMoEVLConfig, lora: LoraSection, base: str | None = None
) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The model with its adapters, without memory of its own, and its weights by name.

    Args:
        base: folder of the model that the adapters were trained on.

    Raises:
        UserError: see `fitting`, or peft is not installed.
    """
    from conceptmoe_vl.modeling import ConceptMoEVLForConditionalGeneration as Model

    with torch.device("meta"):
        model = Model(config)
        add_adapters(model, lora)
    model.name_or_path = base or ""
    names = fitting(model, saved)
    each = {name: saved[name].whole() for name in set(names.values())}  # tied ones are one tensor
    return model, {name: each[own] for name, own in names.items()}


def merged_state(
    model: nn.Module, weights: dict[str, torch.Tensor], lora: LoraSection
) -> SavedState:
    """What a model has whose adapters are merged."""
    merged = merge_adapters(model, weights, lora).state_dict()
    pieces = {name: {WEIGHT: [tensor.reshape(-1)]} for name, tensor in merged.items()}
    return SavedState({}, {n: SavedTensor(tuple(merged[n].shape), pieces[n]) for n in merged})


def write_model(
    saved: SavedState,
    config: ConceptMoEVLConfig,
    out: Path,
    processor: ConceptMoEVLProcessor | None = None,
    generation: GenerationConfig | None = None,
    max_shard_bytes: int = 5 * 10**9,
    also: Callable[[Path], None] | None = None,
) -> None:
    """Writes `out` whole, and only if it loads as what the checkpoint holds.

    Args:
        also: writes more into the folder, before it has its name.

    Raises:
        UserError: the checkpoint has other tensors than this model, `out` exists, or the disk is
            full.
        RuntimeError: what was written does not load as it should.
    """
    from conceptmoe_vl.modeling import ConceptMoEVLForConditionalGeneration as Model

    transformers_logging.disable_progress_bar()
    with torch.device("meta"):
        model = Model(config)
    own = fitting(model, saved)
    tensors = [_new_tensor(name, saved[name]) for name in own if own[name] == name]
    if generation is not None:
        model.generation_config = generation
    config.update({"dtype": torch.float32, "architectures": [Model.__name__]})
    with written_beside(out) as folder:
        write_weights(tensors, folder, max_shard_bytes, lambda _: None)
        config.save_pretrained(folder)
        model.generation_config.save_pretrained(folder)
        if processor is not None:
            processor.save_pretrained(folder)
        if also is not None:
            also(folder)
        require_same(Model.from_pretrained(folder), saved)


def _new_tensor(name: str, saved: SavedTensor) -> NewTensor:
    kind = _NAMES[saved.pieces[WEIGHT][0].dtype]
    size = math.prod(saved.shape) * VALUE_BYTES[kind]
    make = functools.partial(saved.part, WEIGHT, 0, math.prod(saved.shape))
    return NewTensor(name, kind, saved.shape, (Computed(make, size),))


def fitting(model: nn.Module, saved: SavedState) -> dict[str, str]:
    """Names of a model's tensors, and under which each is saved: that of the first of tied ones.

    Raises:
        UserError: a tensor is missing from the checkpoint, has another shape, or is too many.
    """
    first = {parameter: name for name, parameter in model.named_parameters()}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    own = {name: first.get(parameters.get(name), name) for name in model.state_dict()}
    for name, tensor in model.state_dict().items():
        found = saved[own[name]].shape if own[name] in saved else "missing"
        if found != tuple(tensor.shape):
            raise UserError(
                f"{name} is {found} in the checkpoint and {tuple(tensor.shape)} in the model of "
                "the run's config.yaml"
            )
    left = sorted({*saved.trained, *saved.fixed} - own.keys())
    if left:
        raise UserError(f"the checkpoint has {left[0]}, the model of the run's config.yaml has not")
    return own


@torch.no_grad()
def require_same(model: Any, saved: SavedState) -> None:
    """Raises unless a loaded model has the checkpoint's tensors, bit for bit, and computes.

    Raises:
        RuntimeError: names the first tensor that differs.
    """
    tensors = model.state_dict()
    for name, own in fitting(model, saved).items():
        if not torch.equal(tensors[name], saved[own].whole()):
            raise RuntimeError(f"{name} is not loaded as the checkpoint has it")
    config = model.config
    marks = {config.image_token_id, config.vision_start_token_id, config.vision_end_token_id}
    words = [token for token in range(config.text.vocab_size) if token not in marks][:_PROBE]
    if not torch.isfinite(model.eval()(input_ids=torch.tensor([words])).logits).all():
        raise RuntimeError("the logits of the model are not finite; take another checkpoint")
