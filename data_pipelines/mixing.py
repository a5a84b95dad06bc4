"""Weighted mixing of sources: which source each pick of a rank comes from.

Notable:
- a pick's source is a function of seed, rank and pick alone, so a position needs no random state;
- in every block of 256 picks each source has its share, rounded up or down: one point of each of
  256 equal strata of (0, 1), in random order, is held against the summed weights;
- weights may change with the samples that all ranks have picked.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

from conceptmoe_vl.configuration import check_known_keys
from conceptmoe_vl.errors import UserError
from data_pipelines.sampling import generator

BLOCK = 256  # picks of a rank that hold every source's share
_GOLDEN = (math.sqrt(5) - 1) / 2  # its multiples, modulo 1, fill (0, 1) evenly
_STREAM = 2**32 - 1  # random numbers apart from those of the sources


@dataclasses.dataclass(frozen=True)
class Weight:
    """Weight of a source over the samples that all ranks have picked.

    Fields:
        points: (samples, weight), ascending; linear between them, constant outside.
    """

    points: tuple[tuple[int, float], ...]

    @classmethod
    def parse(cls, value: Any, where: str) -> Weight:
        """From a number above 0, or a mapping of samples to numbers of at least 0.

        Raises:
            UserError: neither.
        """
        if _is_number(value) and value > 0:
            return cls(((0, float(value)),))
        if (
            isinstance(value, dict)
            and value
            and all(isinstance(at, int) and not isinstance(at, bool) and at >= 0 for at in value)
            and all(_is_number(weight) and weight >= 0 for weight in value.values())
        ):
            return cls(tuple(sorted((at, float(weight)) for at, weight in value.items())))
        raise UserError(
            f"{where} is {value!r}; give a number above 0, or a mapping of samples picked so far "
            "to weights, as {0: 1.0, 1000000: 0.2}"
        )

    def at(self, samples: int) -> float:
        """The weight after so many samples."""
        place = bisect.bisect_right(self.points, samples, key=lambda point: point[0])
        if place == 0:
            return self.points[0][1]
        if place == len(self.points):
            return self.points[-1][1]
        (start, before), (end, behind) = self.points[place - 1 : place + 1]
        return before + (behind - before) * (samples - start) / (end - start)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


@dataclasses.dataclass(frozen=True)
class SourceConfig:
    """An entry of `data.sources`.

    Fields:
        name: of the data set, for counts and losses by source.
        shards: as in `data.shards`.
        weight: share of the samples, relative to the other sources; None: the sources together are
            one epoch.
        manifest: of remote shards, where it is not beside them.
    """

    name: str
    shards: tuple[str, ...]
    weight: Weight | None = None
    manifest: str | None = None

    @classmethod
    def parse(cls, values: Any, where: str) -> SourceConfig:
        """From a mapping.

        Raises:
            UserError: an unknown key, a missing one, or a wrong value; named with `where`.
        """
        if not isinstance(values, dict):
            raise UserError(f"{where} is {values!r}; give a mapping with name and shards")
        try:
            check_known_keys(values, [field.name for field in dataclasses.fields(cls)], where)
        except ValueError as error:
            raise UserError(str(error)) from error
        name, shards = values.get("name"), values.get("shards")
        if not isinstance(name, str) or not name:
            raise UserError(f"{where}.name is {name!r}; give the data set a name")
        shards = [shards] if isinstance(shards, str) else shards
        if not isinstance(shards, list | tuple) or not shards or not all_text(shards):
            raise UserError(f"{where}.shards is {shards!r}; name tar files or patterns of them")
        manifest = values.get("manifest")
        if manifest is not None and not isinstance(manifest, str):
            raise UserError(f"{where}.manifest is {manifest!r}; give a path or an address")
        weight = values.get("weight")
        parsed = None if weight is None else Weight.parse(weight, f"{where}.weight")
        return cls(name, tuple(shards), parsed, manifest)


def all_text(values: Any) -> bool:
    """Whether values are a sequence of texts."""
    return isinstance(values, list | tuple) and all(isinstance(value, str) for value in values)


def parse_sources(values: Any) -> list[SourceConfig]:
    """`data.sources`.

    Raises:
        UserError: an entry is wrong, a name stands twice, weights are missing in some entries, or
            all weights are 0 at some time.
    """
    if not isinstance(values, list) or not values:
        raise UserError(f"data.sources is {values!r}; give a list of mappings")
    sources = [SourceConfig.parse(each, f"data.sources[{n}]") for n, each in enumerate(values)]
    names = [source.name for source in sources]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"data.sources names '{name}' twice; give each source its own name")
    weights = [source.weight for source in sources if source.weight is not None]
    if weights and len(weights) < len(sources):
        missing = next(source.name for source in sources if source.weight is None)
        raise UserError(
            f"data.sources: '{missing}' has no weight and others have; give all of them one, or "
            "none: then they are one epoch together"
        )
    for at in sorted({at for weight in weights for at, _ in weight.points}):
        if sum(weight.at(at) for weight in weights) <= 0:
            raise UserError(f"data.sources: all weights are 0 after {at} samples; raise one")
    return sources


class Mixture:
    """Chooses a source for each pick of a rank.

    Args:
        weights: one a source.
    """

    def __init__(self, weights: Sequence[Weight], seed: int, rank: int, world_size: int) -> None:
        self._weights = tuple(weights)
        self._seed, self._rank, self._world_size = seed, rank, world_size
        self._block, self._points = -1, [0.0]
        constant = all(len(weight.points) == 1 for weight in weights)
        self._constant = self._sums(0) if constant else None

    def source(self, pick: int) -> int:
        """Number of the source of this rank's pick, from 0."""
        block, place = divmod(pick, BLOCK)
        if block != self._block:
            self._block, self._points = block, self._strata(block)
        sums = self._constant or self._sums(pick * self._world_size)
        chosen = bisect.bisect_right(sums, self._points[place] * sums[-1])
        return min(chosen, len(sums) - 1)

    def _sums(self, samples: int) -> list[float]:
        return list(itertools.accumulate(weight.at(samples) for weight in self._weights))

    def _strata(self, block: int) -> list[float]:
        """One point in each 256th of (0, 1), all at the same place in it, in random order."""
        order = generator(self._seed, self._rank, block, source=_STREAM).permutation(BLOCK)
        offset = (block * self._world_size + self._rank + 0.5) * _GOLDEN % 1
        return ((order + offset) / BLOCK).tolist()
