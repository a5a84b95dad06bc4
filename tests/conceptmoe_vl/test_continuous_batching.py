"""Continuous batching: every prompt gets the text that it gets alone, whatever stands beside it."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conceptmoe_vl.asking import answer_conversations, load_pretrained, question_messages
from conceptmoe_vl.continuous_batching import RequestError, generate_all
from tests.combos import ALL, ROUTERS, model_of
from tests.model_folder import save_model_folder
from tests.pictures import png
from tests.tiny import make_document, padded

MODES = [
    {"router": "cosine", "image_mode": "grid", "init": "random"},
    {"router": "cosine", "image_mode": "sequential", "merge": "mean", "init": "random"},
    {"router": "linear", "merge": "boundary", "image_mode": "grid"},
    {"router": "fixed", "target_ratio": 3, "concept_residual": "delta"},
    {"router": "none", "concept_residual": "delta"},
]
WORDS = ("what", "is", "the", "color", "of", "shape", "there", "a", "circle", "red", "blue", "no")


@pytest.fixture(scope="module", params=MODES, ids=lambda mode: "-".join(map(str, mode.values())))
def pair(request, tmp_path_factory):
    """A model whose answers end by many different marks, so at different steps."""
    folder = save_model_folder(tmp_path_factory.mktemp("model"), chunk=request.param, lively=True)
    model, processor = load_pretrained(folder, "cpu")
    model.generation_config.eos_token_id = list(range(20, 60))
    return model, processor


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return load_pretrained(save_model_folder(tmp_path_factory.mktemp("plain"), lively=True), "cpu")


def conversations_of(count: int, seed: int = 0) -> list[list[dict]]:
    """Prompts of 1 to 40 words, every third of them with one or two pictures."""
    rng = random.Random(seed)
    made = []
    for number in range(count):
        words = " ".join(rng.choices(WORDS, k=rng.randint(1, 40)))
        pictures = [png(seed=10 * number + n) for n in range(rng.randint(1, 2))]
        made.append(question_messages(pictures if number % 3 == 1 else [], words))
    return made


def alone(model, processor, conversations, **options):
    return [answer_conversations(model, processor, [one], **options)[0] for one in conversations]


@pytest.mark.parametrize("batch_size", [1, 2, 5, 16])
def test_answers_are_those_that_prompts_get_alone(pair, batch_size):
    conversations = conversations_of(19)
    expected = alone(*pair, conversations, max_new_tokens=8)
    assert len({answer.answer_tokens for answer in expected}) > 3  # they end at different steps
    seen = {}
    answers = generate_all(
        *pair,
        iter(conversations),
        max_new_tokens=8,
        batch_size=batch_size,
        on_answer=seen.__setitem__,
    )
    assert answers == expected
    assert [seen[number] for number in range(len(expected))] == expected


def test_the_order_of_the_prompts_changes_nothing(pair):
    conversations = conversations_of(11, seed=1)
    expected = generate_all(*pair, conversations, max_new_tokens=6, batch_size=4)
    order = list(range(11))
    random.Random(3).shuffle(order)
    answers = generate_all(*pair, [conversations[i] for i in order], max_new_tokens=6, batch_size=4)
    assert answers == [expected[i] for i in order]


def test_a_compression_holds_for_prompt_and_answer(pair):
    conversations = conversations_of(9)
    expected = alone(*pair, conversations, max_new_tokens=6, compression=1)
    assert generate_all(*pair, conversations, 6, batch_size=4, compression=1) == expected


@pytest.mark.parametrize("limit", [1, 200])
def test_the_cache_stays_within_its_budget(plain, limit, monkeypatch):
    """One row at a time where a budget holds no more; the answers stay the same."""
    model, processor = plain
    conversations = conversations_of(15, seed=2)
    expected = generate_all(model, processor, conversations, 8, batch_size=5)
    held = []
    forward = type(model).forward

    def watched(self, *args, **inputs):
        out = forward(self, *args, **inputs)
        held.append(len(out.cache.token_lengths) * max(out.cache.token_lengths))
        return out

    monkeypatch.setattr(type(model), "forward", watched)
    answers = generate_all(model, processor, conversations, 8, 5, max_cached_tokens=limit)
    assert answers == expected
    longest = max(answer.prompt_tokens for answer in expected) + 8
    assert max(held) <= max(limit, longest)


def test_prompts_are_taken_as_there_is_room(plain):
    """Pictures are fetched when their prompt is taken, which is when rows are free."""
    taken, most = [], []

    def prompts():
        for number, conversation in enumerate(conversations_of(20)):
            taken.append(number)
            yield conversation

    done = []

    def on_answer(number, _):
        done.append(number)
        most.append(len(taken) - len(done))

    generate_all(*plain, prompts(), 3, batch_size=4, on_answer=on_answer)
    assert sorted(done) == list(range(20))
    assert max(most) <= 4 + 4 + 1  # asked, just taken for them, and one ahead


def test_images_may_be_functions(plain):
    fetched = []

    def fetch():
        fetched.append(1)
        return png(seed=4)

    lazy = [question_messages([fetch], "what is it?")]
    assert generate_all(*plain, lazy, 4) == generate_all(
        *plain, [question_messages([png(seed=4)], "what is it?")], 4
    )
    assert fetched == [1]


def test_rendered_texts_are_prompts_too(plain):
    model, processor = plain
    conversations = [question_messages([], "what is it?"), question_messages([], "red")]
    texts = processor.apply_chat_template(conversations, add_generation_prompt=True, tokenize=False)
    assert generate_all(model, processor, texts, 5) == generate_all(
        model, processor, conversations, 5
    )


def test_an_answer_ends_at_a_stop_string(plain):
    """At the first token that completes one, also where it begins inside a token."""
    model, processor = plain
    conversations = conversations_of(8, seed=5)
    whole = generate_all(model, processor, conversations, 24)
    for number, answer in enumerate(whole):
        text = answer.raw
        stop = text[len(text) // 2 : len(text) // 2 + 2]
        if "\ufffd" in stop:
            continue
        (cut,) = generate_all(model, processor, [conversations[number]], 24, stop=("", stop))
        assert cut.raw.endswith(stop) or stop in cut.raw
        assert cut.text == answer.text.split(stop)[0].strip()
        assert answer.raw.startswith(cut.raw)
        assert stop not in processor.tokenizer.decode(
            processor.tokenizer(cut.raw, add_special_tokens=False)["input_ids"][:-1]
        )
    together = generate_all(model, processor, conversations, 24, 3, stop=("e", "a"))
    single = [
        generate_all(model, processor, [one], 24, 1, stop=("e", "a"))[0] for one in conversations
    ]
    assert together == single


def test_settings_that_change_the_greedy_text_hold(plain):
    model, processor = plain
    conversations = conversations_of(5)
    ordinary = generate_all(model, processor, conversations, 8)
    model.generation_config.repetition_penalty = 3.0
    try:
        expected = alone(model, processor, conversations, max_new_tokens=8)
        assert generate_all(model, processor, conversations, 8, batch_size=4) == expected
    finally:
        model.generation_config.repetition_penalty = 1.0
    assert expected != ordinary


def test_a_prompt_that_cannot_be_asked_is_named(plain):
    conversations = conversations_of(4)
    conversations[2] = question_messages([b"no picture"], "what?")
    with pytest.raises(RequestError, match="image") as caught:
        generate_all(*plain, conversations, 4)
    assert caught.value.number == 2


def test_no_prompts_and_bad_numbers(plain):
    assert generate_all(*plain, []) == []
    with pytest.raises(ValueError, match="batch_size is 0"):
        generate_all(*plain, [], batch_size=0)
    with pytest.raises(ValueError, match="max_new_tokens is 0"):
        generate_all(*plain, [], max_new_tokens=0)


# --- joining caches -------------------------------------------------------------------------------


@torch.no_grad()
def filled(model, documents):
    return model(**padded(documents), use_cache=True).cache


@torch.no_grad()
def step(model, cache, ids):
    out = model(input_ids=torch.tensor(ids)[:, None], cache=cache, use_cache=True)
    return out.logits[:, -1]


@pytest.mark.parametrize("mode", ["text", "sequential", "grid8", "tiles"])
@pytest.mark.parametrize("router", ROUTERS)
def test_joined_rows_go_on_as_if_alone(router, mode):
    model = model_of((router, "mean" if mode == "grid8" else "sum", "delta", mode))
    parts = [6] if mode == "text" else [3, "image", 4]
    one, other = [make_document(parts, 1), make_document([9], 2)], [make_document([1], 3)]
    joined = filled(model, one)
    joined.join(filled(model, other), keep=[1])
    assert joined.token_lengths == (9, 1)
    caches = [filled(model, [one[1]]), filled(model, other)]
    for ids in ([7, 8], [9, 9], [30, 11], [12, 50]):
        both = step(model, joined, ids)
        for row, cache in enumerate(caches):
            torch.testing.assert_close(both[row], step(model, cache, ids[row : row + 1])[0])
    assert joined.concept_lengths == tuple(cache.concept_lengths[0] for cache in caches)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.data())
def test_any_sequence_of_steps_joins_and_selections(data):
    """Every row's logits are those of a cache of its own."""
    model = model_of(data.draw(st.sampled_from([c for c in ALL if c[3] == "text"])))
    rng = random.Random(data.draw(st.integers(0, 99)))

    def fresh(count):
        documents = [make_document([rng.randint(1, 12)], rng.randint(0, 999)) for _ in range(count)]
        return filled(model, documents), [filled(model, [document]) for document in documents]

    cache, own = fresh(data.draw(st.integers(1, 3)))
    for _ in range(data.draw(st.integers(1, 6))):
        what = data.draw(st.sampled_from(["step", "join", "rows"]))
        if what == "step":
            ids = [rng.randint(5, 60) for _ in own]
            together = step(model, cache, ids)
            for row, alone_ in enumerate(own):
                torch.testing.assert_close(
                    together[row], step(model, alone_, [ids[row]])[0], atol=1e-4, rtol=0
                )
        elif what == "join":
            more, others = fresh(data.draw(st.integers(1, 3)))
            keep = data.draw(st.lists(st.integers(0, len(own) - 1), max_size=3, unique=True))
            cache.join(more, keep)
            own = [*(own[row] for row in keep), *others]
        else:
            chosen = data.draw(st.lists(st.integers(0, len(own) - 1), min_size=1, max_size=3))
            before = cache.token_lengths
            copied = cache.rows(chosen)
            assert cache.token_lengths == before
            cache, own = copied, [own[row].rows([0]) for row in chosen]
    assert cache.token_lengths == tuple(alone_.token_lengths[0] for alone_ in own)


