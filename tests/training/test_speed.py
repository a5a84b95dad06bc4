"""Speeds and FLOPs of training against torch's counter, and the peak that they are a share of."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from conceptmoe_vl import experts, modeling
from conceptmoe_vl.training import TrainingConfig, World
from conceptmoe_vl.training.lora import LoraSection
from conceptmoe_vl.training.passes import passes
from conceptmoe_vl.training.peak_speed import find_peak
from conceptmoe_vl.training.preparing import freeze, prepare_model
from conceptmoe_vl.training.speed import Speed
from data_pipelines.batch import PackedBatch
from tests.tiny import image_inputs, make_document, tiny_model

ATEN = torch.ops.aten
WORLD = World(0, 1, 0, torch.device("cpu"))
PEAK = 1e9
# Its backward pass computes five products, one of them again that the forward pass had.
_RECOMPUTED = 5 / 4


def _grouped(a_shape, b_shape, *_, out_shape=None, **__) -> int:
    """Rows by matrices forward and for the input's gradient, columns by rows for the weights'."""
    if len(b_shape) == 3:
        return 2 * a_shape[0] * b_shape[1] * b_shape[2]
    return 2 * a_shape[0] * a_shape[1] * b_shape[1]


def _repeated(q_shape, k_shape, v_shape):
    repeats = q_shape[1] // k_shape[1]
    return [q_shape, *((b, h * repeats, s, d) for b, h, s, d in (k_shape, v_shape))]


def _attention(q_shape, k_shape, v_shape, *_, out_shape=None, **__) -> int:
    return sdpa_flop_count(*_repeated(q_shape, k_shape, v_shape))


def _attention_backward(grad_shape, q_shape, k_shape, v_shape, *_, out_shape=None, **__) -> int:
    shapes = _repeated(q_shape, k_shape, v_shape)
    return int(sdpa_backward_flop_count(grad_shape, *shapes) / _RECOMPUTED)


def counted(model, batch) -> int:
    """FLOPs of one forward and backward pass by torch's counter."""
    flash = "_scaled_dot_product_flash_attention_for_cpu"
    mapping = {
        ATEN._grouped_mm: _grouped,
        getattr(ATEN, flash): _attention,
        getattr(ATEN, f"{flash}_backward"): _attention_backward,
    }
    with FlopCounterMode(display=False, custom_mapping=mapping) as counter:
        model(**batch.model_inputs()).loss.backward()
    return counter.get_total_flops()


def batch_of(*documents, native: bool = False):
    made = [make_document(list(parts), seed, native) for seed, parts in enumerate(documents)]
    labels = [[-100] * (len(each.ids) - 5) + list(each.ids[-5:]) for each in made]
    ends = [0, *itertools.accumulate(len(each.ids) for each in made)]
    return PackedBatch(
        input_ids=torch.tensor([token for each in made for token in each.ids]),
        labels=torch.tensor([label for row in labels for label in row]),
        cu_seqlens=torch.tensor(ends, dtype=torch.int32),
        keys=[f"doc-{number}" for number in range(len(made))],
        sources=["all"] * len(made),
        **image_inputs(made, native),
    )


@pytest.fixture(autouse=True)
def plain_products(monkeypatch):
    """Of few rows a product is taken twice for speed; what the formulas count is taken once."""
    for module in (experts, modeling):
        monkeypatch.setattr(module, "FEW_ROWS", 0)


WIDE = {"hidden_size": 64, "encoder_layers": 2, "concept_layers": 3, "decoder_layers": 2}


