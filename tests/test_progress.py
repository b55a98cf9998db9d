"""Progress: a bar in a terminal, lines in a log file."""

from __future__ import annotations

import re
import sys

import pytest

from h2o_flexgen.engine.batch import Sequence
from h2o_flexgen.engine.observer import ProgressBar
from h2o_flexgen.engine.params import SamplingParams
from h2o_flexgen.utils import progress
from h2o_flexgen.utils.progress import bar


@pytest.fixture
def clock(monkeypatch):
    """clock(seconds) moves the time on."""
    now = [0.0]
    monkeypatch.setattr("h2o_flexgen.utils.progress.time.monotonic", lambda: now[0])
    return lambda seconds: now.__setitem__(0, now[0] + seconds)


def test_a_line_for_every_tenth_and_for_every_minute(clock, capsys):
    with bar(desc="generating", total=1000, unit="tokens", leave=True) as b:
        for n, seconds in ((50, 30), (10, 31), (100, 1), (0, 4), (840, 10)):
            clock(seconds)
            b.update(n)
    assert capsys.readouterr().err.splitlines() == [
        "generating: 60 of 1000 tokens, 0.9836 tokens/s, 15:55 left",  # a minute
        "generating: 160 of 1000 tokens, 2.424 tokens/s, 05:46 left",  # a tenth, some seconds after the last line
        "generating: 1000 of 1000 tokens, 13.16 tokens/s",  # and the last line once
    ]


def test_a_quick_task_prints_only_its_result(clock, capsys):
    for leave in (False, True):
        with bar(desc="loading weights", total=3_000_000_000, unit="B", leave=leave) as b:
            clock(1)
            b.update(1_500_000_000)
            b.update(1_500_000_000)
    assert capsys.readouterr().err == "loading weights: 3.00G of 3.00G B, 3.00G B/s\n"


def test_a_loop(clock, capsys):
    for _ in bar(range(3), "measuring", unit="passes"):
        clock(10)
    assert capsys.readouterr().err.splitlines() == [f"measuring: {n} of 3 passes" for n in (1, 2, 3)]


def test_no_line_ends_in_a_carriage_return_and_none_is_shown_unasked(clock, capsys):
    for show in (True, False):
        with bar(desc="x", total=10, show=show) as b:
            clock(100)
            b.update(5)
        out, err = capsys.readouterr()
        assert "\r" not in err and (err == "") == (not show) and out == ""


def test_in_a_terminal_it_is_a_bar(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with bar(desc="generating", total=10, unit="tokens", leave=True) as b:
        b.update(10)
    err = capsys.readouterr().err
    assert "\r" in err and "10/10" in err and "tokens/s" in err


def test_a_job_shows_its_pass_its_rows_and_the_layer_of_prompts(monkeypatch, capsys):
    """And the layer, if the pass has a prompt, since it may take minutes."""
    monkeypatch.setattr(progress, "LINE_SECONDS", 0)
    sequences = [Sequence(n, [1, 2], SamplingParams(max_tokens=length)) for n, length in enumerate((5, 3))]
    job = ProgressBar(total=8, rows=2, layers=5, show=True)
    job.on_begin()
    job.on_pass(sequences)
    job.on_layer(2)
    for s in sequences:
        s.append(7, -1.0)
    job.on_layer(4)
    job.on_pass(sequences)
    for s in sequences:
        s.append(8, -1.0)
    job.on_layer(4)
    job.on_finished(sequences[:1])  # it has stopped early
    job.on_pass(sequences[1:])
    sequences[1].append(9, -1.0)
    job.on_layer(4)
    job.close()
    lines = capsys.readouterr().err.splitlines()
    assert [re.sub(r", \S+ tokens/s(, \S+ left)?| \(\S+/s\)", "", line) for line in lines] == [
        "generating: 0 of 8 tokens, 0 of 2 rows done, pass 1 of 2 rows, layer 3/5",
        "generating: 2 of 8 tokens, 0 of 2 rows done, pass 1 of 2 rows, layer 5/5",
        "generating: 4 of 8 tokens, 0 of 2 rows done, pass 2 of 2 rows",
        "generating: 4 of 5 tokens, 0 of 2 rows done, pass 2 of 2 rows",
        "generating: 5 of 5 tokens, 1 of 2 rows done, pass 3 of 1 rows",
    ]
