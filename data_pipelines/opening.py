"""From the configuration to the sources of a stream."""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Iterator, Sequence

from conceptmoe_vl.errors import NothingUsableError, UserError
from data_pipelines.config import DataConfig
from data_pipelines.encoding import RawReader
from data_pipelines.records import Conversation, RecordError
from data_pipelines.remote import RemoteSource
from data_pipelines.remote_opening import is_remote, shown
from data_pipelines.remote_shards import RemoteShard, find_remote_shards
from data_pipelines.remote_streams import Limits
from data_pipelines.sampling import LocalSource, Place, RawSample, Source
from data_pipelines.shards import (
    ShardIndex,
    ShardReader,
    expand_patterns,
    index_shards,
    read_sample,
    texts_of,
)

logger = logging.getLogger(__name__)


class SampleError(UserError):
    """A damaged sample or shard, or too many of them."""


class NoSampleError(SampleError, NothingUsableError):
    """No sample of a rank is usable; another rank may have some."""


@dataclasses.dataclass(frozen=True)
class _Shards:
    """Patterns of shards that belong together.

    Fields:
        name: the data set's; None: that of the records.
        where: the configuration's field.
    """

    patterns: list[str]
    name: str | None
    manifest: str | None
    where: str

    @property
    def are_remote(self) -> bool:
        return any(is_remote(pattern) for pattern in self.patterns)


def open_sources(config: DataConfig, world_size: int) -> tuple[list[Source], int]:
    """The sources of `config`, and how many of their shards are damaged.

    Sources without weights are one for the stream.

    Raises:
        UserError: no shards, a shard in two sources of one epoch, local and remote shards in one
            epoch, a damaged shard (unless `on_truncated_shard: skip`), or fewer samples than
            processes.
    """
    named = config.source_configs
    parts = [
        _Shards(list(each.shards), each.name, each.manifest, f"data.sources '{each.name}'")
        for each in named
    ] or [_Shards(config.shards, None, None, "data.shards")]
    weighted = bool(named) and named[0].weight is not None
    groups = [[part] for part in parts] if weighted else [parts]
    sources: list[Source] = []
    damaged = shards = 0
    for number, group in enumerate(groups):
        source, num_damaged, num_shards = _open(config, group, number, world_size)
        sources.append(source)
        damaged, shards = damaged + num_damaged, shards + num_shards
    samples = sum(source.num_samples for source in sources)
    if samples < world_size:
        raise UserError(
            f"{shards} shards hold {samples} samples for {world_size} processes; each process "
            "needs one: add data or start fewer processes"
        )
    return sources, damaged


def iter_source_texts(config: DataConfig, max_samples: int | None = None) -> Iterator[str]:
    """The texts of all turns of a configuration's sources, for training a tokenizer.

    Args:
        max_samples: samples read at most, the first ones of the first sources. Records that cannot
            be read are passed over: the stream reports them.
    """
    sources, _ = open_sources(dataclasses.replace(config, shuffle=False), world_size=1)
    left = sys.maxsize if max_samples is None else max_samples
    reader = ShardReader()
    for number, source in enumerate(sources):
        for place in range(min(left, source.num_samples)):
            raw = source.fetch(Place(number, 0, place))
            try:
                yield from texts_of(_conversation(source, place, raw, reader).turns)
            except RecordError:
                continue
        left = max(0, left - source.num_samples)
        source.close()
    reader.close()


def _conversation(
    source: Source, number: int, raw: RawSample | None, reader: ShardReader
) -> Conversation:
    if raw is not None:
        return read_sample(RawReader(), raw)
    assert source.samples is not None
    return read_sample(reader, source.samples[number])


def _open(
    config: DataConfig, group: list[_Shards], number: int, world_size: int
) -> tuple[Source, int, int]:
    """One source, and the numbers of its damaged shards and of all its shards."""
    remote = [part.are_remote for part in group]
    if any(remote) and not all(remote):
        raise UserError(
            "data.sources: local and remote shards make no epoch together; give all sources a "
            "weight"
        )
    if any(remote):
        return _open_remote(config, group, number, world_size)
    return _open_local(config, group, number)


def _open_remote(
    config: DataConfig, group: list[_Shards], number: int, world_size: int
) -> tuple[Source, int, int]:
    limits = Limits(config.remote_timeout, config.remote_retries)
    found: list[RemoteShard] = []
    names: dict[str, str] = {}
    for part in group:
        shards = find_remote_shards(part.patterns, part.manifest, limits, part.where)
        _add_names(names, [shard.shown for shard in shards], part.name)
        found += shards
    if config.shuffle and config.interleave % world_size:
        logger.warning(
            "data.interleave is %d for %d processes: each reads shards of others too, only to pass "
            "over their samples; make it a multiple of the number of processes",
            *(config.interleave, world_size),
        )
    source = RemoteSource(
        *(found, number, config.seed, config.shuffle, config.interleave, limits),
        on_fault=config.on_truncated_shard,
        max_samples=config.max_samples,
        names=names,
    )
    _require_samples(source, group)
    return source, 0, len(found)


def _open_local(config: DataConfig, group: list[_Shards], number: int) -> tuple[Source, int, int]:
    names: dict[str, str] = {}
    for part in group:
        _add_names(names, expand_patterns(part.patterns), part.name)
    index = index_shards([pattern for part in group for pattern in part.patterns])
    for shard, fault in index.damaged.items():
        message = f"shard '{shard}': {fault}"
        if config.on_truncated_shard == "raise":
            raise SampleError(f"{message}; copy it again, or set data.on_truncated_shard to skip")
        logger.warning("%s; its last sample and what follows are lost", message)
    used = ShardIndex(index.samples[: config.max_samples], index.shards, index.damaged)
    source = LocalSource(used, number, config.seed, config.shuffle, names)
    _require_samples(source, group)
    return source, len(index.damaged), len(index.shards)


def _add_names(names: dict[str, str], shards: Sequence[str], name: str | None) -> None:
    if name is None:
        return
    for shard in shards:
        if names.setdefault(shard, name) != name:
            raise UserError(
                f"data.sources: shard '{shard}' is in '{names[shard]}' and in '{name}'; take it "
                "out of one of them, or give all sources a weight"
            )


def _require_samples(source: Source, group: list[_Shards]) -> None:
    if not source.num_samples:
        patterns = [pattern for part in group for pattern in part.patterns]
        patterns = [shown(each) if is_remote(each) else each for each in patterns]
        raise UserError(f"the shards {patterns} hold no sample; build them again")
