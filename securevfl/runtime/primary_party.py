"""The primary's life in its own process: listen, greet, link, pretrain, train, finish."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from securevfl.config.federation import FederationConfig
from securevfl.config.losses import goes_on, helpers_stay, least_in_training
from securevfl.config.parties import parse_address
from securevfl.core import files
from securevfl.core.errors import ConfigError, ProtocolError
from securevfl.core.progress import Listening, Stage, Warned
from securevfl.federation.base import require_estimator
from securevfl.federation.build import primary_data
from securevfl.federation.checkpoint import last_common
from securevfl.federation.class_means.class_means_stage import PrimaryVoting
from securevfl.federation.messages import Hello, RoundKind, TrainingRows
from securevfl.federation.pretraining.pretraining_stage import (
    pretrain_as_primary,
    write_pretraining,
)
from securevfl.federation.rounds.fitted_primary import require_top
from securevfl.federation.rounds.network_primary import NetworkPrimary
from securevfl.federation.rounds.over_star import FederatedExchange
from securevfl.federation.run_plan import RunFacts, plan_run, run_facts
from securevfl.federation.session import handshake
from securevfl.federation.session.handshake import Rejoin as RejoinMessage
from securevfl.federation.session.membership import Presence, SecondariesBackError
from securevfl.federation.session.peers import PeersOverStar
from securevfl.ledger.countersigning import PrimaryCountersigning
from securevfl.linkage.stage.linking import link_as_primary, reveals_of
from securevfl.runtime.figures import RunFigures
from securevfl.runtime.party_job import PartyLife, RejoinDue, countersigner
from securevfl.runtime.preflight import tell_alignment
from securevfl.runtime.primary_run import PrimaryRun
from securevfl.transport.failure import public_reason
from securevfl.transport.message import Done
from securevfl.transport.star import PrimaryTransport, new_session


def run_primary(life: PartyLife) -> RunFigures | dict[str, Any] | RejoinDue:
    """Run the primary to the end and return the run's figures, or those of pretraining alone.

    Where a secondary that was lost is back between two epochs, this session ends there.

    Raises:
        SecureVflError: Whatever went wrong, here or at another party.

    Reveals:
        What the messages of joining, countersigning, linking, pretraining, votes and of rounds say.
    """
    config, job, observe = life.config, life.job, life.observe
    require_estimator(config, None)
    require_top(config, None)
    files.require_writable_folder(job.run_folder)
    table = life.read_table()
    split, facts = run_facts(config, table)
    facts = replace(facts, run=life.go_on() or facts.run)
    plan = plan_run(config, facts)
    life.open_ledger(plan)
    presence = Presence(
        life.files.checkpoints.files,
        {config.ranks[party.name]: party.name for party in config.secondaries},
    )
    with listening(life) as transport:
        plan = replace(plan, facts=_greet(life, transport, facts, presence))
        countersigning = PrimaryCountersigning(
            countersigner(life, plan.facts, session=transport.session),
            transport,
            deadline_s=config.runtime.round_timeout_s,
            log=life.files.log,
        )
        countersigning.start()
        secondaries = list(plan.secondaries.values())
        observe(Stage(text="linking", of=len(secondaries)))
        place = life.place(table, plan.facts)
        linked = link_as_primary(place, transport, observe)
        life.files.log(
            "linked",
            protection=config.linkage.protection,
            learned=reveals_of(place.spec, "primary"),
        )
        data = primary_data(config, table, split, linked, device=job.device)
        alignment = tell_alignment(
            place.spec,
            linked.alignment,
            training_rows=len(data.training_rows),
            log=life.files.log,
            observe=observe,
        )
        if config.training.rows == "aligned":
            rows = TrainingRows(rows=len(data.training_rows))
            transport.broadcast(secondaries, rows.to_message())
        voting = PrimaryVoting.over(transport, plan) if plan.votes else None
        run = PrimaryRun(
            plan,
            table,
            data,
            linked,
            FederatedExchange(
                transport,
                plan.secondaries,
                plan.cut,
                deadline_s=config.runtime.round_timeout_s,
                work_s=config.runtime.idle_timeout_s,
                device=job.device,
            ),
            life.files,
            observe=observe,
            traffic=lambda: sum(
                sum(row.values()) for row in _traffic(transport, config, own_only=True).values()
            ),
            countersigning=countersigning,
            vote=voting,
            presence=presence,
        )
        if job.group is not None:
            assert isinstance(run.primary, NetworkPrimary), "checked before it joined"
            run.primary.share_with(job.group)
        run.alignment = alignment
        run.pretraining = pretrain_as_primary(
            plan,
            table,
            run.primary,
            # Between two messages a secondary may go through all of its records.
            PeersOverStar(transport, plan.secondaries, deadline_s=config.runtime.idle_timeout_s),
            life.files,
            alignment=linked.alignment,
            run_folder=job.run_folder,
            observe=observe,
        )
        if not job.pretrain_only:
            try:
                run.train()
            except SecondariesBackError as back:
                ranks = tuple(sorted(config.ranks[name] for name in back.names))
                transport.broadcast(secondaries, RejoinMessage(ranks=ranks).to_message())
                return RejoinDue(parties=back.names)
        if voting is not None:
            voting.end()
        countersigning.request("end")
        staying = [p.name for p in config.callers if p.is_helper and helpers_stay(config)]
        transport.broadcast([*secondaries, *staying], Done().to_message())
    traffic = _traffic(transport, config)
    if job.pretrain_only:
        return write_pretraining(job.run_folder, run.pretraining, traffic, alignment=run.alignment)
    return run.finish(job.run_folder, mode="federated", traffic=traffic)


def listening(life: PartyLife, *, without: Collection[str] = ()) -> PrimaryTransport:
    """Return the primary's end of the star; parties join when its block begins to greet them.

    Args:
        life: The primary's.
        without: Parties that are turned away.
    """
    config = life.config
    assert config.primary.address is not None, "checked with the federation file"
    return PrimaryTransport(
        parse_address(life.job.listen or config.primary.address),
        life.identity,
        life.pinned,
        new_session(),
        {name: rank for name, rank in config.ranks.items() if name not in without},
        limits=handshake.transport_limits(config),
    )


def _greet(
    life: PartyLife, transport: PrimaryTransport, facts: RunFacts, presence: Presence
) -> RunFacts:
    """Wait for the parties, and agree with them where the run starts."""
    config, resume = life.config, life.job.resume
    checkpoints, deadline_s = life.files.checkpoints, config.runtime.round_timeout_s
    host, port = transport.listen()
    life.observe(Listening(host=host, port=port))
    life.observe(Stage(text="waiting for parties", of=len(config.callers)))
    joined = transport.wait_for_parties(
        life.job.join_timeout_s,
        on_join=lambda name: life.files.log("joined", name=name),
        enough=presence.enough(
            least=least_in_training(config),
            patience_s=config.runtime.continue_after_s,
            awaited=life.job.awaited,
        ),
        else_said=f"; {least_in_training(config)} secondaries at least must be there "
        f"(runtime.least_secondaries)"
        if goes_on(config)
        else "",
    )
    own_run = facts.run if resume else ""
    hellos = _hellos(life, transport, presence, joined, run=own_run)
    stayed = presence.stayed
    present = [party.name for party in config.secondaries if party.name in hellos]
    active = tuple(config.ranks[name] for name in present)
    pretrained = set(checkpoints.pretrained()) if resume else set()
    for name in present:
        pretrained &= set(hellos[name].pretrained)
    saved = [hellos[name].epochs for name in present if name in stayed]
    facts = replace(
        facts,
        active=None if len(present) == len(config.secondaries) else active,
        resume_epoch=last_common(config, checkpoints, saved) if resume else 0,
        resume_pretraining=max(pretrained, default=0),
    )
    if not resume:
        # Before anybody hears of the run: whoever goes on with it must find it here.
        checkpoints.begin(facts.run)
    transport.widen(handshake.session_limits(config, facts))
    transport.broadcast(list(hellos), handshake.welcome(hellos, facts).to_message())
    # Not even keys are sent before every party's budget has room for the run.
    for _ in transport.receive_each(
        list(hellos), RoundKind.READY, round_number=0, deadline_s=deadline_s
    ):
        pass
    life.tell_presence(facts, back=[name for name in present if name not in stayed])
    if goes_on(config):
        presence.begin(after=facts.resume_epoch, active=active)
        presence.calling = transport.calling
    return facts


def _hellos(
    life: PartyLife,
    transport: PrimaryTransport,
    presence: Presence,
    joined: Collection[str],
    *,
    run: str,
) -> dict[str, Hello]:
    """Hear who has joined; one that comes back as it must not is sent away, and ends no session.

    Args:
        life: The primary's.
        transport: Its end of the star.
        presence: Which secondaries took part so far.
        joined: Names of those who are there.
        run: The run that the primary goes on with; empty for a fresh start.

    Returns:
        What each says, by name in the order of ranks.

    Raises:
        ConfigError: If another party holds another federation file.
        ProtocolError: If it goes on with another run.
    """
    config, stayed = life.config, presence.stayed
    has_state, hellos = life.files.checkpoints.holds_state, {}
    for party in config.callers:
        if party.name not in joined:
            continue
        message = transport.receive(
            party.name,
            RoundKind.HELLO,
            round_number=0,
            deadline_s=config.runtime.round_timeout_s,
        )
        try:
            hello = handshake.read_hello(config, message)
            handshake.require_one_run(config, {party.name: hello}, run=run, has_state=has_state)
        except (ConfigError, ProtocolError) as error:
            if party.is_helper or party.name in stayed:
                raise
            life.observe(Warned(text=f"{party.name}: cannot come back: {error}"))
            transport.dismiss(party.name, public_reason(error))
            continue
        hellos[party.name] = hello
    there = sum(not config.party(name).is_helper for name in hellos)
    if there < least_in_training(config):
        raise ProtocolError(
            f"{there} secondaries are left, and {least_in_training(config)} must be"
        )
    return hellos


def _traffic(
    transport: PrimaryTransport, config: FederationConfig, *, own_only: bool = False
) -> Mapping[str, Mapping[str, int]]:
    """Return the bytes that each party sent and received, as the primary has counted them."""
    own = {
        config.primary.name: {
            "sent": sum(transport.bytes_sent.values()),
            "received": sum(transport.bytes_received.values()),
        }
    }
    if own_only:
        return own
    others = {
        party.name: {
            "sent": transport.bytes_received[party.name],
            "received": transport.bytes_sent[party.name],
        }
        for party in config.callers
        if party.name in transport.bytes_sent
    }
    return {**own, **others}
