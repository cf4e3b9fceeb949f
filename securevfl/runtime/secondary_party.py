"""A secondary in its own process: its end of a session, training in it, and serving a model."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from securevfl.config.rules import require_enough_records
from securevfl.core.errors import ProtocolError
from securevfl.core.files import write_json
from securevfl.core.progress import PartyDone, Warned, event_fields
from securevfl.data.tables import PartyTable
from securevfl.federation import messages
from securevfl.federation.build import begin_secondary, save_secondary
from securevfl.federation.link_counts import link_count
from securevfl.federation.over_star import serve, sum_from_secondary
from securevfl.federation.rounds.recording import recording
from securevfl.federation.rounds.secondary import EpochSaver, Secondary
from securevfl.federation.run_plan import RunPlan, plan_prediction, plan_run
from securevfl.federation.saved_model import FOLDER, SavedModel, load_model
from securevfl.federation.session.handshake import Joined
from securevfl.federation.session.party_files import PartyFiles
from securevfl.federation.session.peers import Handler, Next, Reply
from securevfl.federation.stage import SecondaryContext, secondary_parts
from securevfl.ledger.chain import now
from securevfl.ledger.countersigning import (
    Countersigning,
    CountersignRequest,
    LedgerKind,
    epoch_point,
)
from securevfl.linkage.spec import LinkedSecondary
from securevfl.linkage.stage.link_cache import LinkCache
from securevfl.linkage.stage.linkage_parts import reveals_of
from securevfl.linkage.stage.linking import LinkageInput, link_as_secondary
from securevfl.linkage.stage.party_keys import keys_of
from securevfl.mpc.codec import SumTo
from securevfl.mpc.masks import PairwiseMasks
from securevfl.runtime.party import (
    PartySession,
    countersigner,
    join,
    require_same_parties,
    serve_sessions,
)
from securevfl.runtime.prediction_session import KeptSecondary, prediction_spec
from securevfl.runtime.run_folder import OWN_FACTS
from securevfl.transport.message import Done, StarKind
from securevfl.version import __version__


class SecondarySession:
    """A secondary's end of a session: agree to what is announced, countersign, link, sum."""

    def __init__(self, party: PartySession, star: Joined) -> None:
        self.party = party
        self.star = star
        self.countersigning: Countersigning | None = None
        """None until the first ledger of the session is open."""
        self._masks: PairwiseMasks | None = None
        self._sum: SumTo | None = None

    def ready(self, *, releases_once: bool) -> Countersigning:
        """Say that this party's budget covers what was announced; countersign once a session.

        Args:
            releases_once: Whether all rows are released at once, which the primary may countersign.

        Reveals:
            To the primary: that the budget covers it. To all parties: ledger heads, as
            :class:`securevfl.ledger.countersigning.Heads`.
        """
        party, star = self.party, self.star
        star.transport.send(messages.Ready().to_message())
        if self.countersigning is None:
            self.countersigning = Countersigning(
                countersigner(party, star.facts, session=star.transport.session),
                star.transport,
                releases_once=releases_once,
                deadline_s=party.config.waits.work.for_primary_s,
                log=party.files.log,
            )
            self.countersigning.start()
        return self.countersigning

    def sum_to(self, plan: RunPlan) -> SumTo:
        """Return this party's end of secure sums, the same for the whole session."""
        if self._sum is None:
            star = self.star
            context = star.context(plan.config)
            self._sum, self._masks = sum_from_secondary(
                star.transport,
                plan,
                star.pair_keys,
                rank=star.rank,
                context=context,
            )
        return self._sum

    def link(self, place: LinkageInput, *, rows: int) -> LinkedSecondary:
        """Link this party's records to the primary's rows; see :func:`link_as_secondary`."""
        star = self.star
        return link_as_secondary(
            place, star.transport, star.sealed, rows=rows, observe=self.party.observe
        )

    def close(self) -> None:
        """Stop what works ahead in the background."""
        if self._masks is not None:
            self._masks.close()


@contextmanager
def secondary_session(
    party: PartySession, *, run: str, predicts: bool = False
) -> Iterator[SecondarySession]:
    """Join the session that the primary holds; see :func:`securevfl.runtime.party.join`."""
    with join(party, run=run, predicts=predicts) as star:
        session = SecondarySession(party, star)
        try:
            yield session
        finally:
            session.close()


