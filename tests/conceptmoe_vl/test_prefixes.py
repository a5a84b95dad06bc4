"""Prefixes: the values of one pass, and the same bits whether a part is found or computed."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from conceptmoe_vl import prefixes as module
from conceptmoe_vl.asking import load_pretrained, question_messages
from conceptmoe_vl.continuous_batching import Rendered, generate_all, log_likelihoods
from conceptmoe_vl.image_processing import ProcessedImage
from conceptmoe_vl.likelihoods import Continuations, score_continuations
from conceptmoe_vl.prefixes import PrefixCache, prompt_cuts
from conceptmoe_vl.processing import EncodedSample
from conceptmoe_vl.requests import encode_prompt
from tests.combos import every_combination, model_of
from tests.model_folder import save_model_folder
from tests.pictures import png
from tests.tiny import PLAIN_VISION, Document, make_document, tiny_model, tokens_of_calls

MODES = [
    {"router": "cosine", "image_mode": "grid", "init": "random"},
    {"router": "cosine", "image_mode": "sequential", "merge": "mean", "init": "random"},
    {"router": "fixed", "target_ratio": 3, "merge": "boundary", "concept_residual": "delta"},
]
WORDS = ("what", "is", "the", "color", "of", "shape", "there", "a", "circle", "red", "blue", "no")


@pytest.fixture(autouse=True)
def short_parts(monkeypatch):
    monkeypatch.setattr(module, "_SHORTEST", 10)
    monkeypatch.setattr(module, "_SHORTEST_REST", 3)


@pytest.fixture(scope="module", params=MODES, ids=lambda mode: "-".join(map(str, mode.values())))
def pair(request, tmp_path_factory):
    folder = save_model_folder(tmp_path_factory.mktemp("model"), chunk=request.param, lively=True)
    return load_pretrained(folder, "cpu")


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return load_pretrained(save_model_folder(tmp_path_factory.mktemp("plain"), lively=True), "cpu")


def words(rng: random.Random, most: int = 8) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(2, most)))


def prompts_of(count: int = 12) -> list:
    """Texts behind two sets of examples, conversations behind examples, questions about images."""
    rng = random.Random(3)
    examples = ["\n\n".join(f"{words(rng)}\n{words(rng, 3)}" for _ in range(3)) for _ in range(2)]
    turns = [
        {"role": role, "content": words(rng)} for _ in range(2) for role in ("user", "assistant")
    ]
    made: list = []
    for number in range(count):
        question = words(rng)
        pictures = [png(number % 2)]
        made.append(
            (
                f"{examples[number % 8 // 4]}\n\n{question}",
                [*turns, {"role": "user", "content": question}],
                question_messages(pictures, question),
                [*turns, *question_messages(pictures, question)],
            )[number % 4]
        )
    return made


def requests_of(prompts: list) -> list[tuple]:
    """One choice, letters, and choices of several tokens."""
    sets = (("no",), ("a", "b"), ("red", "no circle is there", "the shape"))
    return [
        (prompt, f" {choice}" if isinstance(prompt, str) else choice)
        for number, prompt in enumerate(prompts)
        for choice in sets[number % 3]
    ]


def alone(pair, requests, max_bytes: int = module.PREFIX_BYTES, **options) -> list:
    """Every prompt with a cache of its own."""
    starts = [n for n, r in enumerate(requests) if n == 0 or r[0] != requests[n - 1][0]]
    found = []
    for start, stop in zip(starts, [*starts[1:], len(requests)], strict=True):
        cache = PrefixCache(max_bytes)
        found += log_likelihoods(*pair, requests[start:stop], prefixes=cache, **options)
    return found


def assert_close(found, expected):
    for mine, other in zip(found, expected, strict=True):
        assert mine.sum == pytest.approx(other.sum, abs=2e-4)
        assert (mine.tokens, mine.is_greedy) == (other.tokens, other.is_greedy)


# --- where prompts are cut ------------------------------------------------------------------------


def cut_text(processor, prompt, *images) -> list[str]:
    """The parts of a prompt as text."""
    if isinstance(prompt, str):
        sample = processor.encode_text(prompt, images)
    else:
        sample = processor.encode(prompt, add_generation_prompt=True)
    cuts = (0, *prompt_cuts(processor, sample.input_ids), len(sample.input_ids))
    decode = processor.tokenizer.decode
    return [decode(sample.input_ids[a:b]) for a, b in itertools.pairwise(cuts)]


def test_a_text_is_cut_where_its_last_paragraph_begins(plain):
    _, processor = plain
    examples = "what is it? red\n\nis there a circle? no\n\n\n"
    assert cut_text(processor, examples + "what shape\nis it?") == [examples, "what shape\nis it?"]
    once = "what is it? red\nis there a circle? no\nwhat shape is it?"
    assert cut_text(processor, once) == [once]
    assert cut_text(processor, "what?\n\nis there a circle?") == ["what?\n\nis there a circle?"]
    # What stands behind the last empty line is too short to be a question.
    ended = examples + "what shape is it?\n\n"
    assert cut_text(processor, ended) == [examples, "what shape is it?\n\n"]


def test_a_conversation_is_cut_at_its_last_turn(plain):
    _, processor = plain
    turns = [
        {"role": "user", "content": "what is the color?"},
        {"role": "assistant", "content": "red is the color"},
        {"role": "user", "content": "is there a circle?"},
    ]
    *examples, question = cut_text(processor, turns)
    assert len(examples) == 1
    assert examples[0].endswith("red is the color")
    assert "is there a circle?" in question
    assert len(cut_text(processor, turns[2:])) == 1


def test_a_prompt_with_images_is_cut_behind_the_last_one(plain):
    _, processor = plain
    image = "<|vision_start|><|image_pad|><|vision_end|>"
    first, question = cut_text(processor, f"{image} is it red? no {image} is it?", png(1), png(2))
    assert first.endswith("<|vision_end|>")
    assert question == " is it?"
    parts = cut_text(
        processor, f"what is the color of the shape? red\n\n{image}is there a circle?", png(1)
    )
    assert [
        part.endswith(end) for part, end in zip(parts, ("\n\n", "<|vision_end|>"), strict=False)
    ]
    assert len(parts) == 3
    # No part ends inside an image, nor with an image alone behind it.
    assert len(cut_text(processor, f"is there a circle? {image}", png(1))) == 1


def test_the_defaults_leave_short_prompts_whole(plain, monkeypatch):
    monkeypatch.undo()
    _, processor = plain
    short, long = ("red" * count + "\n\nwhat is the color of the shape?" for count in (40, 400))
    assert len(cut_text(processor, short)) == 1
    assert len(cut_text(processor, long)) == 2


# --- values ---------------------------------------------------------------------------------------


def sample_of(document: Document) -> EncodedSample:
    """A document of `tests.tiny` as the processor would give it."""
    images = []
    for pixels, (_, rows, columns) in zip(document.pixels, document.grids, strict=True):
        if pixels.dim() == 4 and images and len(images[-1].pixels) == 1:  # tiles of a thumbnail
            joined = torch.cat((images.pop().pixels, pixels))
            images.append(ProcessedImage(joined, (rows, columns), thumbnail=(3, 3)))
        else:
            images.append(ProcessedImage(pixels, (rows, columns)))
    return EncodedSample(list(document.ids), [], images)


@every_combination
def test_values_of_one_pass_and_bits_of_a_miss(combo):
    """Two cuts, the second behind an image; one continuation, letters and longer ones."""
    model = model_of(combo)
    middle = {"text": 7, "tiles": ("tiles", 1, 2)}.get(combo[3], "image")
    document = make_document([4, middle, 3, middle, 5], 1)
    where = [n for n, kind in enumerate(document.kinds) if kind != "patch"]
    cuts = tuple(n + 1 for n in where if n + 1 in (3, len(document.ids) - 4))
    assert len(cuts) == 2
    sample = sample_of(document)
    for ids in ([(7, 9, 11)], [(7,), (8,)], [(7, 8), (9, 10, 11), (12,)]):
        numbers = list(range(len(ids)))
        whole = Continuations(sample, ids, numbers)
        cut = Continuations(sample, ids, numbers, cuts)
        expected = score_continuations(model, iter([whole]), len(ids))
        cache = PrefixCache()
        missed = score_continuations(model, iter([cut]), len(ids), prefixes=cache)
        assert_close(missed, expected)
        assert (cache.hits, cache.misses) == (0, 2)
        assert score_continuations(model, iter([cut]), len(ids), prefixes=cache) == missed
        assert (cache.hits, cache.misses) == (2, 2)


@pytest.mark.parametrize("vision", ["native", PLAIN_VISION], ids=["native", "fixed"])
def test_boundaries_are_those_of_one_pass(vision):
    native = vision == "native"
    model = tiny_model(vision=vision, image_mode="grid")
    part = (2, 3) if native else "image"
    document = make_document([5, part, 4, part, 6], 2, native=native)
    images = [
        ProcessedImage(pixels, grid[1:], torch.cartesian_prod(*map(torch.arange, grid[1:])))
        if native
        else ProcessedImage(pixels, grid[1:])
        for pixels, grid in zip(document.pixels, document.grids, strict=True)
    ]
    sample = EncodedSample(list(document.ids), [], images)
    found = {}
    for cuts in ((), (len(document.ids) - 6,)):
        group = Continuations(sample, [(7, 8)], [0], cuts)
        score_continuations(
            model,
            iter([group]),
            1,
            on_prompt=lambda _, ids, fired_T, cuts=cuts: found.update({cuts: (ids, fired_T)}),
        )
    (ids, expected), (other, fired) = found.values()
    assert ids == other == list(document.ids)
    assert torch.equal(fired, expected)


# --- bits -----------------------------------------------------------------------------------------


def test_the_same_to_the_bit_in_any_batch_and_order_found_or_not(pair):
    requests = requests_of(prompts_of())
    expected = alone(pair, requests)
    assert_close(expected, alone(pair, requests, max_bytes=0))
    shared = PrefixCache()
    for batch_size in (1, 4, 16):  # the second and third find all
        found = log_likelihoods(*pair, requests, batch_size, prefixes=shared)
        assert found == expected
    assert shared.hits > shared.misses > 0
    for max_bytes in (1, shared.bytes // 3):  # nothing is kept; a third of it
        few = PrefixCache(max_bytes)
        assert log_likelihoods(*pair, requests, prefixes=few) == expected
        assert few.bytes <= max_bytes
    assert log_likelihoods(*pair, requests) == expected
    starts = [n for n, r in enumerate(requests) if n == 0 or r[0] != requests[n - 1][0]]
    blocks = [range(a, b) for a, b in zip(starts, [*starts[1:], len(requests)], strict=True)]
    random.Random(1).shuffle(blocks)
    order = [n for block in blocks for n in block]
    shuffled = log_likelihoods(*pair, [requests[n] for n in order], prefixes=PrefixCache())
    assert shuffled == [expected[n] for n in order]
    for half in (blocks[::2], blocks[1::2]):  # as two processes share them
        own = [n for block in half for n in block]
        assert log_likelihoods(*pair, [requests[n] for n in own]) == [expected[n] for n in own]


@pytest.mark.parametrize("batch_size", [1, 4, 16])
def test_answers_are_those_of_one_pass(pair, batch_size):
    prompts = prompts_of()
    expected = generate_all(*pair, prompts, 6, prefixes=PrefixCache(0))
    shared = PrefixCache()
    for _ in range(2):
        assert generate_all(*pair, prompts, 6, batch_size, prefixes=shared) == expected
    assert shared.hits > shared.misses > 0


def test_prompts_with_and_without_a_prefix_start_together(plain):
    prompts = ["is it red?", *prompts_of(8), "what is there?"]
    seen = {}
    answers = generate_all(
        *plain,
        prompts,
        5,
        16,
        on_prompt=lambda number, ids, fired_T: seen.update({number: fired_T}),
    )
    assert answers == generate_all(*plain, prompts, 5, 1, prefixes=PrefixCache(0))
    assert [len(seen[n]) for n in range(len(prompts))] == [a.prompt_tokens for a in answers]


def test_a_compression_is_part_of_what_is_kept(pair):
    requests = requests_of(prompts_of(4))
    shared = PrefixCache()
    expected = {None: alone(pair, requests), 1: alone(pair, requests, compression=1)}
    assert expected[None] != expected[1]
    for compression in (None, 1, None):
        found = log_likelihoods(*pair, requests, compression=compression, prefixes=shared)
        assert found == expected[compression]


def test_another_image_or_place_of_the_cut_is_another_part(plain):
    model, processor = plain
    image = "<|vision_start|><|image_pad|><|vision_end|>"
    cache = PrefixCache()
    for number in (1, 2, 1):
        prompt = Rendered(f"is it red? {image} what is it?", (png(number),))
        log_likelihoods(model, processor, [(prompt, " no")], prefixes=cache)
    assert (cache.hits, cache.misses) == (1, 2)
    sample = encode_prompt(model, processor, "what is the color of the shape? " * 3)
    for cuts in ((20,), (14, 20), (20,)):
        cache.behind(model, sample, cuts, None)
    assert (cache.hits, cache.misses) == (2, 5)


# --- memory and what is kept ----------------------------------------------------------------------


def tensors_of(cache: PrefixCache) -> list[torch.Tensor]:
    found = []
    for prefix in cache._held.values():
        stores = (*prefix.cache.encoder, *prefix.cache.concept, *prefix.cache.decoder)
        found += [tensor for store in stores for tensor in (store.keys, store.values)]
        state = prefix.cache.chunk
        found += [prefix.boundary_T, state.last_key_GD, state.smoothed_GD]
        if state.open_chunks is not None:
            found += [state.open_chunks.sum_GD, state.open_chunks.count_G]
    return [tensor for tensor in found if tensor is not None]


def test_what_is_kept_is_never_changed(pair):
    requests = requests_of(prompts_of(8))
    cache = PrefixCache()
    log_likelihoods(*pair, requests, prefixes=cache)
    kept = tensors_of(cache)
    before = [tensor.clone() for tensor in kept]
    generate_all(*pair, prompts_of(12), 5, 4, prefixes=cache)
    log_likelihoods(*pair, requests, prefixes=cache)
    after = tensors_of(cache)[: len(kept)]
    assert len(kept) > 20
    for tensor, copy in zip(kept, before, strict=True):
        assert torch.equal(tensor, copy)
    assert {tensor.data_ptr() for tensor in kept} == {tensor.data_ptr() for tensor in after}


def test_the_latest_used_parts_stay_within_the_bytes(plain):
    model, _ = plain
    rng = random.Random(0)
    samples = [EncodedSample([rng.randrange(6, 200) for _ in range(30)], []) for _ in range(4)]
    one = PrefixCache()
    one.behind(model, samples[0], (20,), None)
    assert one.bytes == sum(tensor.untyped_storage().nbytes() for tensor in tensors_of(one))
    cache = PrefixCache(2 * one.bytes + one.bytes // 2)
    for number in (0, 1, 0, 2, 0, 1, 3):  # 1 goes for 2, 2 for 1, and 0 for 3
        cache.behind(model, samples[number], (20,), None)
        assert cache.bytes <= cache.max_bytes
    assert (len(cache), cache.hits, cache.misses) == (2, 2, 5)


def test_a_part_is_computed_once(plain, monkeypatch):
    model, processor = plain
    seen = tokens_of_calls(model, monkeypatch)
    examples = "what is it? red\n\nis there a circle? no\n\n"
    texts = [examples + question for question in ("what shape is it?", "is there a shape?")]
    lengths = [len(encode_prompt(model, processor, text).input_ids) for text in texts]
    known = prompt_cuts(processor, encode_prompt(model, processor, texts[0]).input_ids)[0]
    log_likelihoods(model, processor, [(t, letter) for t in texts for letter in "ab"])
    assert seen == [known, lengths[0] - known, lengths[1] - known]
    seen.clear()
    generate_all(model, processor, texts, 1)
    assert seen == [known, 2 * (max(lengths) - known)]


def test_what_is_refused(plain):
    model, processor = plain
    with pytest.raises(ValueError, match="max_bytes is -1"):
        PrefixCache(-1)
    cache = PrefixCache()
    text = "what is it? red\n\nis there a circle? no"
    log_likelihoods(model, processor, [(text, " a")], prefixes=cache)
    other = tiny_model(vision=None)
    with pytest.raises(ValueError, match="serves one model"):
        cache.behind(other, EncodedSample([5, 6, 7], []), (2,), None)
