"""A secondary's life in its own process: join, link, pretrain, answer until the primary is done."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from securevfl.config.rules import require_enough_records
from securevfl.core.errors import ProtocolError
from securevfl.core.files import write_json
from securevfl.core.progress import PartyDone, Warned, told
from securevfl.data.tables import PartyTable
from securevfl.federation.build import build_secondary
from securevfl.federation.checkpoint import EpochKeeper
from securevfl.federation.class_means.class_means_stage import SecondaryVoting, VotingKind
from securevfl.federation.exchange import EpochMark
from securevfl.federation.messages import Ready, RoundKind, TrainingRows
from securevfl.federation.pretraining.pretraining_stage import (
    finish_pretraining,
    pretraining_secondary,
)
from securevfl.federation.rounds.secondary import Secondary
from securevfl.federation.rounds.star_secondary import SecondaryServer
from securevfl.federation.run_plan import RunPlan, plan_run
from securevfl.federation.saving import keep_secondary
from securevfl.federation.session.handshake import Joined, joined, own_epoch
from securevfl.federation.session.party_files import PartyFiles
from securevfl.federation.session.peers import serve, sum_from_secondary
from securevfl.ledger.chain import now
from securevfl.ledger.countersigning import SecondaryCountersigning, epoch_point
from securevfl.linkage.spec import LinkedSecondary
from securevfl.linkage.stage.linking import link_as_secondary, reveals_of
from securevfl.runtime.party_job import PartyLife, RejoinDue, countersigner
from securevfl.runtime.run_folder import OWN_FACTS, write_explanation
from securevfl.transport.message import Message, MessageKind
from securevfl.version import __version__


def run_secondary(life: PartyLife) -> RejoinDue | None:
    """Run a secondary to the end, or to where all join another session.

    Raises:
        SecureVflError: Whatever went wrong, here or at another party.

    Reveals:
        What the messages of joining, countersigning, linking, pretraining, votes and of rounds say.
    """
    config, files = life.config, life.files
    life.require_no_listen()
    table = life.read_table()
    require_enough_records(config, table)
    # Before anybody is told from where this party can go on: only what reads whole counts.
    run = life.go_on()
    with joined(
        config,
        life.identity,
        life.pinned,
        epochs=files.checkpoints.epochs(),
        pretrained=files.checkpoints.pretrained(),
        run=run,
        patience_s=life.job.join_timeout_s,
        returning=life.job.returning,
    ) as star:
        files.log("connected")
        life.tell_presence(star.facts)
        plan = plan_run(config, star.facts)
        life.open_ledger(plan)
        if not run:
            _begin(files, star.facts.run)
        star.transport.send(Ready().to_message())
        countersigning = SecondaryCountersigning(
            countersigner(life, plan.facts, session=star.transport.session),
            star.transport,
            frozen=plan.frozen,
            deadline_s=config.runtime.idle_timeout_s,
            log=files.log,
        )
        countersigning.start()
        linked = _linked(life, star, plan, table)
        facts = _own_facts(life, star, table, linked)
        # Before the first release, so that a run that is cut off has a page too.
        write_json(life.job.folder / OWN_FACTS, facts)
        plan = _aligned(life, star, plan)
        epoch = plan.facts.resume_epoch
        away = own_epoch(files.checkpoints.epochs(), plan.facts) < epoch
        secondary = _built(life, plan, table, linked)
        try:
            back = _serve(
                life,
                star,
                plan,
                table,
                secondary,
                linked,
                countersigning,
                came_back=epoch if away else 0,
            )
            if back is not None:
                return back
            keep_secondary(plan, table, linked, secondary, files.ledger, folder=life.job.folder)
            write_explanation(life.job.folder, secondary.explanation())
        finally:
            secondary.close()
    if secondary.not_finite:
        # Its own log and console alone: others must not learn that there is such a record.
        life.observe(Warned(text=_not_finite(life.job.name, secondary.not_finite)))
    ledger = files.ledger
    sent = sum(star.transport.bytes_sent.values())
    files.log(
        "figures",
        epsilon=ledger.spent,
        total_epsilon=ledger.total,
        bytes_sent=sent,
        bytes_received=sum(star.transport.bytes_received.values()),
    )
    write_json(life.job.folder / OWN_FACTS, {**facts, "ended": now(), "bytes_sent": sent})
    life.observe(PartyDone(epsilon=ledger.spent, total_epsilon=ledger.total))
    return None


def _linked(life: PartyLife, star: Joined, plan: RunPlan, table: PartyTable) -> LinkedSecondary:
    """Link this party's records."""
    config = life.config
    place = life.place(table, plan.facts)
    linked = link_as_secondary(
        place,
        star.transport,
        star.sealed,
        rows=plan.facts.rows,
        observe=life.observe,
    )
    life.files.log(
        "linked",
        protection=config.linkage.protection,
        learned=reveals_of(place.spec, "secondary"),
        **{**linked.figures, **({} if linked.counts is None else told(linked.counts))},
    )
    return linked


