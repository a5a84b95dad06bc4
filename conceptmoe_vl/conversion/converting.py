"""From a checkpoint's folder to a ConceptMoE-VL model's folder."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.utils import logging as transformers_logging

from conceptmoe_vl.configuration import ConceptMoEVLConfig
from conceptmoe_vl.conversion.families import Family, read_source, text_fields
from conceptmoe_vl.conversion.mapping import Mapping
from conceptmoe_vl.conversion.reading import DTYPES, Checkpoint
from conceptmoe_vl.conversion.settings import (
    ConversionSettings,
    chunk_section,
    text_section,
    vision_section,
)
from conceptmoe_vl.conversion.vocabulary import (
    Vocabulary,
    end_ids,
    extend_vocabulary,
    load_tokenizer,
)
from conceptmoe_vl.conversion.writing import Computed, NewTensor, write_weights
from conceptmoe_vl.errors import UserError
from conceptmoe_vl.generation_settings import leave_out_sampling
from conceptmoe_vl.modeling import ConceptMoEVLForConditionalGeneration
from conceptmoe_vl.processing import ConceptMoEVLProcessor, build_processor
from conceptmoe_vl.training.run_files import replace_folder

REPORT = "conversion.json"
GENERATION = "generation_config.json"
_DTYPE_NAMES = {value: name for name, value in DTYPES.items()}


@dataclasses.dataclass(frozen=True)
class Conversion:
    """All that a conversion will write, decided and checked before its first byte.

    Attributes:
        config: of the converted model. processor: with the extended tokenizer.
        generation: settings of generation. tensors: the weights. report: what was done, as JSON.
    """

    config: ConceptMoEVLConfig
    processor: ConceptMoEVLProcessor
    generation: GenerationConfig
    tensors: list[NewTensor]
    report: dict[str, Any]

    @property
    def bytes(self) -> int:
        return sum(tensor.size for tensor in self.tensors)


def plan_conversion(folder: Path, settings: ConversionSettings) -> Conversion:
    """Reads a source's headers, configuration and tokenizer, and decides what is written.

    Raises:
        UserError: see the module's functions: an unsupported family, a missing shard, shapes that
            differ from the configuration, a vocabulary smaller than the tokenizer, wrong options.
    """
    if not folder.is_dir():
        raise UserError(f"there is no folder '{folder}'; name the folder of a checkpoint")
    family, source = read_source(folder)
    checkpoint = Checkpoint(folder)
    shape = (source.vocab_size, source.hidden_size)
    embedding = checkpoint.tensor(f"{family.prefix}.embed_tokens.weight", shape)
    fields = {**text_fields(folder, family, source), "vocab_size": embedding.shape[0]}
    text = text_section(settings, family, fields, source.num_hidden_layers)
    chunk, vision = chunk_section(settings), vision_section(settings)
    tokenizer = load_tokenizer(settings.tokenizer or folder)
    vocabulary = extend_vocabulary(tokenizer, embedding.shape[0], folder)
    text = dataclasses.replace(text, vocab_size=vocabulary.rows)
    try:
        processor = build_processor(None, vocabulary.tokenizer, vocabulary.chat_template)
        ids = processor.special_token_ids
        generation = _generation(folder, source, vocabulary, ids)
        ids["eos_token_id"] = generation.eos_token_id
        config = ConceptMoEVLConfig(
            text=text,
            chunk=chunk,
            vision=vision,
            **ids,
            dtype=DTYPES[embedding.dtype],
            architectures=[ConceptMoEVLForConditionalGeneration.__name__],
        )
        processor = build_processor(config, vocabulary.tokenizer, vocabulary.chat_template)
        scaffold = _scaffold(config, settings.seed)
    except UserError:
        raise
    except (ValueError, RuntimeError, OSError) as error:  # OSError: no weights from timm
        raise UserError(
            f"the options do not make a model: {' '.join(str(error).split())[:300]}"
        ) from error
    rows = (vocabulary.new_rows, vocabulary.known)
    mapping = Mapping(checkpoint, family, text, config.chunk, *rows, settings.seed)
    tensors = mapping.tensors() + _new_parts(scaffold, mapping.dtype)
    _check_whole(config, tensors)
    report = _report(folder, family, source, config, vocabulary)
    return Conversion(config, processor, generation, tensors, report)


def _scaffold(config: ConceptMoEVLConfig, seed: int) -> ConceptMoEVLForConditionalGeneration:
    """A model without layers, whose tower, projector and chunk module start as in training."""
    chunk = dataclasses.replace(config.chunk, joint_decoding_layers=0)
    text = dataclasses.replace(
        config.text,
        vocab_size=1,
        encoder_layers=0,
        concept_layers=0,
        decoder_layers=0,
        concept_loops=[],
    )
    ids = {"image_token_id": 0} if config.vision is not None else {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ConceptMoEVLForConditionalGeneration(
            ConceptMoEVLConfig(text=text, chunk=chunk, vision=config.vision, **ids)
        )


def _new_parts(scaffold: ConceptMoEVLForConditionalGeneration, dtype: str) -> list[NewTensor]:
    """Chunk module, tower and projector, as parameters of the converted model."""
    new = []
    for name, tensor in scaffold.state_dict().items():
        if name.startswith(("vision.", "projector.", "language_model.chunk.")):
            value = tensor.to(DTYPES[dtype]) if tensor.is_floating_point() else tensor
            size = value.numel() * value.element_size()
            piece = Computed(partial(_same, value.reshape(-1)), size)
            kind = _DTYPE_NAMES.get(value.dtype)
            if kind is None:
                raise UserError(
                    f"{name} of the vision tower is {value.dtype}; choose another tower"
                )
            new.append(NewTensor(name, kind, tuple(value.shape), (piece,)))
    return new


def _same(value: torch.Tensor) -> torch.Tensor:
    return value


def _check_whole(config: ConceptMoEVLConfig, tensors: list[NewTensor]) -> None:
    """Raises unless the tensors are those of the model.

    Raises:
        RuntimeError: the mapping has a fault.
    """
    with torch.device("meta"):
        model = ConceptMoEVLForConditionalGeneration(config)
    expected = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    if config.text.tie_word_embeddings:
        expected.pop("lm_head.weight", None)
    given = {tensor.name: tensor.shape for tensor in tensors}
    wrong = [
        f"{name} {given.get(name)} instead of {expected.get(name)}"
        for name in sorted(expected.keys() | given.keys())
        if expected.get(name) != given.get(name)
    ]
    if wrong:
        raise RuntimeError(f"the mapping misses the model: {'; '.join(wrong[:5])}")


def _generation(
    folder: Path, source: Any, vocabulary: Vocabulary, ids: dict[str, int]
) -> GenerationConfig:
    """The source's settings of generation, which also stop at the end mark of the template."""
    generation = read_generation(folder)
    found = (folder / GENERATION).is_file()
    given = generation.eos_token_id if found else getattr(source, "eos_token_id", None)
    known = [given] if isinstance(given, int) else given or []
    if not all(isinstance(index, int) for index in known):
        raise UserError(f"'{folder}' has the eos_token_id {given!r}; give ids in {GENERATION}")
    # A configuration class's default may lie beyond a small vocabulary.
    known = [index for index in known if index < vocabulary.rows]
    generation.eos_token_id = end_ids(known, vocabulary.end_id)
    generation.pad_token_id = ids.get("pad_token_id")
    generation.bos_token_id = ids.get("bos_token_id")
    return generation


