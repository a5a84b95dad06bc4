"""Intervals of mean scores."""

from __future__ import annotations

import math

_Z_95 = 1.959964  # 97.5 % quantile of the normal distribution


def wilson_interval(successes: float, count: int, z: float = _Z_95) -> tuple[float, float]:
    """Wilson's score interval of a proportion; (0, 1) when nothing was counted.

    Unlike the normal approximation it stays within [0, 1] and has a width when all answers are
    right, which is where a good model on an easy task ends up.

    Args:
        successes: sum of scores that are 0 or 1.
        count: number of scores.
        z: quantile of the standard normal distribution; the default gives 95 %.
    """
    if not 0 <= successes <= count:
        raise ValueError(f"{successes} successes of {count} trials; scores must be 0 or 1")
    if count == 0:
        return 0.0, 1.0
    share = successes / count
    shrink = 1 + z * z / count
    centre = (share + z * z / (2 * count)) / shrink
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count)) / shrink
    # At the ends centre and half are equal up to rounding; the interval must contain the share.
    return max(0.0, min(share, centre - half)), min(1.0, max(share, centre + half))
