"""The primary in its own process: its end of a session, training in it, and predicting in it."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from securevfl.config.federation import FederationConfig
from securevfl.config.sections import parse_address
from securevfl.core import files
from securevfl.core.errors import ConfigError, PartyFailedError, PartyTimeoutError, ProtocolError
from securevfl.core.formatting import finite_or_none
from securevfl.core.progress import Listening, Observer, Stage, Warned
from securevfl.data.tables import PartyTable, RowSplit
from securevfl.federation import messages, run_plan
from securevfl.federation.base import require_estimator
from securevfl.federation.build import primary_data
from securevfl.federation.checkpoint import last_common
from securevfl.federation.link_counts import book_link_counts, require_link_counts
from securevfl.federation.over_star import PeersOverStar
from securevfl.federation.rounds.exchanges import RoundExchange
from securevfl.federation.rounds.recording import Recorder, recording
from securevfl.federation.run_plan import PredictionBudget, RunFacts, prediction_facts, run_facts
from securevfl.federation.saved_model import FOLDER, SavedModel, load_model
from securevfl.federation.session import handshake, membership
from securevfl.federation.stage import OtherParts
from securevfl.ledger.countersigning import Countersigning
from securevfl.linkage.spec import LinkedPrimary, LinkSpec
from securevfl.linkage.stage.link_cache import LinkCache
from securevfl.linkage.stage.linkage_parts import reveals_of
from securevfl.linkage.stage.linking import LinkageInput, link_as_primary
from securevfl.runtime.party import PartySession, countersigner
from securevfl.runtime.prediction_session import (
    LinkedRequest,
    Request,
    SessionWithPartners,
    expected_blocks,
)
from securevfl.runtime.predictions import Predictions
from securevfl.runtime.primary_run import PrimaryRun, measure_run
from securevfl.runtime.run_folder import RunFigures
from securevfl.transport.channels import Kinds, PrimaryChannels
from securevfl.transport.message import Done, Message
from securevfl.transport.star import PrimaryTransport, new_session


class PrimarySession:
    """The primary's end of a session: greet the parties, countersign, link, exchange, end."""

    def __init__(self, party: PartySession, transport: PrimaryTransport) -> None:
        self.party = party
        self.transport = transport
        self._facts: RunFacts | None = None
        self.countersigning: Countersigning | None = None
        """None until the first ledger of the session is open at all parties."""
        self._waits = party.config.waits

    @property
    def facts(self) -> RunFacts:
        """Facts that all parties received when they were welcomed.

        Raises:
            ProtocolError: If none was welcomed.
        """
        if self._facts is None:
            raise ProtocolError("no party was welcomed to this session")
        return self._facts

    def wait(
        self,
        callers: Collection[str],
        timeout_s: float,
    ) -> None:
        """Listen, and wait until the parties have joined.

        Args:
            callers: Names of the parties that are waited for.
            timeout_s: How long, in seconds.
        """
        observe = self.party.observe
        host, port = self.transport.listen()
        observe(Listening(host=host, port=port))
        observe(Stage(text="waiting for parties", of=len(callers)))
        reported: set[str] = set()

        def report_busy(_waited_s: float) -> bool:
            for name, text in self.transport.busy.items():
                if name not in reported:
                    reported.add(name)
                    observe(Warned(text=f"{text}; waiting for it to start its part"))
            return False

        self.transport.wait_for_parties(
            timeout_s,
            on_join=lambda name: self.party.files.log("joined", name=name),
            stop=report_busy,
        )

    def greetings(self, names: Collection[str]) -> dict[str, Message]:
        """Return parties' greetings as they came; :func:`handshake.read_hello` reads one."""
        came = self.transport.receive_each(
            names, messages.RoundKind.HELLO, round_number=0, deadline_s=self._waits.answer.primary_s
        )
        return {message.sender: message for message in came}

    def welcome(self, hellos: Mapping[str, messages.Hello], facts: RunFacts) -> None:
        """Send the parties the facts of the session and one another's keys.

        Reveals:
            To every caller: what :class:`securevfl.federation.messages.Welcome` says.
        """
        self._facts = facts
        limits = handshake.session_limits(self.party.config, facts, self.transport.limits)
        self.transport.widen(limits)
        self.transport.broadcast(list(hellos), handshake.welcome(hellos, facts).to_message())

    def wait_until_ready(self, callers: Collection[str]) -> None:
        """Wait until every party has said that its budget covers what was announced."""
        for _ in self.transport.receive_each(
            callers,
            messages.RoundKind.READY,
            round_number=0,
            deadline_s=self._waits.answer.primary_s,
        ):
            pass

    def countersign(self) -> Countersigning:
        """Countersign all ledgers at the session's start, once."""
        if self.countersigning is None:
            self.countersigning = Countersigning(
                countersigner(self.party, self.facts, session=self.transport.session),
                self.transport,
                deadline_s=self._waits.answer.primary_s,
                log=self.party.files.log,
            )
            self.countersigning.start()
        return self.countersigning

    def peers(self, plan: run_plan.RunPlan, *, work_s: float | None = None) -> PeersOverStar:
        """Return the secondaries as they are reached in rounds; see :class:`PeersOverStar`."""
        return PeersOverStar(
            self.transport,
            plan.secondaries,
            wait=self._waits.answer,
            work_s=work_s,
        )

    def open_channels(self, names: Collection[str], kinds: Kinds) -> PrimaryChannels:
        """Return channels to some parties, between which sealed messages are relayed."""
        ranks = {name: rank for name, rank in self.party.config.ranks.items() if name in names}
        return PrimaryChannels(
            self.transport, ranks, kinds=kinds, deadline_s=self._waits.work.primary_s
        )

    def end(self, callers: Collection[str]) -> None:
        """Countersign the ledgers, and let the parties go.

        Reveals:
            To every secondary: ledger heads, as :class:`securevfl.ledger.countersigning.Heads`.
        """
        if self.countersigning is not None:
            self.countersigning.request("end")
        self.transport.broadcast(list(callers), Done().to_message())

    def traffic(self) -> dict[str, dict[str, int]]:
        """Return the bytes that each party sent and received, as the primary has counted them."""
        config, sent, received = (
            self.party.config,
            self.transport.bytes_sent,
            self.transport.bytes_received,
        )
        own = {"sent": sum(sent.values()), "received": sum(received.values())}
        others = {
            party.name: {"sent": received[party.name], "received": sent[party.name]}
            for party in config.callers
            if party.name in sent
        }
        return {config.primary.name: own, **others}


