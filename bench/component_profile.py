"""Milliseconds of a prefill by component, from hooks on the language model's parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from bench.timing import Clock

PARTS = ("encoder", "chunk", "concept", "dechunk", "decoder", "head")


def component_milliseconds(model: Any, run: Callable[[], object], clock: Clock) -> dict[str, float]:
    """Milliseconds of one run's parts, of the rest and of all.

    A part ends where the next one begins: `chunk` is what lies between encoder and concept model
    (the module, numbering and merging concepts), `dechunk` what lies between concept model and
    decoder (smoothing and plug-back). `rest` is the embedding, packing and the final norm. On CUDA
    every mark waits for the device, which costs some microseconds a part.

    Args:
        model: ours. run: a pass through it that closes a concept. clock: of its device.
    """
    at: dict[str, float] = {}

    def mark(name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            clock.synchronize()
            at[name] = clock.now()

        return hook

    lm = model.language_model
    watched: dict[str, nn.Module] = {
        "encoder": lm.encoder,
        "concept": lm.concept,
        "decoder": lm.decoder,
        "head": model.lm_head,
    }
    handles = []
    for name, module in watched.items():
        handles.append(module.register_forward_pre_hook(mark(f"{name} begins")))
        handles.append(module.register_forward_hook(mark(f"{name} ends")))
    try:
        total = clock.seconds(run)
    finally:
        for handle in handles:
            handle.remove()
    spans = {name: at[f"{name} ends"] - at[f"{name} begins"] for name in watched}
    spans["chunk"] = at["concept begins"] - at["encoder ends"]
    spans["dechunk"] = at["decoder begins"] - at["concept ends"]
    found = {part: 1e3 * spans[part] for part in PARTS}
    return found | {"rest": 1e3 * (total - sum(spans.values())), "total": 1e3 * total}