def run_secondary(party: PartySession) -> None:
    """Run a secondary to the end.

    Raises:
        SecureVflError: Any failure, here or at another party.

    Reveals:
        What the messages of joining, countersigning, linking, stages and rounds say.
    """
    config, files = party.config, party.files
    party.require_no_listen()
    table = party.read_table()
    require_enough_records(config, table)
    # Before the greeting, which names the epochs that can be resumed: only whole files count.
    run = party.resumed_run()
    with secondary_session(party, run=run) as session:
        facts = session.star.facts
        plan = plan_run(config, facts)
        party.open_ledger(plan)
        if not run:
            _begin(files, facts.run)
        countersigning = session.ready(releases_once=plan.regime.releases_once)
        linked = _link(session, plan, table)
        if plan.releases.linked_rows is not None:
            _tell_link_count(session, plan, linked)
        page = _page_facts(party, facts.run, table, linked)
        # Before the first release, so that a run that is cut off has a page too.
        write_json(party.job.folder / OWN_FACTS, page)
        plan = _align_plan(session, plan)
        secondary = begin_secondary(
            plan, party.job.name, table, linked, files, device=party.job.device
        )
        secondary.log = files.log
        try:
            _serve_recorded(session, plan, table, secondary, linked, countersigning)
            save_secondary(plan, table, linked, secondary, files.ledger, folder=files.folder)
        finally:
            secondary.close()
    if secondary.not_finite:
        # Its own log and console alone: others must not learn that there is such a record.
        party.observe(Warned(text=_not_finite(party.job.name, secondary.not_finite)))
    transport, ledger = session.star.transport, files.ledger
    sent = sum(transport.bytes_sent.values())
    files.log(
        "figures",
        epsilon=ledger.epsilon_spent,
        total_epsilon=ledger.total,
        bytes_sent=sent,
        bytes_received=sum(transport.bytes_received.values()),
    )
    write_json(party.job.folder / OWN_FACTS, {**page, "ended": now(), "bytes_sent": sent})
    party.observe(PartyDone(epsilon=ledger.epsilon_spent, total_epsilon=ledger.total))


def _link(session: SecondarySession, plan: RunPlan, table: PartyTable) -> LinkedSecondary:
    """Link this party's records."""
    party = session.party
    place = party.place(table, plan.facts)
    linked = session.link(place, rows=plan.facts.rows)
    party.files.log(
        "linked",
        protection=party.config.linkage.protection,
        learned=reveals_of(place.spec, "secondary"),
        **{**linked.figures, **({} if linked.counts is None else event_fields(linked.counts))},
    )
    return linked


def _tell_link_count(session: SecondarySession, plan: RunPlan, linked: LinkedSecondary) -> None:
    """Say how many rows are linked, once the primary has heard that all are.

    Reveals:
        To the primary: what :func:`securevfl.federation.link_counts.link_count` says.
    """
    transport, party = session.star.transport, session.party
    transport.receive(
        messages.RoundKind.LINK_COUNT_REQUEST,
        round_number=0,
        deadline_s=party.config.waits.work.for_primary_s,
    )
    transport.send(link_count(plan, linked, party.files.ledger).to_message())


def _page_facts(
    party: PartySession, run: str, table: PartyTable, linked: LinkedSecondary
) -> dict[str, Any]:
    """Return the facts on this party's page that neither ledger nor federation file has."""
    config = party.config
    return {
        "party": party.job.name,
        "run": run,
        "version": __version__,
        "digest": config.digest,
        "table": config.party(party.job.name).data,
        "records": table.num_rows,
        "features": list(table.feature_names),
        "links": None if linked.counts is None else event_fields(linked.counts),
        "ended": None,
        "bytes_sent": None,
    }


def _align_plan(session: SecondarySession, plan: RunPlan) -> RunPlan:
    """Return the plan with the rows that training rounds have, as the primary has announced."""
    if session.party.config.training.rows == "all":
        return plan
    message = session.star.transport.receive(
        messages.RoundKind.TRAINING_ROWS,
        round_number=0,
        deadline_s=session.party.config.waits.work.for_primary_s,
    )
    training_rows = messages.TrainingRows.from_message(message, most=plan.facts.train_rows)
    return replace(plan, training_rows=training_rows.rows)


def _not_finite(name: str, times: int) -> str:
    return (
        f"{name}: {times} times a record, a row or a step was not finite and counted as zero; look "
        f"for values that are far too large, or set party.scaling"
    )


def _begin(files: PartyFiles, run: str) -> None:
    """Begin a fresh run under the id that the primary has drawn.

    Raises:
        ProtocolError: If it is the id of an earlier run, which would be released afresh.
    """
    if len(files.ledger.released_rows) or files.ledger.linked_rows is not None:
        raise ProtocolError("the primary calls this run by the id of an earlier one of this party")
    files.checkpoints.begin(run)


def _serve_recorded(
    session: SecondarySession,
    plan: RunPlan,
    table: PartyTable,
    secondary: Secondary,
    linked: LinkedSecondary,
    countersigning: Countersigning,
) -> None:
    """Serve as :func:`_serve` does, and record what comes where that is asked for."""
    job, run = session.party.job, plan.facts.run
    with recording(
        job.name, job.folder, run=run, most_mib=job.record_mib, observe=job.observe
    ) as recorder:
        if recorder is not None:
            samples = plan.config.privacy.sampling_rate < 1
            recorder.attend(secondary, samples=samples)
        _serve(session, plan, table, secondary, linked, countersigning)
        if recorder is not None:
            recorder.hold_secondary(secondary, batch=plan.config.training.batch_size)
            recorder.hold_keys(table)


