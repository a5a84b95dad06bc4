"""The launcher of the harnesses, and the settings of tasks; needs no harness."""

from __future__ import annotations

import sys

import pytest

from conceptmoe_vl.errors import UserError
from eval.adaptors.__main__ import main
from eval.adaptors.generating import batch_of, generation_settings


def test_usage_and_unknown_harness(capsys):
    assert main(["--help"]) == 0
    assert "lm_eval|lmms_eval" in capsys.readouterr().out
    assert main(["helm"]) == 2
    assert "unknown harness 'helm'" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "extra"), [("lm_eval", "lm-eval"), ("lmms_eval", "lmms-eval")])
def test_a_harness_that_is_not_installed(name, extra, capsys, monkeypatch):
    for module in [
        m for m in sys.modules if m.split(".")[0] == name or m == f"eval.adaptors.{name}"
    ]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    assert main([name, "run"]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert f"pip install 'conceptmoe-vl[{extra}]'" in message


def test_settings_of_a_task():
    assert generation_settings({}, 64) == (64, ())
    assert generation_settings({"until": "\n", "max_gen_toks": 9}, 64) == (9, ("\n",))
    greedy = {"until": ["a", ""], "max_new_tokens": 5, "temperature": 0.7, "do_sample": False}
    assert generation_settings(greedy, 64) == (5, ("a",))
    for sampled in ({"do_sample": True}, {"temperature": 0.2}, {"num_beams": 4}):
        with pytest.raises(UserError, match="generates greedily"):
            generation_settings(sampled, 64)


def test_batch_sizes_of_a_command_line():
    assert [batch_of(given) for given in (None, "auto", "auto:4", "8", 2)] == [16, 16, 16, 8, 2]
    for wrong in ("0", "many"):
        with pytest.raises(UserError, match="--batch_size"):
            batch_of(wrong)
