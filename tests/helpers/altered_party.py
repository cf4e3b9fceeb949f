"""One party of a real run, altered: it is killed at one place of its code, or it lies.

Run as ``python altered_party.py ALTERATION party FED.toml ...``: what follows the alteration goes
to the ``securevfl`` command. ``kill:CachedRows.keep:2:before`` is SIGKILL as the second call of a
method begins, ``...:after`` as it returns; ``trusting`` is a primary that takes any secondary;
``longer`` is a secondary that shares ten times its rows, ``louder`` one that hides them in noise.
"""

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import torch

from securevfl.cli.main import main
from securevfl.federation.rounds.exchanges import CachedRows
from securevfl.federation.rounds.release import CachedRelease, SecondaryRelease
from securevfl.federation.session import handshake

KINDS = {kind.__name__: kind for kind in (CachedRelease, CachedRows)}


def kill_at(place: str) -> None:
    """Let this process be killed at a place, written as above."""
    name, call, when = place.split(":")
    kind, method = name.split(".")
    whole: Callable[..., Any] = getattr(KINDS[kind], method)
    calls = 0

    def killed(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        result = whole(*args, **kwargs) if calls < int(call) or when == "after" else None
        if calls == int(call):
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(KINDS[kind], method, killed)


def trust(*_args: Any, **_kwargs: Any) -> None:
    """Refuse nobody."""


def share_more(alteration: str) -> None:
    """Let a secondary share ten times its rows, as they are or as noise."""
    parts = SecondaryRelease._parts

    def lied(release: SecondaryRelease, clipped: torch.Tensor) -> Any:
        units, noise = parts(release, clipped)
        if alteration == "longer":
            return units * 10, noise
        return units, 9 * units if noise is None else noise + 9 * units

    setattr(SecondaryRelease, "_parts", lied)  # noqa: B010 - typed otherwise


if __name__ == "__main__":
    alteration = sys.argv.pop(1)
    if alteration == "trusting":
        handshake.require_one_run = trust
    elif alteration in ("longer", "louder"):
        share_more(alteration)
    elif alteration != "none":
        kill_at(alteration.removeprefix("kill:"))
    main()
