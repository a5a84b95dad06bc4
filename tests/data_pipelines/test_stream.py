"""The stream's contract: order, resumption, skips, ranks, and what a batch holds."""

from __future__ import annotations

import io
import itertools
import json
import logging
import multiprocessing
import tarfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conceptmoe_vl.errors import UserError
from conceptmoe_vl.prompts import IGNORED
from data_pipelines import DataConfig, PackedBatch, build_stream
from data_pipelines.stream import SampleError
from data_pipelines.writing import write_shards
from tests.data_pipelines.conftest import encoded_image, noise, record, sample, toy_shards


def stream_of(processor, shards, rank=0, world_size=1, **options):
    values = {"tokens_per_batch": 120, **options}
    return build_stream(DataConfig(shards=shards, **values), processor, rank, world_size)


def same(one: PackedBatch, two: PackedBatch) -> bool:
    tensors, others = one.model_inputs(), two.model_inputs()
    return (
        one.keys == two.keys
        and tensors.keys() == others.keys()
        and all(torch.equal(tensors[name], others[name]) for name in tensors)
    )


@pytest.fixture
def shards(tmp_path) -> str:
    return toy_shards(tmp_path / "data", [7, 3, 11], questions=3, independent=True)


OPTIONS = {"shuffle_questions": True, "questions_per_conversation": 2, "augment": "flip_shift"}


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_every_sample_of_an_epoch_is_seen_once_over_all_ranks(
    processor, shards, world_size, num_workers
):
    seen = Counter()
    for rank in range(world_size):
        stream = stream_of(processor, shards, rank, world_size, epochs=2, num_workers=num_workers)
        for batch in stream:
            seen.update(batch.keys)
            assert batch.num_tokens <= 120
        assert stream.epoch == 2
    assert len(seen) == 21
    assert set(seen.values()) == {2}


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("num_workers", [0, 2, 4])
def test_few_shards_are_split_by_sample_or_refused(
    processor, tmp_path, count, world_size, num_workers
):
    shards = toy_shards(tmp_path, [1] * count)
    for rank in range(world_size):
        if count < world_size:
            with pytest.raises(UserError, match="1 samples for 2 processes"):
                stream_of(processor, shards, rank, world_size, num_workers=num_workers)
        else:
            stream = stream_of(processor, shards, rank, world_size, num_workers=num_workers)
            assert next(stream).num_tokens > 0


@pytest.mark.parametrize("cut", [1, 4, 9, 16])
@pytest.mark.parametrize("workers", [(0, 0), (2, 0), (0, 1)])
def test_a_resumed_stream_is_the_unbroken_one(processor, shards, cut, workers):
    unbroken = stream_of(processor, shards, 1, 2, **OPTIONS)
    expected = [next(unbroken) for _ in range(20)]
    first = stream_of(processor, shards, 1, 2, num_workers=workers[0], **OPTIONS)
    start = [next(first) for _ in range(cut)]
    state = json.loads(json.dumps(first.state_dict()))
    first.close()
    second = stream_of(processor, shards, 1, 2, num_workers=workers[1], **OPTIONS)
    second.load_state_dict(state)
    found = start + [next(second) for _ in range(20 - cut)]
    second.close()
    assert all(same(*pair) for pair in zip(found, expected, strict=True))
    assert second.state_dict() == unbroken.state_dict()


def test_a_state_can_be_loaded_into_a_running_stream(processor, shards):
    stream = stream_of(processor, shards, **OPTIONS)
    state = stream.state_dict()
    first = [next(stream) for _ in range(5)]
    stream.load_state_dict(state)
    assert all(same(batch, next(stream)) for batch in first)


def test_a_state_of_other_data_or_ranks_is_refused(processor, shards, tmp_path):
    state = stream_of(processor, shards).state_dict()
    with pytest.raises(UserError, match="world_size 1, this run has 2; give the states of all"):
        stream_of(processor, shards, 0, 2).load_state_dict(state)
    with pytest.raises(UserError, match="seed 0, this run has 1"):
        stream_of(processor, shards, seed=1).load_state_dict(state)
    other = toy_shards(tmp_path / "other", [7, 3, 12])
    with pytest.raises(UserError, match="the shards have changed"):
        stream_of(processor, other).load_state_dict(state)


