"""Our plain MoE (router none) against transformers' Qwen3-MoE of the same shape and weights.

    python -m bench.plain_moe [--threads N] [--repeats N] [--what train prefill decode]

Both run in one process, in alternation, with the same allocator and thread settings; the ratios are
paired medians. Before any timing the logits are compared: the run stops if they differ by 1e-4 or
more.
"""

from __future__ import annotations

import conceptmoe_vl_runtime

conceptmoe_vl_runtime.setup()

# ruff: noqa: E402  (the lines above must run before torch is imported)
import argparse
import statistics
import sys
import time
from collections.abc import Callable
from inspect import signature

import torch
from torch import Tensor, nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from conceptmoe_vl import ConceptMoEVLConfig, ConceptMoEVLForConditionalGeneration

SHAPE = {
    "vocab_size": 8192,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "norm_topk_prob": True,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}
LAYERS = 4


def make_pair(
    shape: dict | None = None, encoder: int = 1, concept: int = LAYERS - 2, decoder: int = 1
) -> tuple[nn.Module, nn.Module]:
    """Ours and the peer with the same weights.

    Args:
        shape: fields that both configurations have; None: `SHAPE` with heads of 32.
        encoder, concept, decoder: layers of E, C and D; the peer has their sum.
    """
    torch.manual_seed(0)
    shape = {**SHAPE, "head_dim": 32} if shape is None else shape
    stages = {"encoder": encoder, "concept": concept, "decoder": decoder}
    peer = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **shape,
            num_hidden_layers=sum(stages.values()),
            use_cache=False,
            router_aux_loss_coef=0.01,
        )
    )
    layers = {f"{stage}_layers": count for stage, count in stages.items()}
    ours = ConceptMoEVLForConditionalGeneration(
        ConceptMoEVLConfig(
            text={**shape, **layers},
            chunk={"router": "none", "concept_residual": "delta"},
        )
    )
    source = peer.state_dict()
    target = {
        "embed_tokens.weight": source["model.embed_tokens.weight"],
        "language_model.norm.weight": source["model.norm.weight"],
        "lm_head.weight": source["lm_head.weight"],
    }
    layer = 0
    for stage, count in stages.items():
        for index in range(count):
            prefix = f"model.layers.{layer}."
            for key, value in source.items():
                if key.startswith(prefix):
                    target[f"language_model.{stage}.layers.{index}.{key[len(prefix) :]}"] = value
            layer += 1
    ours.load_state_dict(target)
    return ours, peer


def check_equal(ours: nn.Module, peer: nn.Module) -> float:
    ids = torch.randint(0, SHAPE["vocab_size"], (2, 257))
    ours.eval()
    peer.eval()
    with torch.no_grad():
        difference = (ours(ids).logits - peer(ids).logits).abs().max().item()
    if difference >= 1e-4:
        sys.exit(
            f"the logits differ by {difference:.1e}; no timing means anything before they agree"
        )
    return difference


def training_step(
    model: nn.Module, *batches: dict[str, Tensor], autocast: bool = True
) -> Callable[[], None]:
    """An optimiser step over micro-batches, the balance loss included; in bfloat16 or float32."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    device = next(model.parameters()).device.type
    # transformers' model adds its balance loss on request only.
    arguments = {} if hasattr(model, "language_model") else {"output_router_logits": True}

    def step() -> None:
        model.train()
        for batch in batches:
            with torch.autocast(device, dtype=torch.bfloat16, enabled=autocast):
                loss = model(**batch, **arguments).loss / len(batches)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def prefill(model: nn.Module, ids: Tensor) -> Callable[[], None]:
    def step() -> None:
        model.eval()
        with torch.no_grad():
            model(input_ids=ids, logits_to_keep=1, use_cache=True)

    return step


def make_chunked() -> nn.Module:
    """A chunked model of the same shape, random weights, about every second token a boundary."""
    torch.manual_seed(0)
    layers = {"encoder_layers": 1, "concept_layers": LAYERS - 2, "decoder_layers": 1}
    model = ConceptMoEVLForConditionalGeneration(
        ConceptMoEVLConfig(
            text={**SHAPE, **layers, "head_dim": 32},
            chunk={"router": "cosine", "joint_decoding_layers": 1},
        )
    )
    with torch.no_grad():
        for projection in (model.language_model.chunk.q_proj, model.language_model.chunk.k_proj):
            projection.weight.normal_()  # cosines around 0, p around one half
    return model


def decoding(model: nn.Module, rows: int, context: int) -> Callable[[], None]:
    """A decoding step of `rows` rows behind `context` tokens; every call goes one token further."""
    model.eval()
    prompt = torch.randint(0, SHAPE["vocab_size"], (rows, context))
    with torch.no_grad():
        out = model(input_ids=prompt, logits_to_keep=1, use_cache=True)
    name = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"
    cache = {name: out.past_key_values if name == "past_key_values" else out.cache}

    def step() -> None:
        ids = torch.randint(0, SHAPE["vocab_size"], (rows, 1))
        with torch.no_grad():
            model(input_ids=ids, logits_to_keep=1, use_cache=True, **cache)

    return step


def paired(
    ours: Callable[[], None],
    peer: Callable[[], None],
    repeats: int,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[float, float, float]:
    """Median seconds of both and the median of the pairwise ratios peer / ours."""
    ours()
    peer()
    pairs = []
    for _ in range(repeats):
        times = []
        for run in (ours, peer):
            start = clock()
            run()
            times.append(clock() - start)
        pairs.append(times)
    ratio = statistics.median(b / a for a, b in pairs)
    return statistics.median(a for a, _ in pairs), statistics.median(b for _, b in pairs), ratio


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument(
        "--what", nargs="+", default=["train", "prefill"], choices=["train", "prefill", "decode"]
    )
    parser.add_argument("--cpu-time", action="store_true", help="CPU seconds, on a busy machine")
    parser.add_argument("--lengths", nargs="+", type=int, default=[1024, 4096, 16384])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = time.process_time if options.cpu_time else time.perf_counter
    ours, peer = make_pair()
    difference = check_equal(ours, peer)
    print(
        f"torch {torch.__version__}, {options.threads} threads; logits differ by {difference:.1e}"
    )
    print(f"{'what':36} {'ours':>10} {'Qwen3-MoE':>10} {'ratio':>7}")

    def report(name: str, tokens: int, a: Callable[[], None], b: Callable[[], None]) -> None:
        mine, theirs, ratio = paired(a, b, options.repeats, clock)
        print(
            f"{name:36} {tokens / mine:8.0f}/s {tokens / theirs:8.0f}/s {ratio:6.2f}x", flush=True
        )

    if "train" in options.what:
        ids = torch.randint(0, SHAPE["vocab_size"], (4, 1024))
        for autocast in (False, True):
            name = f"training step 4 x 1,024 {'bfloat16' if autocast else 'float32'}"
            batch = {"input_ids": ids, "labels": ids}
            steps = [training_step(model, batch, autocast=autocast) for model in (ours, peer)]
            report(name, ids.numel(), *steps)
    if "prefill" in options.what:
        for length in options.lengths:
            ids = torch.randint(0, SHAPE["vocab_size"], (1, length))
            report(f"prefill {length:,} float32", length, prefill(ours, ids), prefill(peer, ids))
    if "decode" in options.what:
        chunked = make_chunked()
        for rows in (1, 16):
            for name, model in (("plain", ours), ("chunked", chunked)):
                steps = decoding(model, rows, 1024), decoding(peer, rows, 1024)
                report(f"decoding {rows} x 1,024, {name}, float32", rows, *steps)


if __name__ == "__main__":
    main()
