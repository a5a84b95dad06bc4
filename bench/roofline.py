"""What the FLOPs and bytes of a cell predict, from rates measured on the baseline's cells alone.

Two terms. A prefill is bound by arithmetic: FLOPs of all products but the attention maps over one
rate, FLOPs of the maps over another. A decoding step is bound by memory: bytes of weights over one
rate, bytes of the cache over another. So with work w and rates r, seconds = w_1 / r_1 + w_2 / r_2.

The two rates are the least-squares fit, by relative error, to the baseline's cells of one kind and
batch (the variants are never looked at); norms, gathers and the interpreter thus count in the first
rate. Neither rate may exceed what a microbenchmark of the same run reaches (a matrix product,
causal attention, reading a large block); where the cells hold too little of a term to tell its
rate, as with a single length, the microbenchmark's is taken.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from bench.inference_models import Contestant
from bench.timing import Clock
from conceptmoe_vl.flops import decoding_cost, forward_flops

Work = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Rates:
    """Work per second of the two terms (FLOPs in prefill, bytes in decoding), and their source."""

    first: float
    second: float
    source: str

    def seconds(self, work: Work) -> float:
        return sum(w / r for w, r in zip(work, (self.first, self.second), strict=True))


def prefill_work(contestant: Contestant, tokens: int) -> Work:
    """FLOPs of a prefill with one position of logits: other products, attention maps."""
    flops = forward_flops(contestant.config, tokens, float(contestant.ratio), logits=1).values()
    return sum(f.rest for f in flops), sum(f.maps for f in flops)


def decoding_work(contestant: Contestant, context: int, rows: int, value_bytes: int) -> Work:
    """Bytes of a step of all rows: weights, cache."""
    costs = decoding_cost(
        contestant.config,
        context,
        float(contestant.ratio),
        rows=rows,
        bytes_per_value=value_bytes,
    ).values()
    return rows * sum(c.weight_bytes for c in costs), rows * sum(c.cache_bytes for c in costs)


def fit_rates(work: Sequence[Work], seconds: Sequence[float], peaks: Rates) -> Rates:
    """The rates that explain the baseline's `seconds` best, none above its peak.

    Args:
        work: of each cell. peaks: rates of the microbenchmarks.
    """
    a, b = ([w[i] / s for w, s in zip(work, seconds, strict=True)] for i in (0, 1))
    aa, bb, ab = (sum(x * y for x, y in zip(*p, strict=True)) for p in ((a, a), (b, b), (a, b)))
    x = y = 0.0
    determinant = aa * bb - ab * ab
    if determinant > 1e-9 * aa * bb:
        x = (sum(a) * bb - sum(b) * ab) / determinant
        y = (sum(b) * aa - sum(a) * ab) / determinant
    source = "fit to the baseline's cells"
    least_x, least_y = 1 / peaks.first, 1 / peaks.second
    if y < least_y:  # too little attention in these cells to tell its rate
        y, source = least_y, f"{source}, the second from the microbenchmark"
        x = (sum(a) - y * ab) / aa
    if x < least_x:
        x, source = least_x, "fit to the baseline's cells, the first from the microbenchmark"
        y = max((sum(b) - x * ab) / bb, least_y)
    return Rates(1 / x, 1 / y, source)


def peak_rates(contestant: Contestant, decoding: bool, clock: Clock) -> Rates:
    """Rates of microbenchmarks on the model's device and in its dtype.

    A product and causal attention of 2,048 rows for prefill, reading a large block for decoding.
    """
    weight = next(contestant.model.parameters())
    make = {"device": weight.device, "dtype": weight.dtype}
    if decoding:
        block = torch.zeros(2**26, **make)
        rate = block.numel() * block.element_size() / _best(block.sum, clock)
        return Rates(rate, rate, "microbenchmark")
    text = contestant.config.text
    rows, d = 2048, text.hidden_size
    x, w = torch.randn(rows, d, **make), torch.randn(4 * d, d, **make)
    product = 2 * rows * d * 4 * d / _best(lambda: F.linear(x, w), clock)
    q = torch.randn(1, text.num_attention_heads, rows, text.head_dim, **make)
    seconds = _best(lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True), clock)
    return Rates(product, 4 * q[0, :, 0].numel() * rows**2 / seconds, "microbenchmark")


def _best(run: Callable[[], object], clock: Clock) -> float:
    return min(clock.seconds(run) for _ in range(5))


def break_even(lengths: Sequence[int], speedups: Sequence[float]) -> str:
    """The length from which on a variant is not slower, between the measured ones by logarithm."""
    if not lengths:
        return "not measured"
    if speedups[-1] < 1:
        return f"above {lengths[-1]:,}"
    slow = max((i for i, s in enumerate(speedups) if s < 1), default=None)
    if slow is None:
        return f"at or below {lengths[0]:,}"
    low, high = math.log(speedups[slow]), math.log(speedups[slow + 1])
    share = -low / (high - low)
    return f"{lengths[slow] * (lengths[slow + 1] / lengths[slow]) ** share:,.0f}"


def predicted_break_even(baseline: Contestant, variant: Contestant, rates: Rates) -> int | None:
    """The shortest prefill, from 16 tokens on and to 1 %, that is predicted to take no longer than
    the baseline's; None: beyond 16 M tokens.
    """

    def faster(tokens: int) -> bool:
        ours, theirs = (prefill_work(c, tokens) for c in (variant, baseline))
        return rates.seconds(ours) <= rates.seconds(theirs)

    tokens = 16
    if faster(tokens):
        return tokens
    while not faster(tokens):
        tokens *= 2
        if tokens > 2**24:
            return None
    low = tokens // 2
    while tokens - low > max(tokens // 100, 1):
        middle = (low + tokens) // 2
        low, tokens = (low, middle) if faster(middle) else (middle, tokens)
    return tokens
