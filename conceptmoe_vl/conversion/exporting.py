"""From a model without chunking back to a checkpoint that transformers and its users know.

The layers of E, C and D stand one behind the other, and the fused experts are cut one by one, as in
the published files of Qwen3-MoE. What that family cannot express is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.utils import logging as transformers_logging

from conceptmoe_vl.asking import check_model_folder
from conceptmoe_vl.configuration import ConceptMoEVLConfig
from conceptmoe_vl.conversion.converting import read_generation, written_beside
from conceptmoe_vl.conversion.reading import DTYPES, Checkpoint, StoredTensor
from conceptmoe_vl.conversion.writing import Copied, NewTensor, write_weights
from conceptmoe_vl.errors import UserError
from conceptmoe_vl.processing import ConceptMoEVLProcessor
from conceptmoe_vl.sections import TextConfig


@dataclasses.dataclass(frozen=True)
class Export:
    """All that an export will write.

    Attributes:
        config: of the exported model. generation: its settings. processor: whose tokenizer it has.
        tensors: the weights.
    """

    config: Qwen3MoeConfig
    generation: GenerationConfig
    processor: ConceptMoEVLProcessor
    tensors: list[NewTensor]

    @property
    def bytes(self) -> int:
        return sum(tensor.size for tensor in self.tensors)


def plan_export(folder: Path) -> Export:
    """Decides what the Qwen3-MoE checkpoint of a model's folder holds.

    Raises:
        UserError: no model, one that this family cannot express, or a tensor is missing or of
            another shape.
    """
    check_model_folder(folder)
    try:
        config = ConceptMoEVLConfig.from_pretrained(folder, local_files_only=True)
        processor = ConceptMoEVLProcessor.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"the model in '{folder}' cannot be loaded: {reason}") from error
    _refuse_what_is_not_expressed(folder, config)
    checkpoint = Checkpoint(folder)
    tensors = _tensors(checkpoint, config.text)
    exported = _config(config, checkpoint.tensor("embed_tokens.weight").dtype)
    _check_whole(exported, tensors)
    return Export(exported, read_generation(folder), processor, tensors)


def _refuse_what_is_not_expressed(folder: Path, config: ConceptMoEVLConfig) -> None:
    text, chunk = config.text, config.chunk
    checks: tuple[tuple[str, Any, Any], ...] = (
        ("chunk.router", chunk.router, "none"),
        ("chunk.concept_residual", chunk.concept_residual, "delta"),
        ("chunk.joint_decoding_layers", chunk.joint_decoding_layers, 0),
        ("text.concept_loops", text.concept_loops, []),
        ("text.concept_hidden_size", text.width_of_concepts, text.hidden_size),
        ("text.concept_num_experts", text.experts_of_concepts, text.num_experts),
        ("text.concept_num_experts_per_tok", text.experts_per_concept, text.num_experts_per_tok),
        ("text.num_shared_experts", text.num_shared_experts, 0),
        ("text.qk_norm", text.qk_norm, True),
        ("text.qk_norm_over", text.qk_norm_over, "head"),
        ("vision", config.vision and config.vision.model, None),
    )
    for name, value, needed in checks:
        if value != needed:
            raise UserError(
                f"'{folder}' cannot be written as qwen3_moe: its {name} is {value!r}, that family "
                f"needs {needed!r}"
            )
    if text.attention_bias == "qkv":
        raise UserError(
            f"'{folder}' cannot be written as qwen3_moe: its text.attention_bias is 'qkv', that "
            "family has biases everywhere ('all') or nowhere ('none')"
        )


def _config(config: ConceptMoEVLConfig, dtype: str) -> Qwen3MoeConfig:
    text = config.text
    rope = {"rope_type": "default", **(text.rope_scaling or {}), "rope_theta": text.rope_theta}
    return Qwen3MoeConfig(
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        num_hidden_layers=text.encoder_layers + text.concept_layers + text.decoder_layers,
        num_attention_heads=text.num_attention_heads,
        num_key_value_heads=text.num_key_value_heads,
        head_dim=text.head_dim,
        max_position_embeddings=text.max_position_embeddings,
        initializer_range=text.initializer_range,
        rms_norm_eps=text.rms_norm_eps,
        tie_word_embeddings=text.tie_word_embeddings,
        rope_parameters=rope,
        attention_bias=text.attention_bias == "all",
        moe_intermediate_size=text.moe_intermediate_size,
        num_experts=text.num_experts,
        num_experts_per_tok=text.num_experts_per_tok,
        norm_topk_prob=text.norm_topk_prob,
        pad_token_id=config.pad_token_id,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        dtype=DTYPES[dtype],
        architectures=[Qwen3MoeForCausalLM.__name__],
    )


def _tensors(source: Checkpoint, text: TextConfig) -> list[NewTensor]:
    def same(target: str, name: str) -> NewTensor:
        stored = source.tensor(name)
        return NewTensor(target, stored.dtype, stored.shape, (Copied.whole(stored),))

    tensors = [same("model.embed_tokens.weight", "embed_tokens.weight")]
    number = 0
    for stage in ("encoder", "concept", "decoder"):
        for index in range(getattr(text, f"{stage}_layers")):
            name, target = f"language_model.{stage}.layers.{index}.", f"model.layers.{number}."
            for own in sorted(n for n in source if n.startswith(name) and ".experts." not in n):
                tensors.append(same(target + own.removeprefix(name), own))
            tensors += _experts(source, text, target + "mlp.experts", name + "mlp.experts")
            number += 1
    tensors.append(same("model.norm.weight", "language_model.norm.weight"))
    if not text.tie_word_embeddings:
        tensors.append(same("lm_head.weight", "lm_head.weight"))
    return tensors


def _experts(source: Checkpoint, text: TextConfig, target: str, name: str) -> list[NewTensor]:
    experts, d, f = text.num_experts, text.hidden_size, text.moe_intermediate_size
    gate_up = source.tensor(f"{name}.gate_up_proj", (experts, 2 * f, d))
    down = source.tensor(f"{name}.down_proj", (experts, d, f))

    def part(expert: int, kind: str, stored: StoredTensor, half: int) -> NewTensor:
        size = f * d * (stored.row_bytes // (stored.shape[1] * stored.shape[2]))
        piece = Copied(stored, expert * stored.row_bytes + half * size, size)
        shape = (d, f) if kind == "down_proj" else (f, d)
        return NewTensor(f"{target}.{expert}.{kind}.weight", stored.dtype, shape, (piece,))

    tensors = []
    for expert in range(experts):
        tensors.append(part(expert, "gate_proj", gate_up, 0))
        tensors.append(part(expert, "up_proj", gate_up, 1))
        tensors.append(part(expert, "down_proj", down, 0))
    return tensors


def _check_whole(config: Qwen3MoeConfig, tensors: list[NewTensor]) -> None:
    """Raises unless the tensors beside the experts are those of the exported model.

    Raises:
        UserError: the folder's weights are not those of its configuration.
    """
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(config)
    expected = {name: tuple(p.shape) for name, p in model.named_parameters()}
    expected = {name: shape for name, shape in expected.items() if ".experts." not in name}
    given = {tensor.name: tensor.shape for tensor in tensors if ".experts." not in tensor.name}
    for name in sorted(expected.keys() | given.keys()):
        if expected.get(name) != given.get(name):
            raise UserError(
                f"the weights do not fit config.json: {name} is {given.get(name, 'missing')} "
                f"instead of {expected.get(name, 'absent')}; export the model again"
            )


def write_export(
    planned: Export,
    target: Path,
    max_shard_bytes: int,
    advance: Callable[[int], object] = lambda _: None,
) -> None:
    """Writes the checkpoint's folder: weights, configuration, generation settings, tokenizer.

    Raises:
        UserError: the folder exists already, or the disk is full.
    """
    transformers_logging.disable_progress_bar()
    with written_beside(target) as folder:
        write_weights(planned.tensors, folder, max_shard_bytes, advance)
        planned.config.save_pretrained(folder)
        planned.generation.save_pretrained(folder)
        tokenizer = planned.processor.tokenizer
        tokenizer.chat_template = planned.processor.chat_template
        tokenizer.save_pretrained(folder)