def test_the_order_depends_on_seed_and_epoch(processor, shards):
    def keys(**options):
        stream = stream_of(processor, shards, epochs=2, pack_lookahead=1, **options)
        found = [key for batch in stream for key in batch.keys]
        return found[:21], found[21:]

    first, second = keys(seed=3)
    assert keys(seed=3) == (first, second)
    assert sorted(first) == sorted(second)
    assert first != second
    assert keys(seed=4)[0] != first
    plain, again = keys(shuffle=False)
    assert plain == again == sorted(plain)
    assert len({key.partition("/")[0] for key in first[:6]}) > 1


def test_questions_are_shuffled_and_chosen_anew_each_epoch(processor, shards):
    stream = stream_of(processor, shards, epochs=6, **OPTIONS)
    asked = {}
    for batch in stream:
        for key, ids in zip(batch.keys, documents(batch.input_ids, batch), strict=True):
            text = processor.tokenizer.decode(ids)
            assert text.count("<|im_start|>") == 2
            assert text.startswith("<|im_start|><|vision_start|><|image_pad|>")
            for question in "012":  # each question keeps its own answer
                assert (f"q{question}" in text) == (f"q{question}<|im_end|>a{question}" in text)
            asked.setdefault(key, set()).add(text)
    assert len(asked) == 21
    assert max(map(len, asked.values())) > 2


def documents(values: torch.Tensor, batch: PackedBatch) -> list[list[int]]:
    ends = batch.cu_seqlens.tolist()
    return [values[start:end].tolist() for start, end in itertools.pairwise(ends)]


def test_images_and_texts_of_mixed_samples_stay_together(processor, tmp_path):
    counts = [0, 3, 1, 2, 0, 1, 3, 0, 2]
    samples = [sample(number, images=count) for number, count in enumerate(counts)]
    write_shards(tmp_path, "mixed", samples, 4)
    stream = stream_of(processor, str(tmp_path / "*.tar"), epochs=1, tokens_per_batch=90)
    seen = Counter()
    for batch in stream:
        assert batch.cu_seqlens.dtype == torch.int32
        place = 0
        for key, ids in zip(batch.keys, documents(batch.input_ids, batch), strict=True):
            number = int(key[-3:])
            assert f"s{number} q0" in processor.tokenizer.decode(ids)
            assert ids.count(processor.image_token_id) == 4 * counts[number]
            for image in range(counts[number]):
                value = ((10 * number + image) % 256) / 255 * 2 - 1
                assert batch.pixel_values[place] == pytest.approx(value, abs=1e-5)
                place += 1
            seen[number] += 1
        found = 0 if batch.pixel_values is None else len(batch.pixel_values)
        assert place == found
        assert ("pixel_values" in batch.model_inputs()) == (found > 0)
    assert seen == Counter(range(len(counts)))


def test_a_packed_batch_is_its_samples_end_to_end(processor, shards):
    stream = stream_of(processor, shards, shuffle=False, tokens_per_batch=200, pack_lookahead=1)
    batch = next(stream)
    assert len(batch.keys) > 1
    position = 0
    for number, (ids, labels) in enumerate(
        zip(documents(batch.input_ids, batch), documents(batch.labels, batch), strict=True)
    ):
        _, given, pictures = sample(number, questions=3)
        messages = given["messages"]
        messages[0]["content"][0] = {"type": "image", "image": pictures[0][1]}
        encoded = processor.encode(messages)
        assert ids == encoded.input_ids
        assert labels == encoded.labels
        position += len(ids)
    assert position == batch.num_tokens
    assert batch.num_supervised == int((batch.labels != IGNORED).sum())
    assert batch.sources == ["toy"] * len(batch.keys)
    assert batch.document_sources.tolist() == [0] * len(batch.keys)
    assert same(batch.to("cpu"), batch)


def test_a_label_at_a_documents_start_is_not_counted():
    labels = torch.tensor([5, IGNORED, 6, 7, IGNORED])
    cu_seqlens = torch.tensor([0, 2, 5], dtype=torch.int32)
    batch = PackedBatch(labels, labels, cu_seqlens, ["a", "b"], ["x", "y"])
    assert batch.num_supervised == 1


