"""Samples longer than a row: no picture is cut, no token lost or doubled, labels exact."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conceptmoe_vl.errors import UserError
from conceptmoe_vl.image_processing import ConceptMoEVLImageProcessor
from conceptmoe_vl.processing import CHAT_TEMPLATE, ConceptMoEVLProcessor, train_tokenizer
from conceptmoe_vl.prompts import IGNORED, Picture, Turn
from data_pipelines import DataConfig, build_stream
from data_pipelines.over_length import is_document, picture_runs, split, truncated
from data_pipelines.sampling import Place
from data_pipelines.writing import write_shards
from tests.data_pipelines.conftest import encoded_image

LONG_TEMPLATE = """\
{%- for m in messages -%}<|im_start|>{{ m['role'] }}
{{ m['content'] }}<|im_end|>
{% endfor -%}"""


def processor_of(template: str, policy: str = "native") -> ConceptMoEVLProcessor:
    images = ConceptMoEVLImageProcessor(policy, 8, patch_size=8, max_patches=12)
    return ConceptMoEVLProcessor(images, train_tokenizer(["a cat sat on the mat"], 300), template)


PROCESSORS = {
    "short": processor_of(CHAT_TEMPLATE),
    "long": processor_of(LONG_TEMPLATE),
    "tiles": processor_of(CHAT_TEMPLATE, "tiles"),
}
HEADS = {
    "short": "<|im_start|><|im_end|>",
    "tiles": "<|im_start|><|im_end|>",
    "long": "<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n",
}

pictures = st.tuples(st.integers(1, 40), st.integers(1, 40)).map(
    lambda size: Picture(np.zeros((*size, 3), np.uint8))
)
parts = st.lists(st.one_of(st.text("acst ", min_size=1, max_size=30), pictures), max_size=8)


def encoded(processor, *contents):
    """User and assistant in turn."""
    roles = ("user", "assistant") * len(contents)
    turns = [Turn(role, tuple(content)) for role, content in zip(roles, contents, strict=False)]
    return turns, processor.encode_turns(turns)


def check_pictures(sample, processor):
    """All runs of image tokens are whole, and belong to the sample's pictures."""
    runs = picture_runs(sample, processor)
    assert [end - start - 2 for start, end in runs] == [image.num_tokens for image in sample.images]
    held = sum(image.num_tokens for image in sample.images)
    assert sample.input_ids.count(processor.image_token_id) == held


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(list(PROCESSORS)), parts, st.integers(2, 90))
def test_split_pieces_are_the_document(template, content, limit):
    processor = PROCESSORS[template]
    turns, whole = encoded(processor, [""], content)
    assert is_document(turns)
    head = len(processor(text=HEADS[template])["input_ids"][0])
    tail = 2 if template == "long" else 1  # the end mark; a line break behind it
    pieces = split(whole, limit, processor)
    runs = picture_runs(whole, processor)
    last = len(whole.input_ids) - tail
    atoms = [end - start + (tail if end == last else 0) for start, end in runs]
    atoms.append(tail + 1 if last > head else tail)
    if pieces is None:
        assert max(atoms) > limit - head
        return
    assert max(atoms) <= limit - head
    assert all(len(piece.input_ids) <= limit for piece in pieces)
    assert all(piece.input_ids[:head] == whole.input_ids[:head] for piece in pieces)
    assert all(set(piece.labels[:head]) == {IGNORED} for piece in pieces)
    for field in ("input_ids", "labels"):
        bodies = [token for piece in pieces for token in getattr(piece, field)[head:]]
        assert getattr(whole, field) == getattr(whole, field)[:head] + bodies
    assert [id(image) for piece in pieces for image in piece.images] == list(map(id, whole.images))
    for piece in pieces:
        check_pictures(piece, processor)
    # The end is taught once, and never to an empty piece.
    assert len(pieces[-1].input_ids) > head + tail or last == head


def test_split_moves_pictures_to_the_text_behind_them():
    processor = PROCESSORS["short"]
    picture = Picture(np.zeros((16, 16, 3), np.uint8))  # 4 tokens and two marks
    _, whole = encoded(processor, [""], ["a cat", picture, "sat"])
    before = whole.input_ids.index(processor.special_token_ids["vision_start_token_id"])
    pieces = split(whole, before + 6, processor)
    assert [len(piece.images) for piece in pieces] == [0, 1]
    assert pieces[0].num_supervised == before - 2
    assert pieces[1].labels[-1] == whole.labels[-1]


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(list(PROCESSORS)), st.tuples(parts, parts, parts, parts), st.integers(2, 90))
def test_truncation_keeps_all_that_can_be_learnt_in_the_limit(template, contents, limit):
    processor = PROCESSORS[template]
    _, whole = encoded(processor, *contents)
    learnable = [
        end for end in range(2, limit + 1) if [*whole.labels, *[IGNORED] * limit][end - 1] >= 0
    ]
    kept = truncated(whole, limit, processor)
    if kept is None:
        assert not learnable
        return
    length = max(learnable)
    assert kept.input_ids == whole.input_ids[:length]
    assert kept.labels == whole.labels[:length]
    inside = sum(end <= length for _, end in picture_runs(whole, processor))
    assert list(map(id, kept.images)) == list(map(id, whole.images[:inside]))
    check_pictures(kept, processor)


