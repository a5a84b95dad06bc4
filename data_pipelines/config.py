"""What the `data` section of a run's configuration may say."""

from __future__ import annotations

import dataclasses
from typing import Any

from conceptmoe_vl.configuration import check_known_keys
from conceptmoe_vl.errors import UserError
from conceptmoe_vl.field_checks import check_type, refuse_idle
from conceptmoe_vl.images import MAX_PIXELS
from data_pipelines.augment import AUGMENTATIONS
from data_pipelines.mixing import SourceConfig, all_text, parse_sources


@dataclasses.dataclass
class DataConfig:
    """Where samples come from and how they become batches.

    Fields:
        shards: tar files: paths, glob patterns or brace ranges (`train-{000..003}.tar`); or
            remote ones: `http(s)://...`, `pipe:COMMAND`, or an address that fsspec knows.
        sources: instead of `shards`: named data sets, a list of mappings with `name`, `shards` and
            perhaps `weight` (see `mixing.SourceConfig`). Without weights they are one epoch
            together; with weights they are mixed without end.
        held_out: share of the samples, by a hash of their keys, that training does not see.
        split: train | held_out: which side of `held_out` to deliver.
        tokens_per_batch: most tokens of a packed batch (one process, one micro-batch).
        over_length: what a longer sample does: drop | truncate (text is cut at the end) | split (a
            document gives several; a conversation is dropped).
        shuffle: a new random order each epoch; False keeps the shards' order.
        seed: of the order, the choice of questions and the augmentation.
        epochs: passes over the data after which the stream ends; None: endless.
        max_samples: samples used, the first ones of the shards, of each weighted source; None: all.
        questions_per_conversation: most questions of a record with `independent_turns`, chosen
            anew each epoch; None: all.
        shuffle_questions: a new order of such a record's questions each epoch.
        augment: none | mirror_shift (left and right swapped, and shifts that keep everything in
            the frame) | flip_shift (mirrors, quarter turns and shifts that keep everything in the
            frame; only for questions that stay true under them).
        max_shift: pixels that either moves a picture at most, along each axis.
        pack_lookahead: samples held ready to fill a batch's rest.
        pack_lookahead_bytes: encoded bytes of them, pixels above all, after which no more are taken
            (one is, however large).
        on_error: what a damaged sample does: raise | skip | limit (skip up to a limit).
        max_skips: damaged samples per epoch and process that `limit` allows; None: by share.
        max_skip_share: the same as a share of the process's samples, 0 to 1.
        on_truncated_shard: raise | skip (count it and use the samples before the damage).
        num_workers: processes that decode ahead; 0 decodes in the training process.
        interleave: remote shards read side by side, over all processes; best a multiple of their
            number.
        remote_timeout: seconds after which a remote file that gives nothing counts as broken off.
        remote_retries: attempts after the first one to go on where it broke off.
        max_image_pixels: larger pictures count as damaged, before they are decoded.
    """

    shards: Any = dataclasses.field(default_factory=list)
    sources: Any = None
    held_out: float = 0.0
    split: str = "train"
    tokens_per_batch: int = 4096
    over_length: str = "drop"
    shuffle: bool = True
    seed: int = 0
    epochs: int | None = None
    max_samples: int | None = None
    questions_per_conversation: int | None = None
    shuffle_questions: bool = False
    augment: str = "none"
    max_shift: int = 8
    pack_lookahead: int = 64
    pack_lookahead_bytes: int = 2**28
    on_error: str = "limit"
    max_skips: int | None = None
    max_skip_share: float = 0.05
    on_truncated_shard: str = "raise"
    num_workers: int = 0
    interleave: int = 16
    remote_timeout: int = 60
    remote_retries: int = 5
    max_image_pixels: int = MAX_PIXELS

    def __post_init__(self) -> None:
        if isinstance(self.shards, str):
            self.shards = [self.shards]
        self._check_sources()
        for name, choices in (
            ("split", ("train", "held_out")),
            ("augment", ("none", *AUGMENTATIONS)),
            ("over_length", ("drop", "truncate", "split")),
            ("on_error", ("raise", "skip", "limit")),
            ("on_truncated_shard", ("raise", "skip")),
        ):
            if getattr(self, name) not in choices:
                raise UserError(
                    f"data.{name} is {getattr(self, name)!r}; choose one of {list(choices)}"
                )
        for name, least in (
            *(("tokens_per_batch", 2), ("seed", 0), ("epochs", 1), ("max_samples", 1)),
            *(("questions_per_conversation", 1), ("max_shift", 0), ("pack_lookahead", 1)),
            *(("max_skips", 0), ("num_workers", 0), ("max_image_pixels", 1)),
            *(("pack_lookahead_bytes", 1), ("interleave", 1)),
            *(("remote_timeout", 1), ("remote_retries", 0)),
        ):
            self._check_integer(name, least)
        if not 0 <= self.max_skip_share <= 1:
            raise UserError(f"data.max_skip_share is {self.max_skip_share}; give 0 to 1")
        if not 0 <= self.held_out < 1:
            raise UserError(f"data.held_out is {self.held_out}; give a share from 0 to below 1")
        if self.split == "held_out" and not self.held_out:
            raise UserError("data.split is held_out, but data.held_out is 0; give it a share")

    def _check_sources(self) -> None:
        """`sources` as mappings, checked; `shards` and they exclude each other."""
        if self.sources is None:
            if not self.shards or not all_text(self.shards):
                raise UserError(
                    f"data.shards is {self.shards!r}; name tar files or patterns of them"
                )
            return
        if self.shards:
            raise UserError("data.shards and data.sources exclude each other; remove one of them")
        if self.source_configs[0].weight is not None and self.epochs is not None:
            raise UserError(
                f"data.epochs is {self.epochs}, but sources with weights are mixed without end; "
                "remove the weights to go through all sources equally often, or remove epochs and "
                "end the run by training.max_steps"
            )

    @property
    def source_configs(self) -> list[SourceConfig]:
        """The sources by name; of `shards` alone none."""
        return [] if self.sources is None else parse_sources(self.sources)

    @property
    def all_shards(self) -> list[str]:
        """Patterns of all sources."""
        return [*self.shards, *(part for each in self.source_configs for part in each.shards)]

    def _check_integer(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if value is None and str(self.__dataclass_fields__[name].type).endswith("None"):
            return
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise UserError(f"data.{name} is {value!r}; give an integer of {least} or more")

    def _check_effect(self, given: set[str]) -> None:
        """Refuses of the given fields what others leave without effect."""
        for idle, names, because in (
            (self.augment == "none", {"max_shift"}, "data.augment is none; set it"),
            (
                self.on_error != "limit",
                {"max_skips", "max_skip_share"},
                f"data.on_error is {self.on_error}; set data.on_error=limit",
            ),
            (
                self.max_skips is not None,
                {"max_skip_share"},
                f"data.max_skips is {self.max_skips}; set that to null",
            ),
        ):
            if idle:
                refuse_idle(self, "data", names & given, because)

    @classmethod
    def from_mapping(cls, values: Any, base: dict | None = None) -> DataConfig:
        """The configuration of a mapping.

        Args:
            base: what `values` are laid over.

        Raises:
            UserError: it is no mapping, a key is unknown (the nearest is named), a value wrong, or
                one of `values` without effect.
        """
        if not isinstance(values, dict):
            raise UserError(f"configuration section 'data' is {values!r}; give a mapping")
        merged = {**(base or {}), **values}
        types = {field.name: str(field.type) for field in dataclasses.fields(cls)}
        try:
            check_known_keys(merged, types, "data")
            for key, value in merged.items():
                if types[key] != "Any":
                    check_type("data", key, value, types[key])
        except ValueError as error:
            raise UserError(str(error)) from error
        config = cls(**merged)
        config._check_effect(set(values))
        return config
