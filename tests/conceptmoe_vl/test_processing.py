"""The processor: exact ids and labels, the same by every entrance; saving and loading."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import AutoImageProcessor, AutoProcessor

from conceptmoe_vl.configuration import ConceptMoEVLConfig
from conceptmoe_vl.errors import UserError
from conceptmoe_vl.image_processing import ConceptMoEVLImageProcessor
from conceptmoe_vl.images import ImageError
from conceptmoe_vl.processing import (
    IGNORED,
    ConceptMoEVLProcessor,
    MessageError,
    build_processor,
    register,
    train_tokenizer,
)

TEXTS = ["what color is the shape? blue", "user assistant system 123", "is there a circle? yes no"]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = "<|im_end|><|im_start|><|vision_start|><|image_pad|><|vision_end|><|endoftext|>"


def new_processor(template: str | None = None, policy: str = "fixed") -> ConceptMoEVLProcessor:
    register()
    image_processor = ConceptMoEVLImageProcessor(policy, 16, 8, max_patches=12)
    return ConceptMoEVLProcessor(image_processor, train_tokenizer(TEXTS, 300), template)


@pytest.fixture(scope="module")
def processor() -> ConceptMoEVLProcessor:
    return new_processor()


def png(height: int = 16, width: int = 16, value: int = 7) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.full((height, width, 3), value, np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def user(*parts) -> dict:
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image", "image": part}
        for part in parts
    ]
    return {"role": "user", "content": content}


def answer(text: str) -> dict:
    return {"role": "assistant", "content": text}


CHATS = {
    "one turn": [user("is it?"), answer("yes")],
    "two turns": [user("is it?"), answer("yes"), user("and?"), answer("no")],
    "three turns": [user("a"), answer("b"), user("c"), answer("d e"), user("f"), answer("g")],
    "image": [user(png(), "what color?"), answer("blue")],
    "image behind": [user("look", png()), answer("blue")],
    "image alone": [user(png()), answer("a shape")],
    "images between": [user(png(), "or", png(), png(), "?"), answer("x"), user(png()), answer("y")],
    "system": [{"role": "system", "content": "be brief"}, user(png(), "q"), answer("a")],
    "empty answer": [user("is it?"), answer(""), user("really?"), answer("no")],
    "roles as text": [user("user assistant"), answer("assistant\nuser: system")],
    "typed special tokens": [user(f"what is {SPECIAL}?"), answer(f"it is {SPECIAL} indeed")],
    "spaces and lines": [user("  a \n\n"), answer("\n b  \n")],
    "other scripts": [user("猫はどこ? \U0001f408"), answer("café ÿ")],
}


def supervised_text(processor, sample) -> str:
    tokenizer = processor.tokenizer
    kept = [label for label in sample.labels if label != IGNORED]
    return tokenizer.decode(kept, skip_special_tokens=False)


@pytest.mark.parametrize("name", CHATS)
@pytest.mark.parametrize("template", [None, CHATML])
def test_supervised_are_the_answers_and_their_end_marks_alone(name, template):
    processor = new_processor(template)
    sample = processor.encode(CHATS[name])
    answers = [message["content"] for message in CHATS[name] if message["role"] == "assistant"]
    assert supervised_text(processor, sample) == "".join(f"{text}<|im_end|>" for text in answers)
    assert len(sample.labels) == len(sample.input_ids)
    assert all(
        label in (IGNORED, token)
        for label, token in zip(sample.labels, sample.input_ids, strict=True)
    )
    ends = sum(token == processor.tokenizer.eos_token_id for token in sample.input_ids)
    assert ends == len(CHATS[name])  # a typed end mark is text


@pytest.mark.parametrize("name", [name for name in CHATS if "special" not in name])
@pytest.mark.parametrize("template", [None, CHATML])
def test_all_entrances_give_the_same_ids(name, template):
    processor = new_processor(template)
    messages = CHATS[name]
    sample = processor.encode(messages)
    by_template = processor.apply_chat_template(messages)
    assert by_template["input_ids"].tolist() == [sample.input_ids]
    images = [
        part["image"]
        for message in messages
        if isinstance(message["content"], list)
        for part in message["content"]
        if part["type"] == "image"
    ]
    text = processor.apply_chat_template(messages, tokenize=False)
    by_call = processor(text=text, images=images or None)
    if (name, template) == ("spaces and lines", CHATML):
        return  # here the header's line break and the answer's would grow together
    assert by_call["input_ids"] == [sample.input_ids]
    if not images:
        whole = processor.tokenizer(text, add_special_tokens=False)["input_ids"]
        assert whole == sample.input_ids


@pytest.mark.parametrize("template", [None, CHATML])
def test_a_prompt_is_how_the_training_text_starts(template):
    processor = new_processor(template)
    for messages in CHATS.values():
        whole = processor.encode(messages).input_ids
        prompt = processor.encode(messages[:-1], add_generation_prompt=True).input_ids
        assert whole[: len(prompt)] == prompt
        continued = processor.tokenizer.decode(whole[len(prompt) :])
        assert continued.startswith(messages[-1]["content"])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.text(max_size=12), st.text(max_size=12)), min_size=1, max_size=3))
def test_any_text_survives(processor, pairs):
    messages = [turn for asked, said in pairs for turn in (user(asked), answer(said))]
    sample = processor.encode(messages)
    assert supervised_text(processor, sample) == "".join(f"{said}<|im_end|>" for _, said in pairs)
    asked = "".join(f"<|im_start|>{asked}<|im_end|>{said}<|im_end|>" for asked, said in pairs)
    assert processor.tokenizer.decode(sample.input_ids) == asked


def test_an_image_stands_between_its_marks(processor):
    sample = processor.encode([user("a", png(), "b"), answer("c")])
    ids = processor.special_token_ids
    start = sample.input_ids.index(ids["vision_start_token_id"])
    assert sample.input_ids[start : start + 6] == [
        ids["vision_start_token_id"],
        *[ids["image_token_id"]] * 4,
        ids["vision_end_token_id"],
    ]
    assert sample.labels[start : start + 6] == [IGNORED] * 6
    assert sample.images[0].num_tokens == 4


def test_an_image_in_an_answer_is_not_supervised(processor):
    said = {"role": "assistant", "content": user("see", png(), "there")["content"]}
    sample = processor.encode([user("where?"), said])
    assert supervised_text(processor, sample) == "seethere<|im_end|>"


def test_a_turn_costs_three_tokens(processor):
    pair = [user("is it?"), answer("yes")]
    one, two = (len(processor.encode(pair * count).input_ids) for count in (1, 2))
    words = sum(len(processor.tokenizer(text)["input_ids"]) for text in ("is it?", "yes"))
    assert two - one == words + 3


def test_there_is_exactly_one_bos():
    template = "{{ bos_token }}" + CHATML
    tokenizer = train_tokenizer(TEXTS, 300)
    tokenizer.bos_token = "<|endoftext|>"
    processor = ConceptMoEVLProcessor(ConceptMoEVLImageProcessor(), tokenizer, template)
    messages = CHATS["two turns"]
    text = processor.apply_chat_template(messages, tokenize=False)
    for ids in (processor.encode(messages).input_ids, processor(text=text)["input_ids"][0]):
        assert ids.count(tokenizer.bos_token_id) == 1
        assert ids[0] == tokenizer.bos_token_id


def test_batches_are_padded_on_the_left(processor):
    rows = [CHATS["image"], CHATS["one turn"], CHATS["images between"]]
    batch = processor.apply_chat_template(rows)
    for row, messages in enumerate(rows):
        ids = processor.encode(messages).input_ids
        gap = batch["input_ids"].shape[1] - len(ids)
        assert batch["input_ids"][row, gap:].tolist() == ids
        assert batch["attention_mask"][row].tolist() == [0] * gap + [1] * len(ids)
        assert (batch["input_ids"][row, :gap] == processor.tokenizer.pad_token_id).all()
    assert batch["pixel_values"].shape == (5, 3, 16, 16)
    assert batch["image_grid_hw"].tolist() == [[2, 2]] * 5


def test_native_pictures_carry_coordinates():
    processor = new_processor(policy="native")
    batch = processor.apply_chat_template([user(png(8, 24), png(16, 16), "?")])
    assert batch["image_grid_hw"].tolist() == [[1, 3], [2, 2]]
    assert batch["pixel_values"].shape == (2, 4, 192)
    assert batch["patch_valid"].sum(1).tolist() == [3, 4]
    placeholders = (batch["input_ids"] == processor.image_token_id).sum()
    assert placeholders == 7


@pytest.mark.parametrize("template", [None, CHATML])
def test_a_picture_in_tiles_stands_between_one_pair_of_marks(template):
    processor = new_processor(template, "tiles")
    messages = [user("a", png(16, 32), png(16, 16), "?"), answer("x")]
    sample = processor.encode(messages)
    assert [image.planes for image in sample.images] == [((2, 2), (2, 4)), ((2, 2),)]
    ids = processor.special_token_ids
    start, pad, end = (ids[f"{name}_token_id"] for name in ("vision_start", "image", "vision_end"))
    place = sample.input_ids.index(start)
    both = [start, *[pad] * 12, end, start, *[pad] * 4, end]
    assert sample.input_ids[place : place + 20] == both
    batch = processor.apply_chat_template(messages)
    assert batch["input_ids"][0].tolist() == sample.input_ids
    assert batch["image_grid_hw"].tolist() == [[2, 2], [2, 4], [2, 2]]
    assert batch["pixel_values"].shape == (4, 3, 16, 16)
    text = processor.apply_chat_template(messages, tokenize=False)
    images = [png(16, 32), png(16, 16)]
    assert processor(text=text, images=images)["input_ids"][0] == sample.input_ids


def test_every_length_limit_is_kept_or_refused(processor):
    messages = [user(png(), "and", png()), answer("x")]
    full = len(processor.encode(messages).input_ids)
    for limit in range(1, full + 5):
        if limit < full:
            with pytest.raises(UserError, match=f"needs {full} tokens.*limit is {limit};"):
                processor.apply_chat_template(messages, max_length=limit)
            continue
        batch = processor.apply_chat_template(messages, max_length=limit)
        assert (batch["input_ids"] == processor.image_token_id).sum() == 8
        assert batch["pixel_values"].shape[0] == 2


@pytest.mark.parametrize(
    ("messages", "reason", "message"),
    [
        ([], "missing_field", "no messages"),
        ("hello", "missing_field", "no messages"),
        ([{"role": "user"}], "missing_field", "message 0 has no 'content'"),
        ([{"content": "x"}], "missing_field", "message 0 has no 'role'"),
        ([{"role": "human", "content": "x"}], "bad_role", "'human'"),
        ([answer("x")], "bad_order", "message 0 is of role 'assistant', but 'user' is due"),
        ([user("x"), user("y")], "bad_order", "message 1"),
        ([{"role": "user", "content": 5}], "bad_content", "message 0 is 5"),
        ([{"role": "user", "content": ["x"]}], "bad_content", "holds the part 'x'"),
        ([{"role": "user", "content": [{"type": "image"}]}], "missing_field", "names no image"),
        ([user("x"), answer("y")], "bad_order", "an answer follows a user turn"),
    ],
)
def test_messages_that_are_no_conversation(processor, messages, reason, message):
    with pytest.raises(MessageError, match=message) as caught:
        processor.encode(messages, add_generation_prompt=True)
    assert caught.value.reason == reason


def test_a_broken_picture_names_its_file(processor, tmp_path):
    path = tmp_path / "broken.png"
    path.write_bytes(png()[:40])
    with pytest.raises(ImageError, match=r"broken\.png"):
        processor.encode([user(path, "what?")], add_generation_prompt=True)


def test_texts_and_images_must_match_in_number(processor):
    with pytest.raises(ValueError, match=r"hold 1 .* but 2 images"):
        processor(text="<|image_pad|>", images=[png(), png()])


def test_unknown_options_are_refused(processor):
    with pytest.raises(ValueError, match="truncation"):
        processor.apply_chat_template(CHATS["one turn"], truncation=True)


@pytest.mark.parametrize("template", [None, CHATML])
def test_saved_and_loaded_it_is_the_same(template, tmp_path):
    processor = new_processor(template)
    processor.save_pretrained(tmp_path)
    ConceptMoEVLConfig(vision=None).save_pretrained(tmp_path)
    own = ConceptMoEVLProcessor.from_pretrained(tmp_path)
    auto = AutoProcessor.from_pretrained(tmp_path)
    assert type(auto) is ConceptMoEVLProcessor
    assert type(AutoImageProcessor.from_pretrained(tmp_path)) is ConceptMoEVLImageProcessor
    expected = processor.apply_chat_template(list(CHATS.values()))
    for loaded in (own, auto):
        assert loaded.image_processor.to_dict() == processor.image_processor.to_dict()
        found = loaded.apply_chat_template(list(CHATS.values()))
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_processor_is_built_from_the_configuration():
    config = ConceptMoEVLConfig(
        vision={"model": "vit_tiny_patch16_224", "image_size": 32},
        image_token_id=4,
        vision_start_token_id=3,
        vision_end_token_id=5,
    )
    processor = build_processor(config, train_tokenizer(TEXTS, 300))
    assert processor.encode([user(png(), "?"), answer("x")]).images[0].grid == (2, 2)
    text_only = build_processor(None, train_tokenizer(TEXTS, 300))
    with pytest.raises(ValueError, match="takes no images"):
        text_only.encode([user(png(), "?"), answer("x")])


def test_a_tokenizer_without_image_marks_gets_them():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    foreign = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="?")
    with pytest.raises(ValueError, match=r"no special token <\|vision_start\|>"):
        ConceptMoEVLProcessor(ConceptMoEVLImageProcessor(), foreign)
    processor = build_processor(None, foreign)
    assert processor.encode([user("a b"), answer("b")]).labels[-2] == 1
    assert processor.special_token_ids["pad_token_id"] == foreign.get_vocab()["<|endoftext|>"]


def test_templates_that_cannot_be_learnt_from_are_refused():
    with pytest.raises(ValueError, match="never learn to stop"):
        new_processor("{% for m in messages %}{{ m['content'] }}\n{% endfor %}").encode(
            CHATS["one turn"]
        )
    with pytest.raises(ValueError, match=r"writes the messages \[1\] of 2"):
        new_processor("{{ messages[-1]['content'] }}<|im_end|>").encode(CHATS["one turn"])


def test_a_trained_tokenizer_writes_every_byte():
    tokenizer = train_tokenizer(TEXTS, 262)
    text = "".join(map(chr, range(1, 0x250))) + "\U0001f408\u200d"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.convert_tokens_to_ids("<|endoftext|>") == 0
    with pytest.raises(ValueError, match="vocab_size is 261"):
        train_tokenizer(TEXTS, 261)
