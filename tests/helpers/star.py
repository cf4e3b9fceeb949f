"""A small federation of threads for transport tests: identities, both ends, quick limits."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helpers.patience import PATIENCE_S

from securevfl.transport.connection import TransportLimits
from securevfl.transport.identity import Identity, provision
from securevfl.transport.star import PrimaryTransport, SecondaryTransport, new_session

RANKS: Mapping[str, int] = {"agency": 0, "rental": 1, "bank": 2}
QUICK = TransportLimits(silence_timeout_s=5.0, farewell_timeout_s=10.0, handshake_timeout_s=30.0)
# No heartbeat comes between the frames of a test that counts them.
CALM = TransportLimits(silence_timeout_s=60.0, farewell_timeout_s=1.0)
WAIT_S = PATIENCE_S


@dataclass(frozen=True, kw_only=True)
class Star:
    """Folders and pins of one federation."""

    folder: Path
    pinned: Mapping[str, str]
    ranks: Mapping[str, int]

    def identity(self, name: str) -> Identity:
        return Identity.load(self.folder / name, name)

    def primary(
        self, *, port: int = 0, session: bytes | None = None, **changes: Any
    ) -> PrimaryTransport:
        settings = {"limits": QUICK, **changes}
        pinned = settings.pop("pinned", self.pinned)
        identity = settings.pop("identity", None) or self.identity("agency")
        return PrimaryTransport(
            ("127.0.0.1", port), identity, pinned, session or new_session(), self.ranks, **settings
        )

    def secondary(self, name: str, address: tuple[str, int], **changes: Any) -> SecondaryTransport:
        settings = {"limits": QUICK, **changes}
        pinned = settings.pop("pinned", self.pinned)
        ranks = settings.pop("ranks", self.ranks)
        identity = settings.pop("identity", None) or self.identity(name)
        return SecondaryTransport(address, identity, pinned, ranks, **settings)

    @contextmanager
    def joined(
        self, **changes: Any
    ) -> Iterator[tuple[PrimaryTransport, dict[str, SecondaryTransport]]]:
        """All parties, connected, in this process; every end is closed afterwards."""
        primary = self.primary(**changes)
        ends: dict[str, SecondaryTransport] = {}
        try:
            address = primary.listen()
            for name in primary.secondaries:
                ends[name] = self.secondary(name, address, limits=changes.get("limits", QUICK))
                ends[name].connect(WAIT_S)
            primary.wait_for_parties(WAIT_S)
            yield primary, ends
        finally:
            together([end.close for end in (primary, *ends.values())])


def make_star(folder: Path, ranks: Mapping[str, int] = RANKS) -> Star:
    return Star(folder=folder, pinned=provision(list(ranks), folder, valid_days=1), ranks=ranks)


def together(calls: list[Callable[[], object]]) -> list[object]:
    """Run calls in threads at the same time; return their results or exceptions."""
    results: list[object] = [None] * len(calls)

    def run(index: int) -> None:
        try:
            results[index] = calls[index]()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "a call did not end"
    return results