def read_generation(folder: Path) -> GenerationConfig:
    """A folder's settings of generation, the defaults where it has none.

    Many published ones set a temperature without `do_sample`. Transformers reads but does not write
    such: what has no effect without sampling is left out.

    Raises:
        UserError: the file is damaged, or its settings contradict each other.
    """
    path = folder / GENERATION
    if not path.is_file():
        return GenerationConfig()
    try:
        generation = GenerationConfig.from_pretrained(folder, local_files_only=True)
        leave_out_sampling(generation)
        generation.validate(strict=True)
    except (OSError, ValueError, TypeError) as error:
        raise UserError(
            f"'{path}' cannot be used: {' '.join(str(error).split())[:300]}; mend or remove it"
        ) from error
    return generation


def _report(
    folder: Path,
    family: Family,
    source: Any,
    config: ConceptMoEVLConfig,
    vocabulary: Vocabulary,
) -> dict[str, Any]:
    text = config.text
    return {
        "source": str(folder),
        "family": source.model_type,
        "upcycled": family.dense,
        "layers": [text.encoder_layers, text.concept_layers, text.decoder_layers],
        "source_tokens": vocabulary.known,
        "added_tokens": vocabulary.added,
        "new_rows": vocabulary.new_rows,
        "rows": vocabulary.rows,
        "chat_template": "project" if vocabulary.template_note else "source",
        "chat_template_note": vocabulary.template_note,
    }


