"""Peak memory of one training step of a long row: a process of its own, started by bench.training.

    python -m bench.training_memory ours|Qwen3-MoE LENGTH [--checkpointing]

Prints one line of JSON: the peak beyond what the process held before the step, and what of it is
kept for the backward pass by component (tensors that autograd saves, counted once each).
"""

from __future__ import annotations

import conceptmoe_vl_runtime

conceptmoe_vl_runtime.setup()

# ruff: noqa: E402  (the lines above must run before torch is imported)
import argparse
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from bench.plain_moe import SHAPE, make_pair
from conceptmoe_vl.resident_memory import peak_resident_bytes, resident_bytes

# Where a tensor is saved: the innermost of these modules.
_COMPONENTS = re.compile(
    r"(?:language_model\.)?(encoder|concept|decoder|chunk)|model\.(layers)\.\d+"
)
_REST = "embedding, norm, head and loss"
MEGABYTE = 2**20


@contextmanager
def saved_by_component(model: nn.Module) -> Iterator[dict[str, int]]:
    """Bytes that autograd saves within the block, by component; parameters are not counted."""
    stack: list[str] = []
    found: dict[str, int] = {}
    seen = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: list[Tensor] = []  # alive, so that no storage's address is used twice

    def pack(tensor: Tensor) -> Tensor:
        pointer = tensor.untyped_storage().data_ptr()
        if pointer not in seen:
            seen.add(pointer)
            kept.append(tensor.detach())
            name = stack[-1] if stack else _REST
            found[name] = found.get(name, 0) + tensor.untyped_storage().nbytes()
        return tensor

    handles = []
    for path, module in model.named_modules():
        component = _COMPONENTS.fullmatch(path)
        if component is not None:
            name = component[1] or component[2]
            handles.append(
                module.register_forward_pre_hook(lambda *_, name=name: stack.append(name))
            )
            handles.append(module.register_forward_hook(lambda *_: stack.pop() and None))
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield found
    finally:
        for handle in handles:
            handle.remove()


def measure_peak(who: str, length: int, checkpointing: bool) -> dict[str, object]:
    """Peak and saved megabytes of forward and backward of one row of one document.

    Args:
        who: ours | Qwen3-MoE. checkpointing: layers are recomputed in the backward pass.
    """
    torch.manual_seed(0)
    ours, peer = make_pair()
    model = ours if who == "ours" else peer
    del ours, peer
    if checkpointing:
        model.gradient_checkpointing_enable()
    model.train()
    arguments = {} if who == "ours" else {"output_router_logits": True}

    def step(tokens: int, count: bool = False) -> dict[str, int]:
        ids = torch.randint(0, SHAPE["vocab_size"], (1, tokens))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            if count:
                with saved_by_component(model) as found:
                    loss = model(input_ids=ids, labels=ids, **arguments).loss
            else:
                found = {}
                loss = model(input_ids=ids, labels=ids, **arguments).loss
        loss.backward()
        return found

    step(256)  # gradients, and kernels that are made at their first use
    before = resident_bytes()
    step(length)
    peak = peak_resident_bytes()
    saved = step(min(length, 4096), count=True)
    scale = length / min(length, 4096) / MEGABYTE
    weights = sum(parameter.numel() for parameter in model.parameters())
    return {
        "peak_mb": round((peak - before) / MEGABYTE),
        "saved_mb": {name: round(count * scale) for name, count in saved.items()},
        "weights_and_gradients_mb": round(8 * weights / MEGABYTE),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("who", choices=["ours", "Qwen3-MoE"])
    parser.add_argument("length", type=int)
    parser.add_argument("--checkpointing", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(json.dumps(measure_peak(options.who, options.length, options.checkpointing)))


if __name__ == "__main__":
    main()