def _serve(
    session: SecondarySession,
    plan: RunPlan,
    table: PartyTable,
    secondary: Secondary,
    linked: LinkedSecondary,
    countersigning: Countersigning,
) -> None:
    """Answer stages and rounds of the primary, until the run is done."""
    party, star = session.party, session.star
    keeper = EpochSaver(secondary, party.files.checkpoints)

    def end_epoch(mark: messages.EpochMark) -> None:
        keeper(mark)
        if not mark.restore_best:
            countersigning.meet(epoch_point(mark.epoch))

    def answer(request: CountersignRequest, _reply: Reply) -> Next:
        return Done if countersigning.answer(request) else None

    waits, ranks = plan.config.waits, tuple(plan.secondaries)
    answering = partial(
        serve,
        transport=star.transport,
        sum_to=session.sum_to(plan),
        ranks=ranks,
        deadline_s=waits.work.for_primary_s,
    )
    parts = secondary_parts(
        SecondaryContext(
            plan=plan,
            party=plan.config.party(party.job.name),
            table=table,
            secondary=secondary,
            linked=linked,
            files=party.files,
            data_root=party.job.data_root,
            observe=party.observe,
            open_channels=partial(star.channels, plan.config),
        )
    )
    handlers = dict(secondary.handlers(end_epoch))
    for part in parts.values():
        if part.opening:
            answering(part.opening)
        handlers |= part.beside_rounds
    # DONE is due after the end's heads and at no other time.
    handlers[CountersignRequest] = Handler(answer)
    handlers[Done] = replace(handlers[Done], follows=True)
    answering(handlers, follow_s=waits.answer.for_primary_s)


def serve_as_secondary(party: PartySession) -> None:
    """Answer a primary's requests for predictions: one session, or one after another.

    Raises:
        SecureVflError: Any failure here; where the party serves on, a primary that goes away is
            waited for instead.

    Reveals:
        What the messages of joining, countersigning, linking and of rounds say.
    """
    party.require_no_listen()
    model = load_model(party.job.folder / FOLDER, party.config, party=party.job.name)
    table = party.read_table(model)

    def session() -> None:
        with secondary_session(party, run=model.run, predicts=True) as joined:
            requests = _Requests(joined, model, table)
            requests.serve()
        if requests.asked:
            ledger = party.files.ledger
            party.files.log("figures", epsilon=ledger.epsilon_spent, total_epsilon=ledger.total)
            party.observe(PartyDone(epsilon=ledger.epsilon_spent, total_epsilon=ledger.total))

    serve_sessions(party, session)


class _Requests:
    """One session's requests for predictions at a secondary."""

    def __init__(self, session: SecondarySession, model: SavedModel, table: PartyTable) -> None:
        job = session.party.job
        self._session = session
        self._kept = KeptSecondary(job.config.party(job.name), table, model, device=job.device)
        self._last_round = 0
        self._linking: dict[str, Any] = {}
        self.asked = 0

    def serve(self) -> None:
        """Answer until the primary is done."""
        session, transport = self._session, self._session.star.transport
        # A party that serves on waits for requests for ever; heartbeats find a lost primary.
        job, work = session.party.job, session.party.config.waits.work
        idle_s = math.inf if job.serves_on else work.for_primary_s
        while True:
            countersigning = session.countersigning
            kinds = (
                (messages.RoundKind.PREDICT, StarKind.DONE)
                if countersigning is None
                else (messages.RoundKind.PREDICT, LedgerKind.COUNTERSIGN)
            )
            message = transport.receive(kinds, round_number=0, deadline_s=idle_s)
            if message.kind is messages.RoundKind.PREDICT:
                self._answer(messages.PredictRequest.from_message(message))
                continue
            if countersigning is not None:
                if not countersigning.answer(CountersignRequest.from_message(message)):
                    continue
                transport.receive(StarKind.DONE, round_number=None, deadline_s=idle_s)
            return

    def _answer(self, request: messages.PredictRequest) -> None:
        session, model, star = self._session, self._kept.model, self._session.star
        party, config, job = session.party, session.party.config, session.party.job
        require_same_parties(config, star.facts, request)
        plan = plan_prediction(config, request.facts, noise_share_std=model.noise_share_std)
        spec = prediction_spec(config, model, active=star.facts.active)
        keys = keys_of(spec.keys, self._kept.table)
        # Before any message: a ledger that does not cover the request gives no answer.
        ledger = party.files.open_prediction(plan, model=model.run, keys=keys)
        session.ready(releases_once=False).count_rows(request.predicted_rows)
        sum_to = session.sum_to(plan)
        sum_to.bind(request.to_message().digest(), request.active)
        place = LinkageInput(
            spec=spec,
            keys=keys,
            data_root=job.data_root,
            cache=LinkCache(None),
            memory=self._linking,
        )
        secondary = self._kept.with_links(
            plan,
            session.link(place, rows=request.rows),
            ledger,
            observe=party.observe,
            after_round=self._last_round,
        )
        secondary.log = party.files.log
        try:
            serve(
                secondary.round_handlers,
                star.transport,
                sum_to,
                ranks=tuple(plan.secondaries),
                deadline_s=config.waits.work.for_primary_s,
            )
            self._last_round = secondary.validator.last_round
        finally:
            secondary.close()
        self.asked += 1
