"""Shards in, packed batches out: `build_stream(DataConfig(shards=...), processor)`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from conceptmoe_vl.lazy_names import lazy_names

if TYPE_CHECKING:
    from data_pipelines.batch import PackedBatch
    from data_pipelines.config import DataConfig
    from data_pipelines.shards import iter_texts
    from data_pipelines.stream import PackedStream, build_stream

__all__ = ["DataConfig", "PackedBatch", "PackedStream", "build_stream", "iter_texts"]

# At their first use: a build of shards needs no torch.
__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "DataConfig": "config",
        "PackedBatch": "batch",
        "PackedStream": "stream",
        "build_stream": "stream",
        "iter_texts": "shards",
    },
)
