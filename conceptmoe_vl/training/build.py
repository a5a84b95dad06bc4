"""Processor and model of a run, from the `model` section of its configuration."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from conceptmoe_vl.configuration import ConceptMoEVLConfig
from conceptmoe_vl.errors import UserError
from conceptmoe_vl.generation_settings import changed_generation
from conceptmoe_vl.processing import ConceptMoEVLProcessor, build_processor, train_tokenizer

from .config import ModelSection, RunConfig
from .distributed import World, raise_together, share_from_main, wait_for_all
from .idle_settings import check_effect
from .random_states import set_seed
from .run_files import LINES, checkpoints_in, recover_folders, replace_folder
from .yaml_io import read_yaml

_SECTIONS = ("text", "chunk", "vision")
_VOCABULARY_MULTIPLE = 64
_SHIFT = "language_model.chunk.dial.shift"
# Weights that a configuration may add to those of `init_from`.
_ADDED = tuple(f"language_model.{name}." for name in ("chunk", "to_concept", "from_concept"))


def prepare_processor(
    config: RunConfig, world: World, texts: Callable[[int], Iterable[str]]
) -> ConceptMoEVLProcessor:
    """The processor of the run, the same on every rank. Collective.

    Rank 0 builds it and saves it as `run_dir/processor`; all ranks load it from there. A run that
    has a checkpoint keeps the one it began with.

    Args:
        texts: texts(n) are the training shards' texts of n samples at most, for a new tokenizer.

    Raises:
        UserError: no tokenizer can be made or loaded.
    """
    folder = Path(config.run_dir) / "processor"
    error: UserError | None = None
    started = bool(checkpoints_in(Path(config.run_dir) / "checkpoints"))
    if world.is_main and not (started and folder.exists()):
        try:
            _save_beside(_new_processor(config.model, texts), folder)
        except UserError as found:
            error = found
    raise_together(error)
    return ConceptMoEVLProcessor.from_pretrained(folder)


def _save_beside(processor: ConceptMoEVLProcessor, folder: Path) -> None:
    beside = folder.with_name(f".{folder.name}.writing")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    processor.save_pretrained(beside)
    replace_folder(beside, folder)


def _new_processor(
    section: ModelSection, texts: Callable[[int], Iterable[str]]
) -> ConceptMoEVLProcessor:
    """A processor for the section's vision and length, on a new tokenizer or that of a model."""
    wanted, template = section.tokenizer, None
    if section.init_from is not None:
        _require_folder(section.init_from, "model.init_from")
        with _loading("model.init_from", section.init_from, "a saved model with its processor"):
            processor = ConceptMoEVLProcessor.from_pretrained(section.init_from)
        tokenizer, template = processor.tokenizer, processor.chat_template
    elif wanted.path is not None:
        _require_folder(wanted.path, "model.tokenizer.path")
        with _loading("model.tokenizer.path", wanted.path, "a saved tokenizer"):
            tokenizer = AutoTokenizer.from_pretrained(wanted.path)
    else:
        with _mistakes_of("model.tokenizer"):
            tokenizer = train_tokenizer(texts(wanted.max_samples), wanted.vocab_size)
    settings = _model_config(section, {})
    base = None if section.init_from is None else _base_config(section.init_from)
    if base is None or settings.vision != base.vision:
        with _mistakes_of("model.vision"):
            processor = build_processor(settings, tokenizer, template)
    processor.tokenizer.model_max_length = settings.text.max_position_embeddings
    return processor


def _base_config(folder: str) -> ConceptMoEVLConfig:
    return ConceptMoEVLConfig.from_pretrained(folder)


@contextlib.contextmanager
def _mistakes_of(section: str) -> Iterator[None]:
    """Turns a refused value of the model's code into the mistake of a configuration section."""
    try:
        yield
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"configuration section '{section}': {error}") from error


@contextlib.contextmanager
def _loading(key: str, path: str, what: str) -> Iterator[None]:
    """Turns what transformers says of a folder that it cannot load into a user's mistake."""
    try:
        yield
    except (OSError, ValueError) as error:
        said = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(f"{key} is {path}, which is no folder of {what}: {said[0]}") from error


