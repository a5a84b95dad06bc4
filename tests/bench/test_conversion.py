"""The benchmark of conversion runs, and its memory figure keeps what the project promises."""

from __future__ import annotations

from bench.conversion import _in_own_process, make_checkpoint, measure
from conceptmoe_vl.conversion.reading import Checkpoint
from tests.peak_memory import linux


@linux
def test_figures_and_memory(tmp_path):
    """A checkpoint of three shards never fills twice the largest of them in memory."""
    source = tmp_path / "source"
    make_checkpoint(source, 190e6, 70_000_000)
    checkpoint = Checkpoint(source)
    size = sum(checkpoint.tensor(name).size for name in checkpoint)
    assert size > 2.2 * checkpoint.largest_file
    peak = _in_own_process(source, tmp_path / "kept")
    assert 0 < peak < 2 * checkpoint.largest_file
    converted = Checkpoint(tmp_path / "kept")
    assert sum(converted.tensor(name).size for name in converted) > size
    figures = measure(source, tmp_path, rounds=1)
    assert all(value > 0 for value in figures.values())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "source"]
