"""From a model folder to an answered question: what `ask`, demo.py and the evaluation share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers.utils import logging as transformers_logging

from conceptmoe_vl.configuration import ConceptMoEVLConfig
from conceptmoe_vl.errors import UserError

_HOW_TO_GET_ONE = "train one (make quickstart) or name another folder with --model"


@dataclass(frozen=True)
class Answer:
    """What the model said to one conversation.

    Fields:
        text: the answer, without special tokens and surrounding white space.
        raw: the generated tokens as text, special tokens included, padding left out.
        prompt_tokens, answer_tokens: counts without padding; the end mark counts.
        prompt: the prompt as text, each run of image placeholders shortened to `<|image_pad|>*N`.
    """

    text: str
    raw: str
    prompt: str
    prompt_tokens: int
    answer_tokens: int


def check_model_folder(folder: str | Path) -> Path:
    """The folder, if it looks like a saved ConceptMoE-VL model.

    Raises:
        UserError: it does not exist, is a file, has no weights or no configuration, or is another
            kind of model.
    """
    folder = Path(folder)
    if not folder.exists():
        raise UserError(f"there is no model folder '{folder}'; {_HOW_TO_GET_ONE}")
    if not folder.is_dir():
        raise UserError(
            f"'{folder}' is a file; --model takes the folder that training wrote (RUN/model)"
        )
    config_file = folder / "config.json"
    if not config_file.is_file():
        inside = folder / "model"
        hint = (
            f"did you mean '{inside}'?" if (inside / "config.json").is_file() else _HOW_TO_GET_ONE
        )
        raise UserError(f"'{folder}' is no model folder: it holds no config.json; {hint}")
    try:
        config = json.loads(config_file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(
            f"'{config_file}' cannot be read as JSON ({error}); export the model again"
        ) from error
    kind = config.get("model_type") if isinstance(config, dict) else None
    if kind != ConceptMoEVLConfig.model_type:
        raise UserError(
            f"'{config_file}' describes a model of type {kind!r}; this program loads "
            f"'{ConceptMoEVLConfig.model_type}'; {_HOW_TO_GET_ONE}"
        )
    if not any(folder.glob("*.safetensors")):
        raise UserError(f"'{folder}' holds no weights (*.safetensors); export the model again")
    return folder


def load_pretrained(folder: str | Path, device: str | None = None) -> tuple[Any, Any]:
    """Model (in evaluation mode) and processor of a folder.

    Args:
        folder: what `train.py` exports as `RUN/model`.
        device: a torch device; None takes CUDA if there is one. The model is float32 on a CPU,
            where bfloat16 decodes slower, and bfloat16 elsewhere.

    Raises:
        UserError: the folder holds no complete model, or the device cannot be used. A weight that
            is missing, left over or of another shape is an error: a part left at random answers
            nonsense with confidence.
    """
    from conceptmoe_vl import ConceptMoEVLForConditionalGeneration, ConceptMoEVLProcessor

    folder = check_model_folder(folder)
    place = _usable_device(device)
    dtype = torch.float32 if place.type == "cpu" else torch.bfloat16
    transformers_logging.disable_progress_bar()
    try:
        model, loading = ConceptMoEVLForConditionalGeneration.from_pretrained(
            folder, dtype=dtype, local_files_only=True, output_loading_info=True
        )
        processor = ConceptMoEVLProcessor.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"the model in '{folder}' cannot be loaded: {reason}; export it again"
        ) from error
    for fault in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        keys = sorted(str(key) for key in loading.get(fault, ()))
        if keys:
            raise UserError(
                f"the weights in '{folder}' do not fit its config.json: {len(keys)} "
                f"{fault.replace('_', ' ')}, the first is {keys[0]}; export the model again"
            )
    return model.to(place).eval(), processor


def _usable_device(name: str | None) -> torch.device:
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        first_line = str(error).splitlines()[0]
        raise UserError(
            f"device '{name}' cannot be used here: {first_line}; give --device cpu"
        ) from error
    return device


def check_finite(are_finite: bool) -> None:
    """Raises `UserError` unless the model's logits are: the likeliest of NaN is the first token."""
    if not are_finite:
        raise UserError(
            "the model computes logits that are not finite: its weights are damaged or overflow "
            "in this dtype; take an earlier checkpoint"
        )


