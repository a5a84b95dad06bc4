"""Encoded samples in order, from this process or from workers that run ahead.

The order is decided by the caller's sequence alone, so the number of workers changes nothing but
speed, and a position is a place in that sequence.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from data_pipelines.encoding import Document, SampleEncoder, Skipped
from data_pipelines.order import Place

_SAMPLES_PER_MESSAGE = 16


def encoded_in_order(
    encoder: SampleEncoder, places: Iterable[Place], num_workers: int
) -> Iterator[tuple[Place, tuple[Document, ...] | Skipped]]:
    """Pairs of place and encoded sample, in the order of `places`."""
    if num_workers == 0:
        for place in places:
            yield place, encoder.encode(*place)
        return
    loader = DataLoader(
        _Encoded(encoder),
        batch_size=_SAMPLES_PER_MESSAGE,
        sampler=places,
        num_workers=num_workers,
        collate_fn=_to_arrays,
    )
    for message in loader:
        for place, result in message:
            yield place, _with_pixels(result, torch.from_numpy)


class _Encoded(Dataset):
    def __init__(self, encoder: SampleEncoder) -> None:
        self._encoder = encoder

    def __getitem__(self, place: Place) -> tuple[Place, tuple[Document, ...] | Skipped]:
        return place, self._encoder.encode(*place)


def _to_arrays(results: list) -> list:
    """Arrays travel inside the message; each tensor would need a file descriptor of its own."""
    return [
        (place, _with_pixels(result, lambda tensor: tensor.numpy())) for place, result in results
    ]


def _with_pixels(
    result: tuple[Document, ...] | Skipped, convert: Any
) -> tuple[Document, ...] | Skipped:
    if isinstance(result, Skipped):
        return result
    return tuple(_converted(document, convert) for document in result)


def _converted(document: Document, convert: Any) -> Document:
    images = [
        dataclasses.replace(
            image,
            pixels=convert(image.pixels),
            coord=None if image.coord is None else convert(image.coord),
        )
        for image in document.sample.images
    ]
    return dataclasses.replace(document, sample=dataclasses.replace(document.sample, images=images))