def _require_folder(path: str, key: str) -> None:
    if not Path(path).is_dir():
        raise UserError(f"{key} is {path}, which is no folder")


def _model_config(section: ModelSection, token_ids: dict[str, int]) -> ConceptMoEVLConfig:
    """The configuration of the section, on top of that of `init_from` if there is one.

    Raises:
        UserError: a key or value that `ConceptMoEVLConfig` refuses.
    """
    given = {name: getattr(section, name) for name in _SECTIONS}
    if section.init_from is not None:
        base = _base_config(section.init_from).to_dict()
        for name in _SECTIONS:
            given[name] = base[name] if not given[name] else {**(base[name] or {}), **given[name]}
    with _mistakes_of("model"):
        return ConceptMoEVLConfig(**given, **token_ids)


def model_config(section: ModelSection, processor: ConceptMoEVLProcessor) -> ConceptMoEVLConfig:
    """The model's configuration with the processor's vocabulary and token ids.

    Raises:
        UserError: an unknown key or wrong value, or a vocabulary smaller than the tokenizer.
    """
    tokens = len(processor.tokenizer)
    if section.init_from is None and "vocab_size" not in section.text:
        rounded = -(-tokens // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE
        section.text = {**section.text, "vocab_size": rounded}
    config = _model_config(section, processor.special_token_ids)
    check_effect(section, config)
    if config.text.vocab_size < tokens:
        raise UserError(
            f"model.text.vocab_size is {config.text.vocab_size}, but the tokenizer has {tokens} "
            "tokens; "
            "raise it, or leave it out"
        )
    return config


def build_model(config: RunConfig, processor: ConceptMoEVLProcessor) -> Any:
    """The model of the run, the same weights on every rank, float32.

    `init_from` may be a model of text alone where the run has a vision section: tower and projector
    are then new (the tower pretrained, if the section says so). Learned thresholds that `init_from`
    lacks start where `conceptmoe-vl calibrate` has found them.

    Raises:
        UserError: see `model_config`; or the weights of `init_from` do not fit the configuration,
            or a ratio lies outside its calibration.
    """
    from conceptmoe_vl.modeling import ConceptMoEVLForConditionalGeneration as Model

    settings, source = model_config(config.model, processor), config.model.init_from
    set_seed(config.training.seed)
    if source is None:
        return _with_generation(Model(settings), config.model)
    if settings.vision is None or _base_config(source).vision is not None:
        model, loading = Model.from_pretrained(
            source, config=settings, output_loading_info=True, ignore_mismatched_sizes=True
        )
        _require_same_shapes(loading["mismatched_keys"], source)
        missing = set(loading["missing_keys"])
        dropped = set(loading["unexpected_keys"])
        if settings.vision is None:
            dropped = {name for name in dropped if not name.startswith(("vision.", "projector."))}
        _require_same_layers(missing, dropped, source)
    else:
        model, text = Model(settings), Model.from_pretrained(source)
        missing = _take_weights(model, text.state_dict(), source)
        model.generation_config = text.generation_config
    if _SHIFT in missing and settings.chunk.calibration is not None:
        with _mistakes_of("model.chunk.target_ratios"):
            model.language_model.chunk.dial.start_at_calibration()
    return _with_generation(model, config.model)


def _with_generation(model: Any, section: ModelSection) -> Any:
    """The model in float32, with the section's settings of generation."""
    before = model.generation_config
    model.generation_config = changed_generation(before, section.generation, "model.generation")
    return model.float()


def _require_same_shapes(mismatched: Iterable[Any], source: str) -> None:
    """Raises for the first weight that transformers has found in another shape: (name, shape in
    the file, shape in the model).
    """
    for name, found, wanted in sorted(mismatched, key=str):
        raise UserError(
            f"model.init_from {source} has {name} {tuple(found)}, the configuration asks for "
            f"{tuple(wanted)}; change model.text, model.chunk or model.vision"
        )


def _require_same_layers(missing: set[str], dropped: set[str], source: str) -> None:
    """Raises where layers would be new, or weights of `init_from` be dropped.

    New may be what chunking adds to a network: the router, ways into and out of another width,
    joint decoding. Dropped may be another router.
    """
    for name in sorted(missing):
        if not name.startswith(_ADDED) and ".joint." not in name:
            raise UserError(
                f"model.init_from {source} has no {name}, which the configuration asks for; "
                "change model.text or model.vision"
            )
    for name in sorted(dropped):
        if not name.startswith("language_model.chunk."):
            raise UserError(
                f"model.init_from {source} has {name}, which the configuration has no place for; "
                "change model.text, model.chunk or model.vision"
            )


def _take_weights(model: Any, weights: dict[str, Any], source: str) -> set[str]:
    """Loads all weights of a model of text alone; returns the names of those that it lacks."""
    own = model.state_dict()
    for name, tensor in weights.items():
        if name not in own or own[name].shape != tensor.shape:
            shape = tuple(own[name].shape) if name in own else "no such weight"
            raise UserError(
                f"model.init_from {source} has {name} {tuple(tensor.shape)}, the configuration "
                f"asks for {shape}; change model.text or model.chunk"
            )
    model.load_state_dict(weights, strict=False)
    return own.keys() - weights.keys()


def require_same_model(config: RunConfig) -> None:
    """Raises when the run's folder has a checkpoint of another model than the configuration's.

    Another model is also one of which other parameters are trained.

    Raises:
        UserError: names the first key that differs, with both values.
    """
    saved = Path(config.run_dir) / "config.yaml"
    if not saved.exists() or not checkpoints_in(Path(config.run_dir) / "checkpoints"):
        return
    before, now = _flat(_shaping(read_yaml(saved))), _flat(_shaping(config.to_dict()))
    for key in {**before, **now}:
        absent_before = key not in before or before[key] is None
        if before.get(key) != now.get(key) and not (
            key == "model.text.vocab_size" and key not in now
        ):
            was = "absent" if absent_before else repr(before[key])
            raise UserError(
                f"{config.run_dir} holds a run whose {key} is {was}, now it is "
                f"{now.get(key, 'absent')!r}; give another run_dir"
            )


def _shaping(config: dict) -> dict:
    """What of a configuration decides on the shape of a run's state; what does nothing is left out.

    The order of names does not matter.
    """
    training = config.get("training", {})
    layers, lora = training.get("freeze_layers") or {}, training.get("lora") or {}
    parts: dict[str, Any] = {"freeze": sorted(training.get("freeze") or [])}
    parts |= {f"freeze_layers.{stack}": each for stack, each in layers.items()}
    parts["lora"] = {"rank": lora.get("rank", 0)}
    if lora.get("rank"):
        names = ("targets", "train_whole")
        parts["lora"] |= {**lora, **{name: sorted(lora[name]) for name in names}}
    return {"model": config.get("model", {}), "training": parts}


def recover_run(config: RunConfig, world: World) -> None:
    """Puts back what a killed run had put aside, before anyone looks for it. Collective."""
    if world.is_main:
        for path in recover_folders(Path(config.run_dir)):
            print(f"{path} is back: a killed run had put it aside", file=sys.stderr)
    wait_for_all()


def begin_again(config: RunConfig, world: World) -> bool:
    """Clears what a run left that was killed before its first checkpoint. Collective.

    Only under `training.resume: auto`, with the very same configuration, and while no model was
    exported: then the same command can start the run anew, as a scheduler that restarts it expects.

    Returns:
        Whether there was such a run.
    """
    folder = Path(config.run_dir)
    saved = folder / "config.yaml"
    unsaved = (
        config.training.resume == "auto"
        and saved.exists()
        # nor a damaged one; one that was being written does not count
        and not any(path.name[0] != "." for path in (folder / "checkpoints").glob("*step-*"))
        and not (folder / "model").exists()
        and read_yaml(saved) == config.to_dict()
    )
    unsaved = share_from_main(unsaved)
    if unsaved and world.is_main:
        for name in LINES:
            (folder / name).unlink(missing_ok=True)
    wait_for_all()
    return unsaved


def _flat(values: dict, prefix: str = "") -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            result |= _flat(value, f"{prefix}{key}.")
        else:
            result[f"{prefix}{key}"] = value
    return result
