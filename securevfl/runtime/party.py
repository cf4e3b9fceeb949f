"""One party's life: read, link, join, train, leave. Every party runs this in its own process."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from securevfl.config.federation import FederationConfig
from securevfl.config.link_spec import link_spec
from securevfl.config.parties import parse_address
from securevfl.config.rules import require_covered_channels, require_helpers
from securevfl.core import files
from securevfl.core.errors import ConfigError
from securevfl.core.events import EventLog
from securevfl.core.progress import Observer
from securevfl.data.tables import PartyTable
from securevfl.federation import handshake
from securevfl.federation.build import build_secondary, require_enough_records
from securevfl.federation.checkpoint import Checkpoints, require_resumable
from securevfl.federation.epochs import EpochKeeper
from securevfl.federation.exchange_over_star import FederatedExchange, PrimaryWire
from securevfl.federation.joining import joined, transport_limits
from securevfl.federation.messages import RoundKind
from securevfl.federation.rounds import RoundCounter
from securevfl.federation.run_plan import (
    RunFacts,
    cut_shape,
    is_frozen,
    release_plan,
    ring_format,
    run_facts,
    slots,
)
from securevfl.federation.star_secondary import SecondaryServer, SecondaryWire
from securevfl.linking.kept_links import LinkCache
from securevfl.linking.keys import keys_of
from securevfl.linking.parties import OwnPlace, link_as_primary, link_as_secondary
from securevfl.linking.protections.table import reveals_of
from securevfl.mpc.crypten_bridge import CrypTenBridge
from securevfl.mpc.masks import PairwiseMasks
from securevfl.mpc.sum_to import CrypTenSumTo
from securevfl.pretraining.processes import (
    pretrain_as_primary,
    pretrain_as_secondary,
)
from securevfl.pretraining.stage import write_pretraining
from securevfl.runtime.linkage_helper import run_linkage_helper
from securevfl.runtime.preflight import open_ledger, table_warnings
from securevfl.runtime.primary_run import PrimaryRun
from securevfl.runtime.run_folder import write_federation
from securevfl.runtime.tables import read_party
from securevfl.transport.identity import Identity
from securevfl.transport.message import Message, StarKind
from securevfl.transport.star import PrimaryTransport, new_session


@dataclass(frozen=True, kw_only=True)
class PartyJob:
    """What a party's process is told."""

    config: FederationConfig
    name: str
    run_folder: Path
    identity_folder: Path
    data_root: Path
    device: torch.device
    resume: bool
    listen: str | None = None
    """Where the primary listens, if not at the address of the federation file."""
    pretrain_only: bool = False
    """Whether the primary ends the run when pretraining is done; secondaries follow."""

    @property
    def folder(self) -> Path:
        """This party's own folder within the run folder."""
        return self.run_folder / "parties" / self.name


def run_party(job: PartyJob, observe: Observer) -> dict[str, Any] | None:
    """Run one party to the end; the primary returns the run's metrics.

    Raises:
        SecureVflError: Whatever went wrong, here or at another party, named.

    Reveals:
        What the messages of :mod:`securevfl.transport.message` say, and nothing else.
    """
    config = job.config
    party = config.party(job.name)
    files.require_writable_folder(job.folder)
    log = EventLog(job.folder / "log.jsonl", party=job.name)
    try:
        require_covered_channels(config)
        require_helpers(config)
        identity = Identity.load(job.identity_folder, job.name)
        pinned = pinned_identities(config)
        log.write("start", role=party.role, digest=config.digest, resume=job.resume)
        run = _LIVES[party.role]
        metrics = run(job, identity, pinned, log, observe)
        log.write("done")
        return metrics
    except BaseException as error:
        log.write("failed", error=type(error).__name__, reason=str(error)[:500])
        raise
    finally:
        log.close()


def _read_own(job: PartyJob, observe: Observer) -> PartyTable:
    party = job.config.party(job.name)
    table = read_party(job.config, party, job.data_root)
    for text in table_warnings(job.config, party, table):
        observe({"event": "warning", "text": text})
    return table


