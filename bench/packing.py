"""Share of row tokens that packing uses on a mixture of lengths, and its time a sample.

    python -m bench.packing [--rows 4096 32768 131072] [--lookahead 8 16 32 64 128]

The mixture (lengths with their image tokens, log-uniform within each part) is of short visual
questions, captions, documents with several images, and long texts: `MIXTURE`. Samples longer than
a row are split into pieces (`data.over_length: split`), or dropped with `--over-length drop`. Times
are of this process's CPU; no sample is encoded, only lengths are packed.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator, Sequence

import numpy as np
from rich.console import Console
from rich.table import Table

from data_pipelines.config import DataConfig
from data_pipelines.packing import next_pack

MIXTURE = {
    "short visual questions": (0.50, 50, 500),
    "captions": (0.25, 270, 340),
    "documents with images": (0.15, 1_000, 8_000),
    "long texts": (0.10, 500, 100_000),
}
"""Part -> share of the samples, least and most tokens."""

_MARKS = 2  # tokens that each further piece of a split document repeats


def lengths_of(
    mixture: dict[str, tuple[float, int, int]],
    samples: int,
    row: int,
    over_length: str,
    seed: int = 0,
) -> list[int]:
    """Tokens of the documents that so many samples give, each at most `row`."""
    rng = np.random.default_rng(seed)
    parts = list(mixture.values())
    chosen = rng.choice(len(parts), samples, p=[share for share, _, _ in parts])
    found: list[int] = []
    for part in chosen.tolist():
        _, least, most = parts[part]
        length = int(math.exp(rng.uniform(math.log(least), math.log(most + 1))))
        if length <= row or over_length == "split":
            found += _pieces(length, row)
    return found


def _pieces(length: int, row: int) -> Iterator[int]:
    while length > row:
        yield row
        length -= row - _MARKS
    yield length


def pack_all(lengths: Sequence[int], row: int, lookahead: int) -> list[list[int]]:
    """The rows that a stream makes of documents of these lengths, in order."""
    ready: list[int] = []
    coming = iter(lengths)

    def refill() -> None:
        while len(ready) < lookahead and (length := next(coming, None)) is not None:
            ready.append(length)

    rows = []
    while pack := next_pack(ready, lambda length: length, row, refill):
        rows.append(pack)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[4096, 32768, 131072])
    parser.add_argument("--lookahead", type=int, nargs="+", default=[8, 16, 32, 64, 128])
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--over-length", choices=("drop", "split"), default="split")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    default = DataConfig(shards="none").pack_lookahead
    table = Table(title=f"{options.samples:,} samples, over-length: {options.over_length}")
    for name in ("row", "look-ahead", "documents", "rows", "tokens used", "us a sample"):
        table.add_column(name, justify="right")
    for row in options.rows:
        lengths = lengths_of(MIXTURE, options.samples, row, options.over_length, options.seed)
        for lookahead in options.lookahead:
            start = time.process_time()
            rows = pack_all(lengths, row, lookahead)
            seconds = time.process_time() - start
            used = sum(map(sum, rows[:-1])) / (row * max(1, len(rows) - 1))
            mark = " (default)" if lookahead == default else ""
            table.add_row(
                *(f"{row:,}", f"{lookahead}{mark}", f"{len(lengths):,}", f"{len(rows):,}"),
                *(f"{used:.2%}", f"{1e6 * seconds / options.samples:.1f}"),
            )
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
