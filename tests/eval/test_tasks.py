from __future__ import annotations

import pytest

from eval.tasks import Question, Scored, all_tasks, get_tasks, mean_score


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
