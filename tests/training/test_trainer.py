"""The trainer in one process on the torch engine, step by step."""

from __future__ import annotations

import json
import math
import signal
import sys

import pytest
import torch

from conceptmoe_vl import ConceptMoEVLForConditionalGeneration
from conceptmoe_vl.errors import UserError
from conceptmoe_vl.training import Trainer, TrainingConfig, World
from conceptmoe_vl.training.checkpoint import stream_state
from tests.tiny import tiny_model
from tests.training.synthetic import SyntheticStream
from tests.training.worker import make_trainer

WORLD = World(0, 1, 0, torch.device("cpu"))


@pytest.fixture
def trainer(tmp_path):
    """Makes a trainer from a specification of `worker`."""

    def make(name: str = "run", **spec) -> Trainer:
        return make_trainer({"name": name, "engine": "torch", **spec}, tmp_path, WORLD)

    return make


def lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("accumulation", [2, 4])
def test_loss_and_gradient_do_not_depend_on_how_the_batch_is_cut(trainer, accumulation):
    whole, cut = (
        trainer(name, accumulation=parts, auxiliary=False)
        for name, parts in (("whole", 1), ("cut", accumulation))
    )
    for _ in range(3):
        expected, found = whole.step(), cut.step()
        for name in ("loss", "lm_loss", "grad_norm", "supervised_tokens", "tokens", "samples"):
            assert found[name] == pytest.approx(expected[name], rel=1e-5), name


def test_first_reported_loss_is_the_mean_over_supervised_tokens(trainer):
    run = trainer(accumulation=2)
    model, stream = tiny_model(noise="none", image_mode="grid").train(), SyntheticStream()
    out = model(**next(iter(stream)).model_inputs())
    found = run.step()
    assert found["lm_loss"] == pytest.approx(out.lm_loss.item(), rel=1e-5)
    weighted = sum(out.lm_loss_per_token.tolist()) / len(out.lm_loss_per_token)
    assert found["lm_loss"] == pytest.approx(weighted, rel=1e-5)


def test_metrics_line_has_the_documented_fields(trainer):
    run = trainer(images="first_half")
    run.step()
    (line,) = lines(run.run_dir / "metrics.jsonl")
    documented = """step samples tokens loss lm_loss ratio_loss balance_loss lm_loss_text
        lm_loss_by_source ratio ratio_image ratio_text boundary_confidence expert_load lr grad_norm
        skipped delivered_by_source tokens_per_second concepts_per_second images_per_second
        data_wait_share model_flops_per_second model_flops_utilization peak_memory"""
    assert set(documented.split()) <= set(line)
    assert line["samples"] == 4
    assert set(line["lm_loss_by_source"]) == {"even", "odd"}
    assert line["ratio"] > 0
    assert set(line["expert_load"]) == {"encoder", "concept", "decoder"}
    assert line["skipped"] == {"too_long": 1}


def test_a_step_without_supervised_tokens_is_no_nan(trainer, capsys):
    run = trainer(masked_steps=[1])
    found = [run.step() for _ in range(3)]
    assert [line["supervised_tokens"] > 0 for line in found] == [True, False, True]
    assert found[1]["lm_loss"] == 0
    assert all(math.isfinite(line["loss"]) and math.isfinite(line["grad_norm"]) for line in found)
    assert all(parameter.isfinite().all() for parameter in run.engine.module.parameters())
    assert "step 2 has no supervised token" in capsys.readouterr().err


def test_nonfinite_step_is_skipped_counted_and_named(trainer):
    run = trainer(poisoned=[[1, 0]])
    run.step()
    before = [parameter.detach().clone() for parameter in run.engine.module.parameters()]
    found = run.step()
    assert found["nonfinite_steps"] == 1
    for parameter, old in zip(run.engine.module.parameters(), before, strict=True):
        assert torch.equal(parameter, old)
    assert lines(run.run_dir / "nonfinite.jsonl") == [
        {
            "step": 2,
            "what": "loss",
            "loss": "nan",
            "keys_by_rank": [["doc-4", "doc-5", "doc-6", "doc-7"]],
        }
    ]
    assert math.isfinite(run.step()["loss"])


def test_too_many_nonfinite_steps_in_a_row_stop_the_run(trainer):
    run = trainer(poisoned=[[0, 0], [2, 0], [3, 0]], max_nonfinite_steps=2)
    for _ in range(3):
        run.step()
    with pytest.raises(UserError, match="not finite in 2 steps in a row, up to step 4"):
        run.step()


