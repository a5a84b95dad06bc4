"""The report on the chunking: kinds of tokens, figures against plain loops, the program."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from conceptmoe_vl import asking, chunk_pictures
from conceptmoe_vl.chunk_trace import ChunkTrace, Plane
from eval.__main__ import main
from eval.chunks import statistics, tracing
from eval.chunks.figures import _short, draw_ratios
from eval.chunks.program import spread
from eval.chunks.statistics import Traced
from eval.chunks.tracing import evidence_of
from eval.chunks.words import KINDS, kind_of_word, kinds_of
from eval.tasks import Question, easy_vqa
from tests.eval.shards import small_set
from tests.model_folder import save_model_folder


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (" the", "determiner"),
        ("The", "determiner"),
        (" it", "pronoun"),
        (" of", "preposition"),
        (" because", "conjunction"),
        (" is", "auxiliary"),
        (" how", "function adverb"),
        (" triangle", "content word"),
        (" don't", "content word"),
        (" 3.14", "digits"),
        ("1,000", "digits"),
        ("7", "digits"),
        (" +", "operator"),
        ("==", "operator"),
        ("?", "punctuation"),
        (" ...", "punctuation"),
        ("\n", "space"),
        ("", "space"),
        ("\ufffd", "bytes"),
        (" élan", "content word"),
        ("3rd", "part of a word"),
    ],
)
def test_kinds_of_single_tokens(text, kind):
    assert kind_of_word(text) == kind
    assert kind in KINDS


def test_parts_of_words_are_no_words():
    texts = ["<|im|>", " tri", "angle", " the", "re", " is", "", " a", "b1", " the", "!", "a"]
    special = [True] + [False] * 11
    image = [False] * 6 + [True] + [False] * 5
    part = "part of a word"
    assert kinds_of(texts, image, special) == [
        *("special", part, part, part, part, "auxiliary", "image patch", part, part),
        *("determiner", "punctuation", "determiner"),
    ]


def random_trace(rng: np.random.Generator) -> ChunkTrace:
    length = int(rng.integers(1, 40))
    boundary = rng.random(length) < 0.4
    boundary[0] = True
    forced = np.zeros(length, bool)
    forced[0] = True
    image = np.zeros(length, bool)
    image[length // 3 : length // 2] = True
    closed = np.cumsum(boundary)
    concept = np.where(closed - boundary < boundary.sum(), closed - boundary, -1)
    probability = np.where(forced, 1, rng.random(length)).astype(np.float32)
    return ChunkTrace(np.arange(length), image, forced, boundary, probability, concept, [])


@pytest.fixture
def traced():
    rng = np.random.default_rng(0)
    kinds = ["digits", "content word", "operator"]
    items = []
    for number in range(12):
        trace = random_trace(rng)
        details = {"source": "ab"[number % 2], "cluster": number // 2}
        question = Question(str(number), [], ["x"], "k" if number % 3 else "", details=details)
        evidence = np.arange(len(trace.ids)) >= len(trace.ids) - 2
        chosen = [str(rng.choice(kinds)) for _ in trace.ids]
        items.append(Traced("t", question, trace, chosen, float(number % 2), evidence))
    return items


def test_ratios_equal_plain_loops(traced):
    views = {
        statistics.by_modality: lambda item, n: [
            "all",
            "image" if item.trace.is_image[n] else "text",
        ],
        statistics.by_task: lambda item, n: ["t"],
        statistics.by_kind: lambda item, n: [f"t: {item.question.kind or 'all'}"],
        statistics.by_source: lambda item, n: [item.question.details["source"]],
        statistics.by_position: lambda item, n: [
            "0 to 15" if n < 16 else "16 to 31" if n < 32 else "32 to 63"
        ],
        statistics.by_token_kind: lambda item, n: [item.kinds[n]],
    }
    for view, names_of in views.items():
        tokens, concepts, distances = {}, {}, {}
        for item in traced:
            for n in range(len(item.trace.ids)):
                for name in names_of(item, n):
                    tokens[name] = tokens.get(name, 0) + 1
                    concepts[name] = concepts.get(name, 0) + bool(item.trace.is_boundary[n])
                    if not item.trace.is_forced[n]:
                        distance = abs(float(item.trace.probability[n]) - 0.5)
                        distances.setdefault(name, []).append(distance)
        found = statistics.ratio_by(traced, view)
        assert set(found) == set(tokens)
        for name, row in found.items():
            assert row["tokens"] == tokens[name]
            assert row["ratio"] == pytest.approx(tokens[name] / concepts[name])
            assert row["confidence"] == pytest.approx(np.mean(distances[name]))
            low, high = row["interval_95"]
            assert low <= row["ratio"] <= high
            assert low < high


def test_merged_tokens_and_distributions_equal_plain_loops(traced):
    found = statistics.merged_tokens(traced)
    for kind, row in found.items():
        places = [
            (item.trace, n)
            for item in traced
            for n in range(len(item.kinds))
            if item.kinds[n] == kind
        ]
        sizes = [int((trace.concept == trace.concept[n]).sum()) for trace, n in places]
        assert row["tokens"] == len(places)
        assert row["ends_a_chunk"] == pytest.approx(np.mean([t.is_boundary[n] for t, n in places]))
        alone = [s == 1 and t.concept[n] >= 0 for (t, n), s in zip(places, sizes, strict=True)]
        assert row["alone"] == pytest.approx(np.mean(alone))
        assert row["mean_chunk_size"] == pytest.approx(np.mean(sizes))
    counts = statistics.size_distribution(traced)
    whole = [size for item in traced for size in item.trace.sizes()]
    assert sum(map(sum, counts.values())) == len(whole)
    assert counts["text"][0] + counts["image"][0] == whole.count(1)
    free = sum(int((~item.trace.is_forced).sum()) for item in traced)
    assert sum(map(sum, statistics.probability_distribution(traced).values())) == free


def test_scores_by_the_size_of_the_evidences_chunks(traced):
    rows = statistics.score_by_evidence(traced)
    assert sum(row["questions"] for row in rows) == len(traced)
    for row in rows:
        scores = [
            item.score
            for item in traced
            if row["from"] <= item.trace.size_of_token()[item.evidence].mean()
            and (row["to"] is None or item.trace.size_of_token()[item.evidence].mean() < row["to"])
        ]
        assert row["score"] == pytest.approx(np.mean(scores))
    assert not statistics.score_by_evidence(
        [Traced("t", item.question, item.trace, item.kinds) for item in traced]
    )


def test_where_an_answer_can_be_read():
    texts = ["is ", "the", " red", " thing", " redder", "?"]
    flags = np.zeros(6, bool)
    trace = ChunkTrace(np.arange(6), flags, flags, flags, np.zeros(6), np.zeros(6, int), [])

    def evidence(*references, **details):
        return evidence_of(Question("k", [], references, details=details), trace, texts)

    assert evidence("Red").tolist() == [False, False, True, False, False, False]
    assert evidence("red thing").tolist() == [False, False, True, True, False, False]
    assert evidence("no", "") is None
    assert evidence("hin") is None


def test_patches_under_a_box():
    image = np.array([False] + [True] * 12 + [False])
    flags = np.zeros(14, bool)
    trace = ChunkTrace(
        np.arange(14), image, flags, flags, np.zeros(14), np.zeros(14, int), [Plane(1, 3, 4)]
    )
    question = Question("k", [], ["x"], details={"box": [0.3, 0.4, 0.5, 0.6]})
    found = evidence_of(question, trace, ["x"] * 14)
    # columns 1 (0.25 to 0.5) of row 1 (1/3 to 2/3); column 2 begins where the box ends
    assert np.flatnonzero(found).tolist() == [1 + 4 + 1]


def test_spread_takes_from_everywhere():
    assert spread(list("abcdefgh"), 4) == list("aceg")
    assert spread(list("abc"), 4) == list("abc")
    assert spread(list("abc"), 0) == []


def test_the_program_writes_one_page(tmp_path, capsys):
    chunk = {"image_mode": "grid", "init": "random"}
    model = save_model_folder(tmp_path / "run" / "model", chunk=chunk, lively=True)
    last = {"step": 9, "ratio": 1.75, "ratio_text": 1.5, "ratio_image": None}
    # A run that was killed leaves half a line.
    (tmp_path / "run" / "metrics.jsonl").write_text(json.dumps(last) + '\n{"step": 10, "rat')
    small_set(tmp_path / "data")
    arguments = ["--model", str(model), "--tasks", "easy_vqa", "--data", str(tmp_path / "data")]
    status = main(["chunks", *arguments, "--compressions", "1", "--pictures", "2"])
    assert status == 0, capsys.readouterr().err
    folder = tmp_path / "run" / "eval" / "chunks"
    results = json.loads((folder / "chunks.json").read_text("utf-8"))
    assert results["method"]["prompts"] == 9
    tokens = results["method"]["ratio_by"]["modality"]
    assert tokens["image"]["tokens"] == 9 * 9
    assert tokens["all"]["tokens"] == results["method"]["tokens"]
    drift = {row["modality"]: row for row in results["drift"]}
    assert drift["all"]["target"] == 2.0
    assert drift["all"]["training"] == 1.75
    assert drift["all"]["drift"] == pytest.approx(tokens["all"]["ratio"] / 2 - 1)
    trained, plain = results["dial"]["easy_vqa"]
    assert (trained["asked"], plain["asked"], plain["ratio"]) == (None, 1.0, 1.0)
    assert plain["cache_kilobytes"] > trained["cache_kilobytes"]
    assert plain["gigaflops"] > trained["gigaflops"]
    # The traced ratio is the one that the evaluation counted.
    assert tokens["all"]["ratio"] == pytest.approx(trained["ratio"])
    page = (folder / "chunks.html").read_text("utf-8")
    # two prompts with one picture in three drawings, and the figures
    assert page.count("data:image/png;base64,") == 2 * 3 + 6
    assert "http" not in page.replace("Content-Security-Policy", "").replace("http-equiv", "")


def test_questions_are_loaded_and_prompts_traced_once(tmp_path, monkeypatch):
    model = save_model_folder(tmp_path / "model")
    small_set(tmp_path / "data", pictures=1)
    done = []

    def counted(module, name, label):
        function = getattr(module, name)

        def count(*arguments, **named):
            done.append(label)
            return function(*arguments, **named)

        return count

    task = dataclasses.replace(easy_vqa.TASK, load=counted(easy_vqa.TASK, "load", "load"))
    monkeypatch.setattr(easy_vqa, "TASK", task)
    for module in (tracing, chunk_pictures):
        monkeypatch.setattr(
            module, "trace_conversation", counted(module, "trace_conversation", "trace")
        )
    monkeypatch.setattr(asking, "load_pretrained", counted(asking, "load_pretrained", "model"))
    arguments = ["--model", str(model), "--tasks", "easy_vqa", "--data", str(tmp_path / "data")]
    arguments += ["--compressions", "1", "--output", str(tmp_path / "out")]
    assert main(["chunks", *arguments]) == 0
    # Three prompts, each drawn in the other image mode too.
    assert (done.count("load"), done.count("model"), done.count("trace")) == (1, 1, 3 + 3)


def test_names_of_data_are_no_formulas():
    row = {"tokens": 4, "ratio": 2.0, "interval_95": [1.5, 2.5], "confidence": 0.25}
    assert draw_ratios({"$x^$": row, r"costs $\frac$": row}, "$").startswith("data:image/png")
    assert _short("a  long\nname " * 5) == "a long name a long name a l…"


def test_several_processes_are_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    model = save_model_folder(tmp_path / "model")
    assert main(["chunks", "--model", str(model), "--tasks", "easy_vqa"]) == 2
    assert "without torchrun" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--compressions", "1,two"], "--compressions"),
        (["--compressions", "7"], "calibrate"),
        (["--prompts", "0"], "--prompts"),
        (["--prefix-cache", "-1"], "--prefix-cache is -1; give 0 or more"),
        (["--data", "/nowhere"], "/nowhere"),
    ],
)
def test_the_program_refuses_in_one_line(arguments, message, tmp_path, capsys):
    model = save_model_folder(tmp_path / "model")
    small_set(tmp_path / "data")
    given = ["chunks", "--model", str(model), "--tasks", "easy_vqa"]
    given += ["--data", str(tmp_path / "data"), *arguments]
    assert main(given) == 2
    # The first test of a process sees its notices too.
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert message in errors[0]
