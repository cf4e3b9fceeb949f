"""Interrupts: whatever comes of the first signal, the process ends as interrupted."""

import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from helpers.patience import PATIENCE_S

from securevfl.core import interrupts
from securevfl.core.errors import DataError
from securevfl.transport.message import failure_kind, public_reason

ROOT = Path(__file__).parents[3]
SIGNALS = [signal.SIGTERM, signal.SIGINT]


def ask_to_end(number: signal.Signals) -> None:
    """Send this process a signal, and make of it what numpy does."""
    try:
        os.kill(os.getpid(), number)
    except KeyboardInterrupt:
        raise DataError("can't be fitted: not a valid PEP 3118 buffer format string") from None


@pytest.mark.parametrize("number", SIGNALS)
def test_an_error_that_an_interrupt_became_is_reported_as_the_interrupt(
    number: signal.Signals,
) -> None:
    error = DataError("a table is wrong")
    before = signal.getsignal(number)
    told = []

    def fail() -> None:
        try:
            ask_to_end(number)
        except DataError:
            told.extend([failure_kind(error), public_reason(error)])
            raise

    with pytest.raises(KeyboardInterrupt), interrupts.watch_signals():
        fail()
    # The others are told the same.
    assert told == ["lost", "was interrupted by its operator"]
    assert signal.getsignal(number) is before
    assert failure_kind(error) == "failed"
    with pytest.raises(DataError), interrupts.watch_signals():
        raise error


def test_an_interrupt_that_was_swallowed_ends_the_next_wait() -> None:
    with interrupts.watch_signals():
        interrupts.check()
        with pytest.raises(DataError):
            ask_to_end(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()
    interrupts.check()


PROGRAM = """
import os, signal, sys
from securevfl.core import interrupts
number = int(sys.argv[1])
signal.signal(number, signal.SIG_IGN if "ignored" in sys.argv else signal.default_int_handler)
interrupts.note_signals()
for _ in range(2):
    try:
        os.kill(os.getpid(), number)
    except KeyboardInterrupt:
        print("once", flush=True)
print("twice", flush=True)
"""


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("ignored", [False, True])
def test_a_second_signal_ends_at_once_and_an_ignored_one_stays_ignored(
    number: signal.Signals, ignored: bool
) -> None:
    arguments = [str(int(number)), *(["ignored"] if ignored else [])]
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    found = (ended.returncode, ended.stdout)
    assert found == ((0, "twice\n") if ignored else (-number, "once\n")), ended.stderr


def test_an_error_made_of_an_interrupt_is_reported_as_one_where_no_signal_is_noted() -> None:
    """In a program of the user's, whose handlers are its own."""

    def fail() -> None:
        try:
            raise ValueError("not a valid PEP 3118 buffer format string") from KeyboardInterrupt()
        except ValueError as error:
            raise DataError("can't be fitted") from error

    with pytest.raises(KeyboardInterrupt), interrupts.unwrap_interrupts():
        fail()


LOADING = """
import os, signal, sys

class Interrupting:
    def find_spec(name, path, target=None):
        if name == "securevfl.cli.run":
            os.kill(os.getpid(), int(sys.argv.pop()))

sys.meta_path.insert(0, Interrupting)
from securevfl.__main__ import main
main()
"""


@pytest.mark.parametrize("number", SIGNALS)
def test_a_command_that_is_interrupted_while_it_loads_says_so_in_a_line(
    number: signal.Signals,
) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", LOADING, "--version", str(int(number))],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    found = (ended.returncode, ended.stdout, ended.stderr)
    assert found == (130, "", "securevfl: interrupted\n")
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"securevfl": "securevfl.__main__:main"}
