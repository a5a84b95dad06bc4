"""Builds: the same bytes from any number of workers and after any interruption."""

from __future__ import annotations

import copy
import errno
import io
import json
import multiprocessing
import os
import select
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from conceptmoe_vl.errors import UserError
from data_pipelines import build_command
from data_pipelines.__main__ import main
from data_pipelines.building import BuildOptions, Made, Recipe, build
from data_pipelines.importing import layout_recipe
from data_pipelines.partial_build import PartialBuild
from data_pipelines.records import RecordError
from data_pipelines.rejects import Rejects
from data_pipelines.shards import index_shards, scan_shard
from data_pipelines.writing import ShardSize, write_shards
from tests.data_pipelines.conftest import encoded_image, failure, record

BY_TWO = ShardSize(samples=2)


def items(count: int, stop: int | None = None, kill: bool = False) -> Iterator[int]:
    """Numbers; at `stop` comes Ctrl-C, or this process is killed."""
    for number in range(count):
        if number == stop:
            if kill:
                os.kill(os.getpid(), signal.SIGKILL)
            raise KeyboardInterrupt
        yield number


def make(number: int) -> Made:
    """Every seventh cannot be used, every fifth is as the one before it."""
    if number % 7 == 3:
        raise RecordError("no_answer", f"item {number} has none", "messages")
    content = number - (number % 5 == 4)
    images = [("png", encoded_image(content % 256, size=1 + content % 40))]
    return Made(f"k{number:04d}", record(content % 9), images, {"questions": 2})


def sound(number: int) -> Made:
    return Made(f"k{number:04d}", record(number, images=0), [])


def recipe(count: int = 40, stop: int | None = None, kill: bool = False) -> Recipe:
    first = count // 2
    return Recipe(
        manifest={"source": "toy", "license": "none"},
        splits={
            "train": partial(items, first, stop, kill),
            "test": partial(items, count - first, None if stop is None else stop - first, kill),
        },
        make=make,
    )


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def options(**more) -> BuildOptions:
    return BuildOptions(**{"max_rejects": 0.5, "size": BY_TWO, **more})


SIZES = st.sampled_from([BY_TWO, ShardSize(samples=7), ShardSize(bytes=20_480)])
WAYS = st.sampled_from([None, "samples", "images"])


@pytest.mark.parametrize("size", [BY_TWO, ShardSize(samples=100), ShardSize(bytes=30_720)])
@pytest.mark.parametrize("deduplicate", [None, "samples"])
def test_the_number_of_workers_changes_no_byte(tmp_path, size, deduplicate):
    for workers in (1, 2, 3):
        how = options(size=size, workers=workers, deduplicate=deduplicate)
        build(recipe(90), tmp_path / str(workers), how)
    assert files(tmp_path / "1") == files(tmp_path / "2") == files(tmp_path / "3")
    manifest = json.loads((tmp_path / "2" / "manifest.json").read_text())
    for split in manifest["splits"].values():
        for entry in split["shards"]:
            shard = tmp_path / "2" / entry["name"]
            assert scan_shard(str(shard))[1] is None
            assert size.bytes is None or entry["bytes"] <= size.bytes
            assert entry["bytes"] == shard.stat().st_size
    assert main(["validate", str(tmp_path / "2")]) == 0


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.integers(0, 39), min_size=1, max_size=3), SIZES, WAYS, st.sampled_from([1, 2]))
def test_a_build_goes_on_where_it_was_interrupted(tmp_path, stops, size, deduplicate, workers):
    how = options(size=size, deduplicate=deduplicate, workers=workers, force=True)
    build(recipe(), tmp_path / "unbroken", how)
    for stop in stops:
        with pytest.raises(KeyboardInterrupt):
            build(recipe(stop=stop), tmp_path / "out", how)
    build(recipe(), tmp_path / "out", how)
    assert files(tmp_path / "out") == files(tmp_path / "unbroken")
    assert {path.name for path in tmp_path.iterdir()} == {"out", "unbroken"}


@pytest.mark.parametrize("workers", [1, 2])
def test_a_killed_build_leaves_no_process_and_goes_on(tmp_path, workers):
    build(recipe(200), tmp_path / "unbroken", options())
    read, write = os.pipe()
    fork = multiprocessing.get_context("fork")
    killed = fork.Process(
        target=build,
        args=(
            *(recipe(200, stop=90, kill=True), tmp_path / "out"),
            options(workers=workers),
        ),
    )
    killed.start()
    os.close(write)
    killed.join()
    assert killed.exitcode == -signal.SIGKILL
    # All processes that held the other end are gone: the workers too.
    assert select.select([read], [], [], 120)[0]
    assert os.read(read, 1) == b""
    os.close(read)
    assert not (tmp_path / "out").exists()
    finished = len(list((tmp_path / ".out.partial").glob("*.tar"))) - 1
    assert finished > 1
    states = []
    build(recipe(200), tmp_path / "out", options(workers=workers), states.append)
    assert states[0].resumed >= finished
    assert files(tmp_path / "out") == files(tmp_path / "unbroken")


