"""From the configuration to the sources of a stream."""

from __future__ import annotations

import logging

from conceptmoe_vl.errors import UserError
from data_pipelines.config import DataConfig
from data_pipelines.sampling import LocalSource, Source
from data_pipelines.shards import ShardIndex, expand_patterns, index_shards

logger = logging.getLogger(__name__)


class SampleError(UserError):
    """A damaged sample or shard, or too many of them."""


def open_sources(config: DataConfig, world_size: int) -> tuple[list[Source], int]:
    """The sources of `config`, and how many of their shards are damaged.

    Sources without weights are one for the stream.

    Raises:
        UserError: no shards, a shard in two sources of one epoch, a damaged shard (unless
            `on_truncated_shard: skip`), or fewer samples than processes.
    """
    named = config.source_configs
    if named and named[0].weight is not None:
        parts = [(list(each.shards), each.name) for each in named]
        opened = [
            _open(config, patterns, number, dict.fromkeys(expand_patterns(patterns), name))
            for number, (patterns, name) in enumerate(parts)
        ]
    else:
        names: dict[str, str] = {}
        for each in named:
            for shard in expand_patterns(each.shards):
                if names.setdefault(shard, each.name) != each.name:
                    raise UserError(
                        f"data.sources: shard '{shard}' is in '{names[shard]}' and in "
                        f"'{each.name}'; take it out of one of them, or give all sources a weight"
                    )
        opened = [_open(config, config.all_shards, 0, names)]
    sources = [source for source, _ in opened]
    samples = sum(source.num_samples for source in sources)
    if samples < world_size:
        shards = len(expand_patterns(config.all_shards))
        raise UserError(
            f"{shards} shards hold {samples} samples for {world_size} processes; each process "
            "needs one: add data or start fewer processes"
        )
    return list(sources), sum(damaged for _, damaged in opened)


def _open(
    config: DataConfig, patterns: list[str], number: int, names: dict[str, str]
) -> tuple[LocalSource, int]:
    index = index_shards(patterns)
    for shard, fault in index.damaged.items():
        message = f"shard '{shard}': {fault}"
        if config.on_truncated_shard == "raise":
            raise SampleError(f"{message}; copy it again, or set data.on_truncated_shard to skip")
        logger.warning("%s; its last sample and what follows are lost", message)
    used = ShardIndex(index.samples[: config.max_samples], index.shards, index.damaged)
    if not used.samples:
        raise UserError(f"the shards {patterns} hold no sample; build them again")
    return LocalSource(used, number, config.seed, config.shuffle, names), len(index.damaged)