def test_over_long_samples_are_dropped_and_counted(processor, tmp_path):
    samples = [sample(number, questions=1 + 20 * (number % 3 == 0)) for number in range(9)]
    write_shards(tmp_path, "long", samples, 9)
    stream = stream_of(processor, str(tmp_path), epochs=1, tokens_per_batch=60, on_error="raise")
    keys = sorted(key for batch in stream for key in batch.keys)
    assert [int(key[-3:]) for key in keys] == [1, 2, 4, 5, 7, 8]
    assert stream.skipped == Counter(too_long=3)


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 90))
def test_no_limit_ever_cuts_an_image(processor, tmp_path_factory, limit):
    folder = tmp_path_factory.mktemp("cut")
    write_shards(folder, "two", [sample(1, images=2), sample(2, images=0)], 2)
    stream = stream_of(processor, str(folder), epochs=1, tokens_per_batch=limit)
    try:
        batches = list(stream)
    except SampleError as error:
        assert "no sample is usable" in str(error)  # noqa: PT017  (both outcomes are right)
        return
    for batch in batches:
        images = 0 if batch.pixel_values is None else len(batch.pixel_values)
        assert (batch.input_ids == processor.image_token_id).sum() == 4 * images
        assert batch.num_tokens <= limit
    assert sum(len(batch.keys) for batch in batches) + stream.skipped["too_long"] == 2


def test_nothing_usable_ends_with_one_message(processor, shards):
    with pytest.raises(SampleError, match=r"21 in a row were skipped .too_long 21.; the last one"):
        next(stream_of(processor, shards, tokens_per_batch=5))