@pytest.mark.parametrize(
    ("vision", "documents"),
    [
        (None, [(300,), (40,), (150,)]),
        ("plain", [("image", 200), (50,), ("image", "image", 90)]),
        ("tiles", [(("tiles", 1, 2), 120), (60,)]),
        ("native", [((2, 3), 200), ((4, 4), 50), (90,)]),
    ],
)
def test_flops_of_a_step_are_those_of_torchs_counter(vision, documents):
    model = tiny_model(text=WIDE, vision=vision, noise="none").train()
    batch = batch_of(*documents, native=vision == "native")
    speed = Speed(model, WORLD, TrainingConfig(max_steps=1, peak_flops=PEAK))
    out = model(**batch.model_inputs())
    speed.look(batch, out)
    speed.add(seconds=2.0, waited=0.5)
    found = speed.take()
    # Short of the formula: no gradient is computed for pixels and for the chunking decisions.
    assert 2 * found["model_flops_per_second"] == pytest.approx(counted(model, batch), rel=0.02)
    assert found["model_flops_utilization"] == found["model_flops_per_second"] / PEAK
    assert found["tokens_per_second"] == batch.num_tokens / 2
    assert found["concepts_per_second"] == int(out.chunks.boundary_mask.sum()) / 2
    pictures = sum(not isinstance(part, int) for parts in documents for part in parts)
    assert found["images_per_second"] == pictures / 2
    assert found["data_wait_share"] == 0.25


ALIGN = ["vision", "chunk", "experts", "embedding", "rest"]
SOME_LAYERS = {"encoder": 1, "concept": [0, 1], "decoder": [0, 0]}
FIRST_LAYERS = {"encoder": 2, "concept": 2}


@pytest.mark.parametrize(
    ("settings", "tolerance"),
    [
        ({"freeze": ["vision"]}, 0.02),
        ({"freeze": ALIGN}, 0.02),
        ({"freeze": ["experts"]}, 0.02),
        ({"freeze": ["rest"]}, 0.02),
        ({"freeze_layers": SOME_LAYERS}, 0.02),
        (
            {
                "freeze_layers": FIRST_LAYERS,
                "freeze": ["vision", "projector", "embedding", "chunk"],
            },
            0.03,
        ),
        # Adapters themselves are left out.
        ({"lora": LoraSection(rank=1, targets=["attention"])}, 0.03),
        ({"lora": LoraSection(rank=1, targets=["attention", "experts"])}, 0.03),
    ],
)
def test_what_is_frozen_costs_no_gradient(settings, tolerance):
    if "lora" in settings:
        pytest.importorskip("peft")
    model = tiny_model(text=WIDE, vision="plain", noise="none").train()
    prepare_model(model, TrainingConfig(max_steps=1, **settings))
    batch = batch_of(("image", 200), (50,), ("image", "image", 90))
    speed = Speed(model, WORLD, TrainingConfig(max_steps=1, peak_flops=PEAK))
    speed.look(batch, model(**batch.model_inputs()))
    speed.add(1.0, 0.0)
    found = speed.take()["model_flops_per_second"]
    assert found == pytest.approx(counted(model, batch), rel=tolerance)


def test_looped_layers_count_as_often_as_they_are_passed():
    loops = {**WIDE, "concept_loops": [[1, 1, 3]]}
    model = tiny_model(text=loops, noise="none")
    freeze(model, TrainingConfig(max_steps=1, freeze_layers={"concept": [1, 1]}))
    assert passes(model)["concept"].rest == pytest.approx(2 + 2 / 5)  # 2 of 5 passes are trained


def test_counts_start_anew_after_each_line_and_leave_filler_out():
    model = tiny_model(noise="none").train()
    speed = Speed(model, WORLD, TrainingConfig(max_steps=1, peak_flops=PEAK))
    batch = batch_of(("image", 30))
    filler = type(batch).filler(5)
    for each in (batch, filler, batch):
        speed.look(each, model(**each.model_inputs()))
    speed.add(1.0, 0.0)
    twice = speed.take()
    speed.look(batch, model(**batch.model_inputs()))
    speed.add(1.0, 0.0)
    once = speed.take()
    for name in ("tokens_per_second", "concepts_per_second", "model_flops_per_second"):
        assert twice[name] == pytest.approx(2 * once[name])


def test_the_peak_is_given_or_looked_up_or_measured(monkeypatch):
    cpu = torch.device("cpu")
    assert find_peak(cpu, "float32", 5e12).flops == 5e12
    measured = find_peak(cpu, "float32", None)
    assert measured.flops > 0
    assert "measured by products" in str(measured)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 PCIe")
    found = find_peak(torch.device("cuda", 0), "bfloat16", None)
    assert found.flops == 756e12
    assert str(found) == "peak of one device: 756 TFLOP/s, the data sheet of H100 PCIe"
