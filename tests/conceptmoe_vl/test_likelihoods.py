"""Log-likelihoods: those of one pass over prompt and continuation, whatever stands beside them."""

from __future__ import annotations

import random

import pytest
import torch

from conceptmoe_vl import likelihoods, token_scores
from conceptmoe_vl.asking import load_pretrained, question_messages
from conceptmoe_vl.continuous_batching import (
    LogLikelihood,
    Rendered,
    RequestError,
    generate_all,
    log_likelihoods,
)
from conceptmoe_vl.errors import UserError
from conceptmoe_vl.likelihoods import Continuations, score_continuations
from conceptmoe_vl.processing import EncodedSample
from conceptmoe_vl.requests import encode_prompt, padded_inputs
from tests.model_folder import save_model_folder
from tests.pictures import png
from tests.tiny import tokens_of_calls

CHOICES = ("a", "red", "no circle is there", "blue", "the shape")
MODES = [
    {"router": "cosine", "image_mode": "grid", "init": "random"},
    {"router": "linear", "merge": "mean", "image_mode": "sequential"},
    {"router": "fixed", "target_ratio": 3, "merge": "boundary", "concept_residual": "delta"},
    {"router": "none", "concept_residual": "delta"},
]


@pytest.fixture(scope="module", params=MODES, ids=lambda mode: mode["router"])
def pair(request, tmp_path_factory):
    folder = save_model_folder(tmp_path_factory.mktemp("m"), chunk=request.param, lively=True)
    return load_pretrained(folder, "cpu")


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return load_pretrained(save_model_folder(tmp_path_factory.mktemp("plain"), lively=True), "cpu")


def requests_of(count: int = 9) -> list[tuple]:
    """Questions with pictures and without, texts, one choice and several."""
    made: list[tuple] = []
    rng = random.Random(5)
    for number in range(count):
        words = " ".join(rng.choices(("what", "shape", "is", "it", "there"), k=1 + 3 * number))
        pictures = [png(number)] if number % 3 == 1 else []
        prompt = words if number % 3 == 2 else question_messages(pictures, words)
        choices = CHOICES[: 1 + number % 4]
        if isinstance(prompt, str):
            choices = tuple(f" {choice}" for choice in choices)
        made += [(prompt, choice) for choice in choices]
    return made


@torch.no_grad()
def one_pass(model, processor, prompt, continuation) -> tuple[LogLikelihood, list[int]]:
    """From all logits of the whole sequence, without a cache."""
    if isinstance(prompt, str):
        before = encode_prompt(model, processor, prompt)
        whole = processor(text=prompt + continuation)["input_ids"][0]
        ids = whole[len(before.input_ids) :]
    else:
        before = encode_prompt(model, processor, prompt)
        ids = processor.tokenizer(continuation, add_special_tokens=False)["input_ids"]
    sample = EncodedSample(before.input_ids + ids, [], before.images)
    scores = model(**padded_inputs(model, [sample])).logits[0].log_softmax(-1)
    scores = scores[len(before.input_ids) - 1 : -1]
    total = sum(scores[place, token].item() for place, token in enumerate(ids))
    scores[:, model.config.image_token_id] = float("-inf")
    return LogLikelihood(total, len(ids), scores.argmax(-1).tolist() == ids), ids


@pytest.mark.parametrize("batch_size", [1, 5])
@pytest.mark.parametrize("on_cpu", [True, False], ids=["alone", "together"])
def test_those_of_one_pass(pair, batch_size, on_cpu, monkeypatch):
    """Alone as on a CPU, and several prompts a call as elsewhere."""
    monkeypatch.setattr(likelihoods, "_prompts_alone", lambda model: on_cpu)
    requests = requests_of()
    results = log_likelihoods(*pair, requests, batch_size)
    for request, result in zip(requests, results, strict=True):
        expected, _ = one_pass(*pair, *request)
        assert result.tokens == expected.tokens
        assert result.is_greedy == expected.is_greedy
        assert result.sum == pytest.approx(expected.sum, abs=2e-4)


def test_the_same_to_the_bit_in_any_batch_and_order(pair):
    requests = requests_of()
    expected = log_likelihoods(*pair, requests, 1)
    for batch_size in (2, 5, 16):
        assert log_likelihoods(*pair, requests, batch_size) == expected
    starts = [n for n, r in enumerate(requests) if n == 0 or r[0] != requests[n - 1][0]]
    blocks = [range(a, b) for a, b in zip(starts, [*starts[1:], len(requests)], strict=True)]
    random.Random(1).shuffle(blocks)
    order = [n for block in blocks for n in block]
    shuffled = log_likelihoods(*pair, [requests[n] for n in order])
    assert shuffled == [expected[n] for n in order]
    half = len(blocks) // 2
    split = [n for block in blocks[:half] for n in block]
    assert log_likelihoods(*pair, [requests[n] for n in split]) == shuffled[: len(split)]


def test_the_greedy_answer_is_greedy(plain):
    model, processor = plain
    prompts = [question_messages([png(3)], "what is it?"), question_messages([], "is it red?")]
    answers = generate_all(model, processor, prompts, 5)
    groups, numbers = [], iter(range(4))
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = processor.tokenizer(answer.raw, add_special_tokens=False)["input_ids"]
        other = (*ids[:-1], ids[-1] - 1)
        sample = encode_prompt(model, processor, prompt)
        groups.append(Continuations(sample, [tuple(ids), other], [next(numbers), next(numbers)]))
    greedy = [r.is_greedy for r in score_continuations(model, iter(groups), 4)]
    assert greedy == [True, False, True, False]


