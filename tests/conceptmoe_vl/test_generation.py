"""`generate()`, the cache, saving and loading, and what is refused (R17, R20, R21 of the field
reports).
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, DynamicCache

from conceptmoe_vl import ConceptMoEVLForConditionalGeneration
from conceptmoe_vl.cache import ConceptCache
from tests.combos import decode
from tests.tiny import (
    END,
    FIRST_TEXT,
    IMAGE,
    PAD,
    VISION_END,
    Document,
    make_document,
    packed,
    padded,
    tiny_model,
)

GREEDY = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": PAD}
MODES = [
    {"router": "cosine", "image_mode": "grid", "neighborhood": 8},
    {"router": "linear", "merge": "mean", "concept_residual": "delta"},
    {"router": "fixed", "merge": "boundary", "image_mode": "grid", "target_ratio": 3},
    {"router": "none", "concept_residual": "delta"},
    {"router": "cosine", "image_mode": "grid", "vision": "tiles"},
]
by_mode = pytest.mark.parametrize(
    "mode", MODES, ids=[mode.get("vision", mode["router"]) for mode in MODES]
)


def prompts(mode=None):
    """Five prompts of 1 to 60 tokens, with and without images."""
    first = ("tiles", 2, 1) if (mode or {}).get("vision") == "tiles" else "image"
    parts = ([1], [60], [4, first, 3], ["image", 1], [2, "image", first, 9])
    return [make_document(p, seed) for seed, p in enumerate(parts)]


def new_tokens(model, documents, **options):
    inputs = padded(documents)
    out = model.generate(**inputs, **{**GREEDY, **options})
    return out[:, inputs["input_ids"].shape[1] :]


def up_to_end(row):
    row = row.tolist()
    return row[: row.index(END) + 1] if END in row else row


@by_mode
def test_greedy_text_with_and_without_cache(mode):
    model = tiny_model(**mode)
    cached, plain = (new_tokens(model, prompts(mode), use_cache=use) for use in (True, False))
    assert torch.equal(cached, plain)


@by_mode
def test_neighbours_in_the_batch_change_nothing(mode):
    """R20: logits and greedy text of a prompt alone and among others, log-likelihoods at any batch
    size.
    """
    model, documents = tiny_model(**mode), prompts(mode)
    together = new_tokens(model, documents)
    for document, row in zip(documents, together, strict=True):
        assert up_to_end(new_tokens(model, [document])[0]) == up_to_end(row)

    def log_likelihoods(batch_size):
        found = []
        for start in range(0, len(documents), batch_size):
            inputs = padded(documents[start : start + batch_size])
            with torch.no_grad():
                logits = model(**inputs).logits
            for row, document in enumerate(documents[start : start + batch_size]):
                ids = torch.tensor(document.ids)[1:]
                own = logits[row][inputs["attention_mask"][row].bool()][:-1].log_softmax(-1)
                found.append(own.gather(1, ids[:, None]).sum())
        return torch.stack(found)

    one = log_likelihoods(1)
    for batch_size in (2, 5):
        torch.testing.assert_close(log_likelihoods(batch_size), one, atol=1e-4, rtol=1e-5)


@by_mode
def test_generated_steps_are_the_full_pass(mode):
    """The scores of every generated token equal the logits of one pass over prompt and answer."""
    model, documents = tiny_model(**mode), prompts(mode)[2:]
    inputs = padded(documents)
    out = model.generate(
        **inputs, **GREEDY, eos_token_id=None, output_logits=True, return_dict_in_generate=True
    )
    width = inputs["input_ids"].shape[1]
    for row, document in enumerate(documents):
        answer = tuple(out.sequences[row, width:].tolist())
        with torch.no_grad():
            full = model(**packed([document.changed(document.ids + answer)])).logits
        for step, logits in enumerate(out.logits):
            expected = full[len(document.ids) - 1 + step]
            torch.testing.assert_close(logits[row], expected, atol=1e-4, rtol=0)


@by_mode
def test_beams_and_several_samples(mode):
    """Beam search reorders the cache; several sequences a prompt repeat its images."""
    model, documents = tiny_model(**mode), prompts(mode)[1:4]
    options = {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.5}
    beams = [new_tokens(model, documents, use_cache=use, **options) for use in (True, False)]
    assert torch.equal(*beams)
    assert beams[0].shape[0] == 6
    samples = []
    for use in (True, False):
        torch.manual_seed(5)
        options = {
            "do_sample": True,
            "num_return_sequences": 3,
            "temperature": 1.5,
            "use_cache": use,
        }
        samples.append(new_tokens(model, documents, **options))
    assert torch.equal(*samples)
    assert len({tuple(row.tolist()) for row in samples[0]}) > 3


def test_no_image_placeholder_is_generated():
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.weight[IMAGE] = model.lm_head.weight.abs().sum(0)
    assert not (new_tokens(model, prompts(), do_sample=True, temperature=5.0) == IMAGE).any()


@by_mode
def test_second_turn_with_a_new_image_continues_from_the_cache(mode):
    """R21: the cache of turn one and the whole conversation give the text of a fresh full
    prompt.
    """
    model = tiny_model(**mode)
    image = ("tiles", 1, 2) if mode.get("vision") == "tiles" else "image"
    first = make_document([5, image, 2], 1)
    turn = model.generate(
        **padded([first]), **GREEDY, eos_token_id=None, return_dict_in_generate=True, use_cache=True
    )
    cache = getattr(turn, "cache", None) or turn.past_key_values
    more = make_document([1, image, 3], 2)
    ids = tuple(turn.sequences[0].tolist()) + more.ids
    shift = turn.sequences.shape[1]
    grids = first.grids + tuple((start + shift, *shape) for start, *shape in more.grids)
    conversation = Document(ids, first.pixels + more.pixels, grids)
    fresh = new_tokens(model, [conversation])
    assert torch.equal(new_tokens(model, [conversation], past_key_values=cache), fresh)


def test_concept_level_is_as_long_as_there_are_boundaries():
    model = tiny_model(image_mode="grid")
    documents = prompts()
    with torch.no_grad():
        out = model(**padded(documents), use_cache=True)
    lengths = [len(document.ids) for document in documents]
    assert out.cache.token_lengths == tuple(lengths)
    fired = [int(x.sum()) for x in out.chunks.boundary_mask.split(lengths)]
    assert out.cache.concept_lengths == tuple(fired)
    assert set(out.cache.bytes) == {"tokens", "concepts"}


def test_rows_of_a_cache_can_be_chosen_and_repeated():
    """After batch_select_indices and batch_repeat_interleave each row goes on as its original."""
    model, documents = tiny_model(image_mode="grid"), prompts()[1:4]
    token = torch.full((1, 1), FIRST_TEXT)

    def next_logits(cache, rows):
        with torch.no_grad():
            return model(input_ids=token.expand(rows, 1), cache=cache).logits[:, 0]

    with torch.no_grad():
        caches = [model(**padded(documents), use_cache=True).cache for _ in range(3)]
    expected = next_logits(caches[0], 3)
    caches[1].batch_select_indices(torch.tensor([2, 0]))
    torch.testing.assert_close(next_logits(caches[1], 2), expected[[2, 0]], atol=1e-5, rtol=0)
    caches[2].batch_repeat_interleave(2)
    repeated = expected.repeat_interleave(2, 0)
    torch.testing.assert_close(next_logits(caches[2], 6), repeated, atol=1e-5, rtol=0)


def test_a_cache_can_be_reset():
    model, documents = tiny_model(), prompts()[1:3]
    cuts = [[0, 4, len(documents[0].ids)], [0, 4, len(documents[1].ids)]]
    expected, _ = decode(model, documents, cuts)
    with torch.no_grad():
        cache = model(**padded(documents), use_cache=True).cache
        cache.reset()
        out = model(**padded(documents[:1]), cache=cache)
    torch.testing.assert_close(out.logits[0], expected[0], atol=1e-4, rtol=0)


# --- what is refused, in one line with both numbers -----------------------------------------------


def test_wrong_number_of_placeholders():
    model = tiny_model()
    inputs = padded([make_document([2, "image", 1])])
    inputs["input_ids"][0, 3] = FIRST_TEXT
    with pytest.raises(ValueError, match=r"8 image placeholders.*9"):
        model(**inputs)
    with pytest.raises(ValueError, match="placeholder"):
        model.generate(**inputs, **GREEDY)


def test_placeholders_without_an_image():
    inputs = padded([make_document([2, "image", 1])])
    del inputs["pixel_values"], inputs["image_grid_hw"]
    with pytest.raises(ValueError, match=r"9 image placeholders.*0"):
        tiny_model()(**inputs)


def test_images_for_a_text_model():
    with pytest.raises(ValueError, match="text-only"):
        tiny_model(vision=None)(**padded([make_document(["image"])]))


def test_more_grids_than_images():
    inputs = padded([make_document(["image", "image"])])
    inputs["pixel_values"] = inputs["pixel_values"][:1]
    with pytest.raises(ValueError, match=r"1 images.*2 rows.*stand for 2"):
        tiny_model()(**inputs)


@pytest.mark.parametrize(
    ("vision", "grid"), [("plain", (1, 9)), ("plain", (6, 3)), ("tiles", (1, 9))]
)
def test_grids_that_are_not_made_of_squares(vision, grid):
    inputs = padded([make_document([2, "image", "image", 1])])
    inputs["image_grid_hw"][0] = torch.tensor(grid)
    inputs["input_ids"] = torch.tensor([[3] + [IMAGE] * (grid[0] * grid[1] + 9)])
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    with pytest.raises(ValueError, match=f"{grid[0]} x {grid[1]} tokens is not made of squares"):
        tiny_model(vision=vision)(**inputs)


def test_padding_on_the_right_is_refused_by_generate():
    with pytest.raises(ValueError, match="left"):
        tiny_model().generate(**padded(prompts()[:2], "right"), **GREEDY)


def test_foreign_caches_are_refused():
    model, inputs = tiny_model(), padded([make_document([3])])
    with pytest.raises(ValueError, match="DynamicCache"):
        model.generate(**inputs, **GREEDY, past_key_values=DynamicCache())
    with pytest.raises(ValueError, match="static"):
        model.generate(**inputs, **GREEDY, cache_implementation="static")
    with pytest.raises(ValueError, match=r"3 rows.*1"):
        model.generate(**inputs, **GREEDY, past_key_values=_filled(model, 3))


def _filled(model, rows):
    cache = ConceptCache(model.config)
    cache.begin(rows)
    return cache


def test_input_shapes_and_empty_inputs():
    model = tiny_model()
    with pytest.raises(ValueError, match="cu_seqlens"):
        model(input_ids=torch.tensor([5, 6]))
    with pytest.raises(ValueError, match="input_ids"):
        model()
    with pytest.raises(ValueError, match="no token"):
        model(input_ids=torch.tensor([[5, 6]]), attention_mask=torch.zeros(1, 2))
    with pytest.raises(ValueError, match="labels"):
        model(**packed([make_document([4])]), labels=torch.zeros(3, dtype=torch.long))


def test_an_image_behind_text_without_its_mark_is_refused_in_the_plane():
    document = make_document([2, "image"])
    ids = list(document.ids)
    ids[2] = VISION_END
    with pytest.raises(ValueError, match="mark"):
        tiny_model(image_mode="grid")(**packed([document.changed(ids)]))


# --- save and load (R17) --------------------------------------------------------------------------

LOAD = """
import sys, torch
import conceptmoe_vl
from transformers import AutoModelForImageTextToText
from tests.conceptmoe_vl.test_generation import new_tokens, prompts
from tests.tiny import packed
torch.set_num_threads(1)
model, info = AutoModelForImageTextToText.from_pretrained(sys.argv[1], output_loading_info=True)
assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
with torch.no_grad():
    logits = model(**packed(prompts())).logits