def broken_shards(folder: Path) -> str:
    """4 shards of 10: a JPEG cut at half, an empty image, a shard cut in its middle."""
    folder.mkdir()
    for shard in range(4):
        samples = []
        for step in range(10):
            number = 10 * shard + step
            data = noise("JPEG", number)
            if number == 3:
                data = data[: len(data) // 2]
            if number == 15:
                data = b""
            samples.append((f"k{number:03d}", record(number), [("jpg", data)]))
        write_shards(folder, f"s{shard}", samples, 10)
    whole = (folder / "s2-000000.tar").read_bytes()
    (folder / "s2-000000.tar").write_bytes(whole[: len(whole) // 2])
    return str(folder / "*.tar")


def test_faults_are_skipped_counted_and_named(processor, tmp_path, caplog):
    shards = broken_shards(tmp_path / "broken")
    with caplog.at_level(logging.WARNING):
        stream = stream_of(processor, shards, epochs=1, on_error="skip", on_truncated_shard="skip")
        keys = [key for batch in stream for key in batch.keys]
    assert stream.skipped == Counter(truncated=1, empty=1, truncated_shard=1)
    numbers = sorted(int(key[-3:]) for key in keys)
    complete = [number for number in numbers if number // 10 == 2]
    assert 2 <= len(complete) <= 8  # those before the cut
    assert numbers == sorted({*range(20), *complete, *range(30, 40)} - {3, 15})
    assert "s0-000000.tar', key 'k003'" in caplog.text
    assert "s1-000000.tar', key 'k015'" in caplog.text
    assert "s2-000000.tar" in caplog.text
    assert "epoch 0, rank 0: skipped 2 of" in caplog.text


def test_faults_can_raise_or_be_limited(processor, tmp_path):
    shards = broken_shards(tmp_path / "broken")
    with pytest.raises(SampleError, match=r"s2-000000\.tar.* ends early.*on_truncated_shard"):
        stream_of(processor, shards)
    options = {"epochs": 1, "on_truncated_shard": "skip"}
    with pytest.raises(SampleError, match=r"s[01]-000000\.tar', key 'k0(03|15)'.*reason"):
        list(stream_of(processor, shards, on_error="raise", **options))
    with pytest.raises(SampleError, match="2 damaged samples in epoch 0, the limit is 1"):
        list(stream_of(processor, shards, on_error="limit", max_skips=1, **options))
    list(stream_of(processor, shards, on_error="limit", max_skips=2, **options))
    with pytest.raises(SampleError, match="the limit is 0"):
        list(stream_of(processor, shards, on_error="limit", max_skip_share=0.02, **options))
    list(stream_of(processor, shards, on_error="limit", max_skip_share=0.1, **options))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_workers_report_faults_too(processor, tmp_path, num_workers):
    shards = broken_shards(tmp_path / "broken")
    options = {"epochs": 1, "on_truncated_shard": "skip", "num_workers": num_workers}
    stream = stream_of(processor, shards, on_error="skip", **options)
    list(stream)
    assert stream.skipped["truncated"] == stream.skipped["empty"] == 1


def members(*names_and_data) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, data in names_and_data:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


GOOD = json.dumps(record(1)).encode()
IMAGE = encoded_image(5)


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ([("k.img0.png", IMAGE)], "missing_field"),
        ([("k.json", b"{"), ("k.img0.png", IMAGE)], "bad_json"),
        ([("k.json", b"[]"), ("k.img0.png", IMAGE)], "bad_json"),
        ([("k.json", GOOD.decode().encode("utf-16")), ("k.img0.png", IMAGE)], "bad_json"),
        ([("k.json", GOOD.replace(b"q0", b"\xed\xa0\x80")), ("k.img0.png", IMAGE)], "bad_json"),
        ([("k.json", b"{}"), ("k.img0.png", IMAGE)], "missing_field"),
        ([("k.json", b'{"messages": []}')], "missing_field"),
        ([("k.json", GOOD)], "image_count"),
        ([("k.json", GOOD), ("k.img1.png", IMAGE)], "image_count"),
        ([("k.json", GOOD), ("k.img0.png", IMAGE), ("k.img0.jpg", IMAGE)], "image_count"),
        ([("k.json", GOOD), ("k.img0.png", IMAGE), ("k.json", GOOD)], "repeated_member"),
        ([("k.json", GOOD), ("k.img0.png", b"text")], "not_an_image"),
        (
            [("k.json", GOOD.replace(b'"assistant"', b'"gpt"')), ("k.img0.png", IMAGE)],
            "bad_role",
        ),
        (
            [("k.json", b'{"messages": [{"role": "user", "content": "x"}]}')],
            "no_answer",
        ),
        ([("k.json", GOOD.replace(b'"toy"', b"7")), ("k.img0.png", IMAGE)], "bad_field"),
    ],
)
def test_each_damaged_record_has_its_reason(processor, tmp_path, files, reason):
    good = [("z.json", GOOD), ("z.img0.png", IMAGE)]
    (tmp_path / "a.tar").write_bytes(members(*files, *good))
    stream = stream_of(processor, str(tmp_path), epochs=1, on_error="skip")
    assert [key for batch in stream for key in batch.keys] == ["a.tar/z"]
    assert stream.skipped == Counter({reason: 1})
    with pytest.raises(SampleError, match=rf"a\.tar', key 'k': .*reason {reason}"):
        list(stream_of(processor, str(tmp_path), epochs=1, on_error="raise", shuffle=False))


def test_members_that_are_no_neighbours_are_one_sample(processor, tmp_path):
    files = [("a.json", GOOD), ("b.json", GOOD), ("a.img0.png", IMAGE), ("b.img0.png", IMAGE)]
    (tmp_path / "a.tar").write_bytes(members(*files))
    stream = stream_of(processor, str(tmp_path), epochs=1, on_error="raise")
    assert sorted(key for batch in stream for key in batch.keys) == ["a.tar/a", "a.tar/b"]


def test_packing_fills_batches(processor, tmp_path):
    rng = np.random.default_rng(0)
    samples = [sample(number, questions=int(rng.integers(1, 9))) for number in range(120)]
    write_shards(tmp_path, "mix", samples, 120)
    batches = list(stream_of(processor, str(tmp_path), epochs=1, tokens_per_batch=800))
    used = [batch.num_tokens / 800 for batch in batches[:-1]]
    assert sum(used) / len(used) > 0.97


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"shard": "x"}, "'data.shard'; the nearest known key is 'shards'"),
        ({"shards": []}, "data.shards is"),
        ({"shards": "x", "augment": "flip"}, "data.augment is 'flip'; choose one of"),
        ({"shards": "x", "tokens_per_batch": 0}, "tokens_per_batch is 0; give an integer of 2"),
        ({"shards": "x", "seed": "a"}, "data.seed is 'a'"),
        ({"shards": "x", "max_skip_share": 2}, "max_skip_share is 2"),
        ("x", "give a mapping"),
    ],
)
def test_wrong_configurations_are_refused(values, message):
    with pytest.raises(UserError, match=message):
        DataConfig.from_mapping(values)


def test_a_dropped_stream_ends_its_workers_at_once(processor, shards):
    before = len(multiprocessing.active_children())
    stream = stream_of(processor, shards, num_workers=2)
    next(stream)
    assert len(multiprocessing.active_children()) == before + 2
    del stream  # no garbage collection: a cycle would leave the workers to a slow end
    assert len(multiprocessing.active_children()) == before
