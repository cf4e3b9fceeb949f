"""A run that loses its parties again and again: no session leaves an object or a descriptor."""

import gc
import os
import socket
import sys
import time
import tomllib
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.patience import SOON_S
from helpers.star import together

from securevfl import read_federation
from securevfl.core.progress import RoundDone, SessionLost
from securevfl.federation.rounds.network_primary import NetworkPrimary
from securevfl.federation.rounds.secondary import Secondary
from securevfl.federation.session.party_files import PartyFiles
from securevfl.ledger.ledger import Ledger
from securevfl.runtime.launching import run_party
from securevfl.runtime.run_folder import RunFigures
from securevfl.runtime.run_options import PartyJob
from securevfl.testing import save_federation, write_federation
from securevfl.transport.identity import provision
from securevfl.transport.star import PrimaryTransport, SecondaryTransport

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="descriptors are looked up in /proc"
)

LOSSES = 3
OF_A_SESSION = (
    PartyFiles,
    Ledger,
    PrimaryTransport,
    SecondaryTransport,
    NetworkPrimary,
    Secondary,
)


def federation(folder: Path) -> tuple[Path, int]:
    """Write one whose parties wait for one another, and return where the primary listens."""
    path = write_federation(
        folder,
        rows=40,
        training={"epochs": LOSSES + 1, "batch_size": 16, "patience": 100},
        runtime={"on_loss": "wait", "wait_s": 60.0, "most_losses": 100},
    )
    source = tomllib.loads(path.read_text())
    pinned = provision([party["name"] for party in source["party"]], folder / "ids")
    for party in source["party"]:
        party["identity"] = pinned[party["name"]]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    source["party"][0]["address"] = f"127.0.0.1:{port}"
    return save_federation(folder, source), port


def descriptors() -> list[Path]:
    return list(Path("/proc/self/fd").iterdir())


def cut_off(port: int) -> None:
    """Shut down every connection of the primary, as a network does."""
    for one in descriptors():
        try:
            if not str(one.readlink()).startswith("socket:"):
                continue
            other = socket.socket(fileno=os.dup(int(one.name)))
        except OSError:
            continue  # it was closed meanwhile
        with other, suppress(OSError, IndexError):
            if other.getsockname()[1] == port and other.getpeername():
                other.shutdown(socket.SHUT_RDWR)


def remember(kind: type[Any], alive: "weakref.WeakSet[Any]") -> Callable[..., None]:
    """Return the kind's constructor, which also notes what it makes."""
    whole: Callable[..., None] = kind.__init__

    def made(one: Any, *args: Any, **named: Any) -> None:
        alive.add(one)
        whole(one, *args, **named)

    return made


def test_a_session_leaves_no_object_and_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, port = federation(tmp_path)
    config = read_federation(path)
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    for kind in OF_A_SESSION:
        monkeypatch.setattr(kind, "__init__", remember(kind, alive))
    cut_in: set[int] = set()
    losses: list[SessionLost] = []

    def observe(event: Any) -> None:
        if isinstance(event, RoundDone) and event.epoch not in cut_in and len(cut_in) < LOSSES:
            cut_in.add(event.epoch)
            cut_off(port)
        if isinstance(event, SessionLost):
            losses.append(event)

    def party(name: str) -> Any:
        job = PartyJob(
            config=config,
            name=name,
            run_folder=tmp_path / "run",
            identity_folder=tmp_path / "ids" / name,
            data_root=tmp_path,
            device=torch.device("cpu"),
            resume=False,
        )
        return run_party(replace(job, observe=observe) if name == "agency" else job)

    before = len(descriptors())
    outcomes = together([lambda name=one.name: party(name) for one in config.parties])
    assert isinstance(outcomes[0], RunFigures), outcomes
    del outcomes
    assert len(losses) == LOSSES
    deadline = time.monotonic() + SOON_S
    while gc.collect() is not None and alive and time.monotonic() < deadline:
        time.sleep(0.05)  # threads that are ending hold what they have called
    assert [type(one).__name__ for one in alive] == []
    assert len(descriptors()) <= before
