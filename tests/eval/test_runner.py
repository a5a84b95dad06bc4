from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from conceptmoe_vl import prefixes
from conceptmoe_vl.asking import load_pretrained
from conceptmoe_vl.errors import UserError
from conceptmoe_vl.files import sha256_of
from eval import replies
from eval.replies import Reply, ReplyStore, question_key
from eval.runner import Asker, to_sample
from eval.tasks import Question, Task, mean_perplexity, mean_score
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

    questions = [question(str(number), image(number)) for number in range(3)]
    asker = Asker(*loaded, 1)
    asker.ask(TASK, questions, ReplyStore(tmp_path), lambda count: events.append("reply"))
    # Once for the checksum and once for the model, one question ahead.
    assert events == [0, 0, 1, 1, "reply", 2, 2, "reply", "reply"]


def test_an_image_of_several_questions_is_read_once_for_their_keys(tmp_path, monkeypatch):
    read: list[str] = []

    def counted(path):
        read.append(str(path))
        return sha256_of(path)

    monkeypatch.setattr(replies, "sha256_of", counted)
    (tmp_path / "a.png").write_bytes(png("red"))
    (tmp_path / "b.png").write_bytes(png("blue"))
    checksum_of = replies.ImageChecksums()

    def key(name: str, text: str) -> str:
        return question_key(TASK, question(text, tmp_path / name, text), checksum_of)

    keys = [key("a.png", "1"), key("a.png", "2"), key("b.png", "1"), key("a.png", "1")]
    assert read == [str(tmp_path / "a.png"), str(tmp_path / "b.png")]
    assert keys[0] == keys[3]
    assert len(set(keys)) == 3
    (tmp_path / "a.png").write_bytes(png("blue"))
    assert key("a.png", "1") == keys[2]


def test_a_function_of_several_questions_is_called_once_for_their_keys():
    calls: list[int] = []

    def fetch() -> bytes:
        calls.append(1)
        return png("red")

    checksum_of = replies.ImageChecksums()
    keys = [question_key(TASK, question(text, fetch, text), checksum_of) for text in "ab"]
    assert len(calls) == 1
    assert keys == [question_key(TASK, question(text, png("red"), text)) for text in "ab"]


def test_what_the_store_holds_is_not_asked_again(loaded, tmp_path):
    questions = [question("a", png("red")), question("b", png("blue"))]
    first = Asker(*loaded, 2).ask(TASK, questions, ReplyStore(tmp_path))
    again = Asker(*loaded, 2).ask(TASK, questions, ReplyStore(tmp_path))
    assert (first.new, again.new) == (2, 0)
    assert again.replies == first.replies
    assert again.keys == first.keys
    anew = Asker(*loaded, 2).ask(TASK, questions, ReplyStore(tmp_path, reuse=False))
    assert anew.new == 2


def test_equal_questions_are_asked_once(loaded, tmp_path):
    asked = Asker(*loaded, 2).ask(TASK, [question(k, png()) for k in "abc"], ReplyStore(tmp_path))
    assert asked.new == 1
    assert asked.replies[0] == asked.replies[1] == asked.replies[2]


def test_a_line_that_was_not_finished_is_asked_again(loaded, tmp_path):
    questions = [question(str(size), png("red", size)) for size in (8, 16, 24)]
    whole = Asker(*loaded, 1).ask(TASK, questions, ReplyStore(tmp_path))
    path = tmp_path / "0.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    for expected in (1, 0):  # what is written behind the broken line can be read
        again = Asker(*loaded, 1).ask(TASK, questions, ReplyStore(tmp_path))
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


def texts(prompt: str, choices: list[str], references: list[str]) -> Question:
    messages = [{"role": "user", "content": prompt}] if prompt else []
    return Question(prompt, messages, references, choices=choices)


def score(parsed: str, question: Question) -> float:
    return float(parsed in question.references)


CHOOSE = dataclasses.replace(TASK, mode="choose", score=score, parse=lambda text, q: text)


def test_the_choice_is_the_likeliest_one(loaded, tmp_path):
    """Against the logits of prompt and choice in one pass."""
    model, processor = loaded
    choices = ["red", "no", "a shape"]
    question = texts("is there a circle?", choices, ["no"])
    (reply,) = Asker(*loaded, 4).ask(CHOOSE, [question], ReplyStore(tmp_path)).replies
    prompt = processor.encode(question.messages, add_generation_prompt=True).input_ids
    for choice, (total, count) in zip(choices, reply.log_likelihoods, strict=True):
        ids = processor.text_ids(choice)
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*prompt, *ids]])).logits[0]
        expected = logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(1, torch.tensor([ids]).T)
        assert count == len(ids)
        assert total == pytest.approx(float(expected.sum()), abs=1e-4)
    assert reply.prompt_tokens == len(prompt) == sum(reply.tokens.values())
    assert "is there a circle?" in reply.prompt
    sample = to_sample(CHOOSE, question, reply)
    totals = [total for total, _ in reply.log_likelihoods]
    assert sample.parsed == choices[totals.index(max(totals))]
    assert sample.score == float(sample.parsed == "no")


