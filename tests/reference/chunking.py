"""Boundaries, concepts and dechunking of one document, token by token (paper eq. 3, 5 and 6).

A document is described by `kinds`, a list with one of "text", "mark" (the two vision marks) and
"patch" (an image placeholder) a token, and by `grids`, a list of (first token, rows, columns).
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor


@dataclasses.dataclass
class Boundaries:
    """`prob` [N] float64, `parent` the token that each token is compared with (None: forced),
    `forced` flags.
    """

    prob: Tensor
    parent: list
    forced: list


@dataclasses.dataclass
class Concepts:
    """`position` of each concept's closing token or seed, its `members`, and `of_token` =
    psi(n).
    """

    position: list
    members: list
    of_token: list


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """Cosine of two vectors [D]."""
    return (a * b).sum() / (a.pow(2).sum().sqrt() * b.pow(2).sum().sqrt())


def plane_neighbors(n: int, grid: tuple, neighborhood: int) -> list[int]:
    """Tokens of the same image that are earlier in raster order and touch token n in the plane."""
    first, rows, columns = grid
    row, column = divmod(n - first, columns)
    steps = [(0, -1), (-1, 0)]
    if neighborhood == 8:
        steps += [(-1, -1), (-1, 1)]
    found = []
    for down, right in steps:
        r, c = row + down, column + right
        if 0 <= r < rows and 0 <= c < columns:
            found.append(first + r * columns + c)
    return sorted(found)


def grid_of(n: int, grids: list) -> tuple | None:
    """The grid that token n lies in, or None."""
    for grid in grids:
        if grid[0] <= n < grid[0] + grid[1] * grid[2]:
            return grid
    return None


def is_forced(n: int, kinds: list, grids: list, grid_mode: bool) -> bool:
    """Document start, vision marks, and in grid mode the first patch of an image."""
    return n == 0 or kinds[n] == "mark" or (grid_mode and any(n == grid[0] for grid in grids))


def find_boundaries(
    states: Tensor,
    kinds: list,
    grids: list,
    router: str,
    *,
    grid_mode: bool = False,
    neighborhood: int = 4,
    w_q: Tensor | None = None,
    w_k: Tensor | None = None,
    w: Tensor | None = None,
    bias: Tensor | None = None,
    target_ratio: float = 2.0,
) -> Boundaries:
    """Eq. 3 and its variants for the encoder states [N, D] of one document."""
    probabilities, parents, forced = [], [], []
    one = states.new_ones(())
    for n in range(len(kinds)):
        grid = grid_of(n, grids) if grid_mode else None
        forced.append(is_forced(n, kinds, grids, grid_mode))
        if forced[n] or router == "none":
            probabilities.append(one)
            parents.append(None)
            continue
        candidates = [n - 1] if grid is None else plane_neighbors(n, grid, neighborhood)
        if router == "cosine":
            scores = [cosine(w_q @ states[n], w_k @ states[m]) for m in candidates]
        else:
            scores = [cosine(states[n], states[m]) for m in candidates]
        best = max(range(len(candidates)), key=lambda i: scores[i].item())
        parents.append(candidates[best])
        if router == "cosine":
            p = 0.5 * (1 - scores[best])
            probabilities.append(p.clamp(0, 1))
        elif router == "linear":
            probabilities.append(1 / (1 + torch.exp(-((w * states[n]).sum() + bias.sum()))))
        elif router == "fixed":
            starts = math.floor(n / target_ratio) != math.floor((n - 1) / target_ratio)
            probabilities.append(one if starts else 0 * one)
    return Boundaries(torch.stack(probabilities), parents, forced)


def decide(prob: Tensor) -> list[bool]:
    """Evaluation: b_n = 1 where p_n >= 0.5."""
    return [p.item() >= 0.5 for p in prob]


def sharpen(p: float, tau: float) -> float:
    """p^sharp of the Bernoulli noise."""
    return p ** (1 / tau) if p >= 0.5 else 1 - (1 - p) ** (1 / tau)


def find_concepts(
    boundary: list, kinds: list, parent: list, *, grid_mode: bool = False
) -> Concepts:
    """Which tokens make which concept, and psi(n) (None before the first concept)."""
    groups: dict[int, list[int]] = {}
    seed_of_patch: dict[int, int] = {}
    pending: list[int] = []
    for n, kind in enumerate(kinds):
        if grid_mode and kind == "patch":
            seed = n
            while not boundary[seed]:
                seed = parent[seed]
            seed_of_patch[n] = seed
            groups.setdefault(seed, []).append(n)
            continue
        pending.append(n)
        if boundary[n]:
            groups[n] = pending
            pending = []
    position = sorted(groups)
    index = {n: m for m, n in enumerate(position)}
    of_token, last = [], None
    for n in range(len(kinds)):
        if n in seed_of_patch:
            of_token.append(index[seed_of_patch[n]])
            continue
        last = index.get(n, last)
        of_token.append(last)
    return Concepts(position, [groups[n] for n in position], of_token)


def merge_tokens(states: Tensor, concepts: Concepts, how: str) -> Tensor:
    """Concept states [M, D] by sum, mean, or the closing token (the seed of a region) alone."""
    rows = []
    for position, members in zip(concepts.position, concepts.members, strict=True):
        if how == "boundary":
            rows.append(states[position])
            continue
        total = 0
        for n in members:
            total = total + states[n]
        rows.append(total / len(members) if how == "mean" else total)
    return torch.stack(rows)


def predecessors(concepts: Concepts, kinds: list, parent: list, *, grid_mode: bool = False) -> list:
    """pi(m): m - 1, or the region of the seed's parent for patches in grid mode; None where
    forced.
    """
    found = []
    for m, position in enumerate(concepts.position):
        if grid_mode and kinds[position] == "patch":
            up = parent[position]
            found.append(None if up is None else concepts.of_token[up])
        else:
            found.append(m - 1 if m > 0 else None)
    return found


def smooth(values: Tensor, prob: Tensor, before: list) -> Tensor:
    """Eq. 5 on a forest: value_m p_m + (1 - p_m) smoothed of its predecessor. values [M, D], prob
    [M].
    """
    rows: list[Tensor] = []
    for m in range(len(before)):
        if before[m] is None:
            rows.append(prob[m] * values[m])
        else:
            rows.append(prob[m] * values[m] + (1 - prob[m]) * rows[before[m]])
    return torch.stack(rows)


def plug_back(states: Tensor, prob: Tensor, boundary: list, u: Tensor, of_token: list) -> Tensor:
    """Eq. 6: z_n = h_n + s_n u_psi(n), s_n = 1 with the gradient of the decision's confidence."""
    rows = []
    for n in range(len(boundary)):
        if of_token[n] is None:
            rows.append(states[n])
            continue
        confidence = prob[n] if boundary[n] else 1 - prob[n]
        s = 1 + (confidence - confidence.detach())
        rows.append(states[n] + s * u[of_token[n]])
    return torch.stack(rows)
