"""Share of the forward pass that chunking and dechunking take, for text and images in the plane.

    python -m bench.chunk_cost [--tokens 4096] [--threads N] [--dtype float32]

The model has the shape of `bench.plain_moe` with R = 2 (router cosine, joint decoding in the last
layer). Times are summed inside one process over repeated passes; the share is a ratio within each
pass.
"""

from __future__ import annotations

import conceptmoe_vl_runtime

conceptmoe_vl_runtime.setup()

# ruff: noqa: E402  (the lines above must run before torch is imported)
import argparse
import statistics
import time
from typing import Any

import torch

from bench.plain_moe import SHAPE
from conceptmoe_vl import ConceptMoEVLConfig, ConceptMoEVLForConditionalGeneration
from conceptmoe_vl.chunk import ImagePatches, TokenKinds
from conceptmoe_vl.language_model import ConceptMoELanguageModel
from conceptmoe_vl.layout import PackedLayout


class Stopwatch:
    """Adds up the seconds spent in some methods of a model."""

    def __init__(self, model: ConceptMoELanguageModel, methods: list[str]) -> None:
        self.seconds = dict.fromkeys(methods, 0.0)
        for name in methods:
            setattr(model, name, self._timed(name, getattr(model, name)))

    def _timed(self, name: str, method: Any) -> Any:
        def run(*arguments: Any) -> Any:
            start = time.perf_counter()
            result = method(*arguments)
            self.seconds[name] += time.perf_counter() - start
            return result

        return run


def text_model(mode: str) -> ConceptMoELanguageModel:
    torch.manual_seed(0)
    config = ConceptMoEVLConfig(
        text={
            **SHAPE,
            "head_dim": 32,
            "encoder_layers": 1,
            "concept_layers": 2,
            "decoder_layers": 1,
        },
        chunk={"init": "random", "joint_decoding_layers": 1, "image_mode": mode},
    )
    return ConceptMoEVLForConditionalGeneration(config).language_model.eval()


def tokens_of(kind: str, count: int) -> TokenKinds:
    """Forced boundaries and places of `count` tokens: one text, or an image of so many patches."""
    forced = torch.zeros(count, dtype=torch.bool)
    forced[0] = True
    if kind == "text":
        return TokenKinds(torch.zeros(count, dtype=torch.bool), forced, None)
    columns = int(count**0.5)
    index = torch.arange(count)
    patches = ImagePatches(
        index, index // columns, index % columns, torch.full_like(index, columns), count
    )
    return TokenKinds(torch.ones(count, dtype=torch.bool), forced, patches)


def measure(kind: str, options: argparse.Namespace) -> None:
    model = text_model("grid" if kind == "image" else "sequential").to(
        getattr(torch, options.dtype)
    )
    watch = Stopwatch(model, ["_chunk", "_dechunk"])
    kinds = tokens_of(kind, options.tokens)
    layout = PackedLayout.from_lengths([options.tokens], torch.device("cpu"))
    x_TD = torch.randn(options.tokens, SHAPE["hidden_size"]).to(next(model.parameters()).dtype)
    shares: dict[str, list[float]] = {"_chunk": [], "_dechunk": []}
    ratio = 0.0
    with torch.no_grad():
        for attempt in range(options.repeats + 1):
            watch.seconds = dict.fromkeys(watch.seconds, 0.0)
            start = time.perf_counter()
            states = model(x_TD, layout, kinds)
            total = time.perf_counter() - start
            ratio = options.tokens / states.concepts.count
            if attempt:
                for name, seconds in watch.seconds.items():
                    shares[name].append(seconds / total)
    chunk, dechunk = (statistics.median(shares[name]) for name in ("_chunk", "_dechunk"))
    print(
        f"{kind:6} {options.tokens:6,} tokens {options.dtype:9} R {ratio:4.2f}: chunk "
        f"{chunk:6.2%}, dechunk {dechunk:6.2%}, together {chunk + dechunk:6.2%} of the language "
        "model's forward pass"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for kind in ("text", "image"):
        measure(kind, options)


if __name__ == "__main__":
    main()
