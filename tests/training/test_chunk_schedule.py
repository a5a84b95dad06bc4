"""Schedules of the method over a run, and the watch over its ratio."""

from __future__ import annotations

import json
import re

import pytest
import torch

from conceptmoe_vl import ConceptMoEVLForConditionalGeneration
from conceptmoe_vl.configuration import ChunkConfig
from conceptmoe_vl.errors import UserError
from conceptmoe_vl.training import Trainer, TrainingConfig, World
from conceptmoe_vl.training.chunk_schedule import (
    ChunkSchedule,
    ChunkScheduler,
    ratio_targets,
)
from conceptmoe_vl.training.watch import RunWatch, WatchConfig
from tests.tiny import tiny_model
from tests.training.synthetic import SyntheticStream

WORLD = World(0, 1, 0, torch.device("cpu"))
SCHEDULE = {
    "ratio_start": 1.0,
    "ratio_fraction": 0.5,
    "tau_start": 2.0,
    "tau_fraction": 0.5,
    "ratio_loss_weight_start": 0.1,
    "ratio_loss_weight_fraction": 1.0,
}


def trainer(run_dir, schedule: dict | None = None, watch: dict | None = None, **chunk) -> Trainer:
    config = TrainingConfig(
        engine="torch",
        max_steps=8,
        precision="float32",
        log_every=1,
        chunk_schedule=ChunkSchedule(**(SCHEDULE if schedule is None else schedule)),
        watch=WatchConfig(**(watch or {})),
    )
    model = tiny_model(image_mode="grid", noise="bernoulli", **chunk)
    return Trainer(model, SyntheticStream(), config, run_dir, WORLD)


def test_values_over_a_run():
    chunk, schedule = ChunkConfig(target_ratio=2.0, tau=6.0), ChunkSchedule(**SCHEDULE)
    found = [schedule.values(chunk, progress) for progress in (0, 0.25, 0.5, 1)]
    assert [v.target(2.0) for v in found] == pytest.approx([1, 4 / 3, 2, 2])
    assert [v.threshold for v in found] == [0, 0.25, 0.5, 0.5]
    assert [v.tau for v in found] == [2, 4, 6, 6]
    assert [v.ratio_loss_weight for v in found] == pytest.approx([0.1, 0.0825, 0.065, 0.03])
    idle = ChunkSchedule().values(chunk, 0.0)
    assert (idle.target(2.0), idle.threshold, idle.tau) == (2.0, 0.5, 6.0)


def test_a_start_above_one_leaves_the_threshold_unless_told():
    chunk = ChunkConfig(target_ratio=3.0)
    assert ChunkSchedule(ratio_start=1.5).values(chunk, 0.0).threshold == 0.5
    told = ChunkSchedule(ratio_start=1.5, threshold_start=0.1)
    assert told.values(chunk, 0.0).threshold == 0.1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ratio_start": 0.5}, "ratio_start is 0.5; give 1 up"),
        ({"ratio_fraction": 2.0}, "ratio_fraction is 2.0; give 0 to 1"),
        ({"ratio_start": 1.0, "threshold_start": 0.7}, "threshold_start is 0.7"),
        ({"threshold_start": 0.1}, "has no effect: there is no ratio_start"),
    ],
)
def test_mistakes(fields, message):
    with pytest.raises(UserError, match=message):
        ChunkSchedule(**fields)


@pytest.mark.parametrize(
    ("fields", "chunk", "message"),
    [
        (
            {"ratio_start": 1.0},
            {"router": "none"},
            "ratio_start is 1, which has no effect: chunk.r",
        ),
        ({"ratio_start": 2.0}, {}, r"no target ratio is above it \(the highest is 2\); leave"),
        ({"tau_start": 2.0}, {"noise": "none"}, "tau_start is 2, .* and chunk.noise none"),
        ({"ratio_loss_weight_start": 0.0}, {"router": "fixed"}, "weight_start is 0, .* is fixed"),
    ],
)
def test_a_start_without_effect_is_refused(fields, chunk, message):
    with pytest.raises(UserError, match=message):
        ChunkScheduler(tiny_model(**chunk), ChunkSchedule(**fields))


def test_a_model_exported_in_mid_warm_up_is_warned_of(tmp_path, capsys):
    run = trainer(tmp_path)
    for _ in range(3):
        run.step()
    run.export()
    assert "warm-up had come 50% of its way when the run ended" in capsys.readouterr().err
    loaded = ConceptMoEVLForConditionalGeneration.from_pretrained(tmp_path / "model")
    assert loaded.language_model.chunk.values.threshold == 0.5


def test_targets_by_scope_and_over_drawn_ratios():
    values = ChunkSchedule().values(ChunkConfig(), 0.0)
    own = ChunkConfig(ratio_scope="modality", image_target_ratio=4.0)
    assert ratio_targets(own, values) == {"target_ratio_image": 4.0, "target_ratio_text": 2.0}
    several = ChunkConfig(target_ratios=[1, 2, 4])
    assert ratio_targets(several, values)["target_ratio"] == pytest.approx(3 / (1 + 1 / 2 + 1 / 4))


