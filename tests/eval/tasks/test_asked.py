"""All public layouts through the runner with a tiny model: asked, read, scored."""

from __future__ import annotations

import pytest

from conceptmoe_vl.asking import load_pretrained
from eval.runner import evaluate
from eval.tasks import Scored, all_tasks
from tests.eval.tasks import files
from tests.model_folder import save_model_folder


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    return load_pretrained(save_model_folder(tmp_path_factory.mktemp("model")), "cpu")


@pytest.mark.parametrize("name", files.MAKERS)
def test_every_question_is_asked_with_its_images_and_scored(name, pretrained, tmp_path):
    files.MAKERS[name](tmp_path)
    task = all_tasks()[name]
    questions = task.load(tmp_path)[:4]
    evaluation = evaluate(*pretrained, task, questions, batch_size=3)
    assert [sample.question.key for sample in evaluation.samples] == [q.key for q in questions]
    for sample in evaluation.samples:
        content = sample.question.messages[-1]["content"]
        images = sum(part["type"] == "image" for part in content)
        assert sample.answer.prompt.count("<|image_pad|>*") == images
        assert 0 <= sample.score <= 1
    scored = [Scored(sample.question, sample.parsed, sample.score) for sample in evaluation.samples]
    assert next(iter(task.metrics(scored))) in (
        *("accuracy", "anls", "relaxed_accuracy", "score", "circular_accuracy", "accuracy_at_0.5"),
    )
