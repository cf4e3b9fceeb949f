"""A caller's life with a kept model: join, answer requests for predictions, and join again."""

import math
from dataclasses import replace
from typing import Final

from securevfl.config.federation import FederationConfig
from securevfl.config.link_spec import link_spec
from securevfl.core.errors import (
    BudgetExceededError,
    ConfigError,
    PartyFailedError,
    PartyTimeoutError,
    ProtocolError,
)
from securevfl.core.progress import PartyDone, Warned
from securevfl.data.tables import PartyTable
from securevfl.federation.build import BottomAtWork, bottom_at_work, build_secondary
from securevfl.federation.messages import Ready, RoundKind
from securevfl.federation.rounds.star_secondary import SecondaryServer
from securevfl.federation.run_plan import plan_prediction
from securevfl.federation.saved_model import FOLDER, KeptModel, load_model
from securevfl.federation.session.handshake import Joined, joined
from securevfl.federation.session.membership import absent_names, idle_helpers
from securevfl.federation.session.peers import sum_from_secondary
from securevfl.ledger.countersigning import LedgerKind, SecondaryCountersigning
from securevfl.linkage.stage.kept_links import LinkCache
from securevfl.linkage.stage.linking import OwnPlace, help_to_link, link_as_secondary
from securevfl.linkage.stage.party_keys import keys_of
from securevfl.mpc.masks import PairwiseMasks
from securevfl.mpc.sum_to import SumTo
from securevfl.runtime.party_job import PartyLife, countersigner
from securevfl.runtime.predicting import PredictRequest, prediction_spec, warn_of_few_links
from securevfl.transport.message import StarKind

# A primary that ends, fails or is not there yet ends a session, not a party that goes on serving;
# nor does a request that its budget does not cover, which was refused before anything left.
_COMES_BACK: Final = (PartyFailedError, PartyTimeoutError, BudgetExceededError)


def serve_as_secondary(life: PartyLife) -> None:
    """Answer a primary's requests for predictions: one session, or for ever.

    Raises:
        SecureVflError: Whatever went wrong here; where the party serves for ever, a primary that
            goes away is waited for instead.

    Reveals:
        What the messages of joining, countersigning, linking and of rounds say.
    """
    life.require_no_listen()
    model = load_model(life.job.folder / FOLDER, life.config, party=life.job.name)
    table = life.read_table(model)
    while True:
        try:
            _session(life, model, table)
        except _COMES_BACK as error:
            if not life.job.serves_on:
                raise
            life.files.log("waiting", reason=type(error).__name__)
            life.observe(Warned(text=f"{life.job.name}: {error.for_others()}; joining again"))
        if not life.job.serves_on:
            return


def _session(life: PartyLife, model: KeptModel, table: PartyTable) -> None:
    config, files = life.config, life.files
    with joined(
        config,
        life.identity,
        life.pinned,
        epochs=[],
        pretrained=[],
        run=model.run,
        predicts=True,
    ) as star:
        files.log("connected")
        server = _Requests(life, model, table, star)
        try:
            server.serve()
        finally:
            server.close()
    if server.asked:
        ledger = files.ledger
        files.log("figures", epsilon=ledger.spent, total_epsilon=ledger.total)
        life.observe(PartyDone(epsilon=ledger.spent, total_epsilon=ledger.total))


