"""lmms-eval with local task files: prompts and outputs are those of the own functions."""

from __future__ import annotations

import sys

import pytest

pytest.importorskip(
    "lmms_eval", reason="lmms-eval is not installed: pip install 'conceptmoe-vl[lmms-eval]'"
)

from lmms_eval.evaluator import simple_evaluate
from lmms_eval.models import MODEL_REGISTRY_V2, get_model
from lmms_eval.tasks import TaskManager

from conceptmoe_vl.asking import question_messages
from conceptmoe_vl.continuous_batching import generate_all, log_likelihoods
from conceptmoe_vl.errors import UserError
from eval.adaptors.__main__ import register
from eval.adaptors.lmms_eval import ConceptMoEVLChat, ConceptMoEVLSimple, messages_of
from tests.eval.harness_data import CHOICES, write_data, write_task
from tests.model_folder import save_model_folder

FUNCTIONS = """from PIL import Image


def pictures(doc):
    return [Image.open(doc["picture"]).convert("RGB")]


def process_results(doc, results):
    return {"exact": float(results[0] == doc["choices"][doc["answer"]])}
"""
GENERATE = """output_type: generate_until
doc_to_text: "{{question}}"
doc_to_visual: !function lmms_pictures_functions.pictures
doc_to_target: "{{choices[answer]}}"
process_results: !function lmms_pictures_functions.process_results
generation_kwargs:
  max_new_tokens: 6
  temperature: 0
  do_sample: false
  until: ["e"]
metric_list:
  - metric: exact
    aggregation: mean
    higher_is_better: true
"""
CHOICE = """output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_visual: !function lmms_choice_functions.pictures
doc_to_choice: choices
doc_to_target: answer
target_delimiter: ""
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    rows = write_data(folder, 6)
    write_task(folder, "lmms_pictures", GENERATE, FUNCTIONS)
    write_task(folder, "lmms_choice", CHOICE, FUNCTIONS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(folder), *sys.path])
        for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
            patch.setenv(name, "1")
        yield folder, rows


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return save_model_folder(tmp_path_factory.mktemp("model"), lively=True)


def samples_of(model, data, task, **options):
    manager = TaskManager("ERROR", include_path=str(data[0]), include_defaults=False)
    results = simple_evaluate(
        model,
        tasks=[task],
        task_manager=manager,
        bootstrap_iters=0,
        log_samples=True,
        process_docs_parallel=1,
        **options,
    )
    return sorted(results["samples"][task], key=lambda sample: sample["doc_id"])


@pytest.mark.parametrize("simple", [False, True], ids=["chat", "simple"])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_answers_about_pictures(model_folder, data, simple, batch_size):
    """The model by its name, as the command line names it."""
    register("lmms_eval")
    samples = samples_of(
        "conceptmoe_vl",
        data,
        "lmms_pictures",
        model_args=f"pretrained={model_folder}",
        device="cpu",
        batch_size=batch_size,
        force_simple=simple,
    )
    model = ConceptMoEVLChat(str(model_folder), device="cpu")
    conversations = [question_messages([row["picture"]], row["question"]) for row in data[1]]
    expected = generate_all(model.model, model.processor, conversations, 6, stop=("e",))
    assert [sample["resps"][0][0] for sample in samples] == [answer.text for answer in expected]
    texts = [answer.text for answer in expected]
    scores = [
        float(t == row["choices"][row["answer"]]) for t, row in zip(texts, data[1], strict=True)
    ]
    assert [sample["exact"] for sample in samples] == scores


def test_log_likelihoods_of_choices_about_pictures(model_folder, data):
    model = ConceptMoEVLSimple(str(model_folder), device="cpu")
    conversations = [question_messages([row["picture"]], row["question"]) for row in data[1]]
    expected = log_likelihoods(
        model.model, model.processor, [(c, choice) for c in conversations for choice in CHOICES]
    )
    samples = samples_of(model, data, "lmms_choice")  # takes the model's weights away at its end
    found = [tuple(resp[0]) for sample in samples for resp in sample["resps"]]
    assert found == [(-score.sum, score.is_greedy) for score in expected]
    sums = [score.sum for score in expected]
    for number, (sample, row) in enumerate(zip(samples, data[1], strict=True)):
        own = sums[number * len(CHOICES) : (number + 1) * len(CHOICES)]
        assert sample["acc"] == float(own.index(max(own)) == row["answer"])


def test_both_kinds_of_model_are_registered():
    register("lmms_eval")
    manifest = MODEL_REGISTRY_V2.get_manifest("conceptmoe_vl")
    assert manifest.model_id == "conceptmoe_vl"
    assert get_model("conceptmoe_vl") is ConceptMoEVLChat
    assert get_model("conceptmoe_vl", force_simple=True) is ConceptMoEVLSimple


def test_marks_of_pictures_in_a_context():
    from eval.adaptors.lmms_eval import simple_messages

    (message,) = simple_messages("see <image> and <image>", ["a", "b"])
    assert [part.get("image", part.get("text")) for part in message["content"]] == [
        *("see ", "a", " and ", "b")
    ]
    assert simple_messages("see <image>", ["a", "b"]) == question_messages(
        ["a", "b"], "see <image>"
    )
    assert simple_messages("words", None) == question_messages([], "words")


def test_what_is_refused(model_folder):
    with pytest.raises(UserError, match="takes no 'attn_implementation'"):
        ConceptMoEVLChat(str(model_folder), attn_implementation="sdpa")
    with pytest.raises(UserError, match="the task shows video"):
        messages_of([{"role": "user", "content": [{"type": "video", "url": "x"}]}])