@contextmanager
def primary_session(
    party: PartySession, *, without: Collection[str] = ()
) -> Iterator[PrimarySession]:
    """Hold the primary's end of the star.

    Args:
        party: The primary.
        without: Parties that are turned away.
    """
    config = party.config
    with PrimaryTransport(
        parse_address(party.job.listen or config.address),
        party.identity,
        party.pinned,
        new_session(),
        {name: rank for name, rank in config.ranks.items() if name not in without},
        limits=handshake.transport_limits(config, work_s=config.waits.work.primary_s),
    ) as transport:
        # Helpers wait until the run is over, and those that serve on for the next request.
        transport.patient = frozenset(caller.name for caller in config.callers if caller.is_helper)
        yield PrimarySession(party, transport)


def run_primary(party: PartySession) -> RunFigures:
    """Run the primary to the end and return the run's figures.

    Raises:
        SecureVflError: Any failure, here or at another party.

    Reveals:
        What the messages of joining, countersigning, linking, stages and rounds say.
    """
    config, job = party.config, party.job
    require_estimator(config, job.base, job.top)
    files.require_writable_folder(job.run_folder)
    table = party.read_table()
    split, facts = run_facts(config, table)
    facts = replace(facts, run=party.resumed_run() or facts.run)
    plan = run_plan.plan_run(config, facts)
    party.open_ledger(plan)
    with (
        recording(
            job.name, job.folder, run=facts.run, most_mib=job.record_mib, observe=job.observe
        ) as recorder,
        primary_session(party) as session,
    ):
        plan = replace(plan, facts=_greet(session, facts))
        secondaries = list(plan.secondaries.values())
        session.countersign()
        linked = _link(session, plan, table)
        linked_rows = _count_links(session, plan)
        run = _begin(session, plan, table, split, linked, recorder)
        run.linked_rows = linked_rows
        run.prepare()
        run.train()
        run.keep()
        run.end_stages()
        staying = [p.name for p in config.callers if config.stays(p)]
        session.end([*secondaries, *staying])
    return measure_run(
        run,
        job.run_folder,
        mode="federated",
        traffic=session.traffic(),
        with_alone=job.with_alone,
    )


def _link(session: PrimarySession, plan: run_plan.RunPlan, table: PartyTable) -> LinkedPrimary:
    """Link the secondaries' records to the primary's rows."""
    party = session.party
    party.observe(Stage(text="linking", of=len(plan.secondaries)))
    place = party.place(table, plan.facts)
    linked = link_as_primary(place, session.transport, party.observe)
    party.files.log(
        "linked",
        protection=party.config.linkage.protection,
        learned=reveals_of(place.spec, "primary"),
        **({} if linked.announced is None else {"announced_keys": dict(linked.announced)}),
    )
    return linked