class _Requests:
    """One session's requests at a secondary."""

    def __init__(self, life: PartyLife, model: KeptModel, table: PartyTable, star: Joined) -> None:
        self._life = life
        self._model = model
        self._table = table
        self._star = star
        self._last_round = 0
        self._countersigning: SecondaryCountersigning | None = None
        self._sum: SumTo | None = None
        self._masks: PairwiseMasks | None = None
        self._bottom: BottomAtWork | None = None
        self.asked = 0

    def close(self) -> None:
        """Stop what works ahead in the background."""
        if self._masks is not None:
            self._masks.close()

    def serve(self) -> None:
        """Answer until the primary is done."""
        # Where requests may come for ever none is late; heartbeats find a primary that is gone.
        life = self._life
        idle_s = math.inf if life.job.serves_on else life.config.runtime.idle_timeout_s
        while True:
            kinds = (
                (RoundKind.PREDICT, StarKind.DONE)
                if self._countersigning is None
                else (RoundKind.PREDICT, LedgerKind.COUNTERSIGN)
            )
            message = self._star.transport.receive(kinds, round_number=0, deadline_s=idle_s)
            if message.kind is RoundKind.PREDICT:
                self._answer(PredictRequest.from_message(message))
                continue
            if self._countersigning is not None:
                self._countersigning.answer(message)
                self._star.transport.receive(StarKind.DONE, round_number=None, deadline_s=idle_s)
            return

    def _answer(self, request: PredictRequest) -> None:
        life, model, star = self._life, self._model, self._star
        config, files = life.config, life.files
        _require_same_parties(config, star, request)
        plan = plan_prediction(config, request.facts, noise_share_std=model.noise_share_std)
        # Before anything is said: no room is no answer.
        ledger = files.open_prediction(plan, model=model.run)
        star.transport.send(Ready().to_message())
        if self._countersigning is None:
            self._countersigning = SecondaryCountersigning(
                countersigner(life, star.facts, session=star.transport.session),
                star.transport,
                frozen=False,
                deadline_s=config.runtime.idle_timeout_s,
                log=files.log,
            )
            self._countersigning.start()
        if self._sum is None:
            self._sum, self._masks = sum_from_secondary(
                star.transport, plan, star.pair_keys, rank=star.rank
            )
        self._sum.bind(request.to_message().digest(), request.active)
        spec = prediction_spec(config, model, active=star.facts.active)
        place = OwnPlace(
            spec=spec,
            keys=keys_of(spec.keys, self._table),
            data_root=life.job.data_root,
            cache=LinkCache(None),
        )
        party = config.party(life.job.name)
        if self._bottom is None:
            self._bottom = bottom_at_work(
                plan, party, self._table, device=life.job.device, model=model
            )
        linked = link_as_secondary(
            place, star.transport, star.sealed, rows=request.rows, observe=life.observe
        )
        warn_of_few_links(
            party.name,
            linked,
            predicted=request.predicted_rows,
            least=config.linkage.least_linked,
            observe=life.observe,
        )
        secondary = build_secondary(
            plan,
            party,
            self._table,
            linked,
            ledger,
            device=life.job.device,
            kept_bottom=self._bottom,
            after_round=self._last_round,
        )
        try:
            server = SecondaryServer(
                secondary,
                star.transport,
                self._sum,
                plan,
                end_epoch=lambda _mark: None,
                log=files.log,
            )
            self._last_round = server.serve_pass()
        finally:
            secondary.close()
        self.asked += 1


def serve_as_helper(life: PartyLife) -> None:
    """Help to link the rows of one request after another; see :func:`serve_as_secondary`.

    Raises:
        ConfigError: If the party deals for votes alone, which predictions do not need.
        SecureVflError: As :func:`serve_as_secondary`.

    Reveals:
        What :func:`securevfl.linkage.stage.linking.help_to_link` says.
    """
    life.require_no_listen()
    if life.job.name in idle_helpers(life.config):
        raise ConfigError(
            f"party {life.job.name!r}: deals masks for votes alone, and predictions need none; "
            f"start the other parties without it"
        )
    while True:
        try:
            _help(life)
        except _COMES_BACK as error:
            if not life.job.serves_on:
                raise
            life.files.log("waiting", reason=type(error).__name__)
        if not life.job.serves_on:
            return


def _help(life: PartyLife) -> None:
    config, name = life.config, life.job.name
    role = config.party(name).role
    spec = link_spec(config)
    assert role == "coordinator" or role == "dealer", "others have a table"
    if spec.similarities is not None:
        raise ProtocolError(
            f"{name}: predictions of a family that reads similarities need the scale of training, "
            f'which a coordinator does not keep; link with protection = "none"'
        )
    with joined(
        config, life.identity, life.pinned, epochs=[], pretrained=[], predicts=True
    ) as star:
        absent = frozenset(absent_names(config, star.facts.active))
        spec = replace(spec, roles=replace(spec.roles, absent=absent))
        while True:
            message = star.transport.receive(
                (RoundKind.PREDICT, StarKind.DONE),
                round_number=None,
                deadline_s=math.inf if life.job.serves_on else config.runtime.idle_timeout_s,
            )
            if message.kind is StarKind.DONE:
                return
            request = PredictRequest.from_message(message)
            _require_same_parties(config, star, request)
            star.transport.send(Ready().to_message())
            help_to_link(
                spec,
                role,
                star.transport,
                star.sealed,
                rows=request.rows,
                cache=LinkCache(None),
            )


def _require_same_parties(config: FederationConfig, star: Joined, request: PredictRequest) -> None:
    """Refuse a request to other secondaries than the session's, which this party has checked.

    Raises:
        ProtocolError: Naming their ranks.
    """
    ranks = tuple(config.ranks[party.name] for party in config.secondaries)
    session = ranks if star.facts.active is None else star.facts.active
    if request.active != session:
        raise ProtocolError(
            f"the primary asks for predictions of the parties {list(request.active)!r}, and the "
            f"session has {list(session)!r}"
        )
