"""Streaming and stopping (R21): split characters are held back, any of several ends stops."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, TextIteratorStreamer, TextStreamer

from conceptmoe_vl import ConceptMoEVLForConditionalGeneration, ConceptMoEVLProcessor
from conceptmoe_vl.streaming import stream_text
from tests.model_folder import save_model_folder

TEXTS = [
    "plain words, then more",
    "a face 🙂 and a family 👨‍👩‍👧 in one",
    "你好,世界。图片里有什么?",
    "mixed 图 and 🙂\nnew line — naïve café\n",
    "🙂🙂🙂",
]


class Forced(LogitsProcessor):
    """Only the next id of a row's list can be chosen; rows start at a common prompt length."""

    def __init__(self, rows: list[list[int]], prompt: int) -> None:
        self.rows, self.prompt = rows, prompt

    def __call__(self, input_ids, scores):
        forced = torch.full_like(scores, float("-inf"))
        for row, ids in enumerate(self.rows):
            forced[row, ids[min(input_ids.shape[1] - self.prompt, len(ids) - 1)]] = 0.0
        return forced


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model(folder):
    return ConceptMoEVLForConditionalGeneration.from_pretrained(folder).eval()


@pytest.fixture(scope="module")
def processor(folder):
    return ConceptMoEVLProcessor.from_pretrained(folder)


def ids_of(processor, text):
    return processor.tokenizer(text, add_special_tokens=False).input_ids


def prompt_of(processor):
    messages = [{"role": "user", "content": [{"type": "text", "text": "what?"}]}]
    return processor.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )


def generate(model, processor, answers, **options):
    """The new ids of a batch of equal prompts that are forced to these answers."""
    inputs = prompt_of(processor)
    if len(answers) > 1:
        inputs = {name: value.repeat(len(answers), 1) for name, value in inputs.items()}
    width = inputs["input_ids"].shape[1]
    forced = LogitsProcessorList([Forced(answers, width)])
    options = {"max_new_tokens": 200, "do_sample": False, **options}
    return model.generate(**inputs, logits_processor=forced, **options)[:, width:]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("through", ["tokenizer", "processor"])
def test_no_character_is_streamed_in_halves(model, processor, text, through):
    answer = [*ids_of(processor, text), processor.tokenizer.eos_token_id]
    if not text.isascii():
        assert any("\ufffd" in processor.tokenizer.decode([i]) for i in answer)
    decoder = processor.tokenizer if through == "tokenizer" else processor
    streamer = TextIteratorStreamer(decoder, skip_prompt=True, timeout=60, skip_special_tokens=True)
    arguments = {"streamer": streamer}
    thread = threading.Thread(target=generate, args=(model, processor, [answer]), kwargs=arguments)
    thread.start()
    pieces = list(streamer)
    thread.join()
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert len(pieces) > 1


@pytest.mark.parametrize("text", TEXTS)
def test_printed_pieces_join_to_the_text(model, processor, text, capsys):
    answer = [*ids_of(processor, text), processor.tokenizer.eos_token_id]
    streamer = TextStreamer(processor.tokenizer, skip_prompt=True, skip_special_tokens=True)
    generate(model, processor, [answer], streamer=streamer)
    assert capsys.readouterr().out == text + "\n"


def test_streams_of_assisted_decoding(model, processor, capsys):
    """Several tokens arrive at once. The end is not the mark that a prompt's turns end with:
    transformers 5.17 stops there before the first token.
    """
    end = ids_of(processor, "z")[0]
    answer = [*ids_of(processor, TEXTS[1]), end]
    streamer = TextStreamer(processor.tokenizer, skip_prompt=True, skip_special_tokens=True)
    options = {"prompt_lookup_num_tokens": 4, "eos_token_id": end}
    generate(model, processor, [answer], streamer=streamer, **options)
    assert capsys.readouterr().out == TEXTS[1] + "z\n"


