"""Several processes of one party, as torchrun starts them."""

import os
from dataclasses import dataclass
from pathlib import Path

from securevfl.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    """One of several processes that torchrun has started together."""

    rank: int
    """From 0 on; 0 is the party."""

    size: int
    """How many there are, 2 or more."""

    name: str
    """Of this start of them all: no other has the same."""

    def meeting(self, folder: Path) -> Path:
        """Return the file by which they find one another, in a folder of all of them."""
        return folder / f"meeting-{self.name}"


def started() -> Started | None:
    """Return which of torchrun's processes this is; None where it is the only one.

    Raises:
        ConfigError: If they are on several machines.
    """
    environment = os.environ
    if "TORCHELASTIC_RUN_ID" not in environment or int(environment["WORLD_SIZE"]) == 1:
        return None
    if environment["LOCAL_WORLD_SIZE"] != environment["WORLD_SIZE"]:
        raise ConfigError(
            "torchrun: a party's processes must be on one machine, since its records travel "
            "between them as they are; leave --nnodes out, and use --nproc-per-node"
        )
    # The agent that has started them all, where it listens, and how often it has started them.
    name = (
        f"{os.getppid()}-{environment['MASTER_PORT']}-{environment['TORCHELASTIC_RESTART_COUNT']}"
    )
    return Started(rank=int(environment["RANK"]), size=int(environment["WORLD_SIZE"]), name=name)


def require_one_process(command: str) -> None:
    """Refuse a command that torchrun has started several times.

    Raises:
        ConfigError: If it has.
    """
    if started() is not None:
        raise ConfigError(
            f"torchrun: securevfl {command} is one process; only securevfl party can be several"
        )