torch.save({"logits": logits, "text": new_tokens(model, prompts())}, sys.argv[2])
"""


def test_a_fresh_process_loads_bit_equal_weights(tmp_path):
    model = tiny_model(image_mode="grid", text={"num_shared_experts": 1})
    model.save_pretrained(tmp_path / "model")
    command = [sys.executable, "-c", LOAD, str(tmp_path / "model"), str(tmp_path / "out.pt")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    loaded = torch.load(tmp_path / "out.pt", weights_only=True)
    torch.set_num_threads(1)
    with torch.no_grad():
        expected = model(**packed(prompts())).logits
    assert torch.equal(loaded["logits"], expected)
    assert torch.equal(loaded["text"], new_tokens(model, prompts()))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("auto", [AutoModelForCausalLM, AutoModelForImageTextToText])
def test_round_trip_of_every_weight_and_the_configuration(tied, auto, tmp_path):
    model = tiny_model(
        vision="native",
        text={"tie_word_embeddings": tied, "concept_hidden_size": 48, "concept_loops": [[0, 0, 2]]},
        router="linear",
    )
    model.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("*.bin"))
    loaded, info = auto.from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is ConceptMoEVLForConditionalGeneration
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    state = loaded.state_dict()
    for name, weight in model.state_dict().items():
        assert torch.equal(state[name], weight), name
    for one in (model, loaded):
        same = one.lm_head.weight.data_ptr() == one.embed_tokens.weight.data_ptr()
        assert same is tied
    assert loaded.config.text == model.config.text
    assert loaded.config.chunk == model.config.chunk
    assert loaded.config.vision == model.config.vision


def test_loading_in_bfloat16_stays_finite():
    model = tiny_model(image_mode="grid").to(torch.bfloat16)
    documents = prompts()
    inputs = packed(documents, labels=True)
    inputs["pixel_values"] = inputs["pixel_values"].bfloat16()
    out = model(**inputs)
    out.loss.backward()
    assert torch.isfinite(out.logits).all()
    assert torch.isfinite(out.loss)


def test_an_unknown_argument_is_refused():
    """A misspelt `labels` must not train on nothing."""
    model = tiny_model(vision=None)
    ids = torch.tensor([[FIRST_TEXT, FIRST_TEXT + 1]])
    with pytest.raises(TypeError, match="label"):
        model(input_ids=ids, label=ids)
