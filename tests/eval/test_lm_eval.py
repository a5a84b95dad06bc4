"""lm-eval with local task files: prompts and outputs are those of the own functions and runner."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip(
    "lm_eval", reason="lm-eval is not installed: pip install 'conceptmoe-vl[lm-eval]'"
)

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager

from conceptmoe_vl import prefixes
from conceptmoe_vl.asking import question_messages
from conceptmoe_vl.continuous_batching import generate_all, log_likelihoods
from conceptmoe_vl.errors import UserError
from conceptmoe_vl.requests import encode_prompt, padded_inputs
from eval.adaptors.lm_eval import ConceptMoEVLForLMEval
from eval.replies import ReplyStore
from eval.runner import Asker
from eval.tasks import Question, Task
from tests.eval.harness_data import CHOICES, write_data, write_task
from tests.model_folder import save_model_folder

CHOICE = """output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: choices
doc_to_target: answer
target_delimiter: " "
metric_list:
  - metric: acc
"""
GENERATE = """output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[answer]}}"
generation_kwargs:
  until: ["e"]
  max_gen_toks: 9
  do_sample: false
metric_list:
  - metric: exact_match
"""
PICTURES = """output_type: generate_until
doc_to_text: "<image>{{question}}"
doc_to_image: !function toy_pictures_functions.pictures
doc_to_target: "{{choices[answer]}}"
generation_kwargs:
  max_gen_toks: 6
  do_sample: false
metric_list:
  - metric: exact_match
"""
PICTURE_FUNCTIONS = """from PIL import Image


def pictures(doc):
    return [Image.open(doc["picture"])]
"""
ROLLING = """output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - metric: word_perplexity
"""


@pytest.fixture(scope="module", autouse=True)
def alone():
    """No hub; and no launcher, whose variables DeepSpeed sets in a process that has none."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
            patch.setenv(name, "1")
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            patch.delenv(name, raising=False)
        yield


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    rows = write_data(folder)
    write_task(folder, "toy_choice", CHOICE)
    write_task(folder, "toy_generate", GENERATE)
    write_task(folder, "toy_pictures", PICTURES, PICTURE_FUNCTIONS)
    write_task(folder, "toy_rolling", ROLLING)
    return folder, rows


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return save_model_folder(tmp_path_factory.mktemp("model"), lively=True)


@pytest.fixture(scope="module")
def lm(model_folder):
    return ConceptMoEVLForLMEval(str(model_folder), device="cpu", batch_size=4)


def samples_of(lm, data, task, **options):
    folder, _ = data
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    results = simple_evaluate(
        lm, tasks=[task], task_manager=manager, bootstrap_iters=0, log_samples=True, **options
    )
    return sorted(results["samples"][task], key=lambda sample: sample["doc_id"])


def responses(samples):
    return [sample["resps"] for sample in samples]


def test_multiple_choice(lm, data):
    expected = log_likelihoods(
        lm.model,
        lm.processor,
        [(row["question"], f" {choice}") for row in data[1] for choice in CHOICES],
    )
    samples = samples_of(lm, data, "toy_choice")
    found = [tuple(resp[0]) for sample in samples for resp in sample["resps"]]
    assert found == [(score.sum, score.is_greedy) for score in expected]


def test_multiple_choice_in_conversations(lm, data):
    """With the chat template the prompts are those of the own runner, to the token."""
    conversations = [question_messages([], row["question"]) for row in data[1]]
    expected = log_likelihoods(
        lm.model, lm.processor, [(c, choice) for c in conversations for choice in CHOICES]
    )
    samples = samples_of(lm, data, "toy_choice", apply_chat_template=True)
    found = [tuple(resp[0]) for sample in samples for resp in sample["resps"]]
    assert found == [(score.sum, score.is_greedy) for score in expected]
    for sample, conversation in zip(samples, conversations, strict=True):
        text = sample["arguments"][0][0]
        assert encode_prompt(lm.model, lm.processor, text).input_ids == (
            encode_prompt(lm.model, lm.processor, conversation).input_ids
        )


def test_generation_with_stop_strings(lm, data):
    conversations = [question_messages([], row["question"]) for row in data[1]]
    expected = generate_all(lm.model, lm.processor, conversations, 9, stop=("e",))
    samples = samples_of(lm, data, "toy_generate", apply_chat_template=True)
    assert [resp[0][0] for resp in responses(samples)] == [answer.text for answer in expected]
    plain = generate_all(
        lm.model, lm.processor, [row["question"] for row in data[1]], 9, stop=("e",)
    )
    samples = samples_of(lm, data, "toy_generate")
    assert [resp[0][0] for resp in responses(samples)] == [answer.text for answer in plain]


