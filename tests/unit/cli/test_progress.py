"""What a run shows of its progress where stderr is no terminal."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from securevfl.core import shown_progress as progress
from securevfl.core.progress import CiphertextsMade, EpochDone, LinksMade, SpendingPlanned
from securevfl.core.shown_progress import RunProgress, bars, spending_in_words
from securevfl.desk.printing import say


def test_long_steps_of_linking_tell_the_time_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the step that is on, and of nothing else; without an estimate there is no line."""
    monkeypatch.setattr(progress, "_QUIET_SECONDS", 0.0)
    with RunProgress(metric="rmse") as show:
        show(CiphertextsMade(name="lab", done=0, of=90, seconds_left=3700.4))
        show(LinksMade(name="bank", done=0, of=60))
        show(LinksMade(name="bank", done=30, of=60, seconds_left=61.0))
        show(EpochDone(epoch=1, epochs=2, loss=0.5, train=0.5, validation=0.25, seconds=1.0))
    assert capsys.readouterr().err.splitlines() == [
        "lab prepares ciphertexts 0/90: 1:01:40 left",
        "linking bank 30/60: 0:01:01 left",
        "epoch 1/2: loss 0.5000  validation rmse 0.2500",
    ]


def test_what_a_run_may_spend_is_one_line() -> None:
    """With what was spent on the table before, and the limit of its owner; None is no bound."""
    fresh = SpendingPlanned(
        party="bank", unit="entity", delta=1e-5, runs_before=0, epsilon=8.0, total_before=0.0
    )
    third = replace(fresh, runs_before=2, total_before=3.2, total=8.8, limit=10.0, limit_delta=1e-6)
    bare = replace(fresh, runs_before=1, epsilon=None, total_before=None, total=None)

    start = "cost to bank: epsilon 8, delta 1e-05 (entity); "
    assert spending_in_words(fresh) == start + "first run; no limit"
    assert spending_in_words(third) == start + "total of 3 runs 8.8; limit 10 at delta 1e-06"
    assert spending_in_words(bare) == (
        "cost to bank: epsilon without bound; total of 2 runs without bound; no limit"
    )


def test_bars_are_cut_in_no_word() -> None:
    """On a narrow terminal, name and figures take more lines."""
    console = Console(file=io.StringIO(), width=60, force_terminal=True)
    figures = "loss 0.4979  validation auc 0.8123  epsilon 8"
    with bars(console, name_width=22) as shown:
        shown.add_task("training the primary alone", total=5, figures=figures)
        table = shown.make_tasks_table(shown.tasks)
    console = Console(file=io.StringIO(), width=60)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    words = console.file.getvalue().split()
    assert {"training", "primary", "alone", *figures.split()} <= {*words}


def test_lines_are_wrapped_at_words_and_paths_stay_whole() -> None:
    path = "folder/" * 15
    text = "word " * 40 + path
    for terminal in (True, False):
        file = io.StringIO()
        say(Console(file=file, width=60, force_terminal=terminal), "note: ", text)
        lines = file.getvalue().splitlines()
        assert len(lines) > 1
        assert all("word" in line and "wor\n" not in line for line in lines[:3])
        if not terminal:
            assert lines[-1].strip() == path
            assert all(len(line) <= 80 for line in lines[:-1])