def test_any_of_several_ends_stops_its_row(model, processor):
    """Each row ends with its own mark; what follows is padding."""
    body = ids_of(processor, "is there a circle? no red shape")
    ends = [processor.tokenizer.eos_token_id, ids_of(processor, "x")[0], ids_of(processor, "z")[0]]
    assert len(set(ends)) == 3
    answers = [[*body[: 3 + row], end, *body] for row, end in enumerate(ends)]
    before = model.generation_config.eos_token_id
    model.generation_config.eos_token_id = ends
    try:
        out = generate(model, processor, answers)
    finally:
        model.generation_config.eos_token_id = before
    pad = model.generation_config.pad_token_id
    assert out.shape[1] == 6
    for row, end in enumerate(ends):
        ids = out[row].tolist()
        assert ids[: 4 + row] == [*body[: 3 + row], end]
        assert set(ids[4 + row :]) <= {pad}


@pytest.mark.parametrize("use_cache", [True, False])
def test_a_stop_string_ends_in_the_middle_of_tokens(model, processor, use_cache):
    """A string split over several tokens, one of its characters over bytes."""
    text = "it is red 🙂. STOP and no more"
    answer = ids_of(processor, text)
    options = {"tokenizer": processor.tokenizer, "use_cache": use_cache, "eos_token_id": None}
    for stop, expected in (("STOP", "it is red 🙂. STOP"), ("🙂.", "it is red 🙂.")):
        out = generate(model, processor, [answer], stop_strings=[stop, "never"], **options)
        assert processor.tokenizer.decode(out[0]).startswith(expected)
        assert len(out[0]) < len(answer)


@pytest.mark.parametrize("text", TEXTS)
def test_a_stream_of_text(model, processor, text):
    inputs = prompt_of(processor)
    ids = [*ids_of(processor, text), processor.tokenizer.eos_token_id]
    forced = LogitsProcessorList([Forced([ids], inputs["input_ids"].shape[1])])
    pieces = list(
        stream_text(model, processor.tokenizer, inputs, max_new_tokens=200, logits_processor=forced)
    )
    assert "".join(pieces) == text
    assert all(pieces)
    assert "\ufffd" not in "".join(pieces)


def test_a_failure_reaches_the_reader_of_a_stream(model, processor, monkeypatch):
    calls = itertools.count()
    forward = model.language_model.decoder.forward

    def broken(*arguments, **options):
        if next(calls) == 3:
            raise RuntimeError("the machine is on fire")
        return forward(*arguments, **options)

    monkeypatch.setattr(model.language_model.decoder, "forward", broken)
    inputs = prompt_of(processor)
    ids = ids_of(processor, "one two three four")
    forced = LogitsProcessorList([Forced([ids], inputs["input_ids"].shape[1])])
    stream = stream_text(
        model, processor.tokenizer, inputs, max_new_tokens=50, logits_processor=forced
    )
    pieces = []
    with pytest.raises(RuntimeError, match="on fire"):
        pieces.extend(stream)
    assert next(calls) == 4  # nothing was generated behind the failure


def test_a_reader_that_leaves_ends_the_generation(model, processor):
    steps = itertools.count()

    class Counting(Forced):
        def __call__(self, input_ids, scores):
            next(steps)
            return super().__call__(input_ids, scores)

    inputs = prompt_of(processor)
    ids = ids_of(processor, "a b " * 400)
    forced = LogitsProcessorList([Counting([ids], inputs["input_ids"].shape[1])])
    stream = stream_text(
        model, processor.tokenizer, inputs, max_new_tokens=len(ids), logits_processor=forced
    )
    next(stream)
    stream.close()
    done = next(steps)
    assert done < len(ids)
    assert next(steps) == done + 1  # and nobody went on counting


def test_a_failure_while_generating_reaches_the_caller(model, processor, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("the machine is on fire")

    monkeypatch.setattr(model.language_model.decoder, "forward", broken)
    with pytest.raises(RuntimeError, match="on fire"):
        generate(model, processor, [ids_of(processor, "red")])
