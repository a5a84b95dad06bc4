"""The cache: tokens taken back exactly, assisted decoding, beams, and bytes (invariant 4)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from conceptmoe_vl import journal
from conceptmoe_vl.cache import ConceptCache
from tests.combos import ALL, cut_is_allowed, decode, every_combination, model_of, piece_of
from tests.tiny import FIRST_TEXT, PAD, make_document, packed, padded, tiny_model

TOLERANCE = {"atol": 1e-4, "rtol": 0.0}
GREEDY = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": PAD, "eos_token_id": None}
MODES = [
    {"router": "cosine", "image_mode": "grid", "neighborhood": 8},
    {"router": "linear", "merge": "mean", "concept_residual": "delta"},
    {"router": "fixed", "merge": "boundary", "target_ratio": 3},
    {"router": "none", "concept_residual": "delta"},
    {"router": "none", "concept_residual": "delta", "joint_decoding_layers": 0},
]
by_mode = pytest.mark.parametrize(
    "mode", MODES, ids=[f"{m['router']}{i}" for i, m in enumerate(MODES)]
)


def give(model, cache, documents):
    with torch.no_grad():
        return model(**padded(documents), cache=cache, use_cache=True)


def check_continues(model, cache, documents, done):
    """What stands in the cache goes on to the logits of one pass over the whole documents."""
    rest = [piece_of(d, n, len(d.ids)) for d, n in zip(documents, done, strict=True)]
    out = give(model, cache, rest)
    with torch.no_grad():
        full = model(**packed(documents)).logits.split([len(d.ids) for d in documents])
    for row, (whole, n, piece) in enumerate(zip(full, done, rest, strict=True)):
        width = out.logits.shape[1]
        mine = out.logits[row, width - len(piece.ids) :]
        torch.testing.assert_close(mine, whole[n:], **TOLERANCE)


# --- taking tokens back ---------------------------------------------------------------------------


@every_combination
def test_any_number_of_the_last_calls_tokens_is_taken_back(combo):
    """Prefill, one longer call, then every crop of it that does not go through an image."""
    model = model_of(combo)
    parts = {"text": [6, 9], "tiles": [3, ("tiles", 1, 2), 5]}.get(combo[3], [3, "image", 5])
    document = make_document(parts, 1)
    length, first = len(document.ids), 2
    for removed in range(length - first + 1):
        kept = length - removed
        cache = give(model, None, [piece_of(document, 0, first)]).cache
        give(model, cache, [piece_of(document, first, length)])
        if not cut_is_allowed(document, kept):
            before = cache.token_lengths
            with pytest.raises(ValueError, match="image"):
                cache.crop(-removed)
            assert cache.token_lengths == before
            continue
        cache.crop(-removed)
        assert cache.get_seq_length() == kept
        assert cache.token_lengths == (kept,)
        other = document.changed(document.ids[:kept] + document.ids[kept:])
        if kept < length:
            check_continues(model, cache, [other], [kept])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_steps_pieces_and_crops_in_any_order(data):
    """Rows of one batch, calls of random length, each followed by a random crop: at the end the
    logits of a full pass.
    """
    combo = data.draw(st.sampled_from([c for c in ALL if c[3] == "text"]))
    model, rows = model_of(combo), data.draw(st.integers(1, 3))
    documents = [make_document([40], data.draw(st.integers(0, 99))) for _ in range(rows)]
    lead = [data.draw(st.integers(0, 4)) for _ in range(rows)]
    documents = [piece_of(d, 0, 30 + n) for d, n in zip(documents, lead, strict=True)]
    cache, column = None, 0
    done = [0] * rows
    for call in range(data.draw(st.integers(1, 6))):
        new = data.draw(st.integers(1, 5))
        # The first call is ragged, padded on the left.
        stops = [n + new + (lead[row] if call == 0 else 0) for row, n in enumerate(done)]
        pieces = [piece_of(d, *span) for d, *span in zip(documents, done, stops, strict=True)]
        cache = give(model, cache, pieces).cache
        done, column = stops, cache.get_seq_length()
        removed = data.draw(st.integers(0, min(new, column - 1)))
        cache.crop(-removed)
        done = [n - removed for n in done]
        if min(done) == 0:
            return
    assert cache.token_lengths == tuple(done)
    check_continues(model, cache, documents, done)


@pytest.mark.parametrize("limit", [8, 100])
def test_a_long_prefill_leaves_only_its_end_behind(limit, monkeypatch):
    """Longer calls than the journal holds: their last tokens can go, no earlier ones, and nothing
    of the size of the prefill stays.
    """
    monkeypatch.setattr(journal, "_TOKENS", limit)
    model, document = tiny_model(vision=None), make_document([90], 3)
    cache = give(model, None, [piece_of(document, 0, 60)]).cache
    held = min(limit, 60)
    record = cache.journal.records[-1]
    assert record.columns == held
    assert record.h_TD.untyped_storage().nbytes() == held * 32 * 4
    with pytest.raises(ValueError, match=rf"{held + 1} tokens .* last {held}"):
        cache.crop(-held - 1)
    cache.crop(-5)
    cache.crop(-2)
    check_continues(model, cache, [document], [53])


def test_steps_behind_the_limit_are_forgotten(monkeypatch):
    monkeypatch.setattr(journal, "_TOKENS", 6)
    model, document = tiny_model(vision=None), make_document([30], 4)
    cache = give(model, None, [piece_of(document, 0, 10)]).cache
    for n in range(10, 20):
        give(model, cache, [piece_of(document, n, n + 1)])
    with pytest.raises(ValueError, match=r"7 tokens .* last 6"):
        cache.crop(-7)
    cache.crop(-6)
    check_continues(model, cache, [document], [14])


def test_a_cut_prefill_with_images_begins_behind_an_image(monkeypatch):
    """The remembered end of a call never starts inside an image."""
    monkeypatch.setattr(journal, "_TOKENS", 8)
    model, document = tiny_model(image_mode="grid"), make_document([4, "image", 3, 5], 5)
    cache = give(model, None, [piece_of(document, 0, 18)]).cache  # 13 patches or marks, then text
    assert cache.journal.columns == 4
    cache.crop(-3)
    check_continues(model, cache, [document], [15])


def test_what_crop_refuses():
    model, document = tiny_model(), make_document([5])
    cache = give(model, None, [document]).cache
    with pytest.raises(ValueError, match=r"crop\(3\).*negative"):
        cache.crop(3)
    cache.crop(0)
    assert cache.token_lengths == (5,)
    cache.batch_repeat_interleave(2)
    with pytest.raises(ValueError, match="reordered"):
        cache.crop(-1)


# --- assisted decoding ----------------------------------------------------------------------------


def drafts(assistant):
    """Long drafts: without a threshold transformers stops one at the first doubtful token."""
    assistant.generation_config.assistant_confidence_threshold = 0.0
    assistant.generation_config.num_assistant_tokens = 7


@by_mode
@pytest.mark.parametrize("assistant", ["same", "smaller", "lookup"])
def test_assisted_decoding_gives_the_greedy_text(mode, assistant):
    model, greedy = tiny_model(**mode), dict(GREEDY)
    if assistant == "lookup":
        options = {"prompt_lookup_num_tokens": 5}
    else:
        helper = model
        if assistant == "smaller":
            # Near enough to be right at times, wrong enough to be taken back.
            helper = tiny_model(seed=0, **mode)
            with torch.no_grad():
                helper.lm_head.weight += 0.3 * torch.randn_like(helper.lm_head.weight)
        drafts(helper)
        options = {"assistant_model": helper}
    # A generated pad token would make transformers mask the assistant's prompt.
    options["suppress_tokens"] = greedy["suppress_tokens"] = [PAD]
    for seed, parts in enumerate(([7], [3, "image", 4], [1])):
        inputs = padded([make_document(parts, seed)])
        expected = model.generate(**inputs, **greedy)
        assert torch.equal(model.generate(**inputs, **{**greedy, **options}), expected)


def test_an_assistant_that_is_always_wrong(monkeypatch):
    """Every draft goes back, the first one to before the end of the prompt."""
    model, helper = tiny_model(vision=None), tiny_model(vision=None, seed=9)
    crops = []
    take_back = journal.Journal.take_back
    monkeypatch.setattr(
        journal.Journal, "take_back", lambda self, n: crops.append(n) or take_back(self, n)
    )
    drafts(helper)
    inputs, greedy = padded([make_document([20], 2)]), {**GREEDY, "suppress_tokens": [PAD]}
    expected = model.generate(**inputs, **greedy)
    crops.clear()
    drafted = model.generate(**inputs, **greedy, assistant_model=helper)
    assert torch.equal(drafted, expected)
    assert max(crops) >= 7


# --- beams, samples, rows -------------------------------------------------------------------------


@by_mode
def test_beams_of_a_ragged_batch_score_like_a_full_pass(mode):
    """The sum of log-likelihoods of every beam is that of one pass over prompt and answer."""
    model = tiny_model(**mode)
    documents = [make_document(p, i) for i, p in enumerate(([2, "image", 3], [9], [1]))]
    inputs = padded(documents)
    out = model.generate(
        **inputs,
        **{**GREEDY, "max_new_tokens": 6},
        num_beams=4,
        num_return_sequences=2,
        length_penalty=0.0,
        output_scores=True,
        return_dict_in_generate=True,
    )
    width = inputs["input_ids"].shape[1]
    for index, answer in enumerate(out.sequences[:, width:].tolist()):
        document = documents[index // 2]
        whole = document.changed(document.ids + tuple(answer))
        with torch.no_grad():
            logits = model(**packed([whole])).logits
        score = logits.log_softmax(-1)
        start = len(document.ids) - 1
        own = score[start : start + len(answer)].gather(1, torch.tensor(answer)[:, None]).sum()
        torch.testing.assert_close(out.sequences_scores[index], own, atol=1e-3, rtol=0)


def test_choosing_all_rows_in_order_copies_nothing():
    model = tiny_model(vision=None)
    cache = give(model, None, [make_document([5]), make_document([3])]).cache
    before = cache.encoder[0].keys
    cache.reorder_cache(torch.tensor([0, 1]))
    assert cache.encoder[0].keys is before


# --- bytes ----------------------------------------------------------------------------------------


def test_the_concept_level_holds_half_of_the_tokens_at_ratio_two():
    """Router `fixed` at ratio 2: exactly T / 2 positions a layer, counted in the tensors, through
    prefill and steps.
    """
    text = {"encoder_layers": 2, "concept_layers": 3, "decoder_layers": 2}
    model = tiny_model(vision=None, text=text, router="fixed", target_ratio=2)
    documents = [make_document([64], 0), make_document([64], 1)]
    cache = give(model, None, [piece_of(d, 0, 40) for d in documents]).cache
    for n in range(40, 64):
        give(model, cache, [piece_of(d, n, n + 1) for d in documents])

    def held(store):
        return (store.keys != 0).any(-1).sum(-1), (store.values != 0).any(-1).sum(-1)

    for stores, expected in ((cache.encoder, 64), (cache.concept, 32), (cache.decoder, 64)):
        for store in stores:
            for counts in held(store):
                assert counts.tolist() == [[expected]] * 2
    position = 2 * 16 * 4  # keys and values, one head of 16, float32
    assert cache.used_bytes == {"tokens": 4 * 2 * 64 * position, "concepts": 3 * 2 * 32 * position}
    for level, reserved in cache.bytes.items():
        assert (
            cache.used_bytes[level]
            <= reserved
            <= 1.25 * cache.used_bytes[level] + 7 * 128 * position
        )


def test_buffers_grow_geometrically():
    """A thousand steps replace the buffers a few times, and keep what they held."""
    model = tiny_model(vision=None)
    cache, token = ConceptCache(model.config), make_document([1])
    buffers = set()
    for _ in range(1000):
        give(model, cache, [token])
        buffers.add(cache.encoder[0].keys.data_ptr())
    assert len(buffers) < 20
    assert cache.encoder[0].keys.shape[2] < 1.3 * 1000 + 64
    ids = token.ids * 1000
    check_continues(model, cache, [token.changed((*ids, FIRST_TEXT + 1))], [1000])


@by_mode
def test_a_reset_cache_and_reused_rows(mode):
    model, documents = tiny_model(**mode), [make_document([9], 1), make_document([9], 2)]
    cuts = [[0, 4, 5, 9]] * 2
    expected, _ = decode(model, documents, cuts)
    cache = give(model, None, documents).cache
    cache.reset()
    assert cache.bytes == cache.used_bytes == {"tokens": 0, "concepts": 0}
    out = give(model, cache, documents)
    for row, logits in enumerate(expected):
        torch.testing.assert_close(out.logits[row], logits, **TOLERANCE)


@pytest.mark.parametrize("foreign", [((torch.zeros(1), torch.zeros(1)),), DynamicCache()])
def test_another_cache_is_refused_by_a_call(foreign):
    with pytest.raises(ValueError, match=f"is a {type(foreign).__name__}; .* ConceptCache"):
        tiny_model(vision=None)(torch.tensor([[5, 6]]), past_key_values=foreign)
