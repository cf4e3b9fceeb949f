"""One party of a real run, altered: killed at one place of its code, lying, or listening.

Run as ``python altered_party.py ALTERATION party FED.toml ...``: what follows the alteration goes
to the ``securevfl`` command. ``kill:CachedRows.keep:2:before`` is SIGKILL as the second call of a
method begins, ``...:after`` as it returns; ``trusting`` is a primary that takes any secondary;
``longer`` is a secondary that adds 20 to the length of each row, once clipped and noised.
``lists:FILE`` writes a line for each message that it receives, without the values of arrays.
"""

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from securevfl.cli.main import main
from securevfl.federation.rounds.kept_rounds import CachedRows
from securevfl.federation.rounds.release import CachedRelease, SecondaryRelease
from securevfl.federation.session import handshake
from securevfl.transport.framing import FrameReader
from securevfl.transport.message import Message, StarKind

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


def list_received(path: str) -> None:
    """Write what is received to a file: sender, kind, round, figures, and arrays' types."""
    assemble = FrameReader._assemble

    def listed(reader: FrameReader, *parts: Any) -> Message:
        message = assemble(reader, *parts)
        if message.kind is not StarKind.PING:
            arrays = {name: [str(one.dtype), one.shape] for name, one in message.tensors.items()}
            line = [message.sender, message.kind.name, message.round_number, message.meta, arrays]
            with Path(path).open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        return message

    setattr(FrameReader, "_assemble", listed)  # noqa: B010 - typed otherwise


def send_longer() -> None:
    """Let a secondary add 20 to the length of each row, once it is clipped and noised."""
    honest = SecondaryRelease.units

    def lied(release: SecondaryRelease, clipped: torch.Tensor) -> torch.Tensor:
        units = honest(release, clipped)
        numbers = units[0].numel()
        return units + int(20 / release.aggregation.cut.ring.granularity / numbers**0.5)

    setattr(SecondaryRelease, "units", lied)  # noqa: B010 - typed otherwise


if __name__ == "__main__":
    alteration = sys.argv.pop(1)
    if alteration == "trusting":
        handshake.require_one_run = trust
    elif alteration == "longer":
        send_longer()
    elif alteration.startswith("lists:"):
        list_received(alteration.removeprefix("lists:"))
    elif alteration != "none":
        kill_at(alteration.removeprefix("kill:"))
    main()
