"""Each public layout, made up on a small scale: what is asked and what a right answer scores."""

from __future__ import annotations

import io
import json
import math

import pytest
from PIL import Image

from conceptmoe_vl.errors import UserError
from eval.tasks import Question, Scored, all_tasks
from tests.eval.tasks import exports, files

_LAYOUTS = [*files.MAKERS.items(), *files.OTHER_LAYOUTS, *exports.EXPORTS]
_IDS = [f"{name}-{make.__name__}" for name, make in _LAYOUTS]


def load(name, folder) -> list[Question]:
    return list(all_tasks()[name].load(folder))


def images_of(question) -> list:
    content = question.messages[-1]["content"]
    return [part["image"] for part in content if part["type"] == "image"]


def color_of(image) -> tuple:
    return Image.open(io.BytesIO(image())).convert("RGB").getpixel((0, 0))


def scored(task, questions, answers) -> list[Scored]:
    samples = []
    for question, answer in zip(questions, answers, strict=True):
        parsed = task.parse(answer, question)
        samples.append(Scored(question, parsed, task.score(parsed, question)))
    return samples


@pytest.mark.parametrize(("name", "make"), _LAYOUTS, ids=_IDS)
def test_questions_are_complete_and_images_are_read_late(name, make, tmp_path, capsys):
    make(tmp_path)
    questions = load(name, tmp_path)
    assert len({question.key for question in questions}) == len(questions) > 0
    assert f"{name}: {len(questions)} questions from '" in capsys.readouterr().err
    assert [question.key for question in load(name, tmp_path)] == [q.key for q in questions]
    for question in questions:
        assert question.text
        assert question.references
        assert all(question.references)
        for image in images_of(question):
            assert callable(image)
            Image.open(io.BytesIO(image())).verify()


@pytest.mark.parametrize(("name", "make"), _LAYOUTS, ids=_IDS)
def test_right_answers_score_1_and_empty_ones_0(name, make, tmp_path):
    make(tmp_path)
    task, questions = all_tasks()[name], load(name, tmp_path)
    right = scored(task, questions, [question.references[0] for question in questions])
    nothing = scored(task, questions, [""] * len(questions))
    best = {"mme": 2800.0}.get(name, 1.0)
    if name in ("vqav2", "textvqa"):  # the first of ten people; others disagree
        best = None
    else:
        assert [sample.score for sample in right] == [1.0] * len(right)
        assert next(iter(task.metrics(right).values())) == best
    assert [sample.score for sample in nothing] == [0.0] * len(nothing)
    assert next(iter(task.metrics(nothing).values())) == 0.0
    # The figures of one sample have the same names: the bootstrap may draw any.
    assert list(task.metrics(right)) == list(task.metrics(right[:1]))


def test_vqav2(tmp_path):
    files.make_vqav2(tmp_path)
    task, questions = all_tasks()["vqav2"], load("vqav2", tmp_path)
    assert questions[1].text == ("How many?\nAnswer the question using a single word or phrase.")
    assert questions[1].references == ("two",) * 4 + ("2",) * 4 + ("3",) * 2
    assert [question.kind for question in questions] == ["yes/no", "number", "other"]
    assert [question.details["cluster"] for question in questions] == [42, 42, 43]
    answers = scored(task, questions, ["Yes.", "two", "navy"])
    # Nine of ten: 1. Two is 2: eight of ten. Three of ten: 7 leave 3 others, 3 leave 2.
    assert [sample.score for sample in answers] == pytest.approx([1.0, 1.0, 0.9])
    assert task.metrics(answers)["accuracy"] == pytest.approx(2.9 / 3)


def test_textvqa(tmp_path):
    files.make_textvqa(tmp_path)
    task, questions = all_tasks()["textvqa"], load("textvqa", tmp_path)
    answers = scored(task, questions * 2, ["Dakota", "dakota digital"])
    assert [sample.score for sample in answers] == pytest.approx([1.0, 0.3])


def test_docvqa(tmp_path):
    files.make_docvqa(tmp_path)
    task, questions = all_tasks()["docvqa"], load("docvqa", tmp_path)
    assert questions[0].kind == "figure/diagram"
    answers = scored(task, questions * 3, ["0.28", "0.29", "28"])
    assert [sample.score for sample in answers] == [1.0, 0.75, 0.5]
    assert list(task.metrics(answers)) == ["anls"]