def test_a_run_warms_up_and_a_resumed_one_goes_on_exactly(tmp_path):
    straight = trainer(tmp_path / "straight")
    expected = [straight.step() for _ in range(6)]
    assert expected[0]["ratio"] == 1  # every token is a boundary
    assert [line["target_ratio"] for line in expected[:5]] == pytest.approx(
        [1 / (1 - done / 8) for done in range(5)]
    )
    assert expected[4]["ratio"] > 1.3
    stopped = trainer(tmp_path / "stopped")
    for _ in range(3):
        stopped.step()
    stopped.save_checkpoint()
    resumed = trainer(tmp_path / "stopped")
    assert resumed.resume()
    assert resumed.engine.module.language_model.chunk.values.threshold == 0.5 * 3 / 4
    found = [resumed.step() for _ in range(3)]
    names = [
        "loss",
        "ratio",
        "target_ratio",
        "tau",
        "ratio_loss_weight",
        "boundary_threshold",
        "grad_norm",
    ]
    for name in names:
        assert [line[name] for line in found] == [line[name] for line in expected[3:]], name
    lines = (resumed.run_dir / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["tau"] for line in lines] == [2, 3, 4, 5, 6, 6]


def line(**fields) -> dict:
    return {
        "ratio": 2.0,
        "target_ratio": 2.0,
        "boundary_share_text": 0.5,
        "boundary_confidence_text": 0.2,
        **fields,
    }


def warnings_of(watch: RunWatch, lines: list[dict], progress: float = 0.5) -> list[str]:
    return [text for each in lines for text in watch.look(each, progress)]


def test_a_ratio_outside_its_band_is_warned_of_once_an_episode():
    watch = RunWatch(WatchConfig(steps=2, ratio_band=0.25), 0.0)
    (text,) = warnings_of(watch, [line(ratio=3.0)] * 9)
    assert "tokens per concept are 3.00" in text
    assert "outside the band 1.60 to 2.50 around the target 2.00" in text
    assert warnings_of(watch, [line()] * 9) == []
    assert len(warnings_of(watch, [line(ratio=1.2)] * 9)) == 1
    by_modality = {"ratio_image": 9.0, "target_ratio_image": 4.0}
    (text,) = warnings_of(watch, [line(**by_modality)] * 9)
    assert text.startswith("tokens per concept of image are 9.00")


def test_the_band_holds_from_the_end_of_the_warm_up_on():
    watch = RunWatch(WatchConfig(steps=2, ratio_from=0.1), 0.3)
    assert warnings_of(watch, [line(ratio=1.0)] * 9, progress=0.29) == []
    assert warnings_of(watch, [line(ratio=1.0)], progress=0.3) == []  # one step is no mean
    assert len(warnings_of(watch, [line(ratio=1.0)], progress=0.31)) == 1
    off = RunWatch(WatchConfig(steps=1, ratio_band=0.0), 0.0)
    assert warnings_of(off, [line(ratio=9.0)] * 3) == []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"boundary_share_text": 0.0}, "as good as no boundary of text fires"),
        ({"boundary_share_text": 1.0}, "as good as every token of text is a boundary"),
        ({"boundary_confidence_text": 0.01}, r"\|p - 1/2\| of text has collapsed to 0.0"),
        (
            {"boundary_share_image": 0.0, "boundary_confidence_image": 0.4},
            "no boundary of image fires",
        ),
    ],
)
def test_a_collapsed_router_is_warned_of(fields, message):
    watch = RunWatch(WatchConfig(steps=3), 0.0)
    assert warnings_of(watch, [line()] * 5) == []
    (text,) = warnings_of(watch, [line(**fields)] * 900)
    assert re.search(message, text)


def test_boundaries_everywhere_are_what_a_warm_up_from_one_wants():
    watch = RunWatch(WatchConfig(steps=1), 0.3)
    fields = {"boundary_share_text": 1.0, "boundary_threshold": 0.1}
    assert warnings_of(watch, [line(**fields)] * 3, progress=0.1) == []


def test_warnings_are_said_and_written(tmp_path, capsys):
    watch = {"steps": 2, "ratio_from": 0.0, "ratio_band": 0.001}
    run = trainer(tmp_path, {}, watch)
    for _ in range(4):
        run.step()
    written = [json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    (texts,) = [each["warnings"] for each in written if "warnings" in each]
    assert "outside the band" in texts[0]
    assert f"warning: step 2: {texts[0]}" in capsys.readouterr().err


def test_metrics_by_modality_count_what_is_not_forced(tmp_path):
    """Every token a boundary, by a router that is certain, or none: all counts by hand."""
    run = trainer(tmp_path, {})
    original = run.engine.forward

    def forced(share: float):
        def forward(**inputs):
            out = original(**inputs)
            free = ~out.chunks.boundary_forced
            out.chunks.boundary_mask = ~free | torch.full_like(free, share == 1)
            out.chunks.boundary_prob = torch.where(free, share, out.chunks.boundary_prob)
            return out

        return forward

    for share in (0.0, 1.0):
        run.engine.forward = forced(share)
        found = run.step()
        for modality in ("image", "text"):
            assert found[f"boundary_share_{modality}"] == share
            assert found[f"boundary_confidence_{modality}"] == 0.5
            assert found[f"documents_without_boundary_{modality}"] == 1 - share
            assert found[f"documents_all_boundary_{modality}"] == share
        # 4 documents of 9 patches; one boundary an image is forced
        assert found["ratio_image"] == (1 if share else 9)


def test_a_fixed_router_fires_and_without_a_router_nothing_is_decided(tmp_path):
    fixed = trainer(tmp_path / "fixed", {}, {"steps": 2}, router="fixed").step()
    for modality in ("image", "text"):
        assert 0.3 < fixed[f"boundary_share_{modality}"] < 0.7
        assert fixed[f"documents_without_boundary_{modality}"] == 0
    plain = trainer(tmp_path / "none", {}, {"steps": 2}, router="none").step()
    assert plain["ratio"] == 1
    assert plain["boundary_share_text"] is plain["boundary_confidence"] is None
