"""Odd, broken and hostile image files: delivered or refused with a reason, and nothing else.

`HOSTILE_IMAGES` names folders with such files (separated as in PATH), such as `Tests/images` of
Pillow's source distribution:

    pip download --no-binary :all: --no-deps pillow && tar xzf pillow-*.tar.gz
    HOSTILE_IMAGES=pillow-13.0.0/Tests/images \\
        python -m pytest -m slow tests/data_pipelines/test_hostile_images.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from conceptmoe_vl.image_processing import ConceptMoEVLImageProcessor
from conceptmoe_vl.processing import ConceptMoEVLProcessor
from data_pipelines import DataConfig, build_stream
from data_pipelines.writing import write_shards
from tests.peak_memory import linux

pytestmark = [
    pytest.mark.slow,
    linux,
    pytest.mark.skipif(
        "HOSTILE_IMAGES" not in os.environ, reason="HOSTILE_IMAGES names no folder of images"
    ),
]

REASONS = {
    *("empty", "not_an_image", "truncated", "damaged", "too_large", "unsupported"),
}
SECONDS_A_FILE = 60
PEAK_BYTES = 1_500_000_000

PROGRAM = """
import json, resource, signal, sys
from conceptmoe_vl.images import ImageError, decode_image
from conceptmoe_vl.resident_memory import peak_resident_bytes

gigabytes, seconds = 8, int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_AS, (gigabytes << 30, gigabytes << 30))
for line in sys.stdin:
    path = line.rstrip("\\n")
    print(json.dumps({"begins": path}), flush=True)
    signal.alarm(seconds)  # its default ends the process: the last line names the file
    try:
        image = decode_image(path)
        outcome = image.mode if min(image.size) > 0 else "no pixels"
    except ImageError as error:
        outcome = error.reason
    signal.alarm(0)
    print(json.dumps({"path": path, "outcome": outcome, "peak": peak_resident_bytes()}), flush=True)
"""


FOLDERS = [name for name in os.environ.get("HOSTILE_IMAGES", "").split(os.pathsep) if name]


def files(folder: str) -> list[Path]:
    return [path for path in sorted(Path(folder).rglob("*")) if path.is_file()]


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_file_is_decoded_or_refused_with_a_reason(folder):
    """All files of a folder in one process."""
    paths = files(folder)
    assert paths, f"HOSTILE_IMAGES: the folder '{folder}' holds no file"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(SECONDS_A_FILE)],
        input="".join(f"{path}\n" for path in paths),
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, f"ended at {lines[-1:]}: {done.stderr[-2000:]}"
    results = [line for line in lines if "path" in line]
    assert [line["path"] for line in results] == [str(path) for path in paths]
    counts = Counter(line["outcome"] for line in results)
    peak = results[-1]["peak"]
    print(f"{len(paths)} files: {dict(counts.most_common())}; peak {peak / 1e6:.2f} GB")
    assert counts.keys() <= {"RGB", *REASONS}
    assert peak < PEAK_BYTES


def test_every_file_is_delivered_or_counted_by_the_stream(processor, tmp_path):
    paths = [path for folder in FOLDERS for path in files(folder)]
    write_shards(tmp_path, "hostile", (as_sample(*pair) for pair in enumerate(paths)), size=200)
    small = ConceptMoEVLProcessor(
        ConceptMoEVLImageProcessor(image_size=32, patch_size=8), processor.tokenizer
    )
    config = DataConfig(
        shards=str(tmp_path / "*.tar"), tokens_per_batch=512, epochs=1, on_error="skip"
    )
    stream = build_stream(config, small)
    delivered = [key for batch in stream for key in batch.keys]
    skipped = Counter(stream.skipped)
    print(f"{len(delivered)} delivered, skipped {dict(skipped.most_common())}")
    assert len(delivered) == len(set(delivered))
    assert len(delivered) + sum(skipped.values()) == len(paths)
    assert skipped.keys() <= REASONS
    assert delivered


def as_sample(number: int, path: Path) -> tuple[str, dict, list[tuple[str, bytes]]]:
    """One question about the file, whose member is called PNG whatever it holds."""
    question = [{"type": "image"}, {"type": "text", "text": "q1"}]
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": "a1"}]
    return f"f{number:05d}", {"messages": messages}, [("png", path.read_bytes())]
