"""One party as a process of its own: runs or serves rounds until the end.

Run as ``python star_party.py FOLDER NAME PORT``. What ends it goes to its standard output, as
one line of JSON; its exit code is that of the error.
"""

import itertools
import json
import os
import sys
from pathlib import Path

import numpy as np

from securevfl import SecureVflError
from securevfl.launch import child
from securevfl.transport.connection import TransportLimits
from securevfl.transport.identity import Identity, public_text
from securevfl.transport.message import Message, StarKind
from securevfl.transport.star import PrimaryTransport, SecondaryTransport, new_session

RANKS = {"agency": 0, "rental": 1, "bank": 2}
LIMITS = TransportLimits(silence_timeout_s=4.0, farewell_timeout_s=1.0)
WAIT_S = 300.0
COUNT = 200_000
# The star hands on whatever it does not say itself; kinds of a round would bring torch along, which
# takes every process seconds to load.
WORDS = StarKind.SEALED


def serve(transport: SecondaryTransport) -> None:
    while True:
        message = transport.receive((WORDS, StarKind.DONE), round_number=None, deadline_s=WAIT_S)
        if message.kind is StarKind.DONE:
            return
        share = np.full(COUNT, RANKS[transport.name], dtype=np.int64)
        transport.send(
            Message(
                kind=WORDS,
                round_number=message.round_number,
                tensors={"words": share},
            )
        )


def tell(**fields: str | None) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()  # events follow, straight to the pipe


def lead(transport: PrimaryTransport) -> None:
    """Run rounds until one fails."""
    transport.listen()
    transport.wait_for_parties(WAIT_S)
    for number in itertools.count(1):
        transport.broadcast(transport.secondaries, Message(kind=WORDS, round_number=number))
        for _ in transport.receive_each(
            transport.secondaries, WORDS, round_number=number, deadline_s=WAIT_S
        ):
            pass
        child.report("round", number=number)


def main(folder: Path, name: str, port: int) -> int:
    child.end_with_launcher()
    identity = Identity.load(folder / name, name)
    pinned = {peer: public_text(certificate) for peer, certificate in identity.trusted.items()}
    address = ("127.0.0.1", port)
    try:
        if RANKS[name] == 0:
            with PrimaryTransport(
                address, identity, pinned, new_session(), RANKS, limits=LIMITS
            ) as primary:
                lead(primary)
        with SecondaryTransport(address, identity, pinned, RANKS, limits=LIMITS) as secondary:
            secondary.connect(WAIT_S)
            child.report("joined", pid=os.getpid())
            serve(secondary)
    except SecureVflError as error:
        tell(error=type(error).__name__, text=str(error))
        origin = getattr(error, "party", None) or name
        child.report_failure(party=origin, reason=str(error), exit_code=error.exit_code)
        return error.exit_code
    tell(error=None)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