def _count_links(session: PrimarySession, plan: run_plan.RunPlan) -> dict[str, Any] | None:
    """Ask every secondary how many rows are linked there; see :func:`require_link_counts`.

    Reveals:
        To every secondary: that all have linked. To this party: the answers.
    """
    party, transport = session.party, session.transport
    secondaries = list(plan.secondaries.values())
    if not book_link_counts(plan, party.files.ledger, party.observe):
        return None
    transport.broadcast(secondaries, messages.LinkCountRequest().to_message())
    came = {
        message.sender: messages.LinkCount.from_message(message, rows=plan.facts.rows)
        for message in transport.receive_each(
            secondaries,
            messages.RoundKind.LINK_COUNT,
            round_number=0,
            deadline_s=party.config.waits.work.primary_s,
        )
    }
    return require_link_counts(plan, {name: came[name] for name in secondaries}, party.observe)


def _begin(
    session: PrimarySession,
    plan: run_plan.RunPlan,
    table: PartyTable,
    split: RowSplit,
    linked: LinkedPrimary,
    recorder: Recorder | None,
) -> PrimaryRun:
    """Build the primary's half of the network and its exchange with the secondaries."""
    party, config = session.party, session.party.config
    data = primary_data(config, table, split, linked, device=party.job.device)
    if config.training.rows == "aligned":
        rows = messages.TrainingRows(rows=len(data.training_rows))
        session.transport.broadcast(list(plan.secondaries.values()), rows.to_message())
    exchange = RoundExchange(
        session.peers(plan, work_s=config.waits.work.primary_s),
        plan.cut,
        device=party.job.device,
        ledger=party.files.ledger,
        recorder=recorder,
    )
    return PrimaryRun(
        plan,
        table,
        data,
        linked,
        party.files,
        exchange,
        party.job,
        countersigning=session.countersigning,
        # Between two messages a secondary may go through all of its records.
        parts=OtherParts(
            peers=lambda _stage: PeersOverStar(
                session.transport, plan.secondaries, wait=config.waits.work
            ),
            open_channels=session.open_channels,
        ),
    )


def _greet(session: PrimarySession, facts: RunFacts) -> RunFacts:
    """Wait for the parties, and agree with them where the run starts.

    Raises:
        ConfigError: If another party holds another federation file.
        ProtocolError: If a secondary resumes another run.
    """
    party = session.party
    config, resume, checkpoints = party.config, party.files.resume, party.files.checkpoints
    callers = [caller.name for caller in config.callers]
    session.wait(callers, party.job.join_timeout_s)
    came = session.greetings(callers)
    hellos = {name: handshake.read_hello(config, came[name]) for name in callers}
    handshake.require_one_run(
        config, hellos, run=facts.run if resume else "", has_state=checkpoints.holds_state
    )
    secondaries = [hellos[secondary.name] for secondary in config.secondaries]
    stage_steps = set(checkpoints.stage_steps()) if resume else set()
    for hello in secondaries:
        stage_steps &= set(hello.stage_steps)
    saved = [hello.epochs for hello in secondaries]
    facts = replace(
        facts,
        resume_epoch=last_common(config, checkpoints, saved) if resume else 0,
        resume_stage=max(stage_steps, default=0),
    )
    if not resume:
        # Before any party hears of the run: one that resumes it must find it here.
        checkpoints.begin(facts.run)
    session.welcome(hellos, facts)
    # Not even keys are sent before every party's budget has room for the run.
    session.wait_until_ready(hellos)
    return facts


