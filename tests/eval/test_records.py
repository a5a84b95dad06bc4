from __future__ import annotations

import pytest

from conceptmoe_vl.errors import UserError
from eval.records import load_questions
from eval.tasks import easy_vqa
from tests.eval.shards import conversation, png, small_set, write_shard


def load(folder):
    return load_questions(folder, "test", lambda references: "k", "easy_vqa")


def test_every_question_is_asked_alone_with_its_image(tmp_path):
    questions = load(small_set(tmp_path, pictures=2))
    assert len(questions) == 6
    assert [question.key for question in questions[:3]] == [f"test0000#{n}" for n in range(3)]
    assert questions[1].text == "is there a circle?"
    assert questions[1].references == ["no"]
    assert [question.images for question in questions] == [[png("red")]] * 3 + [[png("blue")]] * 3


def test_a_question_gets_the_images_up_to_its_own_turn(tmp_path):
    first = conversation(("a?", "b"), images=1)
    second = conversation(("c?", "d"), images=2)
    images = [png("red"), png("green"), png("blue")]
    write_shard(tmp_path / "test-0.tar", {"r": (first + second, images)})
    assert [question.images for question in load(tmp_path)] == [images[:1], images]


def test_ten_images_keep_their_number_order(tmp_path):
    images = [png("red", 8 + number) for number in range(11)]
    record = (conversation(("a?", "b"), images=11), images)
    write_shard(tmp_path / "test-0.tar", {"r": record})
    assert load(tmp_path)[0].images == images


def test_easy_vqa_kinds(tmp_path):
    questions = easy_vqa.load(small_set(tmp_path, pictures=1))
    assert [question.kind for question in questions] == ["colour", "yes/no", "shape"]


def test_missing_shards_name_the_command_that_makes_them(tmp_path):
    with pytest.raises(UserError, match=r"python -m data_pipelines build easy_vqa .*--data"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("messages", "images", "reason"),
    [
        (conversation(("a?", "b"), images=2), [png()], "2 image placeholders, but 1 images"),
        (conversation(("a?", "b"), images=1), [png(), png()], "1 image placeholders, but 2 images"),
        (conversation(("a?", "b"))[:1], [png()], "a question has no answer"),
        (conversation(("a?", "b"))[1:], [], "an answer stands before any question"),
        ([{"role": "user", "content": 7}], [], "neither text nor a list of parts"),
        ([{"content": "a"}], [], "no list of messages"),
        ([], [], "a question has no answer"),
    ],
)
def test_a_damaged_record_is_named(tmp_path, messages, images, reason):
    good = (conversation(("a?", "b")), [png()])
    write_shard(tmp_path / "test-0.tar", {"good": good, "bad": (messages, images)})
    with pytest.raises(UserError, match=reason) as caught:
        load(tmp_path)
    assert "record 'bad'" in str(caught.value)
    assert "test-0.tar" in str(caught.value)


def test_a_cut_shard_is_named(tmp_path):
    shard = small_set(tmp_path) / "test-000000.tar"
    shard.write_bytes(shard.read_bytes()[:1600])
    with pytest.raises(UserError, match=r"test-000000\.tar"):
        load(tmp_path)


def test_the_same_key_twice_is_refused(tmp_path):
    record = {"same": (conversation(("a?", "b")), [png()])}
    write_shard(tmp_path / "test-0.tar", record)
    write_shard(tmp_path / "test-1.tar", record)
    with pytest.raises(UserError, match="1 questions twice"):
        load(tmp_path)