@pytest.mark.parametrize("stop", [1, 3])
def test_resume_is_exact(trainer, stop):
    straight = trainer("straight", noise="bernoulli")
    expected = [straight.step() for _ in range(5)]
    first = trainer("stopped", noise="bernoulli")
    for _ in range(stop):
        first.step()
    first.save_checkpoint()
    first.step()  # what comes after the checkpoint is done again
    second = trainer("stopped", noise="bernoulli")
    assert second.resume()
    found = [second.step() for _ in range(5 - stop)]
    for name in ("step", "loss", "lm_loss", "ratio", "grad_norm", "lr", "samples", "tokens"):
        assert [line[name] for line in found] == [line[name] for line in expected[stop:]], name
    steps = [line["step"] for line in lines(second.run_dir / "metrics.jsonl")]
    assert steps == [1, 2, 3, 4, 5]


def test_a_checkpoint_that_is_not_of_the_engine_it_names_is_refused(trainer):
    run = trainer()
    run.step()
    path = run.save_checkpoint() / "manifest.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps({**manifest, "engine": "deepspeed", "zero_stage": 2}))
    with pytest.raises(UserError, match=r"cannot take .* apart .* ZeRO stage 2 and 1 processes"):
        trainer().resume()


def test_a_stream_gets_the_states_of_all_ranks_where_their_number_has_changed(tmp_path):
    for rank in range(3):
        torch.save({"stream": {"position": rank}, "random": {}}, tmp_path / f"rank-{rank}.pt")
    worlds = [World(rank, 3, rank, torch.device("cpu")) for rank in range(3)]
    assert [stream_state(tmp_path, 3, world) for world in worlds] == [
        {"position": rank} for rank in range(3)
    ]
    assert stream_state(tmp_path, 3, WORLD) == [{"position": rank} for rank in range(3)]


def test_a_used_folder_without_checkpoint_is_refused(trainer):
    trainer().step()
    with pytest.raises(UserError, match="give another run_dir"):
        trainer().resume()


def test_evaluation_does_not_disturb_training(trainer):
    plain = trainer("plain", noise="bernoulli")
    expected = [plain.step()["loss"] for _ in range(3)]
    evaluated, found = trainer("evaluated", noise="bernoulli"), []
    for _ in range(3):
        found.append(evaluated.step()["loss"])
        result = evaluated.evaluate()
    assert found == expected
    assert evaluated.engine.module.training
    total = count = 0.0
    model = evaluated.engine.module.eval()
    for batch in SyntheticStream(steps=2):
        with torch.no_grad():
            each = model(**batch.model_inputs()).lm_loss_per_token
        total, count = total + each.sum().item(), count + each.numel()
    assert result["lm_loss"] == pytest.approx(total / count, rel=1e-5)
    assert result["supervised_tokens"] == count
    assert [line["step"] for line in lines(evaluated.run_dir / "evaluation.jsonl")] == [1, 2, 3]


@pytest.mark.parametrize(("every", "at"), [(2, 4), (2, 10), (0, 10)])
def test_an_evaluation_that_a_kill_prevented_is_made_up_for(trainer, monkeypatch, every, at):
    spec = {"evaluate_every": every, "checkpoint_every": 2}
    straight = trainer("straight", **spec)
    straight.train()
    evaluate = Trainer.evaluate

    def killed(run):
        return evaluate(run) if run.step_number < at else sys.exit()

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "evaluate", killed)
        with pytest.raises(SystemExit):
            trainer("killed", **spec).train()
    for _ in range(2):  # the second one has nothing to do
        resumed = trainer("killed", **spec)
        assert resumed.resume()
        resumed.train()
    found, expected = (lines(run.run_dir / "evaluation.jsonl") for run in (resumed, straight))
    assert found == expected
    assert [line["step"] for line in found] == ([2, 4, 6, 8, 10] if every else [10])


def test_data_without_a_batch_is_an_error(trainer):
    with pytest.raises(UserError, match="the data gave no batch on any process; look at"):
        trainer("training", stream_steps=0).train()
    nothing = [[0, number] for number in range(4)]
    with pytest.raises(UserError, match="the held-out data gave no batch on any process; add"):
        trainer("evaluation", held_out_missing=nothing).evaluate()
    with pytest.raises(UserError, match="the held-out data gave no batch on any process; add"):
        trainer("unusable", held_out_unusable=[0]).evaluate()