def question_messages(images: Sequence[Any], question: str) -> list[dict]:
    """One user turn: the images in their order, then the question.

    Args:
        images: what the processor takes: paths, bytes or PIL images.
    """
    content: list[dict] = [{"type": "image", "image": image} for image in images]
    return [{"role": "user", "content": [*content, {"type": "text", "text": question}]}]


@torch.inference_mode()
def answer_conversations(
    model: Any,
    processor: Any,
    conversations: Sequence[list[dict]],
    max_new_tokens: int = 64,
    compression: float | None = None,
) -> list[Answer]:
    """Greedy answers to several conversations in one left-padded batch.

    Args:
        conversations: lists of messages, each ending with a user turn.
        max_new_tokens: most tokens an answer may have.
        compression: wanted tokens per concept; None: what the model was trained for.

    Raises:
        UserError: an image cannot be decoded, the model takes no images, or it cannot reach the
            compression.
    """
    check_reachable(model, compression)
    for conversation in conversations:
        check_images(model, conversation)
    inputs = processor.apply_chat_template(
        list(conversations),
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        padding=True,
    ).to(model.device)
    ids = model.generate(
        **inputs, max_new_tokens=max_new_tokens, do_sample=False, compression=compression
    )
    start = inputs["input_ids"].shape[1]
    prompt_mask = inputs["attention_mask"].bool().cpu()
    rows = zip(ids.cpu(), prompt_mask, strict=True)
    return [
        make_answer(row[:start][mask].tolist(), row[start:].tolist(), model, processor)
        for row, mask in rows
    ]


def check_reachable(model: Any, compression: float | None) -> None:
    """Raises unless the model can compress by this ratio.

    Raises:
        UserError: it is no ratio, or the model was not calibrated for it.
    """
    try:
        model.language_model.chunk.dial.check(compression)
    except ValueError as error:
        raise UserError(str(error)) from error


def check_images(model: Any, messages: list[dict]) -> None:
    """Raises `UserError` where a text-only model is shown an image."""
    if model.config.vision is None and _has_image(messages):
        raise UserError(
            "this model takes no images (its configuration has vision: null); ask in words alone"
        )


def _has_image(messages: list[dict]) -> bool:
    contents = (message["content"] for message in messages)
    return any(
        part["type"] == "image"
        for parts in contents
        if not isinstance(parts, str)
        for part in parts
    )


def make_answer(
    prompt: Sequence[int],
    generated: Sequence[int],
    model: Any,
    processor: Any,
    stop: Sequence[str] = (),
) -> Answer:
    """The answer that generated tokens are.

    Args:
        prompt: ids without padding. generated: ids behind it; what follows an end mark is padding.
        stop: the text ends before the first of these strings.
    """
    tokenizer = processor.tokenizer
    generated = up_to_end(generated, end_ids(model))
    text = tokenizer.decode(generated, skip_special_tokens=True)
    return Answer(
        text=min((text.split(mark)[0] for mark in stop), key=len, default=text).strip(),
        raw=tokenizer.decode(generated, skip_special_tokens=False),
        prompt=_readable_prompt(list(prompt), tokenizer, model.config.image_token_id),
        prompt_tokens=len(prompt),
        answer_tokens=len(generated),
    )


def end_ids(model: Any) -> frozenset[int]:
    """The ids that end an answer."""
    ids = model.generation_config.eos_token_id
    return frozenset([ids] if isinstance(ids, int) else ids or ())


def up_to_end(generated: Sequence[int], ends: frozenset[int]) -> list[int]:
    """The tokens up to the first end mark, itself included."""
    found = next((n for n, token in enumerate(generated, start=1) if token in ends), None)
    return list(generated[:found])


def _readable_prompt(ids: list[int], tokenizer: Any, image_token_id: int | None) -> str:
    pieces: list[str] = []
    start = 0
    while start < len(ids):
        is_image = ids[start] == image_token_id
        end = start
        while end < len(ids) and (ids[end] == image_token_id) == is_image:
            end += 1
        if is_image:
            pieces.append(f"{tokenizer.convert_ids_to_tokens(image_token_id)}*{end - start}")
        else:
            pieces.append(tokenizer.decode(ids[start:end], skip_special_tokens=False))
        start = end
    return "".join(pieces)
