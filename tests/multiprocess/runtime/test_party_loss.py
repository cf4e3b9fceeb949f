import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import numpy as np
import pytest
from helpers import star_party
from helpers.patience import PATIENCE_S, SOON_S
from helpers.star import make_star

from securevfl.core.errors import PartyFailedError, PartyLostError, PartyTimeoutError
from securevfl.launch.child import EVENTS_VARIABLE
from securevfl.launch.process import PartyCommand
from securevfl.launch.spawn import run_party_processes
from securevfl.transport.message import Message, StarKind

pytestmark = pytest.mark.multiprocess

WORDS = star_party.WORDS


@pytest.fixture(scope="module")
def star(tmp_path_factory):
    return make_star(tmp_path_factory.mktemp("star"))


@contextmanager
def running(star):
    """The primary here, two secondaries in processes of their own; all reaped at the end."""
    primary = star.primary(limits=star_party.LIMITS)
    _, port = primary.listen()
    processes = {
        name: subprocess.Popen(
            [sys.executable, star_party.__file__, str(star.folder), name, str(port)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in ("rental", "bank")
    }
    try:
        primary.wait_for_parties(PATIENCE_S)
        yield primary, processes
    finally:
        primary.close()
        for process in processes.values():
            process.kill()
            process.communicate()


def run_round(primary, number: int) -> int:
    plan = Message(kind=WORDS, round_number=number, tensors={"rows": np.arange(5)})
    primary.broadcast(primary.secondaries, plan)
    total = 0
    for message in primary.receive_each(
        primary.secondaries, WORDS, round_number=number, deadline_s=PATIENCE_S
    ):
        total += int(message.tensor("words", dtype="int64", shape=(star_party.COUNT,))[-1])
    return total


def run_rounds_for_ever(primary, *, after: int) -> None:
    number = after
    while True:
        number += 1
        run_round(primary, number)


def outcome(process) -> dict[str, str]:
    """What a secondary said at its end, and its exit code."""
    said, _ = process.communicate(timeout=SOON_S)
    return {**json.loads(said), "exit_code": process.returncode}


def test_processes_run_rounds_and_end_well(star):
    """Ten rounds between three processes; then everybody ends with exit code 0."""
    with running(star) as (primary, processes):
        assert [run_round(primary, number) for number in range(1, 11)] == [3] * 10
        primary.broadcast(primary.secondaries, Message(kind=StarKind.DONE))
        primary.close()
        for process in processes.values():
            assert outcome(process) == {"error": None, "exit_code": 0}


def lose(star, number, error, text):
    """Send ``number`` to one secondary between rounds; the next round must fail everywhere."""
    with running(star) as (primary, processes):
        assert run_round(primary, 1) == 3
        os.kill(processes["rental"].pid, number)
        started = time.monotonic()
        with pytest.raises(error, match=text):
            run_rounds_for_ever(primary, after=1)
        told = outcome(processes["bank"])
        assert time.monotonic() - started < SOON_S
        assert told["error"] == error.__name__
        assert text.strip("^") in told["text"]
        assert told["exit_code"] == 3


def test_a_killed_party_ends_the_federation_at_once(star):
    """SIGKILL: the primary and the other secondary name the dead party within moments."""
    lose(star, signal.SIGKILL, PartyLostError, "^rental: its connection")


def test_a_silent_party_ends_the_federation_within_the_limit(star):
    """SIGSTOP: the party's connection stays open, but its heartbeats cease."""
    lose(star, signal.SIGSTOP, PartyTimeoutError, "^rental: gave no sign of life for 4 s")


def test_a_busy_party_is_not_a_silent_one(star):
    """A party whose own thread computes for longer than the tolerated silence stays in."""
    with running(star) as (primary, _processes):
        until = time.monotonic() + 1.25 * star_party.LIMITS.silence_timeout_s
        rounds = 0
        while time.monotonic() < until:  # this process's thread holds the interpreter
            rounds += 1
        assert run_round(primary, 1) == 3
        assert rounds > 0


@pytest.mark.parametrize(
    ("number", "error"),
    [(signal.SIGKILL, "PartyLostError"), (signal.SIGSTOP, "PartyTimeoutError")],
)
def test_secondaries_notice_a_lost_primary(star, port, number, error):
    """A primary that dies or stops, without a farewell, is named by both secondaries."""
    processes = {
        name: subprocess.Popen(
            [sys.executable, star_party.__file__, str(star.folder), name, str(port)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, EVENTS_VARIABLE: "1"},
        )
        for name in star_party.RANKS
    }
    try:
        assert json.loads(processes["agency"].stdout.readline())["event"] == "round"
        processes["agency"].send_signal(number)
        for name in ("rental", "bank"):
            said, _ = processes[name].communicate(timeout=SOON_S)
            told = json.loads(said.splitlines()[-1])
            assert told["event"] == "failure"
            assert told["party"] == "agency"
            assert told["exit_code"] == 3
            assert f'"error": "{error}"' in said
            assert processes[name].returncode == 3
    finally:
        for process in processes.values():
            process.kill()
            process.communicate()


@pytest.mark.parametrize(
    ("number", "text", "grace_s"),
    [
        (signal.SIGKILL, "rental: was ended by SIGKILL", PATIENCE_S),
        # A stopped party does not end by itself: the whole grace passes.
        (signal.SIGSTOP, "rental: gave no sign of life for 4 s", 5.0),
    ],
)
def test_a_launched_federation_ends_with_the_lost_party(
    star, port, tmp_path, number, text, grace_s
):
    """The launcher names the party that was lost; soon nobody is left; logs are whole."""
    commands = [
        PartyCommand(
            name=name,
            arguments=[sys.executable, star_party.__file__, str(star.folder), name, str(port)],
            log_path=tmp_path / name,
        )
        for name in star_party.RANKS
    ]
    pids: dict[str, int] = {}
    lost_at = []

    def on_event(name, event):
        if event["event"] == "joined":
            pids[name] = event["pid"]
        if event["event"] == "round" and event["number"] == 3:
            lost_at.append(time.monotonic())
            os.kill(pids["rental"], number)

    with pytest.raises(PartyFailedError, match=f"^{text}"):
        run_party_processes(commands, deadline_s=PATIENCE_S, on_event=on_event, grace_s=grace_s)
    assert time.monotonic() - lost_at[0] < SOON_S
    for name in ("agency", "bank"):
        told = json.loads((tmp_path / name).read_text())
        assert told["text"].startswith("rental: ")