def test_chartqa(tmp_path):
    files.make_chartqa(tmp_path)
    task, questions = all_tasks()["chartqa"], load("chartqa", tmp_path)
    assert [question.kind for question in questions] == ["human", "augmented"]
    answers = scored(task, questions, ["14.7", "58%"])
    assert [sample.score for sample in answers] == [1.0, 1.0]
    assert [s.score for s in scored(task, questions, ["14.8", "57.5"])] == [0.0, 0.0]


def test_pope(tmp_path):
    files.make_pope(tmp_path)
    task, questions = all_tasks()["pope"], load("pope", tmp_path)
    kinds = [question.kind for question in questions]
    assert kinds == ["random"] * 2 + ["popular"] * 2 + ["adversarial"] * 2
    answers = scored(task, questions, ["Yes", "no", "yes", "yes.", "maybe", "No, none"])
    assert task.metrics(answers) == pytest.approx(
        {
            "accuracy": 4 / 6,
            "precision": 2 / 3,
            "recall": 2 / 3,
            "f1": 2 / 3,
            "yes_ratio": 3 / 6,
            "unreadable": 1 / 6,
        }
    )


def test_mme(tmp_path):
    files.make_mme(tmp_path)
    task, questions = all_tasks()["mme"], load("mme", tmp_path)
    assert len(questions) == 28
    assert questions[0].text == ("Is this red?\nAnswer the question using a single word or phrase.")
    figures = task.metrics(scored(task, questions, ["yes"] * 28))
    # Always yes: half of the questions, no image with both.
    assert figures == {
        "score": 700.0,
        "perception": 500.0,
        "cognition": 200.0,
        "accuracy": 0.5,
        "accuracy_plus": 0.0,
        "unreadable": 0.0,
    }
    of_one = [s for s in scored(task, questions, ["yes", "no"] * 14) if s.question.kind == "OCR"]
    assert task.metrics(of_one)["score"] == 200.0
    assert math.isnan(task.metrics(of_one)["cognition"])


def test_mme_figures_count_an_image_that_is_drawn_twice_twice(tmp_path):
    files.make_mme(tmp_path)
    task, questions = all_tasks()["mme"], load("mme", tmp_path)[:2]
    wrong = scored(task, questions, ["yes", "yes"])
    assert task.metrics(wrong * 2) == task.metrics(wrong)


def test_mmbench(tmp_path):
    files.make_mmbench(tmp_path)
    task, questions = all_tasks()["mmbench"], load("mmbench", tmp_path)
    assert questions[2].text == (
        "a hint\nTwo\nlines?\nA. x\nB. y\nC. z\nD. w\n"
        "Answer with the option's letter from the given choices directly."
    )
    assert questions[1].details["options"] == ["pear", "apple"]
    assert color_of(images_of(questions[1])[0]) == color_of(images_of(questions[0])[0])
    # Question 7 is right in one of its two orders: not right. Question 8 is.
    figures = task.metrics(scored(task, questions, ["A", "A", "D"]))
    assert figures == {"circular_accuracy": 0.5, "accuracy": 1.0, "abstained": 0.0}
    figures = task.metrics(scored(task, questions, ["A", "apple", "?"]))
    assert figures == {"circular_accuracy": 0.5, "accuracy": 0.5, "abstained": 1 / 3}
    # A question that the bootstrap draws twice has twice the weight.
    right = scored(task, questions, ["A", "B", "A"])
    assert task.metrics(right[:2] * 2 + right[2:])["circular_accuracy"] == pytest.approx(2 / 3)


def test_a_table_can_be_named_itself(tmp_path):
    files.make_mmbench(tmp_path)
    path = (tmp_path / "MMBench_DEV_EN.tsv").rename(tmp_path / "mine.tsv")
    assert len(load("mmbench", path)) == 3


