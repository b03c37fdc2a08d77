# SPDX-License-Identifier: Apache-2.0
"""The progress display of all commands: a bar on a terminal, now and then a line in a log, on stderr in both."""

import io
import itertools
import re
import sys
import types

import pytest

from kda.cli import progress as module
from kda.cli.progress import progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def stderr(monkeypatch, where):
    """A stderr of that kind; in a log a second passes with each look at the clock."""
    if where == "terminal":
        pytest.importorskip("tqdm")
    else:
        seconds = itertools.count()
        monkeypatch.setattr(module, "time", types.SimpleNamespace(monotonic=lambda: float(next(seconds))))
    monkeypatch.setattr(sys, "stderr", Terminal() if where == "terminal" else io.StringIO())
    return sys.stderr


def test_on_a_terminal_one_line_is_drawn_again_and_again(monkeypatch, capsys):
    shown = stderr(monkeypatch, "terminal")
    with progress("decode", 12, "rounds") as bar:
        for _ in range(3):
            bar.update()
        bar.set_postfix_str("BT=8")
        drawn = shown.getvalue()
    assert drawn.count("\r") >= 2 and "\n" not in drawn
    assert re.search(r"decode: .* 3/12 \[\d\d:\d\d<\d\d:\d\d, .*, BT=8\]", drawn.split("\r")[-1]), drawn
    assert shown.getvalue().count("\n") == 1 and shown.getvalue().endswith("\n")
    assert capsys.readouterr().out == ""


def test_on_a_terminal_results_stand_above_the_bar(monkeypatch, capsys):
    shown = stderr(monkeypatch, "terminal")
    with progress("measured", 2, "rows") as bar:
        with bar.external_write_mode():
            print("a row")
            assert shown.getvalue().split("\r")[-1] == ""  # the terminal's line is free for it
        bar.update(2)
    assert capsys.readouterr().out == "a row\n"
    assert "2/2" in shown.getvalue() and "a row" not in shown.getvalue()


def test_a_total_may_be_known_late(monkeypatch):
    shown = stderr(monkeypatch, "terminal")
    with progress("compilation", unit="launches") as bar:
        bar.total = 7
        bar.update(2)
    assert "2/7" in shown.getvalue()


def test_a_log_has_a_line_now_and_then_and_one_at_the_end(monkeypatch, capsys):
    shown = stderr(monkeypatch, "log")
    with progress("decode", 1000, "candidates") as bar:
        for n in range(1000):
            bar.set_postfix_str(f"BT={n}", refresh=False)
            bar.update()
    lines = shown.getvalue().splitlines()
    assert 2 < len(lines) <= 1000 / module.EVERY + 1 and "\r" not in shown.getvalue()
    assert re.fullmatch(r"decode: 30/1,000 candidates, 0:00:3\d, 0:1\d:\d\d left, BT=29", lines[0]), lines[0]
    assert re.fullmatch(r"decode: 1,000/1,000 candidates, 0:1\d:\d\d, BT=999", lines[-1]), lines[-1]
    assert capsys.readouterr().out == ""


def test_a_log_tells_a_stage_without_steps_when_it_begins(monkeypatch):
    shown = stderr(monkeypatch, "log")
    with progress("warm-up"):
        assert shown.getvalue() == "warm-up ...\n"
    assert shown.getvalue().splitlines()[1:] == ["warm-up: 0:00:01"]


def test_a_terminal_without_tqdm_is_a_log(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with progress("decode", 2, "rounds") as bar, bar.external_write_mode():
        bar.update(2)
    assert sys.stderr.getvalue() == "decode: 2/2 rounds, 0:00:00\n"


@pytest.mark.parametrize("where", ["terminal", "log"])
@pytest.mark.parametrize("error", [None, KeyboardInterrupt, RuntimeError])
def test_what_ends_early_says_how_far_it_came_and_leaves_a_fresh_line(monkeypatch, where, error):
    shown = stderr(monkeypatch, where)
    try:
        with progress("decode", 12, "rounds") as bar:
            bar.update(3)
            if error:
                raise error
    except (KeyboardInterrupt, RuntimeError) as caught:
        assert type(caught) is error
    said = shown.getvalue()
    assert said.count("\n") == 1 and said.endswith("\n") and "3/12" in said.split("\r")[-1]


@pytest.mark.parametrize("where", ["terminal", "log"])
def test_of_nothing_to_do_nothing_is_shown(monkeypatch, where):
    shown = stderr(monkeypatch, where)
    with progress("measured", 0, "rows"):
        pass
    assert shown.getvalue() == ""