@pytest.mark.parametrize("batch_size", [1, 5, "auto"])
def test_pictures(model_folder, data, batch_size):
    lm = ConceptMoEVLForLMEval(str(model_folder), device="cpu", batch_size=batch_size)
    conversations = [question_messages([row["picture"]], row["question"]) for row in data[1]]
    expected = generate_all(lm.model, lm.processor, conversations, 6)
    samples = samples_of(lm, data, "toy_pictures", apply_chat_template=True)
    assert [resp[0][0] for resp in responses(samples)] == [answer.text for answer in expected]


def test_the_own_runner_gets_the_same(lm, data, tmp_path):
    """Per sample: answers about pictures, and log-likelihoods of choices."""
    settings = {
        "description": "",
        "default_data": "",
        "load": lambda folder: [],
        "parse": lambda text, question: text,
        "score": lambda parsed, question: 0.0,
        "max_new_tokens": 6,
    }
    pictures = [
        Question(str(n), question_messages([row["picture"]], row["question"]), ())
        for n, row in enumerate(data[1])
    ]
    words = [
        Question(str(n), question_messages([], row["question"]), (), choices=CHOICES)
        for n, row in enumerate(data[1])
    ]
    asker, store = Asker(lm.model, lm.processor, batch_size=5), ReplyStore(tmp_path)
    answered = asker.ask(Task(name="pictures", **settings), pictures, store).replies
    samples = samples_of(lm, data, "toy_pictures", apply_chat_template=True)
    assert [reply.text for reply in answered] == [resp[0][0] for resp in responses(samples)]
    chosen = asker.ask(Task(name="words", **settings, mode="choose"), words, store).replies
    samples = samples_of(lm, data, "toy_choice", apply_chat_template=True)
    for reply, sample in zip(chosen, samples, strict=True):
        sums = [total for total, _ in reply.log_likelihoods]
        assert sums == [resp[0][0] for resp in sample["resps"]]


