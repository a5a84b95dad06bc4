"""What a person sees of a run, in a terminal and elsewhere."""

from __future__ import annotations

import io
import re
import threading

import pytest
from rich.console import Console

from conceptmoe_vl.training.live_view import LiveView, figures
from conceptmoe_vl.training.progress import Reporter

METRICS = {
    "step": 7,
    "loss": 2.5,
    "lm_loss": 2.25,
    "lm_loss_text": None,
    "ratio": 2.0,
    "target_ratio": 2.0,
    "grad_norm": 0.5,
    "tokens_per_second": 12345.0,
    "model_flops_utilization": 0.3125,
    "data_wait_share": 0.012,
    "peak_memory": 3 * 2**30,
}


def test_figures_leave_out_what_has_no_number():
    assert figures(METRICS) == {
        "losses": ["total 2.5000", "language 2.2500", "norm 0.5"],
        "concepts": ["tokens each 2.00", "target 2.00"],
        "speed": ["tokens/s 12,345", "MFU 31.2%", "data wait 1.2%", "memory 3.00 GiB"],
    }


@pytest.fixture
def terminal():
    file = io.StringIO()
    return file, Console(file=file, force_terminal=True, width=120, height=30, highlight=False)


def test_the_view_of_a_terminal_keeps_figures_and_the_last_warnings(terminal):
    file, console = terminal
    reporter = Reporter(True, console)
    reporter.update(METRICS, 0.25)
    for number in range(5):
        reporter.say(f"warning: step {number}: something began")
    reporter.update({"step": 8, "loss": 1.5, "lm_loss": 1.25, "grad_norm": 0.5}, 0.5)
    file.truncate(0)
    console.print(reporter._view._drawn())
    shown = file.getvalue()
    reporter.close()
    for text in ("step 8", " 50%", "language 1.2500", "tokens/s 12,345", "step 4: something began"):
        assert text in shown
    assert "step 1: something" not in shown


@pytest.mark.parametrize("width", [40, 80, 200])
def test_names_stay_with_their_numbers_and_times_are_whole_at_every_width(width):
    view, paper = LiveView(Console(file=io.StringIO())), io.StringIO()
    view.show({**METRICS, "step": 123_456}, 0.25)
    view.close()
    Console(file=paper, width=width).print(view._drawn())
    lines = paper.getvalue().splitlines()
    assert all(len(line) <= width for line in lines)
    assert re.search(r"step 123456 .* 25% 0:00:0\d left (-:--:--|0:00:0\d)", lines[0])
    shown = [part for row in figures(METRICS).values() for part in row]
    assert all(any(part in line for line in lines) for part in shown)


def test_the_view_ends_its_thread_and_gives_the_cursor_back(terminal):
    file, console = terminal
    before = set(threading.enumerate())
    reporter = Reporter(True, console)
    reporter.update(METRICS, 0.25)
    (drawing,) = set(threading.enumerate()) - before
    reporter.close()
    drawing.join(60)
    assert not drawing.is_alive()
    assert "step 7   25%  loss 2.5000" in file.getvalue()
    assert file.getvalue().rindex("\x1b[?25h") > file.getvalue().rindex("\x1b[?25l")


def test_elsewhere_there_are_plain_lines_and_few(capsys):
    reporter = Reporter(True)
    for step in range(1, 101):
        reporter.update({**METRICS, "step": step}, step / 100)
    reporter.say("warning: step 3: something began")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "step 1    1%  loss 2.5000  lm 2.2500  R 2.00  norm 0.50  12,345 tok/s"
    assert lines[1].startswith("step 100  100%")
    assert lines[2] == "warning: step 3: something began"
    assert len(lines) == 3


def test_a_terminal_that_can_move_no_cursor_gets_plain_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    file = io.StringIO()
    reporter = Reporter(True, Console(file=file, force_terminal=True, width=120))
    reporter.update(METRICS, 0.25)
    assert file.getvalue().startswith("step 7   25%  loss 2.5000")
    reporter.close()
    assert file.getvalue().count("\n") == 1


def test_other_ranks_are_silent(capsys):
    reporter = Reporter(False)
    reporter.update(METRICS, 1.0)
    reporter.say("anything")
    assert capsys.readouterr().err == ""
