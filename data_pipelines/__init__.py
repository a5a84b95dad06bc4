"""Shards in, packed batches out: `build_stream(DataConfig(shards=...), processor)`."""

from data_pipelines.batch import PackedBatch
from data_pipelines.config import DataConfig
from data_pipelines.shards import iter_texts
from data_pipelines.stream import PackedStream, build_stream

__all__ = ["DataConfig", "PackedBatch", "PackedStream", "build_stream", "iter_texts"]