def test_a_conversation_is_no_document():
    empty, said = Turn("user", ("",)), Turn("assistant", ("a",))
    assert is_document([empty, said])
    assert is_document([Turn("user", ()), said])
    for turns in (
        [Turn("user", ("a",)), said],
        [Turn("user", (Picture("img0.png"),)), said],
        [Turn("system", ("",)), empty, said],
        [empty, said, empty, said],
        [empty],
    ):
        assert not is_document(turns)


@pytest.fixture
def shards(tmp_path):
    """A long document of two pictures, a long conversation, a document of one picture, a text."""
    image = ("png", encoded_image(7))

    def document(number, *content):
        answer = [{"type": "text", "text": part} if part else {"type": "image"} for part in content]
        turns = [{"role": "user", "content": ""}, {"role": "assistant", "content": answer}]
        return f"k{number}", {"messages": turns, "source": "toy"}, [image] * content.count(None)

    chat = document(1, "a" * 60)
    chat[1]["messages"][0]["content"] = "s0 q1"
    samples = [
        document(0, "a2 " * 40, None, "what color " * 9, None, "x"),
        chat,
        document(2, None, "a0"),
        document(3, "a1"),
    ]
    write_shards(tmp_path, "docs", samples, 4)
    return str(tmp_path)


def stream_of(processor, shards, policy, rank=0, world_size=1, **options):
    values = {"tokens_per_batch": 30, "epochs": 1, "over_length": policy, "on_error": "raise"}
    config = DataConfig(shards=shards, **{**values, **options})
    return build_stream(config, processor, rank, world_size)


@pytest.mark.parametrize(
    ("policy", "keys", "skipped", "over_length"),
    [
        ("drop", {2, 3}, {"too_long": 2}, {}),
        ("truncate", {0, 1, 2, 3}, {}, {"truncated": 2}),
        ("split", {0, 2, 3}, {"too_long": 1}, {"split": 1}),
    ],
)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_stream_counts_what_was_shortened(
    processor, shards, policy, keys, skipped, over_length, num_workers
):
    stream = stream_of(processor, shards, policy, num_workers=num_workers)
    batches = list(stream)
    assert all(batch.num_tokens <= 30 for batch in batches)
    assert {int(key[-1]) for batch in batches for key in batch.keys} == keys
    assert stream.skipped == Counter(skipped)
    assert stream.over_length == Counter(over_length)


def test_a_stream_resumes_between_the_pieces_of_a_document(processor, shards):
    def stream():
        return stream_of(processor, shards, "split", pack_lookahead=2)

    expected = [batch.input_ids.tolist() for batch in stream()]
    assert len(expected) > 4
    for cut in range(1, len(expected)):
        first, second = stream(), stream()
        start = [next(first).input_ids.tolist() for _ in range(cut)]
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert start + [batch.input_ids.tolist() for batch in second] == expected
        assert second.over_length == Counter(split=1)
    with pytest.raises(UserError, match="split_at 30, this run has 0; set"):
        stream_of(processor, shards, "drop").load_state_dict(first.state_dict())


@pytest.mark.parametrize(
    ("policy", "expected"), [("truncate", {"truncated": 2}), ("split", {"split": 1})]
)
def test_what_was_shortened_counts_once_at_any_chain_of_world_sizes(
    processor, shards, policy, expected
):
    """What is at hand when the ranks change is encoded again."""
    streams = [stream_of(processor, shards, policy)]
    for world_size in (2, 3, 1):
        next(streams[0], None)
        states = [stream.state_dict() for stream in streams]
        ranks = range(world_size)
        streams = [stream_of(processor, shards, policy, rank, world_size) for rank in ranks]
        for stream in streams:
            stream.load_state_dict(states)
    list(streams[0])
    assert streams[0].over_length == Counter(expected)


def test_document_bytes_count_pictures_and_tokens(processor, shards):
    stream = stream_of(processor, shards, "drop", shuffle=False)
    (document,) = stream._encoder.encode(Place(0, 0, 2))
    pixels = 3 * 16 * 16 * 4
    assert pixels < document.num_bytes <= pixels + 100 * len(document)
