"""Loggers beside metrics.jsonl: what arrives, and that none can stop or slow a run."""

from __future__ import annotations

import json
import sys
import threading
import types

import pytest
import torch

from conceptmoe_vl.errors import UserError
from conceptmoe_vl.training import Trainer, TrainingConfig, World, loggers
from tests.tiny import tiny_model
from tests.training.synthetic import SyntheticStream

WORLD = World(0, 1, 0, torch.device("cpu"))


def train(run_dir, names: list[str], options: dict | None = None) -> list[dict]:
    """Trains two steps with an evaluation; returns the lines of metrics.jsonl."""
    config = TrainingConfig(
        engine="torch", max_steps=2, log_every=1, loggers=names, logger_options=options or {}
    )
    run = Trainer(
        tiny_model(),
        SyntheticStream(),
        config,
        run_dir,
        WORLD,
        held_out=lambda: iter(SyntheticStream(steps=1)),
    )
    run.train()
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


class Client(types.ModuleType):
    """Stands in for wandb or trackio."""

    def __init__(self, name: str, fails_at: int | None = None) -> None:
        super().__init__(name)
        self.calls: list = []
        self._fails_at = fails_at

    def init(self, **options) -> None:
        self.calls.append(("init", options))

    def log(self, values: dict, step: int | None = None) -> None:
        if len(self.calls) == self._fails_at:
            raise OSError("no space\nleft")
        self.calls.append(("log", values, step))

    def finish(self) -> None:
        self.calls.append(("finish",))


def test_tensorboard_holds_every_number(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    lines = train(tmp_path, ["tensorboard"])
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    for line in lines:
        for name, value in loggers.flat_numbers(line | {"step": None}):
            (found,) = [e.value for e in events.Scalars(name) if e.step == line["step"]]
            assert found == pytest.approx(value, rel=1e-5), name
    assert "expert_load/concept/max" in events.Tags()["scalars"]
    assert len(events.Scalars("held_out/lm_loss")) == 1


def test_trackio_and_wandb_get_names_steps_and_options(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    trackio, wandb = Client("trackio"), Client("wandb")
    wandb.define_metric = lambda name, step_metric: wandb.calls.append((name, step_metric))
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    lines = train(tmp_path / "run", ["trackio", "wandb"], {"wandb": {"project": "mine"}})
    assert trackio.calls[0] == (
        "init",
        {"project": "conceptmoe-vl", "name": "run", "resume": "allow"},
    )
    given = wandb.calls[0][1]
    assert (given["project"], given["mode"], given["dir"]) == ("mine", "offline", f"{tmp_path}/run")
    assert ("*", "step") in wandb.calls  # a roll-back goes to lower steps
    for client, steps in ((trackio, [1, 2, 2]), (wandb, [None] * 3)):
        logged = [call for call in client.calls if call[0] == "log"]
        assert [call[2] for call in logged] == steps
        assert [call[1].get("loss") for call in logged] == [*(x["loss"] for x in lines), None]
        assert logged[-1][1]["held_out/lm_loss"] > 0
        assert client.calls[-1] == ("finish",)


def test_a_trainer_driven_by_hand_loses_no_line_at_exit(tmp_path, monkeypatch):
    client, at_exit = Client("trackio"), []
    monkeypatch.setitem(sys.modules, "trackio", client)
    monkeypatch.setattr(loggers.atexit, "register", at_exit.append)
    config = TrainingConfig(engine="torch", max_steps=9, log_every=1, loggers=["trackio"])
    run = Trainer(tiny_model(), SyntheticStream(), config, tmp_path, WORLD)
    for _ in range(2):
        run.step()
    (close,) = at_exit
    close()
    assert [call[0] for call in client.calls] == ["init", "log", "log", "finish"]


def test_a_failing_logger_is_warned_of_once_and_stops_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "trackio", Client("trackio", fails_at=2))
    assert [line["step"] for line in train(tmp_path, ["trackio"])] == [1, 2]
    error = capsys.readouterr().err
    assert error.count("trackio logs no further") == 1
    assert "trackio logs no further: OSError: no space left; metrics.jsonl has every line" in error


def test_a_stuck_logger_does_not_hold_up_the_run():
    entered, release, warnings = threading.Event(), threading.Event(), []

    class Stuck:
        def log(self, step, values, warnings):
            entered.set()
            release.wait()

        def close(self):
            raise AssertionError("a logger that was given up is not closed")

    logger = loggers.Logger("stuck", Stuck, warnings.append, capacity=2)
    logger.log(1, {})
    assert entered.wait(60)
    for step in range(2, 9):
        logger.log(step, {})  # would wait for ever
    assert warnings == [
        "warning: stuck logs no further: it is 2 lines behind; metrics.jsonl has every line"
    ]
    logger.close(seconds=0.0)
    release.set()
    assert len(warnings) == 1


def test_a_missing_logger_is_an_error_that_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"pip install conceptmoe-vl\[wandb\], or leave it out"):
        train(tmp_path, ["wandb"])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"loggers": ["tensorbord"]}, "nearest known key is 'tensorboard'"),
        ({"loggers": ["wandb"], "logger_options": {"trackio": {}}}, "logger_options.trackio"),
    ],
)
def test_mistakes(fields, message):
    with pytest.raises(UserError, match=message):
        TrainingConfig(max_steps=1, **fields)