def test_no_usable_sample_on_any_rank_is_an_error(trainer):
    with pytest.raises(UserError, match="no sample is usable: 9 in a row"):
        trainer(unusable=[0]).train()


@pytest.mark.parametrize(("log_every", "logged"), [(3, [1, 3, 5]), (5, [1, 5]), (99, [1, 5])])
def test_the_last_step_of_a_stream_that_ends_has_a_line(trainer, log_every, logged):
    """That it was the last shows only when there is no further batch."""
    run = trainer(stream_steps=5)
    run.config.log_every = log_every
    run.train()
    found = lines(run.run_dir / "metrics.jsonl")
    assert [line["step"] for line in found] == logged
    assert found[-1]["tokens_per_second"] > 0
    assert found[-1]["delivered_by_source"]


def test_training_ends_with_the_stream_and_exports_what_it_trained(trainer):
    run = trainer(stream_steps=2)
    assert run.train()["step"] == 2
    assert (run.run_dir / "checkpoints" / "step-2" / "manifest.json").exists()
    path = run.export()
    model = ConceptMoEVLForConditionalGeneration.from_pretrained(path)
    trained = dict(run.engine.module.named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, trained[name]), name


def test_a_signal_ends_the_run_after_the_step_with_a_checkpoint(trainer):
    run = trainer()
    run.step()
    run.request_stop(signal.SIGTERM)
    run.train()
    assert run.stopped_by == signal.SIGTERM
    assert run.step_number == 2
    assert (run.run_dir / "checkpoints" / "step-2").exists()
    with pytest.raises(KeyboardInterrupt):
        run.request_stop(signal.SIGINT)


def test_a_run_by_the_clock_ends_and_its_rate_follows(tmp_path):
    config = TrainingConfig(
        engine="torch", max_minutes=1.0, precision="float32", warmup_fraction=0.0, log_every=1
    )
    run = Trainer(tiny_model(), SyntheticStream(), config, tmp_path, WORLD)
    rates = []
    for _ in range(3):
        rates.append(run.step()["lr"])
        run.seconds += 20  # as if each step took so long
    assert rates[0] == pytest.approx(1e-3, rel=0.01)
    assert rates == sorted(rates, reverse=True)
    assert run.train() is None
    assert run.step_number == 3


def test_text_only_models_train(tmp_path):
    config = TrainingConfig(engine="torch", max_steps=2, learning_rate=3e-3)
    run = Trainer(tiny_model(vision=None), SyntheticStream(images="none"), config, tmp_path, WORLD)
    last = run.train()
    assert last["ratio_image"] is None
    assert last["lm_loss_image"] is None
    assert last["lm_loss_text"] == pytest.approx(last["lm_loss"], rel=1e-5)


def test_several_ratios_are_logged_and_resume_exactly(tmp_path):
    """Every document's ratio is drawn anew in the resumed run as it was in the unbroken one."""

    def make(name):
        config = TrainingConfig(engine="torch", max_steps=9, learning_rate=3e-3, log_every=1)
        model = tiny_model(target_ratios=[1, 2.0, 3], image_mode="grid")
        return Trainer(model, SyntheticStream(), config, tmp_path / name, WORLD)

    straight = make("straight")
    expected = [straight.step() for _ in range(4)]
    stopped = make("stopped")
    for _ in range(2):
        stopped.step()
    stopped.save_checkpoint()
    resumed = make("stopped")
    assert resumed.resume()
    found = [resumed.step() for _ in range(2)]
    for line, other in zip(found, expected[2:], strict=True):
        assert line["loss"] == other["loss"]
        assert line["ratio_by_target"] == other["ratio_by_target"]
        assert set(line["ratio_by_target"]) == {"1", "2", "3"}
        assert line["ratio_by_target"]["1"] in (0.0, 1.0)  # 0: no document drew it


def test_activation_checkpointing_gives_the_same_gradient(tmp_path):
    norms = []
    for recompute in (False, True):
        config = TrainingConfig(
            engine="torch", max_steps=2, precision="float32", activation_checkpointing=recompute
        )
        model = tiny_model(noise="none")
        run = Trainer(model, SyntheticStream(), config, tmp_path / str(recompute), WORLD)
        norms.append([run.step()["grad_norm"] for _ in range(2)])
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)
