"""The primary's life in its own process: listen, greet, link, pretrain, train, finish."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from jaxtyping import Bool
from torch import Tensor, nn

from securevfl.config.federation import FederationConfig
from securevfl.config.sections import parse_address
from securevfl.core import files
from securevfl.core.errors import ConfigError, PartyFailedError, PartyTimeoutError, ProtocolError
from securevfl.core.memory import loading
from securevfl.core.progress import Listening, Observer, Stage, Warned
from securevfl.data.tables import PartyTable
from securevfl.federation.base import require_estimator
from securevfl.federation.build import primary_data
from securevfl.federation.checkpoint import last_common
from securevfl.federation.class_means.class_means_stage import PrimaryVoting
from securevfl.federation.messages import Hello, RoundKind, TrainingRows
from securevfl.federation.over_star import FederatedExchange, PeersOverStar
from securevfl.federation.pretraining.pretraining_stage import (
    pretrain_as_primary,
    write_pretraining,
)
from securevfl.federation.rounds.exchanges import ChargedExchange
from securevfl.federation.rounds.primaries import NetworkPrimary, require_top
from securevfl.federation.run_plan import (
    PredictionBudget,
    RoundCounter,
    RunFacts,
    plan_prediction,
    plan_run,
    run_facts,
)
from securevfl.federation.saved_model import FOLDER, KeptModel, load_model
from securevfl.federation.session import handshake
from securevfl.federation.session.handshake import Rejoin as RejoinMessage
from securevfl.federation.session.membership import (
    Presence,
    SecondariesBackError,
    absent_names,
    active_without,
    callers_in_predictions,
)
from securevfl.ledger.countersigning import Countersigning
from securevfl.linkage.stage.link_cache import LinkCache
from securevfl.linkage.stage.linking import LinkageInput, link_as_primary, reveals_of
from securevfl.linkage.stage.party_keys import keys_of
from securevfl.runtime.party import PartyLife, countersigner
from securevfl.runtime.predicting import (
    PredictRequest,
    answered,
    kept_top,
    prediction_spec,
    request_of,
    top_model,
)
from securevfl.runtime.predictions import Predictions
from securevfl.runtime.primary_run import PrimaryRun, tell_alignment
from securevfl.runtime.run_folder import RunFigures
from securevfl.runtime.run_options import RejoinDue
from securevfl.transport.message import Done, public_reason
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
        countersigning = Countersigning(
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
        staying = [p.name for p in config.callers if p.is_helper and config.helpers_stay]
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
            least=config.least_in_training,
            patience_s=config.runtime.continue_after_s,
            awaited=life.job.awaited,
        ),
        else_said=f"; {config.least_in_training} secondaries at least must be there "
        f"(runtime.least_secondaries)"
        if config.continues_on_loss
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
    if config.continues_on_loss:
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
    if there < config.least_in_training:
        raise ProtocolError(f"{there} secondaries are left, and {config.least_in_training} must be")
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


class PredictingPrimary:
    """A session of predictions with all parties of a federation, which the primary holds."""

    def __init__(
        self, life: PartyLife, model: KeptModel, transport: PrimaryTransport, facts: RunFacts
    ) -> None:
        self.life = life
        self.model = model
        self._transport = transport
        self._facts = facts
        self._rounds = RoundCounter()
        self._countersigning: Countersigning | None = None
        self._top: nn.Module | None = None
        self.broken = False
        """Whether an error has left the others in the middle of a request."""

    def check(self) -> None:
        """Raise what ended the session, if something has.

        Raises:
            ProtocolError: Naming the party that is lost or left the protocol.
        """
        self._transport.check()

    def budgets(self) -> list[PredictionBudget]:
        """Return what predictions have spent by this party's ledger; others keep their own."""
        return [self.life.files.prediction_budget(self.model.run)]

    def ask(
        self,
        new: PartyTable,
        *,
        linkable: Bool[np.ndarray, " rows"] | None = None,
        names: Sequence[Any] | None = None,
        row_name: str = "row",
        observe: Observer | None = None,
    ) -> Predictions:
        """Return predictions of new rows.

        Args:
            new: The rows, encoded as the model's schema says; labels are not needed.
            linkable: Which rows have a key to be linked by; None: all. The others are predicted
                without the secondaries, and cost nothing.
            names: What the rows are called; None numbers them from 1 on.
            row_name: What these names are called.
            observe: Hears of progress; None tells whom the life tells.

        Raises:
            BudgetExceededError: If this party's ledger has no room for the request; nothing was
                sent then.
            DataError: If the rows have other features than the model.
            ProtocolError: If another party refuses, leaves the protocol or fails.

        Reveals:
            What linking reveals of the rows' keys, and to the primary one average a row.
        """
        life = self.life
        return answered(
            life.config,
            self.model,
            new,
            lambda rows: self._released(rows, observe or life.observe),
            linkable=linkable,
            names=names,
            row_name=row_name,
            device=life.job.device,
            without=absent_names(life.config, self._facts.active),
        )

    def _released(self, new: PartyTable, observe: Observer) -> tuple[Tensor, float]:
        """Return the outputs for rows that are linked, and what releasing them cost."""
        life, model, transport = self.life, self.model, self._transport
        config = life.config
        active = self._facts.active
        spec = prediction_spec(config, model, active=active)
        request = request_of(config, model, keys_of(spec.keys, new), active=active)
        plan = plan_prediction(config, request.facts, noise_share_std=model.noise_share_std)
        ledger = life.files.open_prediction(plan, model=model.run)
        deadline_s = config.runtime.round_timeout_s
        callers, facts = self._callers, request.facts
        asked = PredictRequest(
            run=facts.run,
            rows=facts.rows,
            predicted_rows=facts.predicted_rows,
            active=tuple(plan.secondaries),
        )
        self.broken = True
        transport.broadcast(callers, asked.to_message())
        for _ in transport.receive_each(
            callers, RoundKind.READY, round_number=0, deadline_s=deadline_s
        ):
            pass
        if self._countersigning is None:
            self._countersigning = Countersigning(
                countersigner(life, self._facts, session=transport.session),
                transport,
                deadline_s=deadline_s,
                log=life.files.log,
            )
            self._countersigning.start()
        observe(Stage(text="linking", of=len(plan.secondaries)))
        place = LinkageInput(
            spec=spec,
            keys=request.keys,
            data_root=life.job.data_root,
            cache=LinkCache(None),
        )
        linked = link_as_primary(place, transport, observe)
        exchange = ChargedExchange(
            FederatedExchange(
                transport,
                plan.secondaries,
                plan.cut,
                deadline_s=deadline_s,
                device=life.job.device,
                rounds=self._rounds,
            ),
            ledger,
            lambda _epsilon: None,
        )
        if self._top is None:
            self._top = kept_top(config, model, new, device=life.job.device)
        top = top_model(
            config, model, self._top, new, linked, exchange, request=request, device=life.job.device
        )
        outputs = top.predict(request.rows, "predict")
        self.broken = False
        life.files.log("predicted", rows=new.num_rows, epsilon=_finite(ledger.spent))
        return outputs, ledger.spent

    def end(self) -> None:
        """Countersign the ledgers, and let the others go.

        Reveals:
            To every secondary: ledger heads, as :class:`securevfl.ledger.countersigning.Heads`.
        """
        if self._countersigning is not None:
            self._countersigning.request("end")
        self._transport.broadcast(self._callers, Done().to_message())

    @property
    def _callers(self) -> list[str]:
        """Those that take part."""
        return list(callers_in_predictions(self.life.config, self._facts.active))


