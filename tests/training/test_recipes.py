"""Every recipe of configs/train at tiny size, each from the model that the one before wrote."""

from __future__ import annotations

import io
import json
import math
import random
import signal
import tarfile
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import train
from conceptmoe_vl import (
    ConceptMoEVLConfig,
    ConceptMoEVLForConditionalGeneration,
    ConceptMoEVLProcessor,
)
from conceptmoe_vl.conversion.converting import convert
from conceptmoe_vl.conversion.settings import ConversionSettings
from conceptmoe_vl.image_processing import ConceptMoEVLImageProcessor
from conceptmoe_vl.training import load_run_config
from conceptmoe_vl.training.deepspeed_settings import read_deepspeed_config
from conceptmoe_vl.training.parts import part_of
from data_pipelines import DataConfig
from tests.checkpoints import make_source, save_source

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "configs/train"
# Recipes and the one before each, whose model it starts from.
BEFORE = {
    "pretrain": None,
    "align": "pretrain",
    "instruct": "align",
    "instruct_all": "align",
    "lora": "align",
    "long_context_32k": "instruct",
    "long_context_128k": "long_context_32k",
    "convert": None,
}
SHORT, MIDDLE, LONG = 64, 512, 2048  # stand for 4,096, 32,768 and 131,072 tokens
TINY = (
    *("training.engine=torch", "training.deepspeed=null"),
    *("training.device=cpu", "training.threads=1"),
    *("training.max_steps=3", "training.gradient_accumulation_steps=1", "training.log_every=1"),
    *("training.checkpoint_at_end=false", "data.num_workers=0"),
)
TEXT = (
    "{hidden_size: 32, encoder_layers: 1, concept_layers: 1, decoder_layers: 1, "
    "num_attention_heads: 2, num_key_value_heads: 1, num_experts: 4, num_experts_per_tok: 2, "
    f"moe_intermediate_size: 16, max_position_embeddings: {SHORT}}}"
)
VISION = (
    "{model: conceptmoe_vit_conv, model_args: {embed_dim: 32, depth: 1, num_heads: 2}, "
    "image_size: 24}"
)
WORDS = ("the", "boat", "is", "red", "and", "sails", "to", "a", "far", "green", "island")


def add_member(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))


def write_shard(path: Path, words: int, images: bool, samples: int = 24) -> None:
    """Documents of so many words, or with images conversations about a picture."""
    rng = random.Random(0)
    path.parent.mkdir(parents=True)
    with tarfile.open(path, "w") as tar:
        for number in range(samples):
            text = " ".join(rng.choice(WORDS) for _ in range(words))
            question: list | str = ""
            if images:
                file = io.BytesIO()
                Image.new("RGB", (24, 24), (10 * number, 90, 30)).save(file, "PNG")
                add_member(tar, f"s{number:03d}.img0.png", file.getvalue())
                question = [{"type": "image"}, {"type": "text", "text": "what is it?"}]
            messages = [
                {"role": "user", "content": question},
                {"role": "assistant", "content": text},
            ]
            record = {"messages": messages, "source": "made"}
            add_member(tar, f"s{number:03d}.json", json.dumps(record).encode())


class Runs:
    """Runs recipes in one folder, each once and after the one that it starts from."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name, words, images in (
            *(("text", 15, False), ("captions", 4, True), ("instruct", 8, True)),
            *(("long", 300, False), ("longer", 1200, False)),
        ):
            write_shard(folder / f"data/{name}/train-000000.tar", words, images)

    def shards(self, name: str) -> str:
        return str(self.folder / f"data/{name}/train-*.tar")

    def overrides(self, name: str) -> list[str]:
        """What makes a recipe tiny."""
        if name == "convert":
            source = save_source(make_source("Llama"), self.folder / "source")
            convert(source, self.folder / "converted", ConversionSettings(ratio=2.0))
            start = self.folder / "converted"
            text = ["data.held_out=0.3", f"data.shards={self.shards('text')}"]
            return [f"model.init_from={start}", "data.tokens_per_batch=128", *text]
        before = BEFORE[name]
        start = [] if before is None else [f"model.init_from={self.run(before)}/model"]
        if name == "pretrain":
            text = [f"model.text={TEXT}", "model.tokenizer={vocab_size: 300}"]
            text += ["model.chunk.joint_decoding_layers=1", "data.held_out=0.3"]
            return [*text, f"data.shards={self.shards('text')}", f"data.tokens_per_batch={SHORT}"]
        if name.startswith("long"):  # without held-out data
            length, long = (MIDDLE, "long") if name.endswith("32k") else (LONG, "longer")
            sources = [
                {"name": "long", "shards": self.shards(long), "weight": 0.7},
                {"name": "instruct", "shards": self.shards("instruct"), "weight": 0.3},
            ]
            return [
                *start,
                f"model.text.max_position_embeddings={length}",
                f"model.text.rope_scaling.original_max_position_embeddings={SHORT}",
                f"data.tokens_per_batch={length}",
                f"data.sources={json.dumps(sources)}",
            ]
        shards = self.shards("captions" if name == "align" else "instruct")
        vision = [f"model.vision={VISION}", "data.held_out=0.3"]
        return [*start, *vision, f"data.shards={shards}", f"data.tokens_per_batch={SHORT}"]

    def run(self, name: str) -> Path:
        """The folder of a recipe's run."""
        out = self.folder / "runs" / name
        if not out.exists():
            recipe = ["--config", str(FOLDER / f"{name}.yaml"), f"run_dir={out}"]
            assert train.main([*recipe, *TINY, *self.overrides(name)]) == 0
        return out

    def weights(self, name: str) -> dict[str, torch.Tensor]:
        return load_file(self.run(name) / "model/model.safetensors")

    def changed_parts(self, name: str) -> set[str]:
        """Parts of which a recipe has changed something of what it began with."""
        before, after = self.weights(str(BEFORE[name])), self.weights(name)
        assert before.keys() <= after.keys()
        return {part_of(n) for n, tensor in before.items() if not torch.equal(after[n], tensor)}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield Runs(tmp_path_factory.mktemp("recipes"))
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_no_recipe_is_left_out():
    assert {path.stem for path in FOLDER.glob("*.yaml")} == set(BEFORE)


