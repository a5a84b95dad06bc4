"""What a newcomer meets first: an answer alone on stdout, or one line that says what to do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

import demo
from conceptmoe_vl import cli
from tests.model_folder import save_model_folder

ROOT = Path(demo.__file__).parent


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return save_model_folder(tmp_path_factory.mktemp("run") / "model")


@pytest.fixture
def picture(tmp_path):
    path = tmp_path / "picture.png"
    Image.new("RGB", (40, 24), "red").save(path)
    return path


def expect_one_line(capsys, status) -> str:
    captured = capsys.readouterr()
    assert status == 2
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    return captured.err


def test_the_answer_is_alone_on_standard_output(model_folder, picture):
    command = [sys.executable, str(ROOT / "demo.py"), str(picture), "what is this?"]
    command += ["--model", str(model_folder), "--max-new-tokens", "3", "--device", "cpu"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("\n")
    assert "runtime:" not in done.stdout
    assert "Traceback" not in done.stderr


def test_the_command_and_the_demo_answer_alike(model_folder, picture, capsys):
    arguments = [str(picture), "is it red?", "--model", str(model_folder), "--max-new-tokens", "4"]
    assert demo.main(arguments) == 0
    first = capsys.readouterr().out
    assert cli.main(["ask", *arguments]) == 0
    assert capsys.readouterr().out == first


def test_a_model_of_tiles_answers(tmp_path, picture, capsys):
    folder = save_model_folder(tmp_path / "tiles", size_policy="tiles", image_size=16)
    assert demo.main([str(picture), "is it red?", "--model", str(folder)]) == 0
    assert capsys.readouterr().out.count("\n") >= 1


@pytest.mark.parametrize("count", [0, 2])
def test_any_number_of_images(model_folder, picture, capsys, count):
    arguments = [str(picture)] * count + ["why?", "--model", str(model_folder)]
    assert demo.main([*arguments, "--max-new-tokens", "2"]) == 0
    assert capsys.readouterr().out.count("\n") >= 1


def test_an_unreadable_image(model_folder, tmp_path, capsys):
    path = tmp_path / "broken.png"
    path.write_bytes(b"\x89PNG\r\n\x1a\nnothing more")
    line = expect_one_line(capsys, demo.main([str(path), "q?", "--model", str(model_folder)]))
    assert "broken.png" in line


def test_a_cut_off_image(model_folder, picture, capsys):
    picture.write_bytes(picture.read_bytes()[:60])
    line = expect_one_line(capsys, demo.main([str(picture), "q?", "--model", str(model_folder)]))
    assert "picture.png" in line


def test_a_missing_image(model_folder, tmp_path, capsys):
    path = tmp_path / "nowhere.png"
    line = expect_one_line(capsys, demo.main([str(path), "q?", "--model", str(model_folder)]))
    assert "nowhere.png" in line


def test_a_missing_model(picture, tmp_path, capsys):
    status = demo.main([str(picture), "q?", "--model", str(tmp_path / "none")])
    assert "there is no model folder" in expect_one_line(capsys, status)


def test_a_folder_that_is_no_model(picture, tmp_path, capsys):
    status = demo.main([str(picture), "q?", "--model", str(tmp_path)])
    assert "holds no config.json" in expect_one_line(capsys, status)


def test_a_run_folder_in_place_of_its_model(model_folder, picture, capsys):
    status = demo.main([str(picture), "q?", "--model", str(model_folder.parent)])
    assert f"did you mean '{model_folder}'?" in expect_one_line(capsys, status)


def test_a_file_in_place_of_a_model(picture, capsys):
    status = demo.main([str(picture), "q?", "--model", str(picture)])
    assert "is a file" in expect_one_line(capsys, status)


def copy_folder(source: Path, target: Path) -> Path:
    target.mkdir()
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


def test_another_kind_of_model(model_folder, picture, tmp_path, capsys):
    folder = copy_folder(model_folder, tmp_path / "m")
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    line = expect_one_line(capsys, demo.main([str(picture), "q?", "--model", str(folder)]))
    assert "'qwen3'" in line


def test_a_configuration_that_is_no_json(model_folder, picture, tmp_path, capsys):
    folder = copy_folder(model_folder, tmp_path / "m")
    (folder / "config.json").write_text("{")
    line = expect_one_line(capsys, demo.main([str(picture), "q?", "--model", str(folder)]))
    assert "config.json" in line


def test_an_unknown_key_in_the_configuration(model_folder, picture, tmp_path, capsys):
    folder = copy_folder(model_folder, tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    config["chunk"]["target_ration"] = 2.0
    (folder / "config.json").write_text(json.dumps(config))
    line = expect_one_line(capsys, demo.main([str(picture), "q?", "--model", str(folder)]))
    assert "target_ratio'" in line


def test_no_weights(model_folder, picture, tmp_path, capsys):
    folder = copy_folder(model_folder, tmp_path / "m")
    for file in folder.glob("*.safetensors"):
        file.unlink()
    line = expect_one_line(capsys, demo.main([str(picture), "q?", "--model", str(folder)]))
    assert "holds no weights" in line


def test_cut_off_weights(model_folder, picture, tmp_path, capsys):
    folder = copy_folder(model_folder, tmp_path / "m")
    for file in folder.glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-100])
    line = expect_one_line(capsys, demo.main([str(picture), "q?", "--model", str(folder)]))
    assert "cannot be loaded" in line


def test_a_missing_weight_is_an_error_not_a_random_one(model_folder, picture, tmp_path, capsys):
    from safetensors.torch import load_file, save_file

    folder = copy_folder(model_folder, tmp_path / "m")
    weights = load_file(folder / "model.safetensors")
    name = sorted(weights)[0]
    del weights[name]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    line = expect_one_line(capsys, demo.main([str(picture), "q?", "--model", str(folder)]))
    assert name in line


def test_a_missing_processor(model_folder, picture, tmp_path, capsys):
    folder = copy_folder(model_folder, tmp_path / "m")
    for file in folder.glob("*token*"):
        file.unlink()
    line = expect_one_line(capsys, demo.main([str(picture), "q?", "--model", str(folder)]))
    assert "cannot be loaded" in line


def test_an_empty_question(model_folder, picture, capsys):
    status = demo.main([str(picture), " ", "--model", str(model_folder)])
    assert "the question is empty" in expect_one_line(capsys, status)


def test_a_forgotten_question(model_folder, picture, capsys):
    status = demo.main([str(picture), "--model", str(model_folder)])
    assert "give the question after it" in expect_one_line(capsys, status)


def test_a_device_that_is_not_there(model_folder, picture, capsys):
    arguments = [str(picture), "q?", "--model", str(model_folder), "--device", "nonsense"]
    assert "--device cpu" in expect_one_line(capsys, demo.main(arguments))


def test_an_image_for_a_model_that_takes_none(picture, tmp_path, capsys):
    folder = save_model_folder(tmp_path / "model", vision=False)
    status = demo.main([str(picture), "q?", "--model", str(folder)])
    assert "takes no images" in expect_one_line(capsys, status)
