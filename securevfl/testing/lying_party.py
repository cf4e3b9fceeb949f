"""A party that sends other messages than the installed code: what it alters, and its process.

``python -m securevfl.testing.lying_party COUNT LIE... party FED.toml ...``: what follows the lies
goes to the command line of securevfl.
"""

import inspect
import json
import os
import runpy
import sys
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Final

from securevfl.core.errors import ConfigError
from securevfl.launch.process import PartyCommand
from securevfl.transport import channels, framing, star
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


def main() -> None:
    """Run the party; it fails at the end if a message type that it alters was never sent."""
    # Loaded in the party's process alone: tests that start it need no command line.
    from securevfl.cli.main import main as run_command

    count = int(sys.argv[1])
    lies, sys.argv[1:] = sys.argv[2 : 2 + count], sys.argv[2 + count :]
    altered = {}
    for message, file, function in map(json.loads, lies):
        altered[message] = runpy.run_path(file)[function]
    sent = alter_sent(altered)
    try:
        run_command()
    except SystemExit as end:
        if end.code:
            raise
    unsent = [message for message in altered if not sent[message]]
    if unsent:
        sys.exit(f"{', '.join(unsent)}: this party sends no message of that type")


def alter_sent(altered: Mapping[str, Callable[[Message], Message]]) -> Counter[str]:
    """Alter messages that this process sends, sealed ones and passed on ones too.

    Args:
        altered: A function of a message, by the name of its type.

    Returns:
        How many messages were altered so far, by type; it counts on.
    """
    sent = Counter[str]()

    def encode(message: Message) -> framing.EncodedMessage:
        name = message.kind.name
        if name in altered:
            sent[name] += 1
            message = altered[name](message)
        return framing.encode(message)

    for module in (star, channels):
        vars(module)["encode"] = encode
    return sent


if __name__ == "__main__":
    main()