@pytest.mark.parametrize("make", [files.make_mmmu, files.make_mmmu_json])
def test_mmmu(make, tmp_path):
    make(tmp_path)
    task = all_tasks()["mmmu"]
    by_key = {question.key: question for question in load("mmmu", tmp_path)}
    choice, opened = by_key["validation_Accounting_1"], by_key["validation_Physics_2"]
    content = choice.messages[0]["content"]
    assert [part["type"] for part in content] == ["text", "image"] * 3 + ["text"]
    # Pictures stand where they are mentioned first, a second mention stays.
    assert content[0]["text"] == "See "
    assert content[2]["text"] == ". What is in <image 1> and "
    assert content[4]["text"] == "?\nA. $6\nB. $7\nC. $8 "
    assert [color_of(part["image"]) for part in content[1::2]] == [
        (255, 0, 0),
        (0, 0, 255),
        (0, 128, 0),
    ]
    assert content[6]["text"] == (
        "\n\nAnswer with the option's letter from the given choices directly."
    )
    assert (choice.kind, choice.details["discipline"]) == ("Accounting", "business")
    assert opened.references == ("24/7", "3.429")
    answers = scored(
        task,
        [choice, choice, choice, opened, opened],
        ["$7", "A or B", "(B)", "The answer is 3.43", "4"],
    )
    assert [sample.score for sample in answers] == [1.0, 0.0, 1.0, 1.0, 0.0]
    figures = task.metrics(answers)
    assert (figures["accuracy"], figures["abstained"]) == (3 / 5, 1 / 5)
    assert (figures["business"], figures["science"]) == (2 / 3, 1 / 2)
    assert math.isnan(figures["health_and_medicine"])


def test_scienceqa(tmp_path):
    files.make_scienceqa(tmp_path)
    task, questions = all_tasks()["scienceqa"], load("scienceqa", tmp_path)
    assert [len(images_of(question)) for question in questions] == [1, 0]
    assert questions[1].text == (
        "Context: Read the text.\nWhich word?\nA. here\nB. there\n"
        "Answer with the option's letter from the given choices directly."
    )
    figures = task.metrics(scored(task, questions, ["B.", "I do not know"]))
    assert math.isnan(figures.pop("social_science"))
    assert math.isnan(figures.pop("without_context"))
    assert figures == {
        "accuracy": 0.5,
        "natural_science": 1.0,
        "language_science": 0.0,
        "with_text": 0.0,
        "with_image": 1.0,
        "grades_1_to_6": 1.0,
        "grades_7_to_12": 0.0,
        "abstained": 0.5,
    }


def test_ai2d_covers_texts_by_letters(tmp_path):
    files.make_ai2d(tmp_path)
    questions = load("ai2d", tmp_path)
    assert [question.kind for question in questions] == ["texts", "letters"]
    assert [question.references for question in questions] == [("C",), ("B",)]
    plain, covered = (images_of(question)[0] for question in questions)
    assert Image.open(io.BytesIO(plain())).getpixel((3, 3)) == (128, 128, 128)
    drawn = Image.open(io.BytesIO(covered()))
    assert drawn.getpixel((2, 2)) == (255, 255, 255)
    assert drawn.getpixel((20, 20)) == (128, 128, 128)
    box = drawn.crop((2, 2, 14, 12)).convert("L")
    assert (
        min(box.get_flattened_data() if hasattr(box, "get_flattened_data") else box.getdata()) < 64
    )


def test_rows_of_parquet_have_their_own_pictures(tmp_path):
    exports.make_ai2d_parquet(tmp_path)
    questions = load("ai2d", tmp_path)
    assert [color_of(images_of(question)[0]) for question in reversed(questions)] == [
        (0, 0, 255),
        (0, 128, 0),
        (255, 0, 0),
    ]


def test_gqa(tmp_path):
    files.make_gqa(tmp_path)
    task, questions = all_tasks()["gqa"], load("gqa", tmp_path)
    assert [question.kind for question in questions] == ["verify", "query"]
    figures = task.metrics(scored(task, questions, ["No.", "The girl"]))
    assert (figures["accuracy"], figures["binary"], figures["open"]) == (0.5, 1.0, 0.0)
    assert (figures["global"], figures["relation"]) == (1.0, 0.0)
    assert math.isnan(figures["attribute"])


