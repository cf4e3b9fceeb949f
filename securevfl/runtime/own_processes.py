"""A party as several processes of its own machine: one is the party, the others compute for it."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from securevfl.config.federation import FederationConfig
from securevfl.core import files
from securevfl.core.errors import ConfigError
from securevfl.federation.rounds.worker_group import WorkerGroup
from securevfl.launch.torchrun import Started, started

_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


@contextlib.contextmanager
def own_processes(folder: Path | None, *, device: torch.device) -> Iterator[WorkerGroup | None]:
    """Meet the party's other processes; None where it is one, as nearly always.

    What they hand to one another (weights, records, gradients) stays on the loopback interface, and
    they find one another by a file that only this user can read.

    Args:
        folder: The run's folder, the same for all; None if none was given.
        device: Where the party computes; each process takes a GPU of its own.

    Raises:
        ConfigError: If there are several, and they have no folder, or are on several machines.
    """
    here = started()
    if here is None:
        yield None
        return
    if folder is None:
        raise ConfigError("torchrun: needs --out RUN, so that all processes have the same folder")
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    files.require_writable_folder(folder)
    os.environ["GLOO_SOCKET_IFNAME"] = _LOOPBACK
    with _met(here, folder) as group:
        yield group


def help_party(group: WorkerGroup, *, device: torch.device) -> None:
    """Compute for the party until it ends."""
    from securevfl.federation.rounds.party_workers import WorkerProcess

    # Nothing of a helper is worth a farewell: it must go at once, whatever it waits for.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    WorkerProcess(group, device=device).work()


def leave_at_once() -> None:
    """End a process of several that has done its work, without taking Python and gloo down first.

    Under load one in ten such ends was an abort within torch, after everything had been written;
    torchrun then calls the whole party failed. Where the party is one process nothing happens.
    """
    if started() is None:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def require_network(config: FederationConfig, name: str, *, serves: bool) -> None:
    """Refuse several processes for a party that trains no network.

    Args:
        config: The federation file.
        name: The party.
        serves: Whether it answers for a kept model.

    Raises:
        ConfigError: If torchrun has started several, and it is such a party in this federation.
    """
    if started() is None:
        return
    party, frozen = config.party(name), config.privacy.encoder == "frozen"
    if serves:
        why = "with --serve it answers for the one that it has kept"
    elif party.is_helper:
        why = f"a {party.role} computes nothing"
    elif config.family.assisted:
        why = "assisted boosting fits trees, which use all cores by themselves"
    elif party.role == "secondary" and frozen:
        why = 'an encoder that is "frozen" (privacy.encoder) is applied to each row once'
    elif party.role == "primary" and config.top is not None:
        why = f'model.top = "{config.top.name}" is fitted in one go'
    else:
        return
    raise ConfigError(f"torchrun: {name!r} trains no network: {why}; run it as one process")


@contextlib.contextmanager
def _met(here: Started, folder: Path) -> Iterator[WorkerGroup]:
    from securevfl.federation.rounds.party_workers import end

    meeting = here.meeting(folder)
    group = WorkerGroup(meeting, rank=here.rank, size=here.size)
    try:
        yield group
    finally:
        # Where the others are gone already, there is nobody to send home.
        with contextlib.suppress(RuntimeError):
            if group.rank == 0:
                end(group)
        meeting.unlink(missing_ok=True)
