"""A party that sends other messages than the installed code: what it alters, and how it starts."""

import inspect
import json
import os
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Final

from securevfl.core.errors import ConfigError
from securevfl.launch.process import PartyCommand
from securevfl.transport.message import Message

_PROGRAM: Final = "securevfl.testing.lying_party"


@dataclass(frozen=True, kw_only=True)
class Lie:
    """Messages of one type that a party alters before it sends them."""

    party: str
    """The lying party."""

    message: str
    """Name of the message type in docs/messages.md, for example ``"GRADIENT"``."""

    alter: Callable[[Message], Message]
    """Function of a file, called with each message; returns the message to send."""

    def __post_init__(self) -> None:
        name = self.alter.__qualname__
        if not name.isidentifier() or inspect.getsourcefile(self.alter) is None:
            raise ConfigError(
                f"alter: must be a function at the top of a file, which the party's process reads; "
                f"got {name!r}"
            )

    def as_text(self) -> str:
        """Return message type, file and function as one argument of a program."""
        return json.dumps([self.message, inspect.getsourcefile(self.alter), self.alter.__name__])


def start_lying(command: PartyCommand, lies: Collection[Lie]) -> PartyCommand:
    """Return how to start a party that tells those of ``lies`` that are its own."""
    own = [lie.as_text() for lie in lies if lie.party == command.name]
    if not own:
        return command
    return replace(
        command,
        program=(sys.executable, "-m", _PROGRAM),
        fork_server=None,
        arguments=[str(len(own)), *own, *command.arguments],
        environment={**command.environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
