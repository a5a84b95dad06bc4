from __future__ import annotations

import pytest

from conceptmoe_vl.errors import UserError
from eval.records import load_questions
from eval.tasks import easy_vqa
from tests.eval.shards import conversation, png, small_set, write_shard


def load(folder):
    return load_questions(folder, "test", lambda references: "k", "easy_vqa")


def images_of(question):
    parts = question.messages[-1]["content"]
    return [part["image"]() for part in parts if part["type"] == "image"]


def test_every_question_is_asked_alone_with_its_image(tmp_path):
    questions = load(small_set(tmp_path, pictures=2))
    assert len(questions) == 6
    assert [question.key for question in questions[:3]] == [f"test0000#{n}" for n in range(3)]
    assert questions[1].text == "is there a circle?"
    assert questions[1].references == ["no"]
    assert [images_of(question) for question in questions] == [
        *[[png("red")]] * 3,
        *[[png("blue")]] * 3,
    ]
    assert all(len(question.messages) == 1 for question in questions)


def test_a_system_turn_stays(tmp_path):
    messages = [{"role": "system", "content": "be short"}, *conversation(("a?", "b"), ("c?", "d"))]
    write_shard(tmp_path / "test-0.tar", {"r": (messages, [png()])})
    for question in load(tmp_path):
        assert [message["role"] for message in question.messages] == ["system", "user"]
        assert images_of(question) == [png()]


def test_questions_that_may_build_on_each_other_are_refused(tmp_path):
    record = (conversation(("a?", "b"), ("and then?", "d")), [png()])
    write_shard(tmp_path / "test-0.tar", {"r": record}, independent=False)
    with pytest.raises(UserError, match="cannot be asked alone"):
        load(tmp_path)


def test_ten_images_keep_their_number_order(tmp_path):
    images = [png("red", 8 + number) for number in range(11)]
    record = (conversation(("a?", "b"), images=11), images)
    write_shard(tmp_path / "test-0.tar", {"r": record})
    assert images_of(load(tmp_path)[0]) == images


def test_easy_vqa_kinds(tmp_path):
    questions = easy_vqa.load(small_set(tmp_path, pictures=1))
    assert [question.kind for question in questions] == ["colour", "yes/no", "shape"]


def test_missing_shards_name_the_command_that_makes_them(tmp_path):
    with pytest.raises(UserError, match=r"python -m data_pipelines build easy_vqa .*--data"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("messages", "images", "reason"),
    [
        (conversation(("a?", "b"), images=2), [png()], "2 image placeholders, but"),
        (
            conversation(("a?", "b"), images=1),
            [png(), png()],
            "1 image placeholders, but",
        ),
        (conversation(("a?", "b"))[:1], [png()], "no assistant turn"),
        (conversation(("a?", "b"))[1:], [], "role"),
        ([{"role": "user", "content": 7}], [], "content"),
        ([{"content": "a"}], [], "role"),
        ([], [], "messages"),
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


@pytest.mark.parametrize(
    ("manifest", "reason"),
    [
        ('{"splits": {"test": {"questions": 7}}}', "promises 7 test questions, the shards hold 6"),
        ('{"splits": {}}', "is no manifest"),
        ("[]", "is no manifest"),
        ("{", "is no manifest"),
    ],
)
def test_a_lost_shard_is_noticed_by_the_manifest(tmp_path, manifest, reason):
    small_set(tmp_path, pictures=2)
    (tmp_path / "manifest.json").write_text(manifest)
    with pytest.raises(UserError, match=reason):
        load(tmp_path)
    (tmp_path / "manifest.json").write_text('{"splits": {"test": {"questions": 6}}}')
    assert len(load(tmp_path)) == 6