def test_a_text_is_tokenised_as_lm_eval_does(plain):
    """Spaces at the end of the prompt go to the continuation; an empty prompt is the end mark."""
    model, processor = plain
    spaced, unspaced = log_likelihoods(model, processor, [("red ", "no"), ("red", " no")])
    assert spaced == unspaced
    (empty, blank) = log_likelihoods(model, processor, [("", "red"), ("  ", "red")])
    end = processor.tokenizer.eos_token
    expected, _ = one_pass(model, processor, end, "red")
    assert empty.sum == pytest.approx(expected.sum, abs=1e-4)
    expected, _ = one_pass(model, processor, end, "  red")
    assert blank.sum == pytest.approx(expected.sum, abs=1e-4)
    assert blank.tokens == expected.tokens


def test_a_rendered_prompt_with_images_is_its_conversation(plain):
    model, processor = plain
    messages = question_messages([png(1), png(2)], "is it red?")
    text = processor.apply_chat_template([messages], add_generation_prompt=True, tokenize=False)[0]
    rendered = Rendered(text, (png(1), png(2)))
    choices = ("no", "red is it")
    assert log_likelihoods(model, processor, [(rendered, choice) for choice in choices]) == (
        log_likelihoods(model, processor, [(messages, choice) for choice in choices])
    )
    with pytest.raises(RequestError, match="1 images are given"):
        log_likelihoods(model, processor, [(Rendered(text, (png(1),)), "no")])


def test_equal_choices_are_computed_once(plain, monkeypatch):
    """As rows of one product they differ in their last bits: then there would be no tie."""
    rows: list[tuple[int, ...]] = []
    go_on = likelihoods._continue

    def recorded(model, cache, part, *rest):
        rows.extend(ids for _, _, ids in part)
        go_on(model, cache, part, *rest)

    monkeypatch.setattr(likelihoods, "_continue", recorded)
    choices = ["no circle is there", "a", "no circle is there", "the shape", "a"]
    prompt = question_messages([], "what is there?")
    found = log_likelihoods(*plain, [(prompt, choice) for choice in choices])
    assert len(rows) == len(set(rows)) >= 2
    assert (found[0], found[1]) == (found[2], found[4])
    assert found[0] != found[3]


def test_the_prompt_of_several_choices_is_computed_once(plain, monkeypatch):
    model, processor = plain
    seen = tokens_of_calls(model, monkeypatch)
    prompt = question_messages([png(1)], "what shape is it?")
    tokens = len(encode_prompt(model, processor, prompt).input_ids)
    log_likelihoods(model, processor, [(prompt, letter) for letter in "abcd"])
    assert seen == [tokens]
    seen.clear()
    log_likelihoods(model, processor, [(prompt, "ab"), (prompt, "cd"), (prompt, "e")])
    assert seen == [tokens, 2]
    seen.clear()
    log_likelihoods(model, processor, [(prompt, "ab")])
    assert seen == [tokens + 1]


def test_pieces_of_the_logits_and_of_the_copies_change_nothing(plain, monkeypatch):
    requests = requests_of()
    expected = log_likelihoods(*plain, requests)
    monkeypatch.setattr(token_scores, "_LOGIT_ENTRIES", 2 * plain[0].config.text.vocab_size)
    monkeypatch.setattr(likelihoods, "_COPIED_TOKENS", 1)
    monkeypatch.setattr(likelihoods, "_CALL_TOKENS", 1)
    for result, other in zip(log_likelihoods(*plain, requests), expected, strict=True):
        assert result.sum == pytest.approx(other.sum, abs=1e-4)
        assert (result.tokens, result.is_greedy) == (other.tokens, other.is_greedy)


def test_a_compression(pair):
    requests = requests_of(4)
    results = log_likelihoods(*pair, requests, compression=1)
    assert (results == log_likelihoods(*pair, requests)) == (pair[0].config.chunk.router == "none")


def test_logits_that_are_not_finite_are_no_answer(tmp_path):
    model, processor = load_pretrained(save_model_folder(tmp_path / "m"), "cpu")
    model.get_output_embeddings().weight.data[3] = float("nan")
    prompt = question_messages([], "what is there?")
    for choices in (["red"], ["red", "no circle is there"]):
        with pytest.raises(UserError, match="logits that are not finite"):
            log_likelihoods(model, processor, [(prompt, choice) for choice in choices])
    with pytest.raises(UserError, match="logits that are not finite"):
        generate_all(model, processor, [prompt], 3)


def test_what_is_refused(plain):
    with pytest.raises(RequestError, match="has no token") as caught:
        log_likelihoods(*plain, [("a", "b"), ("a", "")])
    assert caught.value.number == 1
    with pytest.raises(RequestError, match="has no token"):
        log_likelihoods(*plain, [("", "")])
    with pytest.raises(RequestError, match="image") as caught:
        log_likelihoods(*plain, [("a", "b"), (question_messages([b"x"], "?"), "c")])
    assert caught.value.number == 1
    with pytest.raises(ValueError, match="batch_size is 0"):
        log_likelihoods(*plain, [("a", "b")], batch_size=0)
    assert log_likelihoods(*plain, []) == []


def test_losses_may_be_left_out(plain):
    """Where nobody wants a gradient."""
    model, processor = plain
    inputs = padded_inputs(model, [encode_prompt(model, processor, "what is the color?")])
    with torch.no_grad():
        whole, bare = model(**inputs), model(**inputs, return_losses=False)
    torch.testing.assert_close(whole.logits, bare.logits, atol=1e-4, rtol=0.0)
    assert whole.ratio_loss is not None
    assert (bare.ratio_loss, bare.balance_loss, bare.chunks.ratio) == (None, None, None)
    assert model(**inputs, return_losses=False).ratio_loss.requires_grad
