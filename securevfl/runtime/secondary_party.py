"""A secondary's life in its own process: join, link, pretrain, answer until the primary is done."""

import math
from dataclasses import replace
from functools import partial
from typing import Any, Final

from securevfl.config.federation import FederationConfig, link_spec
from securevfl.config.rules import require_enough_records
from securevfl.core.errors import (
    BudgetExceededError,
    ConfigError,
    PartyFailedError,
    PartyTimeoutError,
    ProtocolError,
)
from securevfl.core.files import write_json
from securevfl.core.progress import PartyDone, Warned, told
from securevfl.data.tables import PartyTable
from securevfl.federation.build import BottomAtWork, bottom_at_work, build_secondary, keep_secondary
from securevfl.federation.class_means.class_means_stage import SecondaryVoting, VotesCall
from securevfl.federation.messages import Ready, RoundKind, TrainingRows
from securevfl.federation.over_star import SecondaryServer, serve, sum_from_secondary
from securevfl.federation.pretraining.pretraining_stage import (
    finish_pretraining,
    pretraining_secondary,
)
from securevfl.federation.rounds.secondary import EpochKeeper, Secondary
from securevfl.federation.run_plan import EpochMark, RunPlan, plan_prediction, plan_run
from securevfl.federation.saved_model import FOLDER, KeptModel, load_model
from securevfl.federation.session.handshake import Joined, joined, own_epoch
from securevfl.federation.session.membership import absent_names, idle_helpers
from securevfl.federation.session.party_files import PartyFiles
from securevfl.federation.session.peers import Handler
from securevfl.ledger.chain import now
from securevfl.ledger.countersigning import Countersigning, LedgerKind, epoch_point
from securevfl.linkage.spec import LinkedSecondary
from securevfl.linkage.stage.link_cache import LinkCache
from securevfl.linkage.stage.linking import (
    LinkageInput,
    help_to_link,
    link_as_secondary,
    reveals_of,
)
from securevfl.linkage.stage.party_keys import keys_of
from securevfl.mpc.masks import PairwiseMasks
from securevfl.mpc.sum_to import SumTo
from securevfl.runtime.party import PartyLife, countersigner
from securevfl.runtime.predicting import PredictRequest, prediction_spec, warn_of_few_links
from securevfl.runtime.run_folder import OWN_FACTS, write_explanation
from securevfl.runtime.run_options import RejoinDue
from securevfl.transport.message import StarKind
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
        countersigning = Countersigning(
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
    countersigning: Countersigning,
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
        handlers = dict(secondary.handlers(end_epoch))
        if secondary.voter is not None:
            vote = SecondaryVoting.over(star, plan, secondary.voter)
            handlers[VotesCall] = Handler(lambda _call, _reply: vote())
        done = SecondaryServer(
            secondary,
            star.transport,
            sum_to,
            plan,
            handlers=handlers,
            log=life.files.log,
            countersigning=countersigning,
        ).serve()
    finally:
        masks.close()
    return None if done else RejoinDue(parties=())


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
        self._countersigning: Countersigning | None = None
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
            self._countersigning = Countersigning(
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
        place = LinkageInput(
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
                handlers={},
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
