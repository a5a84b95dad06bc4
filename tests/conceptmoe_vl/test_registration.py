"""The Auto classes know the model behind `import conceptmoe_vl`, whatever else is imported when."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import conceptmoe_vl
from conceptmoe_vl.registration import RegisterBehindImports
from tests.model_folder import save_model_folder

ROOT = Path(__file__).resolve().parents[2]
LOAD = """
import sys
from transformers import AutoConfig, AutoImageProcessor, AutoModel, AutoModelForCausalLM
from transformers import AutoModelForImageTextToText, AutoModelForMultimodalLM, AutoProcessor

folder = sys.argv[1]
for auto in (AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText,
             AutoModelForMultimodalLM, AutoConfig, AutoProcessor, AutoImageProcessor):
    print(type(auto.from_pretrained(folder)).__name__)
print(type(sys.modules["transformers"].__spec__.loader).__name__)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_model_folder(tmp_path_factory.mktemp("model"))


def run(code: str, *arguments: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


FIRST = [
    "import conceptmoe_vl",
    # the first import of transformers comes from the middle of a module of this package
    "import conceptmoe_vl.configuration",
]
MORE = [
    "import transformers, conceptmoe_vl",
    "from transformers import AutoModel, AutoProcessor; import conceptmoe_vl",
    "import conceptmoe_vl.errors",
    "from conceptmoe_vl import ConceptMoEVLProcessor",
    "import data_pipelines.stream",
    # somebody has asked where transformers is, and has not imported it
    "import conceptmoe_vl, importlib.util; importlib.util.find_spec('transformers')",
]


@pytest.mark.parametrize(
    "before", [*FIRST, *(pytest.param(b, marks=pytest.mark.slow) for b in MORE)]
)
def test_auto_classes_load_the_model(before, folder):
    names = run(f"{before}\n{LOAD}", str(folder))
    assert names == [
        *["ConceptMoEVLForConditionalGeneration"] * 4,
        "ConceptMoEVLConfig",
        "ConceptMoEVLProcessor",
        "ConceptMoEVLImageProcessor",
        "SourceFileLoader",  # what others see of transformers is as before
    ]


def test_the_package_alone_imports_nothing_slow():
    code = (
        "import sys, conceptmoe_vl, conceptmoe_vl.errors, data_pipelines, data_pipelines.writing\n"
        "print(*{'torch', 'transformers', 'timm'} & set(sys.modules))"
    )
    assert run(code) == []


def test_public_names():
    for name in conceptmoe_vl.__all__:
        assert getattr(conceptmoe_vl, name).__name__ == name
        assert name in dir(conceptmoe_vl)
    with pytest.raises(AttributeError, match="no attribute 'ConceptMoE'"):
        _ = conceptmoe_vl.ConceptMoE
    with pytest.raises(ImportError, match="cannot import name 'ConceptMoE'"):
        from conceptmoe_vl import ConceptMoE  # noqa: F401


def test_a_module_that_fails_is_no_longer_running():
    registering = RegisterBehindImports()

    def fail(module):
        raise ImportError("broken")

    with pytest.raises(ImportError, match="broken"):
        registering._execute(fail, True, sys)
    assert registering._running == 0
