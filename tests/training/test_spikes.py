"""The loss-spike guard, router entropy, and the watch over idle experts."""

from __future__ import annotations

import json
import math

import pytest
import torch

from conceptmoe_vl.errors import UserError
from conceptmoe_vl.moe import MoEBlock
from conceptmoe_vl.training import Trainer, TrainingConfig, World
from conceptmoe_vl.training.health import SpikeConfig, SpikeGuard
from conceptmoe_vl.training.run_files import read_lines
from conceptmoe_vl.training.watch import RunWatch, WatchConfig
from tests.tiny import make_document, packed, tiny_model
from tests.training.synthetic import SyntheticStream

WORLD = World(0, 1, 0, torch.device("cpu"))
GUARD = {"rollbacks": 2, "deviations": 4.0, "history": 4, "steps": 2}


class SpikingTrainer(Trainer):
    """Spoils the weights while the data of some steps are trained on, whichever step it is."""

    def _count(self, batches, nothing):
        place = int(batches[0].keys[0].split("-")[1]) // 4 + 1
        if place in self.bad_data:
            with torch.no_grad():
                for parameter in self.engine.module.parameters():
                    parameter.mul_(3.0)
        return super()._count(batches, nothing)


def make(run_dir, bad_data=(), guard=None, **settings) -> Trainer:
    config = TrainingConfig(
        engine="torch",
        max_steps=12,
        precision="float32",
        learning_rate=1e-5,
        log_every=1,
        spike_guard=SpikeConfig(**(GUARD if guard is None else guard)),
        **{"checkpoint_every": 4, "checkpoint_at_end": False, **settings},
    )
    run = SpikingTrainer(tiny_model(noise="none"), SyntheticStream(), config, run_dir, WORLD)
    run.bad_data = set(bad_data)
    return run


def lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_spike_takes_the_run_back_and_its_data_are_skipped(tmp_path, capsys):
    run = make(tmp_path, bad_data=[7, 8])
    run.train()
    (event,) = lines(tmp_path / "rollbacks.jsonl")
    assert (event["step"], event["to_step"], event["samples_skipped"]) == (8, 4, 16)
    assert len(event["losses"]) == 2
    written = lines(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in written] == list(range(1, 13))
    assert max(line["lm_loss"] for line in written) < min(event["losses"])
    assert written[4]["warnings"][0].endswith("back to step 4, 16 samples skipped")
    assert "warning: step 8: the language loss spiked" in capsys.readouterr().err
    # 4 documents a step: steps 1 to 8, then on with those of the ninth
    assert run.stream.keys_seen[16:36] == [f"doc-{number}" for number in range(16, 36)]
    assert len(run.stream.keys_seen) == 4 * (8 + 8)
    clean = make(tmp_path / "clean")
    for _ in range(4):
        clean.step()
    for _ in range(4):
        next(clean._batches)
    expected = [clean.step()["loss"] for _ in range(8)]
    assert [line["loss"] for line in written[4:]] == expected


def test_a_run_killed_behind_a_roll_back_resumes_behind_the_spike(tmp_path):
    run = make(tmp_path, bad_data=[7, 8])
    for _ in range(8):
        metrics = run.step()
        if run.step_number == 4:
            run.save_checkpoint()
        spiked = run._spikes.look(metrics)
    assert spiked
    assert run.roll_back()
    expected = [run.step()["loss"] for _ in range(3)]
    resumed = make(tmp_path, bad_data=[7, 8])
    assert resumed.resume()
    assert resumed.step_number == 4
    assert resumed._spikes.rollbacks == 1
    assert [resumed.step()["loss"] for _ in range(3)] == expected
    assert resumed.stream.keys_seen[0] == "doc-32"