def _own_facts(
    life: PartyLife, star: Joined, table: PartyTable, linked: LinkedSecondary
) -> dict[str, Any]:
    """Return what this party's page says of it beside the ledger and the federation file."""
    config = life.config
    return {
        "party": life.job.name,
        "run": star.facts.run,
        "version": __version__,
        "digest": config.digest,
        "table": config.party(life.job.name).data,
        "records": table.num_rows,
        "features": list(table.feature_names),
        "links": None if linked.counts is None else told(linked.counts),
        "ended": None,
        "bytes_sent": None,
    }


def _aligned(life: PartyLife, star: Joined, plan: RunPlan) -> RunPlan:
    """Return the plan with the rows that training rounds have, as the primary says."""
    if life.config.training.rows == "all":
        return plan
    message = star.transport.receive(
        RoundKind.TRAINING_ROWS,
        round_number=0,
        deadline_s=life.config.runtime.idle_timeout_s,
    )
    told = TrainingRows.from_message(message, most=plan.facts.train_rows)
    return replace(plan, training_rows=told.rows)


def _built(life: PartyLife, plan: RunPlan, table: PartyTable, linked: LinkedSecondary) -> Secondary:
    """Build this party's half of the network, as it was where the run goes on."""
    config = life.config
    secondary = build_secondary(
        plan,
        config.party(life.job.name),
        table,
        linked,
        life.files.ledger,
        files=life.files.checkpoints.files,
        device=life.job.device,
    )
    if life.job.group is not None:
        secondary.share_with(life.job.group)
    checkpoints, epoch = life.files.checkpoints, plan.facts.resume_epoch
    own = 0 if plan.frozen else own_epoch(checkpoints.epochs(), plan.facts)
    if own:
        # With the encoder of its last epoch, however far the others have gone since.
        checkpoints.load(own, partial(secondary.resume, epoch))
    elif life.job.resume:
        checkpoints.forget_after(0)
        if not plan.frozen:
            secondary.allowance.start_after(epoch)
    return secondary


def _not_finite(name: str, times: int) -> str:
    return (
        f"{name}: {times} times a record, a row or a step was not finite and counted as zero; look "
        f"for values that are far too large, or set party.scaling"
    )


def _begin(files: PartyFiles, run: str) -> None:
    """Begin a fresh run under the id that the primary has drawn.

    Raises:
        ProtocolError: If it is the id of an earlier run, whose rows would be released afresh.
    """
    if len(files.ledger.released_rows):
        raise ProtocolError("the primary calls this run by the id of an earlier one of this party")
    files.checkpoints.begin(run)


def _serve(
    life: PartyLife,
    star: Joined,
    plan: RunPlan,
    table: PartyTable,
    secondary: Secondary,
    linked: LinkedSecondary,
    countersigning: SecondaryCountersigning,
    *,
    came_back: int,
) -> RejoinDue | None:
    """Answer the primary until it is done, or until all join another session."""
    keeper = EpochKeeper(secondary, life.files.checkpoints, came_back=came_back)

    def end_epoch(mark: EpochMark) -> None:
        keeper(mark)
        if not mark.restore_best:
            countersigning.meet(epoch_point(mark.epoch))

    sum_to, masks = sum_from_secondary(star.transport, plan, star.pair_keys, rank=star.rank)
    try:
        part = pretraining_secondary(
            plan, table, secondary, life.files, linked=linked, observe=life.observe
        )
        if part is not None:
            serve(
                part.handlers,
                star.transport,
                sum_to,
                ranks=tuple(plan.secondaries),
                deadline_s=plan.config.runtime.idle_timeout_s,
            )
            finish_pretraining(plan.config, secondary.bottom, part.learning, life.files.folder)
        voting: dict[MessageKind, Callable[[Message], None]] = {}
        if secondary.voter is not None:
            voting[VotingKind.VOTES_CALL] = SecondaryVoting.over(star, plan, secondary.voter)
        done = SecondaryServer(
            secondary,
            star.transport,
            sum_to,
            plan,
            end_epoch=end_epoch,
            log=life.files.log,
            countersigning=countersigning,
            also=voting,
        ).serve()
    finally:
        masks.close()
    return None if done else RejoinDue(parties=())
