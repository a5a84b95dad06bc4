"""What bench/conversion_training.py makes of texts, models and figures."""

from __future__ import annotations

import json
import math

import pytest
import torch

from bench import conversion_training
from bench.conversion_curve import draw
from bench.conversion_evaluation import log_perplexities, random_boundaries
from bench.conversion_texts import build_texts, join_texts
from conceptmoe_vl.configuration import ChunkConfig
from conceptmoe_vl.training import load_run_config
from data_pipelines.batch import PackedBatch
from data_pipelines.config import DataConfig
from tests.tiny import tiny_model


def test_texts_are_joined_whole_and_in_order():
    texts = [letter * 5 for letter in "abcdefg"]
    joined = list(join_texts(texts, least=12))
    assert joined == ["aaaaa\n\nbbbbb", "ccccc\n\nddddd", "eeeee\n\nfffff", "ggggg"]


def batches(number=2):
    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(number):
        ids = torch.randint(6, 60, (40,), generator=generator)
        ends = torch.tensor([0, 25, 40], dtype=torch.int32)
        made.append(PackedBatch(ids, ids.clone(), ends, ["a", "b"], ["x", "x"]))
    return made


def test_log_perplexities_are_measured_at_exact_ratios():
    model = tiny_model(concept_residual="delta")
    found = log_perplexities(model, batches(), (1.5, 2))
    assert list(found) == [1.0, 1.5, 2]
    for ratio, (reached, value) in found.items():
        assert reached == pytest.approx(ratio, rel=0.02)
        assert math.isfinite(value)
    with torch.no_grad():
        losses = [
            model(input_ids=part[None], labels=part[None], compression=1).lm_loss * (len(part) - 1)
            for batch in batches()
            for part in batch.input_ids.split([25, 15])
        ]
    assert found[1.0][1] == pytest.approx(sum(losses).item() / (2 * (24 + 14)), rel=1e-4)


def test_random_boundaries_reach_the_ratio_too_and_end_with_the_block():
    model = tiny_model()
    learned = log_perplexities(model, batches(), (2,))
    with random_boundaries(model):
        drawn = log_perplexities(model, batches(), (2,))
    assert drawn[1.0] == learned[1.0]
    assert drawn[2][0] == pytest.approx(2, rel=0.02)
    assert drawn[2][1] != learned[2][1]
    assert log_perplexities(model, batches(), (2,)) == learned


def test_without_chunking_there_is_one_ratio():
    assert list(log_perplexities(tiny_model(router="none"), batches(), (1.5,))) == [1.0]


def test_held_out_texts_are_of_other_articles(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    rows = {
        f"Title {n}": {"title": f"Title {n}", "extract": f"Article {n} ends here. " * 30}
        for n in range(40)
    }
    (package / "summaries_en-us.json").write_text(json.dumps(rows))
    build_texts(tmp_path, package)
    found = {}
    for split in ("train", "test"):
        lines = (tmp_path / f"{split}.jsonl").read_text().splitlines()
        words = " ".join(json.loads(line)["text"] for line in lines).split()
        found[split] = {words[place + 1] for place, word in enumerate(words) if word == "Article"}
    assert len(found["train"] | found["test"]) == 40
    assert not found["train"] & found["test"]
    assert found["test"]


def test_every_run_is_a_configuration_that_train_takes(tmp_path):
    names = []
    for run in conversion_training.runs(80, 30):
        config = load_run_config("bench/smollm2.yaml", run.overrides(tmp_path))
        DataConfig.from_mapping(config.data)
        chunk = ChunkConfig(**config.model.chunk)
        assert {name: getattr(chunk, name) for name in run.chunk} == run.chunk
        names.append(run.name)
    assert len(set(names)) == len(names)


def test_figures_become_tables_and_a_curve(tmp_path):
    ratios = {str(float(r)): [r, 2 + r / 2] for r in (1, 1.1, 1.25, 1.5, 2)}
    row = {"variant": "delta, boundary", "tokens": 2000, "processor_seconds": 120.0}
    control = {**row, "variant": "source", "log_perplexity": {"1.0": [1, 2.4]}}
    row["log_perplexity"] = {"1.0": [1, 2.45], "1.5": [1.5, 2.625]}
    figures = {"untrained": {"delta, boundary": ratios}, "long": row, "long-source": control}
    lines = list(conversion_training.report(figures, ["long", "long-source"]))
    assert lines[2] == "| 1 | 12.2 |"
    # of 2.75 - 2.5 a half is won back
    assert lines[-2] == "| long | 2,000 | 2.450 | 2.625 | 50% | 2 |"
    assert lines[-1] == "| long-source | 2,000 | 2.400 | - | - | 2 |"
    for name in ("long", "long-source"):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        steps = [{"step": s, "tokens": 1000 * s, "ratio": 1.2, "target_ratio": 1.5} for s in (1, 2)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(s) + "\n" for s in steps))
        line = json.dumps({"step": 2, "lm_loss": 2.5})
        (folder / "evaluation.jsonl").write_text(line + "\n")
    draw(tmp_path, figures, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 5000
