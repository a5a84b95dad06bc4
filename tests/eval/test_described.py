"""Tasks from YAML files."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from conceptmoe_vl.errors import UserError
from eval.__main__ import main
from eval.described import read_task
from eval.tasks import all_tasks, get_tasks, mean_perplexity
from tests.eval.shards import png, small_set
from tests.model_folder import save_model_folder

DOCS = Path(__file__).parents[2] / "docs" / "evaluation.md"
ROWS = [
    {"id": "a", "q": "which?", "options": ["cat", "dog"], "answer": 1, "type": "x", "image": "a"},
    {"id": "b", "q": "what?", "options": ["red", "blue"], "answer": "A", "type": "y", "image": "b"},
    {"id": "c", "q": "who?", "options": ["I", "you"], "answer": "you", "type": "y", "image": "a"},
]


def write(folder, text: str, rows=ROWS) -> Path:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = folder / "task.yaml"
    path.write_text(f"data: rows.jsonl\n{text}")
    return path


def load(path):
    task = read_task(path)
    return task, task.load(Path(task.default_data))


def test_the_example_of_the_docs_is_evaluated(tmp_path, capsys):
    text = DOCS.read_text(encoding="utf-8").split("## A task of your own, in YAML")[1]
    text = text.split("\n## ")[0]
    (described,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    (rows,) = re.findall(r"```json\n(.*?)```", text, re.DOTALL)
    (tmp_path / "signs.yaml").write_text(described)
    (tmp_path / "signs.jsonl").write_text(rows)
    for line in rows.splitlines():
        (tmp_path / json.loads(line)["photo"]).write_bytes(png())
    model = save_model_folder(tmp_path / "model")
    words = ["--model", str(model), "--tasks", str(tmp_path / "signs.yaml"), "--device", "cpu"]
    assert main([*words, "--output", str(tmp_path / "out")]) == 0
    results = json.loads((tmp_path / "out" / "signs" / "results.json").read_text())
    assert results["count"] == len(rows.splitlines())
    assert list(results["by_kind"]) == ["meaning", "shape"]
    first = json.loads((tmp_path / "out" / "signs" / "samples.jsonl").open().readline())
    assert "<|image_pad|>*9" in first["prompt"]
    assert "A. stop\nB. give way" in first["prompt"]
    assert first["references"] == ["A"]
    assert first["details"] == {"cluster": "1.png"}


def test_fields_of_rows_become_questions(tmp_path):
    path = write(
        tmp_path,
        "prompt: '{q}\n\n  {choices} {{ok}}'\nsystem: be short\nimages: image\nchoices: options\n"
        "kind: type\nkey: id\ncluster: image\nparse: letter\nstop: '.'\nmax_new_tokens: 3\n",
    )
    task, questions = load(path)
    assert (task.name, task.stop, task.max_new_tokens, task.mode) == ("task", (".",), 3, "generate")
    assert [question.key for question in questions] == ["a", "b", "c"]
    assert [question.references for question in questions] == [["B"], ["A"], ["B"]]
    assert [question.kind for question in questions] == ["x", "y", "y"]
    assert [question.details for question in questions] == [{"cluster": c} for c in "aba"]
    assert questions[0].text == "which?\nA. cat\nB. dog {ok}"
    assert questions[0].messages[0] == {"role": "system", "content": "be short"}
    assert questions[0].messages[1]["content"][0] == {"type": "image", "image": tmp_path / "a"}
    assert task.parse("The answer is (B).", questions[0]) == "B"
    assert task.score("B", questions[0]) == 1.0


def test_choices_that_are_compared_are_texts(tmp_path):
    task, questions = load(write(tmp_path, "prompt: '{q}'\nchoices: options\nmode: choose\n"))
    assert task.mode == "choose"
    assert [question.references for question in questions] == [["dog"], ["red"], ["you"]]
    assert questions[0].choices == ["cat", "dog"]
    assert questions[1].key.endswith("rows.jsonl:2")


def test_a_text_needs_no_prompt_for_its_perplexity(tmp_path):
    task, questions = load(write(tmp_path, "references: q\nmode: perplexity\n"))
    assert task.metrics is mean_perplexity
    assert (questions[0].messages, questions[0].references) == ([], ["which?"])


def test_a_regular_expression_reads_the_answer(tmp_path):
    path = write(tmp_path, "prompt: '{q}'\nparse: {regex: 'answer: (\\w+)'}\n")
    task, questions = load(path)
    assert task.parse("the answer: cat, surely", questions[0]) == "cat"
    assert task.parse("cat", questions[0]) == ""


def test_questions_of_shards_are_asked_in_another_way(tmp_path):
    small_set(tmp_path / "shards", pictures=1)
    path = tmp_path / "again.yaml"
    path.write_text("data: shards/test-*.tar\nprompt: 'Q: {question}'\nchoices: ['no', red]\n")
    _, questions = load(path)
    assert questions[1].text == "Q: is there a circle?"
    assert questions[1].references == ["no"]
    assert questions[1].choices == ["no", "red"]
    assert callable(questions[0].messages[0]["content"][0]["image"])


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("prompt: a\nmetrc: anls\n", "unknown configuration key 'task.metrc'; .* is 'metric'"),
        ("prompt: a\nmetric: exact\n", "task.metric is 'exact'; choose one of .*exact_match"),
        ("prompt: a\nmode: guess\n", "task.mode is 'guess'"),
        ("prompt: a\nparse: word\n", "task.parse is 'word'"),
        ("prompt: a\nparse: {regex: 'a('}\n", "is no regular expression"),
        ("prompt: a\nparse: {regex: a}\n", "has no group"),
        ("prompt: a\nparse: {rx: (a)}\n", "give {regex"),
        ("prompt: a\nmax_new_tokens: 0\n", "max_new_tokens is 0"),
        ("prompt: a\nmax_new_tokens: many\n", "its type is int"),
        ("prompt: a\nmode: choose\n", "task.choices is missing"),
        ("references: q\n", "task.prompt is missing"),
        ("prompt: a\nchoices: [yes, no]\n", "task.choices holds True; .* yes and no in quotes"),
        ("prompt: a\nstop: [a, null]\n", "task.stop holds None"),
        ("prompt: a\nimages: [[a]]\n", r"task.images holds \['a'\]"),
        ("prompt: a\nname: ../a\n", "task.name is '../a'; give one that can be the results'"),
        ("prompt: a\nname: replies\n", "task.name is 'replies'"),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path, text, part):
    with pytest.raises(UserError, match=part) as caught:
        read_task(write(tmp_path, text))
    assert "task.yaml" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("prompt: '{qq}'\n", r"rows\.jsonl:1 has no field 'qq'; the nearest is 'q'"),
        ("prompt: '{q'\n", "is no template"),
        ("prompt: '{q}'\nimages: picture\n", "has no field 'picture'"),
        ("prompt: '{q}'\nmode: choose\nchoices: [x, y]\n", "answer 'you' is none of the choices"),
        ("prompt: '{q}'\ndata: other.jsonl\n", "there is no file"),
        ("prompt: '{q} {choices}'\n", "has no field 'choices'"),
        ("prompt: '{q!r}'\n", "formats 'q'"),
        ("prompt: 'Answer {q: in one word}'\n", "formats 'q'"),
    ],
)
def test_a_mistake_in_the_rows_is_named(tmp_path, text, part):
    path = write(tmp_path, text)
    if "data:" in text:
        path.write_text(text)
    with pytest.raises(UserError, match=part):
        load(path)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"answer": None}, "'answer' of .*:1 holds None; give texts"),
        ({"answer": []}, "'answer' of .*:1 is empty; give the right answer"),
        ({"answer": {"text": "dog"}}, "'answer' of .*:1 holds {'text'"),
        ({"answer": True}, "'answer' of .*:1 holds True; .*in quotes"),
        ({"options": [1, [2]]}, r"'options' of .*:1 holds \[2\]"),
        ({"options": list("abcdefghijklmnopqrstuvwxyzä")}, "has 27 choices; letters name 26"),
        ({"options": [2, 3, 1], "answer": 2}, "right answer 2 is a choice's number and another"),
        ({"image": [None]}, "'image' of .*:1 holds None"),
    ],
)
def test_a_field_that_holds_something_else_is_named(tmp_path, changes, part):
    text = "prompt: '{q} {choices}'\nchoices: options\nparse: letter\nimages: image\n"
    with pytest.raises(UserError, match=part):
        load(write(tmp_path, text, [ROWS[0] | changes]))


def test_numbers_may_be_choices(tmp_path):
    text = "prompt: '{q}'\nchoices: options\nmode: choose\n"
    rows = [ROWS[0] | {"options": [2, 3, 1], "answer": answer} for answer in ("2", "A", 0)]
    _, questions = load(write(tmp_path, text, rows))
    assert [question.references for question in questions] == [["2"]] * 3


def test_more_choices_than_letters_can_be_compared(tmp_path):
    options = [f"option {number}" for number in range(30)]
    text = "prompt: '{q}'\nchoices: options\nmode: choose\n"
    _, (question,) = load(write(tmp_path, text, [ROWS[0] | {"options": options, "answer": 29}]))
    assert question.references == ["option 29"]


def test_characters_beyond_the_basic_plane_may_be_escaped(tmp_path):
    _, (question,) = load(write(tmp_path, "prompt: '{q}'\n", [{"q": "a 🙂", "answer": "a"}]))
    assert "\\ud83d" in (tmp_path / "rows.jsonl").read_text()
    assert question.text == "a 🙂"


def test_a_row_may_have_no_picture(tmp_path):
    rows = [ROWS[0] | {"image": image} for image in (None, [], ["a", "b"])]
    _, questions = load(write(tmp_path, "prompt: '{q}'\nimages: image\n", rows))
    assert [len(question.messages[0]["content"]) for question in questions] == [1, 1, 3]


def test_questions_have_the_same_names_wherever_their_files_lie(tmp_path, monkeypatch):
    keys = []
    for name in ("one", "two [1]"):
        folder = tmp_path / name
        (folder / "more").mkdir(parents=True)
        path = write(folder, "prompt: '{q}'\n")
        keys.append([question.key for question in load(path)[1]])
        monkeypatch.chdir(folder)
        keys.append([question.key for question in read_task(path).load(Path("rows.jsonl"))])
    assert keys == [["rows.jsonl:1", "rows.jsonl:2", "rows.jsonl:3"]] * 4
    (tmp_path / "one" / "more" / "b.jsonl").write_text((folder / "rows.jsonl").read_text())
    task = read_task(tmp_path / "one" / "task.yaml")
    several = [question.key for question in task.load(tmp_path / "one" / "**" / "*.jsonl")]
    assert several == [f"{name}:{i}" for name in ("more/b.jsonl", "rows.jsonl") for i in (1, 2, 3)]


@pytest.mark.parametrize(
    ("line", "part"),
    [
        *(("{", "is no JSON"), ("[]", "is no JSON object"), ("[" * 100_000, "is no JSON")),
        (json.dumps({"q": "\ud800", "answer": "a"}), "is no JSON .*surrogates not allowed"),
    ],
)
def test_a_damaged_row_is_named(tmp_path, line, part):
    path = write(tmp_path, "prompt: '{q}'\n")
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write(f"\n{line}\n")
    with pytest.raises(UserError, match=rf"rows\.jsonl:5 {part}"):
        load(path)


def test_shards_have_no_fields(tmp_path):
    path = tmp_path / "task.yaml"
    path.write_text("data: shards/test-*.tar\nkind: type\n")
    with pytest.raises(UserError, match="only rows of JSONL have fields"):
        read_task(path)


def test_files_and_names_go_together(tmp_path):
    path = write(tmp_path, "prompt: '{q}'\n")
    assert [task.name for task in get_tasks(f"easy_vqa,{path}")] == ["easy_vqa", "task"]
    taken = tmp_path / "easy_vqa.yaml"
    taken.write_text(path.read_text())
    with pytest.raises(UserError, match="are both named 'easy_vqa'"):
        get_tasks(f"easy_vqa,{taken}")
    assert "task" not in all_tasks()
