from __future__ import annotations

import pytest

from conceptmoe_vl.asking import load_pretrained
from eval.runner import evaluate
from eval.tasks import Question, Scored, Task, all_tasks, get_tasks, mean_score
from tests.eval.shards import png
from tests.model_folder import save_model_folder


def test_every_task_is_found_and_described():
    tasks = all_tasks()
    assert "easy_vqa" in tasks
    assert list(tasks) == sorted(tasks)
    assert all(task.name == name and task.description for name, task in tasks.items())


def test_tasks_are_taken_by_name_once_each():
    assert [task.name for task in get_tasks("easy_vqa, easy_vqa")] == ["easy_vqa"]


def test_mean_score_is_the_accuracy():
    question = Question("a", [], ["x"])
    samples = [Scored(question, "x", 1.0), Scored(question, "", 0.0), Scored(question, "y", 0.5)]
    assert mean_score(samples) == {"accuracy": 0.5}


@pytest.mark.parametrize("content", ["what?", [{"type": "text", "text": "what?"}]])
def test_the_text_is_that_of_the_last_turn(content):
    messages = [{"role": "system", "content": "be short"}, {"role": "user", "content": content}]
    assert Question("a", messages, []).text == "what?"


def test_an_image_is_fetched_when_its_question_is_asked(tmp_path):
    model, processor = load_pretrained(save_model_folder(tmp_path / "model"), "cpu")
    events: list = []

    def question(number: int) -> Question:
        def image() -> bytes:
            events.append(f"fetched {number}")
            return png()

        content = [{"type": "image", "image": image}, {"type": "text", "text": "what?"}]
        return Question(str(number), [{"role": "user", "content": content}], [], details={"n": 1})

    task = Task("t", "t", "", lambda path: [], lambda text, q: text, lambda parsed, q: 0.5, 2)
    evaluation = evaluate(
        model, processor, task, [question(0), question(1)], 1, lambda batch: events.append("asked")
    )
    assert events == ["fetched 0", "asked", "fetched 1", "asked"]
    assert [sample.to_row()["details"] for sample in evaluation.samples] == [{"n": 1}] * 2
    assert mean_score([sample.scored for sample in evaluation.samples]) == {"accuracy": 0.5}
