from __future__ import annotations

import dataclasses

import pytest

from conceptmoe_vl.asking import load_pretrained
from conceptmoe_vl.errors import UserError
from eval.replies import ReplyStore, question_key
from eval.runner import ask
from eval.tasks import Question, Task
from tests.eval.shards import png
from tests.model_folder import save_model_folder

TASK = Task("t", "t", "", lambda path: [], lambda text, q: text, lambda parsed, q: 0.5, 2)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return load_pretrained(save_model_folder(tmp_path_factory.mktemp("run") / "model"), "cpu")


def question(key: str, image, text: str = "what?") -> Question:
    content = [{"type": "image", "image": image}, {"type": "text", "text": text}]
    return Question(key, [{"role": "user", "content": content}], ["a"])


def test_images_are_fetched_when_their_question_is_asked(loaded, tmp_path):
    events: list = []

    def image(number: int):
        def fetch() -> bytes:
            events.append(number)
            return png("red", 8 + number)

        return fetch

    questions = [question(str(number), image(number)) for number in range(2)]
    ask(*loaded, TASK, questions, 1, ReplyStore(tmp_path), None, events.append)
    # Once for the checksum and once for the model; 0: nothing was in the store.
    assert events == [0, 1, 0, 0, 1, 1, 1]


def test_what_the_store_holds_is_not_asked_again(loaded, tmp_path):
    questions = [question("a", png("red")), question("b", png("blue"))]
    first = ask(*loaded, TASK, questions, 2, ReplyStore(tmp_path))
    again = ask(None, None, TASK, questions, 2, ReplyStore(tmp_path))  # no model at all
    assert (first.new, again.new) == (2, 0)
    assert again.replies == first.replies
    assert again.keys == first.keys
    anew = ask(*loaded, TASK, questions, 2, ReplyStore(tmp_path, reuse=False))
    assert anew.new == 2


def test_equal_questions_are_asked_once(loaded, tmp_path):
    asked = ask(*loaded, TASK, [question(k, png()) for k in "abc"], 2, ReplyStore(tmp_path))
    assert asked.new == 1
    assert asked.replies[0] == asked.replies[1] == asked.replies[2]


def test_a_line_that_was_not_finished_is_asked_again(loaded, tmp_path):
    questions = [question(str(size), png("red", size)) for size in (8, 16, 24)]
    whole = ask(*loaded, TASK, questions, 1, ReplyStore(tmp_path))
    path = tmp_path / "0.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    for expected in (1, 0):  # what is written behind the broken line can be read
        again = ask(*loaded, TASK, questions, 1, ReplyStore(tmp_path))
        assert again.new == expected
        assert again.replies == whole.replies


@pytest.mark.parametrize(
    "changed",
    [
        question("a", png("blue")),
        question("a", png(), "what is it?"),
        dataclasses.replace(question("a", png()), choices=["x"]),
    ],
)
def test_another_question_has_another_key(changed):
    assert question_key(TASK, changed) != question_key(TASK, question("a", png()))


def test_the_key_is_that_of_what_is_asked_however_the_image_is_given(tmp_path):
    (tmp_path / "a.png").write_bytes(png())
    images = [png(), lambda: png(), tmp_path / "a.png", str(tmp_path / "a.png")]
    keys = {question_key(TASK, question("a", image)) for image in images}
    assert len(keys) == 1
    other = dataclasses.replace(question("b", png()), references=["z"], kind="k", details={"n": 1})
    assert question_key(TASK, other) in keys
    for change in ({"max_new_tokens": 3}, {"stop": ("\n",)}, {"mode": "choose"}):
        assert question_key(dataclasses.replace(TASK, **change), other) not in keys


def test_a_missing_image_names_its_question(tmp_path):
    with pytest.raises(UserError, match=r"question 'a' cannot be asked: .*nowhere\.png"):
        question_key(TASK, question("a", tmp_path / "nowhere.png"))
