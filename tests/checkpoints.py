"""Small random checkpoints of other families, written by transformers itself, with a tokenizer."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tests.tiny import randomize

ROWS, LAYERS = 320, 4
COMMON = {
    "vocab_size": ROWS,
    "hidden_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": None,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {"head_dim": 12, "moe_intermediate_size": 16, **EXPERTS},
    "Olmoe": EXPERTS,
    "Mixtral": {"num_local_experts": 5},
    "Qwen2Moe": {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 20, **EXPERTS},
    "Llama": {"tie_word_embeddings": True},
    "Mistral": {"sliding_window": None},
    "Qwen2": {},
    "Qwen3": {"head_dim": 12},
}
# A template with a header for every turn, which takes no system turn.
TEMPLATE = (
    "{%- for m in messages -%}{%- if m['role'] == 'system' -%}{{ raise_exception('no system') }}"
    "{%- endif -%}[{{ m['role'] }}]{{ m['content'] }}"
    "{%- if m['role'] == 'assistant' -%}{{ eos_token }}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}[assistant]{%- endif -%}"
)


@functools.cache
def _trained() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<unk>", "</s>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = ["the quick brown fox jumps over the lazy dog", "what is in the picture?"] * 4
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def foreign_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer without pad token and without this project's special tokens."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained().to_str()), eos_token="</s>"
    )
    tokenizer.chat_template = template
    return tokenizer


def make_source(family: str, seed: int = 0, **fields: Any) -> PreTrainedModel:
    """A causal language model of a family with random weights, every path alive."""
    config = getattr(transformers, f"{family}Config")(**{**COMMON, **FAMILIES[family], **fields})
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    randomize(model, seed)
    return model.eval()


def make_vl_source(seed: int = 0, **fields: Any) -> PreTrainedModel:
    """A Qwen3-VL-MoE with a small vision tower."""
    text = {**COMMON, "head_dim": 12, "moe_intermediate_size": 16, **EXPERTS, **fields}
    text["rope_parameters"] = {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [2, 2, 2],
    }
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": 32,
        "patch_size": 4,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    }
    ids = {"image_token_id": 316, "video_token_id": 317}
    ids |= {"vision_start_token_id": 318, "vision_end_token_id": 319}
    config = transformers.Qwen3VLMoeConfig(text_config=text, vision_config=vision, **ids)
    model = transformers.Qwen3VLMoeForConditionalGeneration(config)
    randomize(model, seed)
    return model.eval()


def save_source(
    model: PreTrainedModel,
    folder: Path,
    one_by_one: bool = True,
    template: str | None = TEMPLATE,
    **saving: Any,
) -> Path:
    """Writes a checkpoint's folder with its tokenizer.

    Args:
        one_by_one: the layout of the family's published files; False: as transformers has it in
            memory, experts fused.
        saving: further arguments of `save_pretrained`.
    """
    model.save_pretrained(folder, save_original_format=one_by_one, **saving)
    foreign_tokenizer(template).save_pretrained(folder)
    return folder


@torch.no_grad()
def source_logits(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """`[B, N, V]` logits of the original model."""
    return model(input_ids=ids).logits