@pytest.mark.parametrize("name", BEFORE)
def test_recipes_at_their_own_size_are_consistent(name):
    text, chunk, vision, step = {}, {}, None, name
    while step is not None:  # a later stage's fields go over those of the stages before
        config = load_run_config(FOLDER / f"{step}.yaml")
        text, chunk = {**config.model.text, **text}, {**config.model.chunk, **chunk}
        vision = vision or config.model.vision
        folder = "runs/" + BEFORE[step] if BEFORE[step] else "converted"
        assert config.model.init_from == (None if step == "pretrain" else f"{folder}/model")
        step = BEFORE[step]
    config = load_run_config(FOLDER / f"{name}.yaml")
    assert config.run_dir == f"runs/{name}"
    data = DataConfig.from_mapping(config.data)
    read_deepspeed_config(str(ROOT / config.training.deepspeed))
    model = ConceptMoEVLConfig(text=text, chunk=chunk, vision=vision, image_token_id=4)
    if model.vision is not None:
        ConceptMoEVLImageProcessor.from_vision_config(model.vision)
    if name != "convert":
        assert model.text.max_position_embeddings == data.tokens_per_batch
    if (scaling := model.text.rope_scaling) is not None:
        stretched = scaling["factor"] * scaling["original_max_position_embeddings"]
        assert stretched == model.text.max_position_embeddings


@pytest.mark.parametrize("name", BEFORE)
def test_every_recipe_runs(runs, name):
    lines = [json.loads(line) for line in (runs.run(name) / "metrics.jsonl").open()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(math.isfinite(line["loss"]) and line["grad_norm"] > 0 for line in lines)
    evaluated = (runs.run(name) / "evaluation.jsonl").exists()
    assert evaluated == (not name.startswith("long"))


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("align", set()),
        ("instruct", {"projector", "chunk", "embedding", "experts", "rest"}),
        ("instruct_all", {"vision", "projector", "chunk", "embedding", "experts", "rest"}),
        ("lora", {"projector", "chunk", "experts", "rest"}),
    ],
)
def test_recipes_train_what_they_say(runs, name, parts):
    if name == "lora":
        pytest.importorskip("peft")
    assert runs.changed_parts(name) == parts


def test_alignment_adds_a_tower_and_a_projector_to_a_model_of_text(runs):
    text, aligned = runs.weights("pretrain"), runs.weights("align")
    assert {part_of(name) for name in aligned.keys() - text.keys()} == {"vision", "projector"}
    processor = ConceptMoEVLProcessor.from_pretrained(runs.run("align") / "model")
    assert processor.image_processor is not None


def test_a_model_of_text_of_another_shape_is_refused(runs, capsys):
    recipe = ["--config", str(FOLDER / "align.yaml"), f"run_dir={runs.folder / 'refused'}"]
    changed = "model.text={moe_intermediate_size: 8}"
    assert train.main([*recipe, *TINY, *runs.overrides("align"), changed]) == 2
    assert "gate_up_proj (4, 32, 32), the configuration asks for (4, 16, 32)" in (
        capsys.readouterr().err
    )


def test_adapters_touch_no_norm(runs):
    pytest.importorskip("peft")
    before, after = runs.weights("align"), runs.weights("lora")
    assert all(torch.equal(after[n], before[n]) for n in before if "norm" in n and "joint" not in n)
    assert (runs.run("lora") / "adapter/adapter_config.json").exists()


@pytest.mark.parametrize(
    ("name", "length", "before"),
    [("long_context_32k", MIDDLE, SHORT), ("long_context_128k", LONG, MIDDLE)],
)
def test_long_rows_reach_beyond_the_old_length(runs, name, length, before):
    folder = runs.run(name) / "model"
    model = ConceptMoEVLForConditionalGeneration.from_pretrained(folder).eval()
    assert model.config.max_position_embeddings == length
    assert model.config.text.rope_scaling["factor"] == length / SHORT
    processor = ConceptMoEVLProcessor.from_pretrained(folder)
    assert processor.tokenizer.model_max_length == length
    lines = [json.loads(line) for line in (runs.run(name) / "metrics.jsonl").open()]
    long = lines[-1]["delivered_by_source"]["long"]
    assert long["tokens"] / long["samples"] > before
    ids = torch.randint(5, 200, (length,), generator=torch.Generator().manual_seed(0))
    cu_seqlens = torch.tensor([0, length], dtype=torch.int32)
    with torch.no_grad():
        out = model(input_ids=ids, cu_seqlens=cu_seqlens, labels=ids)
    assert out.lm_loss_per_token.isfinite().all()
    assert len(out.lm_loss_per_token) > before
