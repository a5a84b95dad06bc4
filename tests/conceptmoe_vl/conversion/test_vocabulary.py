"""Tokenizer, rows of the embedding, chat template and processor of converted models."""

from __future__ import annotations

import json

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor, GenerationConfig

from conceptmoe_vl.asking import answer_conversations, load_pretrained, question_messages
from conceptmoe_vl.conversion.converting import convert
from conceptmoe_vl.conversion.exporting import plan_export, write_export
from conceptmoe_vl.conversion.settings import ConversionSettings
from conceptmoe_vl.conversion.vocabulary import end_ids, extend_vocabulary
from conceptmoe_vl.prompts import CHAT_TEMPLATE, MessageError
from conceptmoe_vl.tokenizing import SPECIAL_TOKENS, TURN_END
from tests.checkpoints import TEMPLATE, foreign_tokenizer, make_source, save_source

KNOWN = len(foreign_tokenizer())
VISION = {
    "model": "vit_tiny_patch16_224",
    "model_args": {"patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2},
    "image_size": 24,
}


def converted(tmp_path, rows=320, template=TEMPLATE, **settings):
    """Source model, its folder and the converted one's."""
    source = make_source("Llama", vocab_size=rows, tie_word_embeddings=False)
    folder = save_source(source, tmp_path / "source", template=template)
    convert(folder, tmp_path / "out", ConversionSettings(**settings))
    return source, folder, tmp_path / "out"


@pytest.mark.parametrize(("rows", "expected"), [(320, 320), (KNOWN, KNOWN + 6), (303, 306)])
def test_new_rows_are_the_mean_and_the_others_stay(rows, expected, tmp_path):
    source, _, out = converted(tmp_path, rows)
    model, processor = load_pretrained(out, "cpu")
    added = [processor.tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS]
    assert added == list(range(KNOWN, KNOWN + 6))
    assert model.config.text.vocab_size == expected
    for ours, theirs in (
        (model.embed_tokens.weight, source.model.embed_tokens.weight),
        (model.lm_head.weight, source.lm_head.weight),
    ):
        mean = theirs[:KNOWN].double().mean(0).float()
        torch.testing.assert_close(ours[added], mean.expand(6, -1), atol=1e-6, rtol=1e-6)
        kept = [row for row in range(rows) if row not in added]
        assert torch.equal(ours[kept], theirs[kept])


def test_rows_are_filled_up_to_a_multiple_of_64_where_the_source_had_one(tmp_path):
    tokenizer = foreign_tokenizer()
    tokenizer.add_tokens([f"t{i}" for i in range(320 - KNOWN)])
    vocabulary = extend_vocabulary(tokenizer, 320, tmp_path)
    assert vocabulary.rows == 384
    assert vocabulary.new_rows == list(range(320, 384))
    assert vocabulary.added == list(SPECIAL_TOKENS)


def test_tokens_that_the_source_has_are_not_added(tmp_path):
    """As in Qwen's tokenizers: nothing is added, and no row changes."""
    tokenizer = foreign_tokenizer()
    tokenizer.add_tokens(list(SPECIAL_TOKENS), special_tokens=True)
    vocabulary = extend_vocabulary(tokenizer, 320, tmp_path)
    assert (vocabulary.added, vocabulary.new_rows, vocabulary.rows) == ([], [], 320)


def test_the_sources_template_is_kept(tmp_path):
    source, _, out = converted(tmp_path)
    model, processor = load_pretrained(out, "cpu")
    assert processor.chat_template == TEMPLATE
    report = json.loads((out / "conversion.json").read_text())
    assert (report["chat_template"], report["chat_template_note"]) == ("source", "")
    end = processor.tokenizer.eos_token_id
    assert model.generation_config.eos_token_id == end == source.config.eos_token_id
    sample = processor.encode(
        [{"role": "user", "content": "what?"}, {"role": "assistant", "content": "the fox"}]
    )
    supervised = [label for label in sample.labels if label >= 0]
    assert processor.tokenizer.decode(supervised) == "the fox</s>"


def test_a_template_that_refuses_system_turns_says_so_in_one_line(tmp_path):
    _, _, out = converted(tmp_path)
    processor = AutoProcessor.from_pretrained(out)
    messages = [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]
    with pytest.raises(MessageError, match="refuses the roles system, user: no system"):
        processor.apply_chat_template(messages)


@pytest.mark.parametrize(
    ("template", "note"),
    [
        (None, "the source has none"),
        ("{%- for m in messages -%}{{ m['content'] }}\n{%- endfor -%}", "no special token"),
        ("{{ messages[0]['content'] }}", "it must write each once"),
        ("{%- for m in messages -%}{{ m['content'] + 1 }}{%- endfor -%}", "str"),
        ("{% for %}", "expected"),
        ("{{ 1 / 0 }}", "division by zero"),
    ],
    ids=["none", "no_end_mark", "first_turn_only", "fault", "syntax", "division"],
)
def test_a_template_that_does_not_fit_is_replaced(template, note, tmp_path):
    _, _, out = converted(tmp_path, template=template)
    model, processor = load_pretrained(out, "cpu")
    assert processor.chat_template == CHAT_TEMPLATE
    report = json.loads((out / "conversion.json").read_text())
    assert report["chat_template"] == "project"
    assert note.lower() in report["chat_template_note"].lower()
    end = processor.tokenizer.convert_tokens_to_ids(TURN_END)
    assert model.generation_config.eos_token_id == [1, end]
    assert model.config.eos_token_id == [1, end]


def test_end_ids():
    assert end_ids([], 5) == 5
    assert end_ids([5], 5) == 5
    assert end_ids([3, 7], 5) == [3, 7, 5]


def test_generation_settings_are_the_sources(tmp_path):
    source = make_source("Llama")
    source.generation_config.update(temperature=0.5, do_sample=True, top_k=7, eos_token_id=[2, 9])
    folder = save_source(source, tmp_path / "source")
    convert(folder, tmp_path / "out", ConversionSettings())
    generation = load_pretrained(tmp_path / "out", "cpu")[0].generation_config
    assert (generation.temperature, generation.top_k, generation.do_sample) == (0.5, 7, True)
    assert generation.eos_token_id == [2, 9, 1]


def test_a_temperature_without_sampling(tmp_path):
    """Published settings have it, and transformers does not write it."""
    folder = save_source(make_source("Qwen3Moe"), tmp_path / "source")
    settings = {"temperature": 0.6, "top_p": 0.9, "max_new_tokens": 7}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    convert(folder, tmp_path / "out", ConversionSettings(router="none"))
    model, _ = load_pretrained(tmp_path / "out", "cpu")
    assert model.generation_config.max_new_tokens == 7
    assert not model.generation_config.do_sample
    model.save_pretrained(tmp_path / "again")
    (tmp_path / "out" / "generation_config.json").write_text(json.dumps(settings))
    write_export(plan_export(tmp_path / "out"), tmp_path / "back", 10**9)
    assert GenerationConfig.from_pretrained(tmp_path / "back").max_new_tokens == 7


def test_an_attached_tower_answers_about_a_picture(tmp_path):
    """Through the functions behind demo.py and `ask`, and through the Auto classes."""
    plan = {"text": {}, "vision": VISION}
    _, _, out = converted(tmp_path, plan=plan, template=None, seed=3)
    model, processor = load_pretrained(out, "cpu")
    assert {p.dtype for p in model.vision.parameters()} == {torch.float32}
    messages = question_messages([Image.new("RGB", (30, 20), "red")], "what is it?")
    (answer,) = answer_conversations(model, processor, [messages], max_new_tokens=3)
    assert "<|vision_start|><|image_pad|>*9<|vision_end|>" in answer.prompt
    again = AutoModelForImageTextToText.from_pretrained(out)
    assert torch.equal(again.projector[1].weight, model.projector[1].weight)
    assert again.vision.model.pos_embed.abs().sum() > 0
    assert type(AutoProcessor.from_pretrained(out)) is type(processor)


def test_the_same_seed_gives_the_same_tower(tmp_path):
    plan = {"text": {}, "vision": VISION}
    source = save_source(make_source("Llama"), tmp_path / "source")
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        convert(source, tmp_path / name, ConversionSettings(plan=plan, seed=seed))
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b != c


def test_a_text_model_refuses_pictures_and_answers_words(tmp_path):
    _, _, out = converted(tmp_path)
    model, processor = load_pretrained(out, "cpu")
    assert model.config.vision is None
    (answer,) = answer_conversations(model, processor, [question_messages([], "what is it?")], 3)
    assert answer.prompt == "[user]what is it?[assistant]"
