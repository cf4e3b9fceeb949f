"""Processes that torchrun or CrypTen's launcher has started together."""

import hashlib
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from securevfl.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    """One of several processes that were started together, one for each party."""

    rank: int
    """Position among them from 0 on; 0 is the primary."""

    size: int
    """Number of processes, 2 or more."""

    name: str
    """Name of this start of them all: no other has the same."""

    place: Path
    """Folder for exchanging identities; it may not exist yet."""

    def meeting(self, folder: Path) -> Path:
        """Return the file by which the processes find one another, in a folder that they share."""
        return folder / f"meeting-{self.name}"


def detect_torchrun() -> Started | None:
    """Return this process's place among those started together; None if it is the only one.

    It is read from CrypTen's variables ``RANK``, ``WORLD_SIZE`` and ``RENDEZVOUS``, or from
    torchrun's.

    Raises:
        ConfigError: If the processes are on several machines.
    """
    environment = os.environ
    by_file = {"RANK", "WORLD_SIZE", "RENDEZVOUS"} <= environment.keys()
    if not by_file and "TORCHELASTIC_RUN_ID" not in environment:
        return None
    rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    if size == 1:
        return None
    if by_file:
        _, _, path = environment["RENDEZVOUS"].partition("file://")
        if not path.startswith("/"):
            raise ConfigError(
                f"RENDEZVOUS: must be file:///PATH, of a file that is not there yet, got "
                f"{environment['RENDEZVOUS']!r}; on several machines run securevfl party"
            )
        name = hashlib.sha256(path.encode()).hexdigest()[:16]
        return Started(rank=rank, size=size, name=name, place=Path(f"{path}.parties"))
    if environment["LOCAL_WORLD_SIZE"] != environment["WORLD_SIZE"]:
        raise ConfigError(
            "torchrun: all parties of a program must be on one machine; use --nproc-per-node, "
            "not --nnodes, or run securevfl party on each machine"
        )
    # The starting agent's process, its port, and the number of restarts.
    name = (
        f"{os.getppid()}-{environment['MASTER_PORT']}-{environment['TORCHELASTIC_RESTART_COUNT']}"
    )
    place = Path(tempfile.gettempdir()) / f"securevfl-{os.getuid()}-{name}"
    return Started(rank=rank, size=size, name=name, place=place)
