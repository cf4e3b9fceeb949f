"""Lines between parties that are threads of one process, for protocols without a network."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from queue import Empty, Queue
from typing import Any

from helpers.patience import PATIENCE_S

from securevfl.core.progress import Observer, ProgressEvent, unheard
from securevfl.data.tables import KeyTable
from securevfl.lab.audit.audit_party import Wires as Unheard
from securevfl.linkage.protections.protection import DataParty, LinkageHelper, Take, take_nothing
from securevfl.linkage.spec import LinkageSecret, LinkSpec
from securevfl.linkage.stage.link_cache import LinkCache
from securevfl.linkage.stage.linkage_parts import protection_of
from securevfl.transport.channels import Channels
from securevfl.transport.message import Message

SECRET = LinkageSecret(b"k" * 32)
SESSION = b"s" * 16
_DEADLINE_S = PATIENCE_S


class Wires(Unheard):
    """All messages on their way; what travelled stays to be looked at."""

    def __init__(self) -> None:
        super().__init__(_DEADLINE_S)
        self.travelled: list[tuple[str, str, Message]] = []

    def put(self, sender: str, receiver: str, message: Message) -> None:
        tensors = {key: value.copy() for key, value in message.tensors.items()}
        self.travelled.append((sender, receiver, replace(message, tensors=tensors, sender=sender)))
        super().put(sender, receiver, message)


def run_all(parties: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """Run every party in a thread of its own; return what each returned or raised."""
    results: dict[str, Any] = {}
    ended: Queue[bool] = Queue()

    def life(name: str, run: Callable[[], Any]) -> None:
        try:
            results[name] = run()
        except Exception as error:
            results[name] = error
        ended.put(isinstance(results[name], Exception))

    for item in parties.items():
        threading.Thread(target=life, args=item, daemon=True).start()
    failed = False
    for _ in parties:
        # A party whose peer has failed waits in vain; its result is not looked at then.
        try:
            failed |= ended.get(timeout=1 if failed else _DEADLINE_S)
        except Empty:
            break
    return results


def data_party(
    spec: LinkSpec,
    keys: KeyTable,
    lines: Channels,
    *,
    rows: int = 60,
    secret: LinkageSecret = SECRET,
    folder: Path | None = None,
    observe: Observer = lambda _event: None,
) -> DataParty:
    """Return a party that links by these lines."""
    return DataParty(
        spec=spec,
        keys=keys,
        rows=rows,
        channels=lines,
        session=SESSION,
        secret=secret if protection_of(spec).needs_secret else None,
        cache=LinkCache(folder),
        observe=observe,
    )


def link_as_threads(
    spec: LinkSpec,
    keys: Mapping[str, KeyTable],
    *,
    told: list[ProgressEvent] | None = None,
    secrets: Mapping[str, LinkageSecret] | None = None,
    cache: Path | None = None,
    take: Take = take_nothing,
) -> tuple[dict[str, Any], Wires]:
    """Run every party's part; return what each has in the end, and what travelled."""
    wires, hides, rows = Wires(), protection_of(spec), keys[spec.roles.primary].num_rows

    def folder(name: str) -> Path | None:
        return None if cache is None else cache / name

    def party(name: str) -> DataParty:
        return data_party(
            spec,
            keys[name],
            wires.of(name),
            rows=rows,
            secret=(secrets or {}).get(name, SECRET),
            folder=folder(name),
            observe=unheard if told is None else told.append,
        )

    lives: dict[str, Any] = {
        spec.roles.primary: lambda: hides.link_as_primary(party(spec.roles.primary))
    }
    for name in spec.roles.present:
        lives[name] = lambda name=name: hides.link_as_secondary(party(name))
    for role in hides.helpers:
        name = spec.roles.helpers[role]
        helper = LinkageHelper(
            spec=spec, rows=rows, channels=wires.of(name), cache=LinkCache(folder(name)), take=take
        )
        lives[name] = lambda role=role, helper=helper: hides.help_to_link(role, helper)
    return run_all(lives), wires