def test_gqa_answers_that_are_valid_and_plausible(tmp_path):
    files.make_whole_gqa(tmp_path, "val")
    task, questions = all_tasks()["gqa_val"], load("gqa_val", tmp_path)
    for answers, expected in (
        (["No.", "T-shirt girl"], (1.0, 1.0, 0.5)),
        (["yes", "girl"], (0.0, 1.0, 1.0)),
        (["red", "car"], (0.0, 0.0, 0.0)),
    ):
        figures = task.metrics(scored(task, questions, answers))
        found = (figures["accuracy"], figures["validity"], figures["plausibility"])
        assert found == expected
    (tmp_path / "eval/val_choices.json").unlink()
    assert "validity" not in task.metrics(scored(task, load("gqa_val", tmp_path), ["no", "girl"]))


def test_gqa_what_both_have_in_common(tmp_path):
    files.make_whole_gqa(tmp_path, "val")
    path = tmp_path / "questions1.2/val_balanced_questions.json"
    records = json.loads(path.read_text())
    records["201640614"]["types"]["detailed"] = "twoCommon"
    files.put(path, records)
    task, questions = all_tasks()["gqa_val"], load("gqa_val", tmp_path)
    assert task.metrics(scored(task, questions, ["no", "shape"]))["validity"] == 1.0
    assert task.metrics(scored(task, questions, ["no", "girl"]))["validity"] == 0.5


def test_gqa_consistency(tmp_path):
    files.make_whole_gqa(tmp_path)
    task, questions = all_tasks()["gqa_consistency"], load("gqa_consistency", tmp_path)
    assert [question.key for question in questions] == ["201307251", "201640614", "201307252"]
    assert [question.kind for question in questions] == ["verify", "query", "entailed"]
    for answers, consistency, accuracy in (
        (["no", "t-shirt girl", "yes"], 1.0, 1.0),
        (["no", "boy", "yes"], 0.5, 0.5),
        (["no", "boy", "no"], 0.0, 0.5),
        (["yes", "t-shirt girl", "no"], math.nan, 0.5),  # nothing right entails anything
    ):
        figures = task.metrics(scored(task, questions, answers))
        assert figures["consistency"] == pytest.approx(consistency, nan_ok=True)
        assert figures["accuracy"] == accuracy
    for answer, distance in (("t-shirt girl", 0.0), ("boy", 0.01)):  # (0 - 1)^2 / 1, over 100
        figures = task.metrics(scored(task, questions, ["no", answer, "yes"]))
        assert figures["distribution"] == pytest.approx(distance)
    # The report has a row for each kind.
    names = [list(task.metrics([s])) for s in scored(task, questions, ["no", "girl", "yes"])]
    assert names[0] == names[1]
    assert set(names[2]) < set(names[0])


def test_gqa_lacks_an_entailed_question(tmp_path):
    files.make_whole_gqa(tmp_path)
    path = tmp_path / "questions1.2/testdev_all_questions.json"
    files.put(
        path, {key: value for key, value in json.loads(path.read_text()).items() if key[-1] != "2"}
    )
    with pytest.raises(UserError, match="lacks the entailed question 201307252"):
        load("gqa_consistency", tmp_path)


@pytest.mark.parametrize(
    "make", [files.make_refcoco_mdetr, exports.make_refcoco_parquet, files.make_refcoco_pickle]
)
def test_refcoco(make, tmp_path):
    make(tmp_path)
    task = all_tasks()["refcoco_testA"]
    questions = [q for q in load("refcoco_testA", tmp_path) if q.text.endswith("the red one")]
    assert questions[0].details["box"] == [0.25, 0.25, 0.75, 0.75]
    answers = scored(
        task,
        questions[:1] * 4,
        ["[0.25, 0.25, 0.75, 0.75]", "[0.25, 0.25, 0.5, 0.75]", "[0, 0, 1, 1]", "the red one"],
    )
    # Half of the box is half an overlap: right. The whole picture has a quarter.
    assert [sample.score for sample in answers] == [1.0, 1.0, 0.0, 0.0]
    assert task.metrics(answers) == {
        "accuracy_at_0.5": 0.5,
        "mean_iou": pytest.approx((1 + 0.5 + 0.25) / 4),
        "unreadable": 0.25,
    }