def interrupted(out: Path, how: BuildOptions) -> None:
    with pytest.raises(KeyboardInterrupt):
        build(recipe(stop=15), out, how)


@pytest.mark.parametrize("change", ["size", "deduplicate", "inputs", "shard", "journal"])
def test_what_is_no_longer_of_the_same_kind_begins_anew(tmp_path, change):
    out, how, new = tmp_path / "out", options(deduplicate="samples"), recipe()
    interrupted(out, how)
    if change == "size":
        how = options(deduplicate="samples", size=ShardSize(samples=3))
    elif change == "deduplicate":
        how = options()
    elif change == "inputs":
        new = Recipe(new.manifest, new.splits, new.make, inputs="another file")
    elif change == "shard":
        next((tmp_path / ".out.partial").glob("*.tar")).write_bytes(b"cut")
    else:
        (tmp_path / ".out.partial" / ".journal").write_bytes(b'{"finger')
    states = []
    build(new, out, how, states.append)
    assert states[0].resumed == 0
    assert states[0].renewed == (change != "journal")
    build(new, tmp_path / "unbroken", how)
    assert files(out) == files(tmp_path / "unbroken")


def test_a_torn_journal_loses_its_last_shard_alone(tmp_path):
    interrupted(tmp_path / "out", options())
    journal = tmp_path / ".out.partial" / ".journal"
    journal.write_bytes(journal.read_bytes()[:-10])
    states = []
    build(recipe(), tmp_path / "out", options(), states.append)
    assert states[0].resumed > 2
    build(recipe(), tmp_path / "unbroken", options())
    assert files(tmp_path / "out") == files(tmp_path / "unbroken")


def full(number: int) -> Made:
    if number == 20:
        raise OSError(errno.ENOSPC, "No space left on device")
    return make(number)


def killed(number: int) -> Made:
    if number == 33:
        os._exit(9)
    return make(number)


@pytest.mark.parametrize(
    ("fails", "workers", "message"),
    [(full, 1, "No space left"), (full, 2, "No space left"), (killed, 2, "use fewer --workers")],
)
def test_an_error_keeps_what_is_finished_and_says_so(tmp_path, fails, workers, message):
    broken = Recipe({"source": "toy"}, {"train": partial(items, 60)}, fails)
    repaired = Recipe({"source": "toy"}, {"train": partial(items, 60)}, make)
    with pytest.raises(UserError, match=message) as caught:
        build(broken, tmp_path / "out", options(workers=workers))
    assert not (tmp_path / "out").exists()
    partial_folder = tmp_path / ".out.partial"
    if partial_folder.exists():  # a worker may die before the first shard is finished
        assert f"kept in '{partial_folder}': the same command goes on there" in str(caught.value)
    build(repaired, tmp_path / "out", options())
    build(repaired, tmp_path / "unbroken", options())
    assert files(tmp_path / "out") == files(tmp_path / "unbroken")


def test_two_builds_of_one_data_set_do_not_mix(tmp_path):
    with PartialBuild(tmp_path / "out"):
        fork = multiprocessing.get_context("fork")
        with fork.Pool(1) as pool, pytest.raises(UserError, match="is under way; wait"):
            pool.apply(build, (recipe(), tmp_path / "out", options()))
    build(recipe(), tmp_path / "out", options())


def test_only_data_sets_are_replaced(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    build(recipe(), out, options())
    with pytest.raises(UserError, match=r"not empty.*--force"):
        build(recipe(), out, options())
    build(recipe(10), out, options(force=True))
    assert len(index_shards([str(out)]).samples) == 8
    (out / "thesis.txt").touch()
    with pytest.raises(UserError, match=r"holds 'thesis\.txt'"):
        build(recipe(), out, options(force=True))
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="is a file"):
        build(recipe(), tmp_path / "file", options())
    assert {path.name for path in tmp_path.iterdir()} == {"out", "file"}


def rows(path: Path) -> Path:
    """Eight records; 2 is 0 again, 4 has its image and another text, 5 cannot be used."""
    for value in (1, 2):
        (path / f"{value}.png").write_bytes(encoded_image(value))
    (path / "copy.png").write_bytes(encoded_image(1))

    def row(question: str, image: str | None = None) -> str:
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": "a"}]
        return json.dumps({"messages": turns, **({"image": image} if image else {})})

    lines = [
        *(row("<image>x", "1.png"), row("<image>x", "2.png"), row("<image>x", "copy.png")),
        *(row("x"), row("<image>y", "1.png"), "{", row("y"), row("x")),
    ]
    (path / "rows.jsonl").write_text("\n".join(lines))
    return path / "rows.jsonl"