class PredictingPrimary(SessionWithPartners):
    """A session of predictions with all parties of a federation, which the primary holds."""

    def __init__(self, session: PrimarySession, model: SavedModel) -> None:
        party, facts = session.party, session.facts
        super().__init__(
            party.config,
            model,
            device=party.job.device,
            active=facts.active,
            observe=party.observe,
        )
        self._session = session
        self._rounds = run_plan.RoundCounter()
        self._linking: dict[str, Any] = {}

    def check(self) -> None:
        """Raise what ended the session, if anything has; countersign after long serving.

        Raises:
            ProtocolError: Naming the party that is lost or left the protocol.

        Reveals:
            To all parties: what :class:`securevfl.ledger.countersigning.Heads` holds, where due.
        """
        self._session.transport.check()
        countersigning = self._session.countersigning
        if countersigning is not None and countersigning.long_served():
            countersigning.request("served")

    def budgets(self) -> list[PredictionBudget]:
        """Return what predictions have spent by this party's ledger; others keep their own."""
        return [self._session.party.files.prediction_budget(self.model.run)]

    def end(self) -> None:
        """End the session; see :meth:`PrimarySession.end`."""
        self._session.end(membership.callers_in_predictions(self.config, self.active))

    @contextmanager
    def _link(
        self, plan: run_plan.RunPlan, spec: LinkSpec, request: Request, observe: Observer
    ) -> Iterator[LinkedRequest]:
        """Announce a request whose ledger is open to the parties, and link it.

        Reveals:
            To the parties: the request's size and id, and what linking reveals of its keys.
        """
        session, party = self._session, self._session.party
        self.check()
        ledger = party.files.open_prediction(plan, model=self.model.run)
        callers = list(membership.callers_in_predictions(self.config, self.active))
        self.broken = True
        asked = messages.PredictRequest.of(request.facts, active=tuple(plan.secondaries))
        session.transport.broadcast(callers, asked.to_message())
        session.wait_until_ready(callers)
        session.countersign().count_rows(request.facts.predicted_rows)
        observe(Stage(text="linking", of=len(plan.secondaries)))
        place = LinkageInput(
            spec=spec,
            keys=request.keys,
            data_root=party.job.data_root,
            cache=LinkCache(None),
            memory=self._linking,
        )
        yield LinkedRequest(
            primary=link_as_primary(place, session.transport, observe),
            exchange=RoundExchange(
                session.peers(plan),
                plan.cut,
                device=party.job.device,
                rounds=self._rounds,
                ledger=ledger,
                blocks=expected_blocks(plan),
            ),
            ledgers=[ledger],
        )
        self.broken = False
        rows, epsilon = request.facts.predicted_rows, finite_or_none(ledger.epsilon_spent)
        party.files.log("predicted", rows=rows, epsilon=epsilon)


@contextmanager
def predicting(
    party: PartySession,
    model: SavedModel,
    *,
    opened: Callable[[PrimaryTransport], None] = lambda _transport: None,
    without: Sequence[str] = (),
) -> Iterator[PredictingPrimary]:
    """Wait for the parties, and hold a session of predictions with them.

    Args:
        party: The primary.
        model: Its half of the network.
        opened: Called with the primary's end of the star before any party is waited for; another
            thread can end the wait by it.
        without: Secondaries that are absent, and turned away should they come.

    Raises:
        ConfigError: If another party holds another federation file, or too few are left.
        ProtocolError: If a party does not come, or holds the model of another run.

    Reveals:
        What the messages of joining say.
    """
    config = party.config
    active = membership.active_without(config, without)
    facts = prediction_facts(run=model.run, active=active)
    callers = membership.callers_in_predictions(config, active)
    turned_away = [caller.name for caller in config.callers if caller.name not in callers]
    with primary_session(party, without=turned_away) as session:
        opened(session.transport)
        session.wait(callers, config.waits.joining().primary_s)
        came = session.greetings(callers)
        hellos = {name: handshake.read_hello(config, came[name]) for name in callers}
        handshake.require_one_run(config, hellos, run=model.run)
        session.welcome(hellos, facts)
        predictions = PredictingPrimary(session, model)
        yield predictions
        predictions.end()


def predict_once(party: PartySession) -> Predictions:
    """Ask for predictions of new rows, and write them.

    Raises:
        SecureVflError: Any failure, here or at another party.

    Reveals:
        What :meth:`PredictingPrimary.ask` says.
    """
    job, config, asked = party.job, party.config, party.job.prediction
    if asked is None:
        raise ConfigError("--serve: the primary asks; run securevfl predict RUN --identity DIR")
    model = load_model(job.folder / FOLDER, config, party=job.name)
    try:
        with predicting(party, model, without=asked.without) as session:
            predictions = session.ask(asked.named)
    except (PartyTimeoutError, PartyFailedError) as error:
        raise _with_advice(config, error, without=asked.without) from error
    predictions.write(asked.out)
    return predictions


def _with_advice(
    config: FederationConfig, error: ProtocolError, *, without: Sequence[str]
) -> ProtocolError:
    """Return the error, with the option ``--without`` where secondaries are absent."""
    lost = [] if error.party is None else error.party.split(", ")
    secondaries = [secondary.name for secondary in config.secondaries]
    if not lost or not set(lost) <= set(secondaries):
        return error
    names = ",".join(name for name in secondaries if name in (*without, *lost))
    advised = type(error)(f"{error}; to predict without it: --without {names}")
    advised.party = error.party
    return advised