def pinned_identities(config: FederationConfig) -> dict[str, str]:
    """Return every party's pinned public key.

    Raises:
        ConfigError: If the federation file pins none for some party.
    """
    missing = [party.name for party in config.parties if party.identity is None]
    if missing:
        raise ConfigError(
            f"party {missing[0]!r}: the federation file pins no identity for it; "
            f"run securevfl provision and add the line that it prints"
        )
    return {party.name: party.identity for party in config.parties if party.identity is not None}


def _run_primary(
    job: PartyJob,
    identity: Identity,
    pinned: Mapping[str, str],
    log: EventLog,
    observe: Observer,
) -> dict[str, Any]:
    config = job.config
    files.require_writable_folder(job.run_folder)
    table = _read_own(job, observe)
    split, facts = run_facts(config, table)
    plan = release_plan(config, facts)
    checkpoints = Checkpoints(job.folder, settings_digest=config.settings_digest)
    ledger = open_ledger(job.folder, config, plan, party=job.name, resume=job.resume)
    checkpoints.guard(ledger)
    assert config.primary.address is not None
    transport = PrimaryTransport(
        parse_address(job.listen or config.primary.address),
        identity,
        pinned,
        new_session(),
        config.ranks,
        limits=transport_limits(config),
    )
    with transport:
        host, port = transport.listen()
        observe({"event": "listening", "host": host, "port": port})
        secondaries = [party.name for party in config.secondaries]
        observe({"event": "stage", "text": "waiting for parties", "of": len(config.callers)})
        transport.wait_for_parties(
            config.runtime.join_timeout_s,
            on_join=lambda name: log.write("joined", name=name),
        )
        facts = _greet(job, transport, facts, checkpoints if job.resume else None)
        write_federation(job.run_folder, config)
        observe({"event": "stage", "text": "linking", "of": len(secondaries)})
        place = _place(job, table)
        linked = link_as_primary(place, transport, observe)
        log.write(
            "linked",
            protection=config.linkage.protection,
            learned=reveals_of(place.spec, "primary"),
        )
        rounds = RoundCounter()
        names = {config.ranks[name]: name for name in secondaries}
        ring = ring_format(config, plan)
        wire = PrimaryWire(transport, names, deadline_s=config.runtime.round_timeout_s)
        exchange = FederatedExchange(
            transport,
            names=names,
            sum_to=CrypTenSumTo(CrypTenBridge(wire, rank=0), None),
            ring=ring,
            slots=slots(config, plan),
            cut_shape=cut_shape(config),
            runtime=config.runtime,
            device=job.device,
            rounds=rounds,
        )
        run = PrimaryRun(
            config,
            table,
            split,
            linked,
            plan=plan,
            exchange=exchange,
            rounds=rounds,
            ledger=ledger,
            checkpoints=checkpoints,
            device=job.device,
            observe=observe,
            traffic=lambda: (
                sum(transport.bytes_sent.values()) + sum(transport.bytes_received.values())
            ),
        )
        run.pretraining = pretrain_as_primary(
            config,
            table,
            run.primary,
            transport,
            facts,
            run_folder=job.run_folder,
            checkpoints=checkpoints,
            device=job.device,
            observe=observe,
        )
        if not job.pretrain_only:
            run.train(resume_epoch=facts.resume_epoch)
        transport.broadcast(secondaries, Message(kind=StarKind.DONE))
    traffic = {
        job.name: {
            "sent": sum(transport.bytes_sent.values()),
            "received": sum(transport.bytes_received.values()),
        }
    }
    for name in (party.name for party in config.callers):
        traffic[name] = {
            "sent": transport.bytes_received[name],
            "received": transport.bytes_sent[name],
        }
    if job.pretrain_only:
        return write_pretraining(job.run_folder, run.pretraining, traffic)
    return run.finish(job.run_folder, mode="federated", traffic=traffic)


def _greet(
    job: PartyJob, transport: PrimaryTransport, facts: RunFacts, checkpoints: Checkpoints | None
) -> RunFacts:
    hellos, common = {}, set(checkpoints.epochs()) if checkpoints else set()
    pretrained = set(checkpoints.pretrained()) if checkpoints else set()
    for party in job.config.callers:
        message = transport.receive(
            party.name,
            RoundKind.HELLO,
            round_number=0,
            deadline_s=job.config.runtime.round_timeout_s,
        )
        theirs = handshake.check_hello(job.config, message)
        hellos[party.name] = message
        if party.is_helper:
            continue
        if not is_frozen(job.config):
            common &= theirs.epochs
        pretrained &= theirs.pretrained
    if checkpoints is not None:
        require_resumable(job.config, checkpoints, common)
    facts = replace(
        facts,
        resume_epoch=max(common, default=0),
        resume_pretraining=max(pretrained, default=0),
    )
    transport.broadcast(list(hellos), handshake.welcome(hellos, facts))
    # Not even keys are sent before every party's budget has room for the run.
    for _ in transport.receive_each(
        list(hellos),
        RoundKind.READY,
        round_number=0,
        deadline_s=job.config.runtime.round_timeout_s,
    ):
        pass
    return facts