def test_copies_of_rows_do_not_touch_each_other():
    model = model_of(("cosine", "sum", "add", "text"))
    cache = filled(model, [make_document([6], 1), make_document([4], 2)])
    first, second = cache.rows([0, 1]), cache.rows([0, 1])
    expected = step(model, cache.rows([0, 1]), [9, 9])
    step(model, first, [30, 31])
    torch.testing.assert_close(step(model, second, [9, 9]), expected, rtol=0, atol=0)
    torch.testing.assert_close(step(model, cache, [9, 9]), expected, rtol=0, atol=0)


def test_a_joined_cache_is_as_long_as_its_longest_row_needs():
    model = model_of(("cosine", "sum", "add", "text"))
    cache = filled(model, [make_document([300], 1), make_document([3], 2)])
    cache.join(filled(model, [make_document([5], 3)]), keep=[1])
    assert cache.encoder[0].keys.shape[:3] == (2, 1, 5 + 64)


def test_what_join_refuses():
    text, other = (
        model_of(("cosine", "sum", "add", "text")),
        model_of(("none", "sum", "add", "text")),
    )
    cache = filled(text, [make_document([4])])
    with pytest.raises(ValueError, match="without rows"):
        cache.join(type(cache)(text.config))
    wrong = filled(other, [make_document([4])])
    wrong.decoder = wrong.decoder * 2
    with pytest.raises(ValueError, match="1 and 2 decoder layers"):
        cache.join(wrong)
