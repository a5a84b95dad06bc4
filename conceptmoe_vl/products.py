"""Matrix products whose number of rows changes with every batch.

On a CPU oneDNN compiles a bfloat16 kernel for every new shape (about 0.4 ms each; the rows of a
packed batch, of its concepts and of every expert's tokens are never the same twice). Rounding the
rows up leaves a handful of shapes, whose kernels oneDNN keeps.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_LARGEST_MULTIPLE = 64


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype that matrix products have here: autocast's, where it is on, else the input's."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def row_multiple(rows: int, x: Tensor) -> int:
    """What the rows of a product of about `rows` rows are rounded up to: 1 changes nothing.

    Args:
        rows: rows of the product (tokens of one expert on average, for grouped products).
        x: an operand: only bfloat16 products on a CPU are rounded, by an eighth of them at most.
    """
    if rows < 16 or x.device.type != "cpu" or compute_dtype(x) != torch.bfloat16:
        return 1
    return min(1 << ((rows // 8).bit_length() - 1), _LARGEST_MULTIPLE)


def round_rows(x: Tensor) -> Tensor:
    """`[T, D]` -> `[T', D]` in the products' dtype with zeros behind T; x itself if T stays."""
    missing = -x.shape[0] % row_multiple(x.shape[0], x)
    return F.pad(x.to(compute_dtype(x)), (0, 0, 0, missing)) if missing else x


# Up to this many rows MKL is quicker with the product turned round. One core, cold weights
# [512, 256], microseconds as x W^T / as W x^T: 1 row 87 / 88 (as 2 rows 48), 2 rows 104 / 48,
# 4 rows 124 / 75, 6 rows 130 / 75, 16 rows 148 / 170. The operand on the right must be the
# transpose of contiguous rows (otherwise 170).
FEW_ROWS = 8


def few_rows_product(x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """`W x^T` `[out, rows]` of a few float32 rows on a CPU, without gradient.

    Args:
        x: `[rows, in]`, contiguous. weight: `[out, in]`. out: written to, if given.
    """
    if x.shape[0] > 1:
        return torch.mm(weight, x.T, out=out)
    doubled = torch.mm(weight, x.expand(2, -1).contiguous().T)[:, :1]
    return doubled if out is None else out.copy_(doubled)


class Linear(nn.Linear):
    """`nn.Linear` over packed rows `[T, in]` -> `[T, out]`."""

    def forward(self, x: Tensor) -> Tensor:
        rounded = round_rows(x)
        out = super().forward(rounded)
        return out if rounded is x else out[: x.shape[0]]
