"""The primary's life with a kept model: greet, then one request for predictions after another."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from jaxtyping import Bool
from torch import Tensor, nn

from securevfl.core import files
from securevfl.core.errors import PartyFailedError, PartyTimeoutError, ProtocolError
from securevfl.core.progress import Listening, Observer, Stage
from securevfl.data.tables import PartyTable
from securevfl.federation.exchange import RoundCounter
from securevfl.federation.messages import RoundKind
from securevfl.federation.rounds.around import ChargedExchange
from securevfl.federation.rounds.over_star import FederatedExchange
from securevfl.federation.run_plan import PredictionBudget, RunFacts, plan_prediction
from securevfl.federation.saved_model import FOLDER, KeptModel, load_model
from securevfl.federation.session import handshake
from securevfl.federation.session.membership import (
    absent_names,
    active_without,
    callers_in_predictions,
)
from securevfl.ledger.countersigning import PrimaryCountersigning
from securevfl.linkage.stage.kept_links import LinkCache
from securevfl.linkage.stage.linking import OwnPlace, link_as_primary
from securevfl.linkage.stage.party_keys import keys_of
from securevfl.runtime.party_job import PartyLife, countersigner
from securevfl.runtime.predicting import (
    PredictRequest,
    answered,
    kept_top,
    prediction_spec,
    read_new_rows,
    request_of,
    top_model,
)
from securevfl.runtime.predictions import Predictions
from securevfl.runtime.primary_party import listening
from securevfl.transport.message import Done
from securevfl.transport.star import PrimaryTransport


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
        self._countersigning: PrimaryCountersigning | None = None
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
            self._countersigning = PrimaryCountersigning(
                countersigner(life, self._facts, session=transport.session),
                transport,
                deadline_s=deadline_s,
                log=life.files.log,
            )
            self._countersigning.start()
        observe(Stage(text="linking", of=len(plan.secondaries)))
        place = OwnPlace(
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