def test_a_checkpoint_of_the_spike_itself_is_not_gone_back_to(tmp_path):
    run = make(tmp_path, bad_data=[7, 8], guard={**GUARD, "steps": 3}, checkpoint_every=2)
    for _ in range(9):
        metrics = run.step()
        if run.step_number % 2 == 0:
            run.save_checkpoint()
        spiked = run._spikes.look(metrics)
    assert spiked  # from step 7 on, whose weights step 8's checkpoint holds
    assert run.roll_back()
    assert run.step_number == 6
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step-6\n"


def test_without_a_checkpoint_a_spike_is_only_warned_of(tmp_path):
    run = make(tmp_path, bad_data=[7, 8], checkpoint_every=0)
    run.train()
    written = lines(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in written] == list(range(1, 13))
    (text,) = [line["warnings"][0] for line in written if "warnings" in line]
    assert text.endswith("and there is no checkpoint to go back to")
    assert not (tmp_path / "rollbacks.jsonl").exists()


def test_the_step_of_a_spike_without_a_way_back_has_its_checkpoint(tmp_path):
    run = make(tmp_path, bad_data=[7, 8], checkpoint_every=8)
    run.train()
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step-8\n"


def test_a_rollback_that_was_half_written_does_not_stop_a_resume(tmp_path):
    """Killed between the line and the checkpoint: the line is not of the run that goes on."""
    run = make(tmp_path, bad_data=[7, 8])
    for _ in range(8):
        metrics = run.step()
        if run.step_number == 4:
            run.save_checkpoint()
        run._spikes.look(metrics)
    path = tmp_path / "rollbacks.jsonl"
    path.write_text('{"step": 8, "to_step": 4}\n{"step": 9, "los')
    (tmp_path / "metrics.jsonl").open("a").write('{"step": 9, "lo')
    resumed = make(tmp_path, bad_data=[7, 8])
    assert resumed.resume()
    assert path.read_text() == ""
    resumed.train()
    assert [event["step"] for event in lines(path)] == [8]
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == list(range(1, 13))
    assert make(tmp_path).resume()
    assert [event["step"] for event in lines(path)] == [8]


def test_a_line_that_is_no_json_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n\x00\x00\n{"step": 2}\n')
    with pytest.raises(UserError, match=r"line 2 of .*metrics.jsonl is no JSON"):
        read_lines(path)


def look(guard: SpikeGuard, loss: float, supervised: int = 9) -> bool:
    return guard.look({"lm_loss": loss, "supervised_tokens": supervised})


def steady(guard: SpikeGuard, number: int = 4) -> None:
    assert not any(look(guard, 2.0 + 0.01 * (step % 2)) for step in range(number))


def test_what_spikes():
    guard = SpikeGuard(SpikeConfig(**GUARD))
    assert not look(guard, 99.0)  # no history yet
    steady(guard, 9)
    assert not look(guard, 9.0)  # one hard batch
    steady(guard, 9)
    assert not look(guard, math.nan)
    assert not look(guard, 9.0)
    assert not look(guard, math.inf)  # skipped steps neither spike nor end a spike
    assert not look(guard, 0.0, supervised=0)  # nor do steps that supervise nothing
    assert look(guard, 8.0)
    assert guard.losses == [9.0, 8.0]
    copy = SpikeGuard(SpikeConfig(**GUARD))
    copy.load_state_dict(json.loads(json.dumps(guard.state_dict())))
    for each in (guard, copy):
        each.went_back()
        steady(each)
        assert [look(each, 9.0), look(each, 9.0)] == [False, True]
        each.went_back()
        steady(each)
        assert not any(look(each, 9.0) for _ in range(9))  # no roll-back is left


def test_steps_without_supervised_tokens_are_no_losses_to_compare_with():
    guard = SpikeGuard(SpikeConfig(**{**GUARD, "steps": 1}))
    steady(guard)
    for _ in range(4):
        assert not look(guard, 0.0, supervised=0)
    assert not look(guard, 2.02)
    assert look(guard, 9.0)


def test_the_guard_is_off_by_default():
    guard = SpikeGuard(SpikeConfig())
    assert not any(look(guard, loss) for loss in [1.0] * 200 + [1e9] * 50)