@contextmanager
def predicting(
    life: PartyLife,
    model: KeptModel,
    *,
    opened: Callable[[PrimaryTransport], None] = lambda _transport: None,
    without: Sequence[str] = (),
) -> Iterator[PredictingPrimary]:
    """Wait for the parties, and hold a session of predictions with them.

    Args:
        life: The primary's.
        model: Its half of the network.
        opened: Gets the primary's end of the star before anybody is waited for; whoever keeps it
            can end the wait from another thread.
        without: Secondaries that are absent, and turned away should they come.

    Raises:
        ConfigError: If another party holds another federation file, or too few are left.
        ProtocolError: If a party does not come, or holds the model of another run.

    Reveals:
        What the messages of joining say.
    """
    config, deadline_s = life.config, life.config.runtime.round_timeout_s
    active = active_without(config, without)
    facts = RunFacts(
        rows=0,
        train_rows=0,
        validation_rows=0,
        test_rows=0,
        predicts=True,
        run=model.run,
        active=active,
    )
    callers = callers_in_predictions(config, active)
    turned_away = [party.name for party in config.callers if party.name not in callers]
    with listening(life, without=turned_away) as transport:
        opened(transport)
        host, port = transport.listen()
        life.observe(Listening(host=host, port=port))
        life.observe(Stage(text="waiting for parties", of=len(callers)))
        transport.wait_for_parties(
            config.runtime.join_timeout_s, on_join=lambda name: life.files.log("joined", name=name)
        )
        hellos = {
            name: handshake.read_hello(
                config,
                transport.receive(name, RoundKind.HELLO, round_number=0, deadline_s=deadline_s),
            )
            for name in callers
        }
        handshake.require_one_run(config, hellos, run=model.run)
        transport.widen(handshake.session_limits(config, facts))
        transport.broadcast(list(hellos), handshake.welcome(hellos, facts).to_message())
        session = PredictingPrimary(life, model, transport, facts)
        yield session
        session.end()


def predict_once(life: PartyLife) -> Predictions:
    """Ask for predictions of one file of new rows, and write them.

    Raises:
        SecureVflError: Whatever went wrong, here or at another party.

    Reveals:
        What :meth:`PredictingPrimary.ask` says.
    """
    job = life.job
    assert job.new_rows is not None, "said where the job was made"
    files.require_writable_folder(job.new_rows.out.parent, what="folder of --out")
    model = load_model(job.folder / FOLDER, life.config, party=job.name)
    with loading():  # pandas loads with it
        from securevfl.runtime.run_tables import read_new_rows
    rows = read_new_rows(life.config, model, job.new_rows.path, id_column=job.new_rows.id_column)
    try:
        with predicting(life, model, without=job.new_rows.without) as session:
            predictions = session.ask(
                rows.table, linkable=rows.linkable, names=rows.names, row_name=rows.row_name
            )
    except (PartyTimeoutError, PartyFailedError) as error:
        raise _with_advice(life, error, without=job.new_rows.without) from error
    predictions.write(job.new_rows.out)
    return predictions


def _with_advice(life: PartyLife, error: ProtocolError, *, without: Sequence[str]) -> ProtocolError:
    """Return the error with how to go on, where it is about secondaries that are not there."""
    lost = [] if error.party is None else error.party.split(", ")
    secondaries = [party.name for party in life.config.secondaries]
    if not lost or not set(lost) <= set(secondaries):
        return error
    names = ",".join(name for name in secondaries if name in (*without, *lost))
    told = type(error)(f"{error}; to predict without it: --without {names}")
    told.party = error.party
    return told


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None
