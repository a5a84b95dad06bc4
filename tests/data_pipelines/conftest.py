"""Small data sets in shards, and a tiny processor."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from conceptmoe_vl.image_processing import ConceptMoEVLImageProcessor
from conceptmoe_vl.processing import ConceptMoEVLProcessor, train_tokenizer
from data_pipelines.__main__ import main
from data_pipelines.writing import write_shards


def encoded_image(value: int, kind: str = "PNG", size: int = 16) -> bytes:
    """A square of one grey value: which image a batch holds can be read from its pixels."""
    buffer = io.BytesIO()
    Image.fromarray(np.full((size, size, 3), value, np.uint8)).save(buffer, kind)
    return buffer.getvalue()


def noise(kind: str, seed: int = 0) -> bytes:
    buffer = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(buffer, kind)
    return buffer.getvalue()


def record(number: int, images: int = 1, questions: int = 2, independent: bool = False) -> dict:
    """Questions that name sample and question; all pictures stand in the first."""
    messages: list[dict] = []
    for question in range(questions):
        parts: list[dict] = [{"type": "image"}] * (images if question == 0 else 0)
        parts = [*parts, {"type": "text", "text": f"s{number} q{question}"}]
        messages += [
            {"role": "user", "content": parts},
            {"role": "assistant", "content": f"a{question}"},
        ]
    return {"messages": messages, "source": "toy", "independent_turns": independent}


def sample(number: int, images: int = 1, **options) -> tuple[str, dict, list]:
    pictures = [("png", encoded_image((10 * number + place) % 256)) for place in range(images)]
    return f"k{number:03d}", record(number, images, **options), pictures


def toy_shards(folder: Path, counts: list[int], **options) -> str:
    """One shard a count; samples are numbered over all shards. Returns a pattern."""
    folder.mkdir(parents=True, exist_ok=True)
    number = 0
    for place, count in enumerate(counts):
        samples = [sample(number + step, **options) for step in range(count)]
        write_shards(folder, f"toy{place}", samples, size=count)
        number += count
    return str(folder / "*.tar")


def failure(capsys, *arguments: str) -> str:
    """The one line that a mistaken call prints."""
    assert main(list(arguments)) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    return captured.err


def make_processor() -> ConceptMoEVLProcessor:
    tokenizer = train_tokenizer(["s0 q1 a2 what color is the shape"], 300)
    return ConceptMoEVLProcessor(ConceptMoEVLImageProcessor(image_size=16, patch_size=8), tokenizer)


@pytest.fixture(scope="session")
def processor() -> ConceptMoEVLProcessor:
    return make_processor()