def test_mistakes():
    with pytest.raises(UserError, match=r"training\.spike_guard\.steps is 0; give 1 up"):
        SpikeConfig(steps=0)


def test_router_entropy_is_one_for_uniform_and_zero_for_certain_routers(tmp_path):
    model = tiny_model()
    batch = packed([make_document([9, "image"])])
    blocks = [module for module in model.modules() if isinstance(module, MoEBlock)]
    found = []
    for scale in (0.0, 1e4):
        for block in blocks:
            torch.nn.init.normal_(block.gate.weight, std=scale)
        out = model(**batch)
        found.append([value for layers in out.router_entropy.values() for value in layers.tolist()])
    assert found[0] == pytest.approx([1.0] * 3, abs=1e-5)
    assert found[1] == pytest.approx([0.0] * 3, abs=0.05)
    logits = torch.randn(5, 4)
    by_hand = torch.distributions.Categorical(logits=logits).entropy().mean() / math.log(4)
    blocks[0].gate.forward = lambda x: logits
    _, statistics = blocks[0](torch.randn(5, 32))
    assert statistics.entropy.item() / 5 == pytest.approx(by_hand.item(), abs=1e-6)
    run = Trainer(
        tiny_model(),
        SyntheticStream(),
        TrainingConfig(engine="torch", max_steps=1, log_every=1),
        tmp_path,
        WORLD,
    )
    entropy = run.step()["router_entropy"]
    assert set(entropy) == {"encoder", "concept", "decoder"}
    assert all(0 < value < 1 for value in entropy.values())


def test_idle_experts_are_named_once_and_again_when_another_joins():
    watch = RunWatch(WatchConfig(idle_lines=3, least_expert_load=0.02), 0.0)

    def look(*layers: list[float]) -> list[str]:
        return watch.look({}, 0.5, {"concept": list(layers)})

    for _ in range(2):
        assert look([2.0, 0.0, 1.0], [1.0, 1.0, 1.0]) == []
    (text,) = look([2.0, 0.01, 0.99], [1.0, 1.0, 1.0])
    assert text == (
        "1 of 6 experts of the concept stage had less than 2% of their fair load in the last 3 "
        "logged steps: layer 0 expert 1; raise model.text.balance_loss_weight"
    )
    assert look([2.0, 0.0, 1.0], [1.5, 1.5, 0.0]) == []
    assert look([2.0, 0.0, 1.0], [1.5, 1.5, 0.0]) == []
    (text,) = look([2.0, 0.0, 1.0], [1.5, 1.5, 0.0])
    assert "2 of 6 experts" in text
    assert "layer 0 expert 1, layer 1 expert 2" in text
    for _ in range(3):
        assert look([1.0, 1.0, 1.0], [1.5, 1.5, 0.0]) == []
    off = RunWatch(WatchConfig(idle_lines=0), 0.0)
    assert [off.look({}, 0.5, {"concept": [[2.0, 0.0]]}) for _ in range(20)] == [[]] * 20


def test_a_trained_run_warns_of_an_expert_that_its_router_never_chooses(tmp_path):
    model = tiny_model(noise="none")
    config = TrainingConfig(
        engine="torch",
        max_steps=4,
        log_every=1,
        learning_rate=0.0,
        watch=WatchConfig(idle_lines=2),
    )
    run = Trainer(model, SyntheticStream(), config, tmp_path, WORLD)
    gate = model.language_model.decoder.layers[0].mlp.gate
    original = gate.forward
    gate.forward = lambda x: original(x) - 1e4 * torch.tensor([0.0, 0.0, 0.0, 1.0])
    run.train()
    texts = [
        text for line in lines(tmp_path / "metrics.jsonl") for text in line.get("warnings", [])
    ]
    assert len(texts) == 1
    assert "1 of 4 experts of the decoder stage" in texts[0]
    assert "layer 0 expert 3" in texts[0]
