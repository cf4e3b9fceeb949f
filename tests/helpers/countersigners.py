"""Parties that countersign one another's ledgers, without a network between them."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from securevfl.ledger.chain import ChainedFile
from securevfl.ledger.countersigning import (
    Countersigner,
    Heads,
    Memories,
    Memory,
    Occasion,
    OtherLedgers,
    Remembered,
    SignedHead,
)
from securevfl.transport.identity import Identity

NAMES = ("agency", "bank", "rental")
OCCASION = Occasion(federation="test", digest="d" * 64, run="r" * 32)
SESSION = b"s" * 16


def remembered(entries: Iterable[Mapping[str, Any]], federation: str) -> dict[str, Remembered]:
    """Return what a ledger's lines remember of each other party of a federation."""
    others = OtherLedgers()
    for entry in entries:
        others.take(entry)
    return others.of(federation)


class Table:
    """Ledgers of parties in one folder, which outlive their sessions, and who the parties are."""

    def __init__(self, folder: Path, names: tuple[str, ...] = NAMES) -> None:
        self.folder = folder
        self.people = {name: Identity.create(name, valid_days=1) for name in names}
        self.pinned = {name: one.public_text for name, one in self.people.items()}

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.jsonl"

    def open(self, **changes: Any) -> "Session":
        """Let everybody open their ledger for a session."""
        occasion = changes.get("occasion", OCCASION)
        ledgers = {name: ChainedFile(self.path(name)) for name in self.people}
        signers = {
            name: Countersigner(
                ledgers[name],
                self.people[name],
                self.pinned,
                occasion,
                session=SESSION,
                known=remembered(ledgers[name].entries, occasion.federation),
            )
            for name in self.people
        }
        return Session(ledgers, signers)


class Session:
    """Parties in one session."""

    def __init__(
        self, ledgers: Mapping[str, ChainedFile], signers: Mapping[str, Countersigner]
    ) -> None:
        self.ledgers = ledgers
        self.signers = signers

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        for ledger in self.ledgers.values():
            ledger.close()

    def charge(self, count: int = 1, *names: str) -> None:
        """Let parties write lines of their own."""
        for name in names or self.ledgers:
            for number in range(count):
                self.ledgers[name].append({"kind": "charge", "number": number})

    def memories(self) -> dict[str, Memory]:
        """Return what all parties remember, as it travels."""
        parties = tuple(sorted(self.signers))
        told = {name: signer.memory() for name, signer in self.signers.items()}
        message = Memories(parties=parties, memories=told).to_message()
        return dict(Memories.from_message(message, senders=parties, parties=parties).memories)

    def heads(self, point: str) -> dict[str, SignedHead]:
        """Return all parties' heads, as they travel."""
        stated = {name: signer.state(point) for name, signer in self.signers.items()}
        message = Heads(heads=stated).to_message()
        return dict(Heads.from_message(message, senders=list(stated)).heads)

    def start(self) -> None:
        """Open the meeting, and let everybody check everybody's head."""
        memories = self.memories()
        for signer in self.signers.values():
            signer.open(memories)
        self.meet("start")

    def meet(self, point: str) -> None:
        """Let everybody check everybody's head."""
        heads = self.heads(point)
        for signer in self.signers.values():
            signer.keep(point, heads)


def rewrite(path: Path) -> None:
    """Write a ledger anew, as its owner can: other figures, and a chain that is whole."""
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    path.unlink()
    forged = ChainedFile(path)
    for entry in entries:
        del entry["previous"], entry["salt"]
        forged.append({**entry, "epsilon": 0.0} if entry["kind"] == "charge" else entry)
    forged.close()
