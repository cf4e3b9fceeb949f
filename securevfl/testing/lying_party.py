"""The process of a lying party, started by :func:`securevfl.testing.run_between_processes`.

``python -m securevfl.testing.lying_party COUNT LIE... party FED.toml ...``: what follows the lies
goes to the command line of securevfl.
"""

import json
import runpy
import sys
from collections import Counter
from collections.abc import Callable, Mapping

from securevfl.cli.main import main as run_command
from securevfl.transport import channels, framing, star
from securevfl.transport.message import Message


def main() -> None:
    """Run the party; it fails at the end if a message type that it alters was never sent."""
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
