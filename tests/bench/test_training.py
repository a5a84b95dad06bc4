"""bench.training counts what it says: slots, supervised tokens, bytes kept for backward."""

from __future__ import annotations

import torch
from torch import nn

from bench.inference_models import SHAPES
from bench.timing import Clock
from bench.training import batches_of, by_length, conversation_lengths, padded, training_step
from bench.training_memory import saved_by_component
from bench.training_overhead import contestants, make_batch, make_model


def test_samples_fill_the_row_exactly():
    for tokens in (4096, 16384):
        lengths = conversation_lengths(tokens)
        assert tokens - 1 <= sum(lengths) <= tokens
        assert max(lengths) <= 4096


def test_padded_batches_hold_their_samples_and_no_more_slots():
    lengths = conversation_lengths(16384, seed=3)
    batches = batches_of(lengths, 8192)
    assert [length for batch in batches for length in batch] == lengths
    assert all(len(batch) * max(batch) <= 8192 for batch in batches)
    batch, supervised = padded([10, 5], 100)
    assert batch["attention_mask"].sum(1).tolist() == [10, 5]
    # 4 and 2 supervised tokens at the ends; shifting loses none of them
    assert supervised == 6
    assert (batch["labels"] == -100)[1].tolist() == [True] * 3 + [False] * 2 + [True] * 5


def test_micro_batches_train_like_one():
    """Steps of two equal halves and of the whole change the weights alike."""
    torch.manual_seed(0)

    class Linear(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.language_model = None

        def forward(self, x):
            return type("Output", (), {"loss": (x * self.weight).sum(-1).square().mean()})

    x = torch.randn(4, 3)
    whole, halves = Linear(), Linear()
    training_step(whole, {"x": x})()
    training_step(halves, {"x": x[:2]}, {"x": x[2:]})()
    assert not torch.equal(whole.weight, torch.ones(3))
    torch.testing.assert_close(whole.weight, halves.weight)


def test_saved_tensors_are_counted_once_by_component():
    class Squares(nn.Module):
        def forward(self, x):
            y = x * 2  # saves nothing that needs a gradient
            return y * y + y.exp()  # y twice and exp(y)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = Squares()
            self.language_model = nn.ModuleDict({"decoder": Squares()})

        def forward(self, x):
            return self.language_model["decoder"](self.encoder(x)).square().sum()

    x = torch.randn(10, requires_grad=True)
    model = Model()
    with saved_by_component(model) as found:
        out = model(x)
    assert out.requires_grad
    # y and exp(y) of each, 10 float32 values; behind both the output of the decoder
    assert found == {"encoder": 80, "decoder": 80, "embedding, norm, head and loss": 40}


def test_chunked_models_are_timed_beside_the_plain_one():
    results = by_length(Clock("cpu", "cpu"), 1, [64], SHAPES["tiny"])
    assert set(results["64"]) == set(results["matching"]) - {"MoE"}
    assert len(results["64"]) == 5
    for row in results["matching"].values():
        assert abs(row["parameters_to_baseline"] - 1) < 0.03


def test_the_trainers_overhead_is_that_of_the_same_training(tmp_path):
    """Both train the same weights by the same steps: what differs is not the work."""
    tiny = {
        **{"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 2, "head_dim": 16},
        **{"num_key_value_heads": 1, "num_experts": 4, "moe_intermediate_size": 16},
    }
    steps, models = contestants(make_model(tiny), make_batch(2, 20, 64), tmp_path, log_every=1)
    start = {name: value.clone() for name, value in models["bare"].state_dict().items()}
    for _ in range(3):
        for step in steps.values():
            step()
    bare, trained = (models[name].state_dict() for name in ("bare", "trainer"))
    assert any(not torch.equal(value, start[name]) for name, value in bare.items())
    for name, value in bare.items():
        torch.testing.assert_close(trained[name], value, msg=name)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3