@pytest.mark.parametrize(
    ("flags", "kept", "duplicates"),
    [
        ([], 7, 0),
        (["--deduplicate"], 5, 2),
        (["--deduplicate-images"], 4, 3),
    ],
)
def test_duplicates_are_left_out_on_request(tmp_path, capsys, flags, kept, duplicates):
    (tmp_path / "given").mkdir()
    file, out = rows(tmp_path / "given"), tmp_path / "out"
    # The share of rejects is of what cannot be used: 1 of 8.
    command = ["build", "messages", str(file), str(out), "--max-rejects", "0.13", *flags]
    assert main(["validate", str(file), "--json"]) == 1
    stated = json.loads(capsys.readouterr().out)["duplicates"]
    assert main(command) == 0
    report = json.loads((out / "rejects.json").read_text())
    expected = {"duplicate": duplicates, "bad_json": 1} if duplicates else {"bad_json": 1}
    assert report["by_reason"] == expected
    assert (report["records"], report["rejected"]) == (8, 1 + duplicates)
    assert len(index_shards([str(out)]).samples) == kept
    capsys.readouterr()
    assert main(["validate", str(out), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["samples"] == kept
    assert found["duplicates"] == (0 if flags else stated)


@pytest.mark.parametrize("deduplicate", [None, "samples"])
def test_a_recipe_may_say_what_is_a_duplicate(tmp_path, deduplicate):
    def marked(number: int) -> Made:
        return sound(number)._replace(mark=bytes([number % 4]) * 16)

    made = Recipe({"source": "toy"}, {"train": partial(items, 10)}, marked)
    _, rejects = build(made, tmp_path / "out", options(size=BY_TWO, deduplicate=deduplicate))
    assert rejects.by_reason == {"duplicate": 6}
    assert [entry["record"] for entry in rejects.named] == ["4", "5", "6", "7", "8", "9"]


@pytest.mark.parametrize("kind", ["file", "folder", "pattern"])
def test_the_files_of_records_are_what_a_build_depends_on(tmp_path, kind):
    for number in range(2):
        write_shards(tmp_path, f"s{number}", [("a", {"caption": "x"}, [])], 1)
    names = {"file": "s0-000000.tar", "folder": ".", "pattern": "s{0..1}-000000.tar"}
    path = tmp_path / names[kind]
    before = layout_recipe("img2dataset", path).inputs
    assert layout_recipe("img2dataset", path).inputs == before
    os.utime(tmp_path / "s0-000000.tar", ns=(0, 5))
    assert layout_recipe("img2dataset", path).inputs != before


def test_duplicates_are_no_faults():
    rejects = Rejects(records=10)
    for _ in range(9):
        rejects.add("r", "", "duplicate", "m")
    rejects.check(0.0)
    rejects.add("the one", "f", "bad_json", "broken")
    with pytest.raises(UserError, match="cannot be used, first the one: broken"):
        rejects.check(0.05)


def test_options_stand_before_and_behind_the_source(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n{"text": "b"}\n')
    path, out = str(tmp_path / "a.jsonl"), str(tmp_path / "out")
    common = ["--force", "--shard-size", "1", "--workers", "1", "--deduplicate"]
    for command in (
        ["build", *common, "text", path, out],
        ["build", "text", path, *common, out],
        ["build", *common[:3], "text", *common[3:], path, out],
    ):
        assert main(command) == 0
        assert "2 samples, 0 images, 2 shards" in capsys.readouterr().out
    assert "nearest is 'text'" in failure(capsys, "build", "--force", "tex", path, out)
    assert "not empty" in failure(capsys, "build", "text", path, out)
    for wrong in (["--workers", "0"], ["--shard-size", "1.5GB"], ["--shard-size", "0"]):
        with pytest.raises(SystemExit):
            main(["build", *wrong, "text", path, out])
        assert f"'{wrong[1]}' is no" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1000", ShardSize(samples=1000)),
        ("256MB", ShardSize(bytes=256_000_000)),
        ("2gib", ShardSize(bytes=2**31)),
        ("7KB", ShardSize(bytes=7000)),
    ],
)
def test_sizes_of_shards(text, size):
    assert ShardSize.parse(text) == size


def test_an_interrupted_command_and_its_successor(tmp_path, capsys, monkeypatch):
    out = str(tmp_path / "out")
    for stop, status in ((13, 130), (None, 0)):
        made = Recipe({"source": "toy"}, {"train": partial(items, 20, stop)}, sound)
        monkeypatch.setitem(build_command.SOURCES, "easy_vqa", partial(copy.copy, made))
        assert main(["build", "easy_vqa", out, "--workers", "1", "--shard-size", "3"]) == status
        printed = capsys.readouterr()
    assert "going on behind 4 finished shards" in printed.err
    assert f"{out}/train-*.tar: 20 samples, 0 images, 7 shards" in printed.out


def test_progress_is_drawn_on_terminals_alone(tmp_path):
    for terminal in (True, False):
        text = io.StringIO()
        console = Console(file=text, force_terminal=terminal, width=100)
        with build_command._Bar(console, seconds=0.0) as bar:
            build(recipe(), tmp_path / str(terminal), options(), bar.update)
        assert ("40 records, 34 samples, 6 rejected" in text.getvalue()) == terminal
        assert terminal or text.getvalue() == ""
