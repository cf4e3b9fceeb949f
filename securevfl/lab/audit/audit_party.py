"""One party's process of an audit: ``python -m securevfl.lab.audit.audit_party FOLDER NAME``."""

import contextlib
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from securevfl.core.conventions import PRIMARY_RANK
from securevfl.core.errors import EncodingRangeError, PrivacyError, ProtocolError, SecureVflError
from securevfl.federation.messages import RoundKind
from securevfl.federation.over_star import PeersOverStar, serve, sum_from_secondary
from securevfl.federation.rounds.exchanges import RoundExchange
from securevfl.federation.rounds.secondary import Secondary, save_nothing
from securevfl.federation.run_plan import RoundCounter
from securevfl.federation.session import handshake
from securevfl.lab.audit.audit_worlds import AuditStage
from securevfl.lab.audit.settings import RELEASES, ROUNDS_EVENT, AuditSettings
from securevfl.launch.child import end_with_launcher, report, report_failure
from securevfl.mpc.session_key import SessionKey
from securevfl.transport.connection import TransportLimits
from securevfl.transport.identity import Identity
from securevfl.transport.message import Done
from securevfl.transport.star import PrimaryTransport, SecondaryTransport, new_session


def run_audit_party(folder: Path, name: str) -> None:
    """Take part in every round of the job in ``folder``; the primary saves the averages.

    Raises:
        SecureVflError: If this or another party fails.

    Reveals:
        To the primary: averages of made-up rows, noised. To secondaries: public keys.
    """
    torch.set_num_threads(1)
    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    settings = AuditSettings(**job["settings"])
    stages = [AuditStage(settings, release) for release in RELEASES]
    identity = Identity.load(folder / name, name)
    rank = settings.names.index(name)
    address = ("127.0.0.1", int(job["port"]))
    ranks = {party: number for number, party in enumerate(settings.names)}
    limits = TransportLimits(silence_timeout_s=settings.timeout_s)
    pinned = job["pinned"]
    if rank == PRIMARY_RANK:
        primary = PrimaryTransport(address, identity, pinned, new_session(), ranks, limits=limits)
        with primary:
            _reveal(primary, stages, folder)
    else:
        secondary = SecondaryTransport(address, identity, pinned, ranks, limits=limits)
        with secondary:
            _contribute(secondary, stages, folder, identity=identity, rank=rank, pinned=pinned)


def _reveal(transport: PrimaryTransport, stages: Sequence[AuditStage], folder: Path) -> None:
    config, deadline_s = stages[0].config, stages[0].settings.timeout_s
    names = {rank: name for name, rank in config.ranks.items() if rank != PRIMARY_RANK}
    transport.listen()
    transport.wait_for_parties(deadline_s)
    hellos = {}
    for name in names.values():
        message = transport.receive(name, RoundKind.HELLO, round_number=0, deadline_s=deadline_s)
        hellos[name] = handshake.read_hello(config, message)
    transport.broadcast(list(hellos), handshake.welcome(hellos, stages[0].facts).to_message())
    rounds = RoundCounter()
    started = time.monotonic()
    for stage in stages:
        exchange = RoundExchange(
            PeersOverStar(transport, names, wait=config.waits.work),
            stage.plan.cut,
            device=torch.device("cpu"),
            # One session, so no number may come again in its second stage.
            rounds=rounds,
        )
        np.save(folder / f"{stage.release}.npy", stage.run(exchange))
        transport.broadcast(list(hellos), Done().to_message())
    report(ROUNDS_EVENT, seconds=time.monotonic() - started)


def _contribute(
    transport: SecondaryTransport,
    stages: Sequence[AuditStage],
    folder: Path,
    *,
    identity: Identity,
    rank: int,
    pinned: dict[str, str],
) -> None:
    # Built before the first round, so that no round waits for it.
    secondaries = [stage.secondary(rank, folder / identity.name) for stage in stages]
    with contextlib.ExitStack() as ending:
        for secondary in secondaries:
            ending.callback(secondary.close)
        _serve(transport, stages, secondaries, identity=identity, rank=rank, pinned=pinned)


def _serve(
    transport: SecondaryTransport,
    stages: Sequence[AuditStage],
    secondaries: Sequence[Secondary],
    *,
    identity: Identity,
    rank: int,
    pinned: dict[str, str],
) -> None:
    config, deadline_s = stages[0].config, stages[0].settings.timeout_s
    transport.connect(deadline_s)
    key = SessionKey(session=transport.session, rank=rank, name=identity.name)
    hello = handshake.hello(config, identity=identity, key=key, epochs=[])
    transport.send(hello.to_message())
    message = transport.receive(RoundKind.WELCOME, round_number=0, deadline_s=deadline_s)
    _, pair_keys = handshake.open_welcome(config, message, key=key, pinned=pinned)
    sum_to, masks = sum_from_secondary(transport, stages[0].plan, pair_keys, rank=rank)
    try:
        for stage, secondary in zip(stages, secondaries, strict=True):
            serve(
                secondary.handlers(save_nothing),
                transport,
                sum_to,
                ranks=tuple(stage.plan.secondaries),
                deadline_s=config.waits.work.for_primary_s,
                follow_s=config.waits.answer.for_primary_s,
            )
    finally:
        masks.close()


def main(arguments: Sequence[str]) -> None:
    """Run one party for the launcher, and report its failure."""
    end_with_launcher()
    folder, name = Path(arguments[0]), arguments[1]
    try:
        run_audit_party(folder, name)
    except SecureVflError as error:
        origin = error.party if isinstance(error, ProtocolError) else None
        # Data of an audit are within every range: who refuses to encode them was not clipped.
        refused = isinstance(error, EncodingRangeError)
        code = PrivacyError.exit_code if refused else error.exit_code
        report_failure(party=origin or name, reason=str(error), exit_code=code)
        sys.exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
