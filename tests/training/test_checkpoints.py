"""Checkpoints on disk: verified when written, kept by rule, and what damage to them does."""

from __future__ import annotations

import errno
import json
import shutil
import signal
import zipfile
from pathlib import Path

import pytest
import torch

import train
from conceptmoe_vl.errors import UserError
from conceptmoe_vl.training import Trainer, TrainingConfig, World, distributed, verification
from conceptmoe_vl.training.run_files import recover_folders
from tests.tiny import tiny_model
from tests.training.synthetic import SyntheticStream
from tests.training.test_train_program import program, write_config

WORLD = World(0, 1, 0, torch.device("cpu"))


def make(run_dir, **settings) -> Trainer:
    config = TrainingConfig(
        engine="torch", max_steps=12, precision="float32", log_every=1, **settings
    )
    return Trainer(tiny_model(), SyntheticStream(), config, run_dir, WORLD)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A run of three steps with a checkpoint after each, and the losses of steps 3 and 4."""
    run = make(tmp_path_factory.mktemp("run"), checkpoint_every=1, keep_checkpoints=3)
    losses = []
    for _ in range(3):
        losses.append(run.step()["loss"])
        run.save_checkpoint()
    losses.append(run.step()["loss"])
    return run.run_dir, losses[2:]


@pytest.fixture
def run_dir(written, tmp_path):
    """A copy of that run."""
    return Path(shutil.copytree(written[0], tmp_path / "run"))


def flip(path: Path, at: int) -> None:
    """Changes one bit of a file, and not its size."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_the_manifest_has_checksums_and_latest_names_the_newest(run_dir):
    folder = run_dir / "checkpoints"
    assert (folder / "latest").read_text() == "step-3\n"
    files = json.loads((folder / "step-3" / "manifest.json").read_text())["files"]
    assert set(files) == {"engine/state.pt", "rank-0.pt"}
    for name, entry in files.items():
        path = folder / "step-3" / name
        assert entry["bytes"] == path.stat().st_size
        assert entry["sha256"] == verification.sha256_of(path)
    assert verification.damage_of(folder / "step-3", WORLD) is None


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: flip(path / "engine/state.pt", 5000), "state.pt has not the checksum"),
        (lambda path: (path / "engine/state.pt").write_bytes(b"cut"), "state.pt has 3 bytes"),
        (lambda path: (path / "rank-0.pt").unlink(), "rank-0.pt has no bytes"),
        (lambda path: (path / "manifest.json").write_text('{"format"'), "cannot read manifest"),
    ],
)
def test_a_resume_falls_back_from_a_damaged_checkpoint(run_dir, written, capsys, damage, message):
    folder = run_dir / "checkpoints"
    damage(folder / "step-3")
    (folder / ".writing-step-4").mkdir()  # of a killed run
    run = make(run_dir)
    assert run.resume()
    assert run.step_number == 2
    said = capsys.readouterr().err
    assert message in said
    assert "put aside as damaged-step-3" in said
    assert ".writing-step-4 was left half-written" in said
    assert (folder / "latest").read_text() == "step-2\n"
    assert [run.step()["loss"] for _ in range(2)] == written[1]
    run.save_checkpoint()
    assert sorted(path.name for path in folder.iterdir()) == [
        "damaged-step-3",
        "latest",
        "step-2",
        "step-4",
    ]


def test_no_whole_checkpoint_is_an_error_and_no_fresh_start(run_dir):
    for number in (1, 2, 3):
        flip(run_dir / "checkpoints" / f"step-{number}" / "rank-0.pt", 500)
    with pytest.raises(UserError, match=r"no checkpoint in .* is whole; the last: .*step-1 is dam"):
        make(run_dir).resume()


def test_the_configured_rates_hold_after_a_resume(run_dir):
    run = make(run_dir, learning_rate=0.0, weight_decay=0.0, betas=[0.5, 0.6], epsilon=1e-3)
    assert run.resume()
    groups = run.engine.optimizer.param_groups
    assert {(group["betas"], group["eps"], group["weight_decay"]) for group in groups} == {
        ((0.5, 0.6), 1e-3, 0.0)
    }
    before = run.engine.gather_weights()
    before = {name: tensor.clone() for name, tensor in before.items()}
    assert run.step()["lr"] == 0.0
    assert all(torch.equal(before[name], now) for name, now in run.engine.gather_weights().items())


def test_a_named_checkpoint_that_is_damaged_is_refused(run_dir):
    path = run_dir / "checkpoints" / "step-3"
    flip(path / "engine/state.pt", 5000)
    with pytest.raises(UserError, match=r"is damaged: .*; give training\.resume another one"):
        make(run_dir, resume=str(path)).resume()
    assert path.exists()  # the user named it: it is not put aside


def test_another_version_is_refused_and_not_put_aside(run_dir):
    path = run_dir / "checkpoints" / "step-3" / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 1}))
    with pytest.raises(UserError, match="has checkpoint format 1; this version reads 2"):
        make(run_dir).resume()
    assert path.exists()


