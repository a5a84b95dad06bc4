"""A picture as several squares of one size: the size policy `tiles`."""

from __future__ import annotations

import itertools
import math
from functools import lru_cache

from torch import Tensor


@lru_cache(maxsize=4096)
def choose_tiles(height: int, width: int, side: int, most: int) -> tuple[int, int]:
    """Rows and columns of tiles that a picture is resized to.

    Of all grids of 1 to `most` tiles, none larger than the picture needs to keep its pixels, the
    one that changes the more changed of the two sides least; among equals the nearest aspect, then
    the fewest tiles. A side changes by a factor, up or down. That weighs the change of the aspect
    and of the area alike: a nearer aspect is no reason for many more tiles, and small pictures are
    one.

    Args:
        height, width, side: pixels of the picture, and of a tile's side.
    """

    def cost(grid: tuple[int, int]) -> tuple[float, float, int]:
        tall, wide = math.log(grid[0] * side / height), math.log(grid[1] * side / width)
        # Rounded: equal grids must not be told apart by the last bit.
        return (
            round(max(abs(tall), abs(wide)), 9),
            round(abs(tall - wide), 9),
            grid[0] * grid[1],
        )

    rows = range(1, min(most, -(-height // side)) + 1)
    columns = range(1, min(most, -(-width // side)) + 1)
    grids = (grid for grid in itertools.product(rows, columns) if grid[0] * grid[1] <= most)
    return min(grids, key=cost)


def cut_tiles(pixels: Tensor, side: int) -> Tensor:
    """`[3, R * side, C * side]` to tiles `[R * C, 3, side, side]`, row by row."""
    rows, columns = pixels.shape[1] // side, pixels.shape[2] // side
    tiles = pixels.view(3, rows, side, columns, side).permute(1, 3, 0, 2, 4)
    return tiles.reshape(rows * columns, 3, side, side)


def join_tiles(tokens_NSSD: Tensor, rows: int) -> Tensor:
    """Tokens of the tiles of a picture, row by row, as one plane.

    Args:
        tokens_NSSD: each tile's tokens, `[R * C, S, S, D]`. rows: of tiles, R.

    Returns:
        `[R * S * C * S, D]` in the raster order of the whole picture.
    """
    grid = tokens_NSSD.unflatten(0, (rows, -1))
    return grid.transpose(1, 2).reshape(-1, tokens_NSSD.shape[-1])
