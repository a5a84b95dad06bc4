"""What is missing or damaged is named: the file, the record, the remedy. Nothing is left out."""

from __future__ import annotations

import json
import os
import pickle

import pytest

from conceptmoe_vl.errors import UserError
from eval.tasks import all_tasks
from eval.tasks.refcoco import plain_pickle
from tests.eval.tasks import exports, files

_LAYOUTS = [*files.MAKERS.items(), *files.OTHER_LAYOUTS, *exports.EXPORTS]
_IDS = [f"{name}-{make.__name__}" for name, make in _LAYOUTS]


def load(name, folder):
    return all_tasks()[name].load(folder)


@pytest.mark.parametrize("name", files.MAKERS)
def test_an_empty_folder_is_told_which_file_is_expected(name, tmp_path):
    with pytest.raises(UserError, match=r"holds no .*'.*\.(json|tsv|csv|txt|parquet)'") as error:
        load(name, tmp_path)
    assert str(tmp_path) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", files.MAKERS)
def test_a_folder_that_is_not_there(name, tmp_path):
    with pytest.raises(UserError, match="nowhere"):
        load(name, tmp_path / "nowhere")


def _files_of(folder, kinds):
    return [path for path in sorted(folder.rglob("*")) if path.suffix in kinds]


@pytest.mark.parametrize(("name", "make"), _LAYOUTS, ids=_IDS)
def test_every_text_file_that_is_damaged_is_named(name, make, tmp_path):
    make(tmp_path)
    for path in _files_of(tmp_path, (".json", ".tsv", ".txt", ".parquet", ".p")):
        whole = path.read_bytes()
        for damaged in (b"", whole[: len(whole) // 2], b"\xff\xfe\x00[]{}"):
            path.write_bytes(damaged)
            with pytest.raises(UserError) as error:
                load(name, tmp_path)
            assert path.name in str(error.value), (path, damaged)
        path.write_bytes(whole)
    load(name, tmp_path)


@pytest.mark.parametrize(("name", "make"), _LAYOUTS, ids=_IDS)
def test_every_image_that_is_missing_is_named_before_anything_is_asked(name, make, tmp_path):
    make(tmp_path)
    for path in _files_of(tmp_path, (".jpg", ".png")):
        hidden = path.rename(path.with_suffix(".hidden"))
        with pytest.raises(UserError, match=path.stem):
            load(name, tmp_path)
        hidden.rename(path)
    load(name, tmp_path)


@pytest.mark.parametrize(
    "value", ["../secret.png", "/etc/hostname", "..", "", "\0", "link.png", 7, None, {"a": 1}]
)
def test_no_record_leads_out_of_the_folder(value, tmp_path):
    folder = tmp_path / "data"
    files.put(tmp_path / "secret.png", files.picture(kind="PNG"))
    files.make_chartqa(folder)
    os.symlink(tmp_path / "secret.png", folder / "test/png/link.png")
    path = folder / "test/test_human.json"
    path.write_text(json.dumps([{"imgname": value, "query": "q", "label": "1"}]))
    with pytest.raises(UserError, match="test_human"):
        load("chartqa", folder)


def test_a_question_without_annotation_is_no_silent_gap(tmp_path):
    files.make_vqav2(tmp_path)
    path = tmp_path / "annotations/v2_mscoco_val2014_annotations.json"
    content = json.loads(path.read_text())
    content["annotations"].pop()
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match="no annotation of question 42000"):
        load("vqav2", tmp_path)


def test_test_splits_without_answers_are_refused(tmp_path):
    files.make_mmbench(tmp_path)
    path = tmp_path / "MMBench_DEV_EN.tsv"
    path.write_text(path.read_text().replace("\tA\tidentity", "\t\tidentity"))
    with pytest.raises(UserError, match="development split"):
        load("mmbench", tmp_path)
    files.make_mmmu_json(tmp_path)
    path = tmp_path / "validation.json"
    path.write_text(path.read_text().replace('"answer": "B"', '"answer": "?"'))
    with pytest.raises(UserError, match="take the validation"):
        load("mmmu", tmp_path)


def test_a_row_that_names_another_rows_picture_needs_that_row(tmp_path):
    files.make_mmbench(tmp_path)
    path = tmp_path / "MMBench_DEV_EN.tsv"
    path.write_text(path.read_text().replace("\tidentity\t7\t", "\tidentity\t9\t"))
    with pytest.raises(UserError, match="index '9'"):
        load("mmbench", tmp_path)


def test_mmmu_pictures_that_are_mentioned_have_to_be_there(tmp_path):
    files.make_mmmu_json(tmp_path)
    path = tmp_path / "validation.json"
    path.write_text(path.read_text().replace('"image_2": "blue.png"', '"image_2": null'))
    with pytest.raises(UserError, match="mentions <image 2>"):
        load("mmmu", tmp_path)


class _Attack:
    def __reduce__(self):
        return os.system, ("echo harm > harmed",)


def test_a_pickle_that_calls_something_is_refused_and_calls_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = files.put(tmp_path / "refs.p", pickle.dumps([{"a": 1}, _Attack()]))
    with pytest.raises(UserError, match="no plain pickle"):
        plain_pickle(path)
    assert not (tmp_path / "harmed").exists()


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_plain_pickles_of_all_protocols(protocol, tmp_path):
    content = [{"split": "val", "ids": [1, 2], "box": (0.5, True, None), "text": "ü"}]
    assert plain_pickle(files.put(tmp_path / "p", pickle.dumps(content, protocol))) == content


def test_a_question_that_stands_twice_is_refused(tmp_path):
    files.make_pope(tmp_path)
    path = tmp_path / "output/coco/coco_pope_popular.json"
    path.write_text(path.read_text() * 2)
    with pytest.raises(UserError, match="popular-1 stands twice"):
        load("pope", tmp_path)
