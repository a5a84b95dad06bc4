"""`bench.data`: every way reads all samples; the share of waiting comes from a run's metrics."""

from __future__ import annotations

import json

import pytest

from bench import data
from conceptmoe_vl.errors import UserError


def test_reading_measures_every_way(tmp_path, capsys):
    file = tmp_path / "found.json"
    arguments = ["--what", "reading", "--samples", "20", "--repeats", "1", "--json", str(file)]
    assert data.main(arguments) == 0
    found = json.loads(file.read_text())["reading"]
    assert found["samples"] == 20
    assert found["bytes_per_image"] > 5000
    assert all(found[f"{name}_of_pillow"] > 0 for name in ("ours", "webdataset"))
    assert "Pillow, from memory" in capsys.readouterr().out


def test_equal_seeds_make_equal_samples():
    one, same, other = (list(data.samples(2, seed)) for seed in (0, 0, 1))
    assert one == same
    assert one[0][2] != one[1][2] != other[1][2]


def test_share_of_waiting_leaves_the_first_interval_out():
    lines = [
        {"step": 1, "seconds": 50.0, "data_wait_share": 0.9},
        {"step": 2, "seconds": 51.0, "data_wait_share": 0.5},
        {"step": 3, "seconds": 54.0, "data_wait_share": 0.1},
    ]
    found = data.waiting_share([json.dumps(line) for line in lines])
    assert found["waiting"] == pytest.approx((1 * 0.5 + 3 * 0.1) / 4)
    assert (found["steps"], found["seconds_per_step"]) == (2, 2.0)


def test_one_step_is_too_few():
    with pytest.raises(UserError, match="logged 1 steps"):
        data.waiting_share(['{"step": 1, "seconds": 50.0, "data_wait_share": 0.9}'])