def test_a_checkpoint_that_reads_back_otherwise_stays_unfinished(tmp_path, monkeypatch):
    """A disk that loses what was written: the file is not the one that torch made."""
    run = make(tmp_path)
    run.step()
    run.save_checkpoint()
    original = torch.save

    def losing(state, path):
        original(state, path)
        if Path(path).name == "rank-0.pt":
            with zipfile.ZipFile(path) as file:
                first = file.infolist()[0]
                at = first.header_offset + 30 + len(first.filename) + len(first.extra)
            flip(Path(path), at + 60)

    monkeypatch.setattr(torch, "save", losing)
    run.step()
    with pytest.raises(UserError, match=r"was not written whole: rank-0.pt \("):
        run.save_checkpoint()
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step-1\n"
    assert not (tmp_path / "checkpoints" / "step-2").exists()


def test_checkpoints_are_kept_by_number_and_by_interval(tmp_path):
    run = make(tmp_path, checkpoint_every=1, keep_checkpoints=2, keep_every=2)
    for _ in range(7):
        run.step()
        run.save_checkpoint()
    found = sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*"))
    assert found == ["step-2", "step-4", "step-6", "step-7"]


def test_what_killed_processes_left_is_removed(run_dir):
    """In the middle of a rename, of a removal, and of writing; others' files stay."""
    folder = run_dir / "checkpoints"
    (folder / "step-1").rename(folder / ".removed-step-1")
    for name in (".config.yaml", ".metrics.jsonl", "checkpoints/.latest"):
        (run_dir / f"{name}.0123abcd.tmp").write_text("half")
    (run_dir / ".report.html.0123abcd.tmp").write_text("of a process that runs")
    assert recover_folders(run_dir) == []
    assert [path.name for path in run_dir.rglob(".*")] == [".report.html.0123abcd.tmp"]
    assert sorted(path.name for path in folder.iterdir()) == ["latest", "step-2", "step-3"]


def test_an_interval_that_no_checkpoint_meets_is_refused():
    with pytest.raises(UserError, match="keep_every is 5, but checkpoints are written every 2"):
        TrainingConfig(max_steps=1, checkpoint_every=2, keep_every=5)


def test_a_rank_reads_its_share_of_the_files(run_dir, monkeypatch):
    """Two ranks, one after the other: each hashes half, together all."""
    folder, read = run_dir / "checkpoints" / "step-3", []
    original = verification.sha256_of
    monkeypatch.setattr(
        verification, "sha256_of", lambda path: (read.append(path.name), original(path))[1]
    )
    for rank in (0, 1):
        assert verification.damage_of(folder, World(rank, 2, rank, WORLD.device)) is None
    assert read == ["state.pt", "rank-0.pt"]


@pytest.mark.parametrize(
    ("number", "setting", "status"),
    [(signal.SIGTERM, None, 143), (signal.SIGUSR1, None, 138), (signal.SIGTERM, 85, 85)],
)
def test_a_signal_gives_the_status_that_a_scheduler_asks_for(
    tmp_path, monkeypatch, number, setting, status
):
    def build(config, world):
        run = make(tmp_path, stopped_exit_status=setting)
        original = run.step

        def step():
            signal.raise_signal(number)
            return original()

        run.step = step
        config.training.stopped_exit_status = setting
        return run

    kept = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    monkeypatch.setattr(train, "build_trainer", build)
    file = tmp_path / "run.yaml"
    file.write_text("{run_dir: r, model: {}, data: {}, training: {engine: torch, max_steps: 9}}")
    try:
        assert train.main(["--config", str(file)]) == status
    finally:
        for each, handler in kept.items():
            signal.signal(each, handler)
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step-1\n"


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device", "run/metrics.jsonl"),
        RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 36288 vs 36182"),
    ],
)
def test_a_full_disk_is_one_line_and_the_same_command_goes_on(tmp_path, monkeypatch, error):
    def full(*_: object) -> None:
        raise error

    found = distributed.of_disk(error)
    assert isinstance(found, UserError)
    assert "make room or rights for it" in str(found)
    run = make(tmp_path)
    run.step()
    run.save_checkpoint()
    run.step()
    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(type(error)):
        run.save_checkpoint()
    monkeypatch.undo()
    again = make(tmp_path)
    assert again.resume()
    assert again.step_number == 1


def test_an_error_that_is_not_of_the_disk_stays_what_it_is():
    error = RuntimeError("shapes differ")
    assert distributed.of_disk(error) is error


def test_a_start_of_other_shapes_is_one_line(tmp_path, capsys):
    config_file = write_config(tmp_path)
    assert program(config_file, "training.max_steps=1") == 0
    start = f"model.init_from={tmp_path / 'run' / 'model'}"
    other = (f"run_dir={tmp_path / 'other'}", "model.text.num_experts=8")
    assert program(config_file, start, *other) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "the configuration asks for (8, " in error