def test_of_equal_choices_the_first_is_taken_and_length_counts_in_the_second_score():
    question = texts("q", ["aa", "bb", "cccccccc"], ["cccccccc"])
    sample = to_sample(
        CHOOSE, question, Reply("", "", "q", 1, 0, log_likelihoods=((-2, 1), (-2, 1), (-4, 4)))
    )
    assert (sample.parsed, sample.score, sample.score_normalised) == ("aa", 0.0, 1.0)
    assert mean_score([sample.scored]) == {"accuracy": 0.0, "accuracy_normalised": 1.0}


def test_perplexity_is_that_of_the_text_by_token_word_and_byte(loaded, tmp_path):
    task = dataclasses.replace(TASK, mode="perplexity", metrics=mean_perplexity)
    questions = [
        dataclasses.replace(texts("", [], ["what is the color?"]), key="plain"),
        texts("what shape is it?", [], ["red"]),
    ]
    asked = Asker(*loaded, 4).ask(task, questions, ReplyStore(tmp_path))
    samples = [
        to_sample(task, question, reply)
        for question, reply in zip(questions, asked.replies, strict=True)
    ]
    pairs = [sample.reply.log_likelihoods[0] for sample in samples]
    total, tokens = (sum(pair[i] for pair in pairs) for i in (0, 1))
    figures = mean_perplexity([sample.scored for sample in samples])
    assert figures["perplexity"] == pytest.approx(math.exp(-total / tokens))
    assert figures["word_perplexity"] == pytest.approx(math.exp(-total / 5))
    assert figures["byte_perplexity"] == pytest.approx(math.exp(-total / 21))
    assert asked.replies[0].prompt_tokens == 1  # the start token alone
    assert float(samples[1].parsed) == pytest.approx(math.exp(-pairs[1][0] / pairs[1][1]), 1e-4)


def test_a_question_that_a_mode_cannot_ask_is_named(loaded, tmp_path):
    with pytest.raises(UserError, match=r"question 'what' cannot be asked: .*has no token"):
        Asker(*loaded, 1).ask(CHOOSE, [texts("what", ["a", ""], ["a"])], ReplyStore(tmp_path))
    with pytest.raises(UserError, match="question 'what': mode choose needs messages and choices"):
        Asker(*loaded, 1).ask(CHOOSE, [texts("what", [], ["a"])], ReplyStore(tmp_path))


@pytest.mark.parametrize("mode", ["generate", "choose"])
def test_what_questions_share_is_computed_once(loaded, tmp_path, monkeypatch, mode):
    """Prompts, tokens and concepts are told as without; a task that shares nothing is not cut."""
    monkeypatch.setattr(prefixes, "_SHORTEST", 10)
    monkeypatch.setattr(prefixes, "_SHORTEST_REST", 3)
    task = dataclasses.replace(CHOOSE, mode=mode)
    image, choices = png("red"), ["red", "no circle"]
    questions = [
        dataclasses.replace(question(text, image, text), choices=choices)
        for text in ("what is the shape?", "is there a circle?", "what is the color of it?")
    ]
    shared, alone = Asker(*loaded, 2), Asker(*loaded, 2)
    found = shared.ask(task, questions, ReplyStore(tmp_path / "shared")).replies
    assert (shared.prefixes.hits, shared.prefixes.misses) == (2, 1)
    apart = dataclasses.replace(task, shares_prefixes=False)
    expected = alone.ask(apart, questions, ReplyStore(tmp_path / "apart")).replies
    assert (alone.prefixes.hits, alone.prefixes.misses) == (0, 0)
    for mine, other in zip(found, expected, strict=True):
        assert mine.tokens["image"] == 9
        for (total, count), (wanted, wanted_count) in zip(
            mine.log_likelihoods, other.log_likelihoods, strict=True
        ):
            assert total == pytest.approx(wanted, abs=2e-4)
            assert count == wanted_count
        assert dataclasses.replace(mine, log_likelihoods=()) == (
            dataclasses.replace(other, log_likelihoods=())
        )
    keys = {question_key(each, questions[0]) for each in (task, apart)}
    assert len(keys) == 2
