"""What an answer costs: FLOPs and bytes of the cache, from the tokens and concepts read."""

from __future__ import annotations

import math
from collections.abc import Sequence

from conceptmoe_vl.configuration import ConceptMoEVLConfig
from conceptmoe_vl.flops import decoding_cost, forward_flops
from conceptmoe_vl.memory import cache_bytes
from conceptmoe_vl.vision_cost import image_tokens, vision_flops
from eval.replies import Reply


def answer_cost(config: ConceptMoEVLConfig, reply: Reply) -> dict[str, float]:
    """FLOPs of one answer, and bytes that the float32 cache holds at its end.

    Args:
        reply: with the counts of its prompt's tokens and concepts. Generated tokens are taken to be
            compressed as the prompt is, and images of several sizes to cost what their tokens do.
    """
    tokens, concepts = sum(reply.tokens.values()), sum(reply.concepts.values())
    ratio = max(tokens / max(concepts, 1), 1.0)
    flops = sum(
        part.total for part in forward_flops(config, tokens, logits=1, concepts=concepts).values()
    )
    if reply.tokens.get("image") and config.vision is not None:
        images = reply.tokens["image"] / image_tokens(config.vision)
        flops += images * sum(vision_flops(config.vision, config.text.hidden_size))
    # The first generated token comes out of the prompt's own pass.
    steps = max(reply.answer_tokens - 1, 0)
    step = decoding_cost(config, tokens + steps // 2, ratio)
    return {
        "flops": flops + steps * sum(cost.flops.total for cost in step.values()),
        "cache_bytes": cache_bytes(config, tokens + steps, ratio).total,
    }


def mean_cost(config: ConceptMoEVLConfig, replies: Sequence[Reply]) -> dict[str, float]:
    """Means over the questions: `flops_per_question`, `cache_bytes_per_question`."""
    costs = [answer_cost(config, reply) for reply in replies]
    return {
        f"{name}_per_question": math.fsum(cost[name] for cost in costs) / len(costs)
        for name in ("flops", "cache_bytes")
    }