def check_target(target: Path, source: Path) -> None:
    """Refuses a folder that cannot be written, before anything is read.

    Raises:
        UserError: something stands under that name, or it lies in the source's folder.
    """
    refuse_existing(target)
    if target.resolve().is_relative_to(source.resolve()):
        raise UserError(
            f"'{target}' lies inside '{source}', which is read; name a folder elsewhere"
        )


def refuse_existing(target: Path) -> None:
    if target.exists():
        raise UserError(f"'{target}' exists already; name another folder, or remove it")


@contextlib.contextmanager
def written_beside(target: Path) -> Iterator[Path]:
    """A folder beside `target` that takes its name when the block ends, and vanishes if it fails.

    Raises:
        UserError: `target` exists already, another process is writing it, or a folder cannot be
            made beside it.
    """
    beside = target.with_name(f".{target.name}.writing")
    try:
        with _claimed(beside, target):
            try:
                refuse_existing(target)
                for left in beside.iterdir():  # by a killed process
                    shutil.rmtree(left) if left.is_dir() else left.unlink()
                yield beside
                replace_folder(beside, target)
            finally:
                shutil.rmtree(beside, ignore_errors=True)
    except OSError as error:
        raise UserError(
            f"'{target}' cannot be written: {error.strerror or error}; make room, or write "
            "elsewhere"
        ) from error


@contextlib.contextmanager
def _claimed(beside: Path, target: Path) -> Iterator[None]:
    """The folder, held by the kernel's lock: a killed process leaves none.

    Raises:
        UserError: another process holds it.
    """
    beside.mkdir(parents=True, exist_ok=True)
    held = os.open(beside, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # who held it before may just have renamed or removed it
        if not beside.exists() or not os.path.samestat(os.fstat(held), beside.stat()):
            raise BlockingIOError
        yield
    except BlockingIOError as error:
        raise UserError(
            f"another process is writing '{target}'; wait for it, or name another folder"
        ) from error
    finally:
        os.close(held)


def write_conversion(
    conversion: Conversion,
    target: Path,
    max_shard_bytes: int,
    advance: Callable[[int], object] = lambda _: None,
) -> None:
    """Writes the model's folder: weights, configuration, processor, generation settings, report.

    Args:
        advance: told how many bytes of weights were written.

    Raises:
        UserError: the folder exists already, or the disk is full.
    """
    transformers_logging.disable_progress_bar()
    with written_beside(target) as folder:
        write_weights(conversion.tensors, folder, max_shard_bytes, advance)
        conversion.config.save_pretrained(folder)
        conversion.generation.save_pretrained(folder)
        conversion.processor.save_pretrained(folder)
        text = json.dumps(conversion.report, indent=2) + "\n"
        (folder / REPORT).write_text(text, encoding="utf-8")


def convert(
    folder: Path,
    target: Path,
    settings: ConversionSettings | None = None,
    advance: Callable[[int], object] = lambda _: None,
) -> Conversion:
    """Converts a checkpoint's folder into a model's folder.

    Raises:
        UserError: see `plan_conversion` and `write_conversion`.
    """
    settings = settings or ConversionSettings()
    check_target(target, folder)
    conversion = plan_conversion(folder, settings)
    write_conversion(conversion, target, settings.max_shard_bytes, advance)
    return conversion