@pytest.mark.slow  # 47 s of CPU time, most of it imports in two processes
@pytest.mark.distributed
def test_the_command_line_in_two_processes(model_folder, data, tmp_path):
    """Samples and scores are those of one process; lm-eval asks the last question again where the
    processes do not divide their number.
    """
    tasks = ("toy_choice", "toy_pictures")
    settings = ["--model", "conceptmoe_vl", "--model_args", f"pretrained={model_folder}"]
    settings += ["--tasks", ",".join(tasks), "--include_path", str(data[0]), "--device", "cpu"]
    settings += ["--apply_chat_template", "--log_samples", "--output_path", str(tmp_path)]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run(
        [*launch, "-m", "eval.adaptors", "lm_eval", "run", *settings, "--limit", "5"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lm = ConceptMoEVLForLMEval(str(model_folder), device="cpu")
    for task in tasks:
        (path,) = tmp_path.glob(f"**/samples_{task}_*.jsonl")
        found = sorted(map(json.loads, path.read_text().splitlines()), key=lambda s: s["doc_id"])
        expected = samples_of(lm, data, task, apply_chat_template=True, limit=5)
        assert [sample["doc_id"] for sample in found] == [0, 1, 2, 3, 4]
        for one, other in zip(found, expected, strict=True):
            # The file has pairs of texts, as lm-eval writes them.
            assert str(one["filtered_resps"]) == str(_written(other["filtered_resps"]))


def _written(answers):
    return [
        [str(part) for part in answer] if isinstance(answer, tuple) else answer
        for answer in answers
    ]


def test_perplexity_of_whole_texts(lm, data, monkeypatch):
    """In windows of `max_length`, each behind one token: the sum over them."""
    monkeypatch.setattr(lm, "max_length", 50)
    samples = samples_of(lm, data, "toy_rolling")
    for sample, row in zip(samples, data[1], strict=True):
        ids = lm.processor.encode_text(row["text"]).input_ids
        total, start = 0.0, lm.processor.tokenizer.eos_token_id
        for end in range(50, len(ids) + 50, 50):
            # A full window each; the last one begins earlier, and its last tokens alone count.
            scored = ids[end - 50 : end]
            end = min(end, len(ids))
            given = ([start, *ids] if end <= 50 else ids[end - 51 :])[: min(end, 50)]
            with torch.no_grad():
                scores = lm.model(input_ids=torch.tensor([given])).logits[0].log_softmax(-1)
            target = torch.tensor(scored)[:, None]
            total += scores[-len(scored) :].gather(1, target).sum().item()
        assert sample["resps"][0][0] == pytest.approx(total, rel=1e-5)


def test_against_lm_evals_own_model(model_folder, lm, data):
    """lm-eval's `hf` model loads the checkpoint and gives the same log-likelihoods and texts."""
    options = {"pretrained": str(model_folder), "device": "cpu", "dtype": "float32"}
    theirs = samples_of("hf", data, "toy_choice", model_args=options, batch_size=1)
    for mine, other in zip(samples_of(lm, data, "toy_choice"), theirs, strict=True):
        for (ours,), (expected,) in zip(mine["resps"], other["resps"], strict=True):
            assert float(ours[0]) == pytest.approx(float(expected[0]), abs=1e-3)
            assert ours[1] == expected[1]
    theirs = samples_of("hf", data, "toy_generate", model_args=options, batch_size=1)
    mine = samples_of(lm, data, "toy_generate")
    assert [r[0][0] for r in responses(mine)] == [r[0][0].strip() for r in responses(theirs)]


def test_requests_share_their_examples(model_folder, data, monkeypatch):
    """To the bit what each gets alone; with a cache of 0 up to rounding."""
    monkeypatch.setattr(prefixes, "_SHORTEST", 10)
    lm = ConceptMoEVLForLMEval(str(model_folder), device="cpu", batch_size=4)
    contexts = [f"what is it? red\n\nis it blue? no\n\n{row['question']}" for row in data[1]]
    pairs = [(context, f" {choice}") for context in contexts for choice in CHOICES]
    requests = [Instance("loglikelihood", {}, pair, n) for n, pair in enumerate(pairs)]
    found = lm.loglikelihood(requests)
    assert lm.prefixes.hits > lm.prefixes.misses > 0
    for pair, result in zip(pairs, found, strict=True):
        own = [n for n, other in enumerate(pairs) if other[0] == pair[0]]
        alone = log_likelihoods(lm.model, lm.processor, [pairs[n] for n in own])
        assert result == (alone[own.index(pairs.index(pair))].sum, result[1])
    whole = ConceptMoEVLForLMEval(str(model_folder), device="cpu", prefix_cache=0)
    for (mine, greedy), (other, _) in zip(whole.loglikelihood(requests), found, strict=True):
        assert mine == pytest.approx(other, abs=2e-4)
        assert isinstance(greedy, bool)
    assert (whole.prefixes.hits, whole.prefixes.misses) == (0, 0)


def test_few_shot_examples_and_a_begun_answer(lm):
    history = [
        {"role": "user", "content": "is it red?"},
        {"role": "assistant", "content": "no"},
        {"role": "user", "content": "is it blue?"},
    ]
    text = lm.apply_chat_template(history)
    assert encode_prompt(lm.model, lm.processor, text).input_ids == (
        encode_prompt(lm.model, lm.processor, history).input_ids
    )
    begun = lm.apply_chat_template(
        [*history, {"role": "assistant", "content": "It is"}], add_generation_prompt=False
    )
    assert begun == text + "It is"


def test_what_is_refused(model_folder, lm):
    with pytest.raises(UserError, match="takes no 'dtype'"):
        ConceptMoEVLForLMEval(str(model_folder), dtype="float16")
    with pytest.raises(UserError, match="names no model"):
        ConceptMoEVLForLMEval()
    refused = {"compression": "two", "max_length": -5, "max_gen_toks": "nan", "prefix_cache": -1}
    for name, value in refused.items():
        with pytest.raises(UserError, match=f"{name} is {value!r}; give a number above 0"):
            ConceptMoEVLForLMEval(str(model_folder), **{name: value})
    with pytest.raises(UserError, match="never calibrated"):
        ConceptMoEVLForLMEval(str(model_folder), compression=7)
    with pytest.raises(UserError, match="batch_size is 'many'"):
        ConceptMoEVLForLMEval(str(model_folder), batch_size="many")
    sampled = Instance("generate_until", {}, ("a", {"do_sample": True, "temperature": 0.7}), 0)
    with pytest.raises(UserError, match="generates greedily"):
        lm.generate_until([sampled])


def test_a_prompt_beyond_the_models_length_is_not_cut(lm):
    long = Instance("generate_until", {}, ("red " * 300, {"max_gen_toks": 1}), 0)
    with pytest.warns(UserWarning, match="nothing was cut"):
        (text,) = lm.generate_until([long])
    with torch.no_grad():
        inputs = padded_inputs(lm.model, [encode_prompt(lm.model, lm.processor, "red " * 300)])
        best = lm.model(**inputs).logits[0, -1].argmax()
    assert text == lm.processor.tokenizer.decode([best], skip_special_tokens=True).strip()
