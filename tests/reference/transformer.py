"""RMSNorm, rotary positions, causal attention and the MoE block of one document, by loops."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., D] over its root mean square, times weight [D]."""
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def rotate(vector: Tensor, position: int, theta: float) -> Tensor:
    """Rotary embedding of one head [H]: components i and i + H/2 turn by position *
    theta^(-2i/H).
    """
    half = vector.shape[0] // 2
    first, second = [], []
    for i in range(half):
        angle = position * theta ** (-2 * i / vector.shape[0])
        a, b = vector[i], vector[i + half]
        first.append(a * math.cos(angle) - b * math.sin(angle))
        second.append(b * math.cos(angle) + a * math.sin(angle))
    return torch.stack(first + second)


def norm_of_all_heads(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [N, heads, H]: the heads of a token normalised as one vector."""
    return torch.stack([rms_norm(row.flatten(), weight, eps).view_as(row) for row in x])


def causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: list,
    theta: float,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """One document's attention: q [N, heads, H], k and v [N, kv heads, H] before norm and
    rotation.
    """
    tokens, heads, size = q.shape
    group = heads // k.shape[1]

    def turned(x: Tensor, n: int, head: int, weight: Tensor | None) -> Tensor:
        row = x[n, head] if weight is None else rms_norm(x[n, head], weight, eps)
        return rotate(row, positions[n], theta)

    keys = [[turned(k, m, h, k_norm) for h in range(k.shape[1])] for m in range(tokens)]
    output = []
    for n in range(tokens):
        mixed = []
        for h in range(heads):
            query = turned(q, n, h, q_norm)
            scores = [(query * keys[m][h // group]).sum() / math.sqrt(size) for m in range(n + 1)]
            weights = torch.softmax(torch.stack(scores), 0)
            mixed.append(sum(weights[m] * v[m, h // group] for m in range(n + 1)))
        output.append(torch.stack(mixed))
    return torch.stack(output)


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """x [D], gate and up [F, D], down [D, F]."""
    g = gate @ x
    return down @ (g / (1 + torch.exp(-g)) * (up @ x))


def moe_block(
    x: Tensor,
    router: Tensor,
    experts: list,
    top_k: int,
    normalise: bool,
    shared: tuple | None = None,
    shared_gate: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, list]:
    """Top-k mixture for x [T, D]: router [E, D], experts of (gate, up, down), shared the same or
    None.

    Returns output [T, D], router logits [T, E], probabilities [T, E], chosen experts [T][K].
    """
    output, logits, probabilities, chosen = [], [], [], []
    for row in x:
        logit = router @ row
        prob = torch.exp(logit - logit.max())
        prob = prob / prob.sum()
        best = torch.sort(prob.detach(), descending=True).indices[:top_k].tolist()
        total = sum(prob[e] for e in best) if normalise else 1.0
        y = sum(prob[e] / total * swiglu(row, *experts[e]) for e in best)
        if shared is not None:
            share = 1 if shared_gate is None else 1 / (1 + torch.exp(-shared_gate @ row))
            y = y + share * swiglu(row, *shared)
        output.append(y)
        logits.append(logit)
        probabilities.append(prob)
        chosen.append(best)
    return torch.stack(output), torch.stack(logits), torch.stack(probabilities), chosen
