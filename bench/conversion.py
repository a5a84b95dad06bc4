"""Speed and memory of `conceptmoe-vl convert`, against copying the files.

    python -m bench.conversion [--gigabytes 1] [--shard-megabytes 250] [--rounds 5] [--folder DIR]

A random Qwen3-MoE checkpoint in bfloat16, experts one by one as they are published, is copied file
by file (`shutil.copyfile`) and converted, in turns. Printed are medians of the ratios of pairs, by
the clock and by the process's own time, of the writing alone and of the whole conversion, whose
fixed part (tokenizer, checks) does not grow with the checkpoint. A process of its own then converts
once and tells its peak memory beyond what it held before.
"""

from __future__ import annotations

import conceptmoe_vl_runtime

conceptmoe_vl_runtime.setup()

# ruff: noqa: E402  (the lines above must run before torch is imported)
import argparse
import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from transformers import Qwen3MoeConfig

from bench.timing import Clock, alternate
from conceptmoe_vl.conversion.converting import convert, plan_conversion, write_conversion
from conceptmoe_vl.conversion.reading import Checkpoint
from conceptmoe_vl.conversion.settings import ConversionSettings
from conceptmoe_vl.conversion.writing import Computed, NewTensor, write_weights
from conceptmoe_vl.resident_memory import peak_resident_bytes
from conceptmoe_vl.tokenizing import train_tokenizer

# Widths of Qwen3-30B-A3B, fewer and smaller layers.
_WIDTH, _EXPERT, _EXPERTS, _HEADS, _KEY_HEADS, _HEAD, _ROWS = 2048, 768, 16, 32, 4, 128, 8192


def layer_shapes() -> dict[str, tuple[int, ...]]:
    """Tensors of one layer."""
    query, key = _HEADS * _HEAD, _KEY_HEADS * _HEAD
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (_WIDTH,),
        "post_attention_layernorm.weight": (_WIDTH,),
        "self_attn.q_proj.weight": (query, _WIDTH),
        "self_attn.k_proj.weight": (key, _WIDTH),
        "self_attn.v_proj.weight": (key, _WIDTH),
        "self_attn.o_proj.weight": (_WIDTH, query),
        "self_attn.q_norm.weight": (_HEAD,),
        "self_attn.k_norm.weight": (_HEAD,),
        "mlp.gate.weight": (_EXPERTS, _WIDTH),
    }
    for expert in range(_EXPERTS):
        name = f"mlp.experts.{expert}"
        shapes[f"{name}.gate_proj.weight"] = (_EXPERT, _WIDTH)
        shapes[f"{name}.up_proj.weight"] = (_EXPERT, _WIDTH)
        shapes[f"{name}.down_proj.weight"] = (_WIDTH, _EXPERT)
    return shapes


def make_checkpoint(folder: Path, size: float, shard: int) -> None:
    """Writes a random checkpoint of about `size` bytes in files of `shard` bytes."""
    layer = sum(torch.Size(shape).numel() for shape in layer_shapes().values()) * 2
    layers = max(round((size - 4 * _ROWS * _WIDTH) / layer), 3)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (_ROWS, _WIDTH)}
    for number in range(layers):
        shapes |= {f"model.layers.{number}.{k}": shape for k, shape in layer_shapes().items()}
    shapes |= {"model.norm.weight": (_WIDTH,), "lm_head.weight": (_ROWS, _WIDTH)}
    tensors = [NewTensor(name, "BF16", shape, (_random(shape),)) for name, shape in shapes.items()]
    folder.mkdir(parents=True)
    write_weights(tensors, folder, shard, lambda _: None)
    Qwen3MoeConfig(
        vocab_size=_ROWS,
        hidden_size=_WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=_HEADS,
        num_key_value_heads=_KEY_HEADS,
        head_dim=_HEAD,
        moe_intermediate_size=_EXPERT,
        num_experts=_EXPERTS,
        num_experts_per_tok=4,
        bos_token_id=None,
        eos_token_id=None,
    ).save_pretrained(folder)
    train_tokenizer(["what is in the picture?"], 300).save_pretrained(folder)


def _random(shape: tuple[int, ...]) -> Computed:
    """One random row, repeated: what the values are costs nothing here."""

    def make() -> torch.Tensor:
        return torch.randn(shape[-1], dtype=torch.bfloat16).expand(shape)

    return Computed(make, 2 * torch.Size(shape).numel())


@contextlib.contextmanager
def _place(folder: str | None) -> Iterator[Path]:
    if folder is not None:
        Path(folder).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as place:
        yield Path(place)


def copy_files(source: Path, target: Path) -> None:
    """Copies the files of weights."""
    target.mkdir()
    for path in sorted(source.glob("*.safetensors")):
        shutil.copyfile(path, target / path.name)
    shutil.rmtree(target)


def measure(source: Path, place: Path, rounds: int) -> dict[str, float]:
    """Speed of conversion as a share of the speed of copying; deleting counts in both."""
    settings = ConversionSettings()
    planned = plan_conversion(source, settings)

    def write() -> None:
        write_conversion(planned, place / "out", settings.max_shard_bytes)
        shutil.rmtree(place / "out")

    def whole() -> None:
        convert(source, place / "out")
        shutil.rmtree(place / "out")

    figures = {}
    for kind in ("wall", "cpu"):
        found, _ = alternate(
            Clock("cpu", kind),
            partial(copy_files, source, place / "copy"),
            {"writing": write, "whole": whole},
            rounds,
        )
        for name, pairs in found.items():
            figures[f"{name}_{kind}_ratio"] = pairs.speedup
            figures[f"{name}_{kind}_seconds"] = pairs.variant
            figures[f"copy_{kind}_seconds"] = pairs.baseline
    return figures


def measure_memory(source: Path, target: Path) -> int:
    """Bytes that converting adds to a process's peak. Call it in a process of its own."""
    before = peak_resident_bytes()
    convert(source, target)
    return peak_resident_bytes() - before


def _in_own_process(source: Path, target: Path) -> int:
    code = (
        "import sys; from pathlib import Path; from bench.conversion import measure_memory; "
        "print(measure_memory(Path(sys.argv[1]), Path(sys.argv[2])))"
    )
    words = [sys.executable, "-c", code, str(source), str(target)]
    run = subprocess.run(words, check=True, capture_output=True, text=True)
    return int(run.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--shard-megabytes", type=float, default=250.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help="on the disk to measure (default: the system's)")
    arguments = parser.parse_args()
    with _place(arguments.folder) as place:
        source = place / "source"
        make_checkpoint(source, arguments.gigabytes * 1e9, int(arguments.shard_megabytes * 1e6))
        checkpoint = Checkpoint(source)
        figures = measure(source, place, arguments.rounds)
        peak = _in_own_process(source, place / "memory")
        figures |= {
            "gigabytes": sum(checkpoint.tensor(name).size for name in checkpoint) / 1e9,
            "peak_bytes": peak,
            "largest_shard_bytes": checkpoint.largest_file,
            "peak_in_shards": peak / checkpoint.largest_file,
        }
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