def _run_secondary(
    job: PartyJob,
    identity: Identity,
    pinned: Mapping[str, str],
    log: EventLog,
    observe: Observer,
) -> None:
    config = job.config
    _require_no_listen(job)
    table = _read_own(job, observe)
    require_enough_records(config, table)
    checkpoints = Checkpoints(job.folder, settings_digest=config.settings_digest)
    with joined(
        config,
        identity,
        pinned,
        epochs=checkpoints.epochs() if job.resume else [],
        pretrained=checkpoints.pretrained() if job.resume else [],
    ) as star:
        log.write("connected")
        transport, facts, pair_keys, rank = star.transport, star.facts, star.pair_keys, star.rank
        secondaries = {config.ranks[party.name] for party in config.secondaries}
        plan = release_plan(config, facts)
        ledger = open_ledger(job.folder, config, plan, party=job.name, resume=job.resume)
        checkpoints.guard(ledger)
        transport.send(Message(kind=RoundKind.READY))
        place = _place(job, table)
        linked = link_as_secondary(place, transport, pair_keys, rows=facts.rows, observe=observe)
        log.write(
            "linked",
            protection=config.linkage.protection,
            learned=reveals_of(place.spec, "secondary"),
            **linked.figures,
        )
        secondary = build_secondary(
            config,
            config.party(job.name),
            table,
            linked,
            plan=plan,
            ring=ring_format(config, plan),
            ledger=ledger,
            device=job.device,
        )
        if facts.resume_epoch and not is_frozen(config):
            secondary.load_state(checkpoints.load(facts.resume_epoch))
        masks = PairwiseMasks(rank, {r: k for r, k in pair_keys.items() if r in secondaries})
        sum_to = CrypTenSumTo(CrypTenBridge(SecondaryWire(transport), rank=rank), masks)
        try:
            pretrain_as_secondary(
                config,
                table,
                secondary,
                transport,
                sum_to,
                facts,
                folder=job.folder,
                checkpoints=checkpoints,
                device=job.device,
                observe=observe,
                log=log.write,
            )
            SecondaryServer(
                secondary,
                transport,
                sum_to,
                cut_shape=cut_shape(config),
                parties=1 + len(config.secondaries),
                min_active=plan.min_active,
                runtime=config.runtime,
                device=job.device,
                end_epoch=EpochKeeper(secondary, checkpoints),
                log=log.write,
            ).serve()
        finally:
            masks.close()
            secondary.close()
    log.write(
        "figures",
        epsilon=secondary.epsilon_spent,
        bytes_sent=sum(transport.bytes_sent.values()),
        bytes_received=sum(transport.bytes_received.values()),
    )
    observe({"event": "figures", "epsilon": secondary.epsilon_spent})


def _run_helper(
    job: PartyJob,
    identity: Identity,
    pinned: Mapping[str, str],
    log: EventLog,
    observe: Observer,  # noqa: ARG001
) -> None:
    _require_no_listen(job)
    run_linkage_helper(job.config, identity, pinned, folder=job.folder, log=log.write)


def _require_no_listen(job: PartyJob) -> None:
    if job.listen is not None:
        raise ConfigError(f"--listen: {job.name!r} is no primary, and all others only dial out")


def _place(job: PartyJob, table: PartyTable) -> OwnPlace:
    spec = link_spec(job.config)
    return OwnPlace(
        spec=spec,
        keys=keys_of(spec.keys, table),
        data_root=job.data_root,
        cache=LinkCache.of_party(spec, job.name, job.folder),
    )


_LIVES = {
    "primary": _run_primary,
    "secondary": _run_secondary,
    "coordinator": _run_helper,
    "dealer": _run_helper,
}
