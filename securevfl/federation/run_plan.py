"""Plan of a run: its releases, their noise, and the format of what crosses the cut."""

import json
import math
import secrets
from collections.abc import Mapping, Sequence, Sized
from dataclasses import asdict, dataclass, field, replace
from typing import Final, Literal

import numpy as np

from securevfl.config.federation import FederationConfig
from securevfl.core.errors import ConfigError, DataError
from securevfl.data.tables import PartyTable, RowSplit, split_rows
from securevfl.dp.laplace import LaplacePlan, reach
from securevfl.dp.privacy import Privacy
from securevfl.dp.regime import Regime
from securevfl.dp.release_plan import ReleasePlan, choose_scores
from securevfl.dp.symbols import SymbolPlan
from securevfl.federation.rounds.cut import AGGREGATIONS, Aggregation, CutLayer
from securevfl.ledger.book import Session, epsilon_of_sessions
from securevfl.models.task_metrics import metrics_of
from securevfl.mpc.codec import COARSEST_STEP, RingFormat

RUN_ID_DIGITS: Final = 32
"""Hexadecimal digits of a run's id."""


def new_run() -> str:
    """Return a fresh run's id, which no other run has."""
    return secrets.token_hex(RUN_ID_DIGITS // 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """What every party must know to do its own accounting before anything is released."""

    rows: int
    """The primary's rows; ids run from 0."""

    train_rows: int
    validation_rows: int
    test_rows: int

    unlabelled_rows: int = 0
    """Training rows whose labels are missing or not used."""

    predicts: bool = False
    """True if a saved model is asked for predictions, and nothing is trained. Rows come with every
    request (:mod:`securevfl.runtime.prediction_session`); there are none before the first."""

    predicted_rows: int = 0
    """How many rows, the last ones, are predicted; the others only take part in linking."""

    active: tuple[int, ...] | None = None
    """Ranks of the secondaries that take part in this session, ascending; None: all."""

    resume_stage: int = 0
    """Steps that are done already of the stage before rounds."""

    resume_epoch: int = 0
    """Epoch to go on from; 0 starts afresh."""

    run: str = field(default_factory=new_run)
    """Names the run in every party's files, so that no run resumes from the state of another."""

    def statement(self) -> bytes:
        """Return all of them as bytes, which go into the keys of a session."""
        return json.dumps(asdict(self), sort_keys=True).encode()


def prediction_facts(
    *,
    rows: int = 0,
    predicted_rows: int = 0,
    run: str = "",
    active: tuple[int, ...] | None = None,
) -> RunFacts:
    """Return the facts of a session, or of one request, that predicts and does not train."""
    return RunFacts(
        run=run,
        rows=rows,
        train_rows=0,
        validation_rows=0,
        test_rows=0,
        predicts=True,
        predicted_rows=predicted_rows,
        active=active,
    )


def run_facts(config: FederationConfig, table: PartyTable) -> tuple[RowSplit, RunFacts]:
    """Split the primary's rows and count them.

    Raises:
        DataError: If there are too few rows for that, a class has too few rows for the metric that
            training goes by, or the table lacks the column that decides.
    """
    training = config.training
    kind = config.split_kind
    by = table.labels if kind == "stratified" else table.split_by
    if kind != "random" and by is None:
        raise DataError(
            f"table of {table.name!r}: has no split_by, which training.split = {kind!r} goes by; "
            f"read the table from a file, or give it one"
        )
    try:
        split = split_rows(
            table.num_rows,
            validation_fraction=training.validation_fraction,
            test_fraction=training.test_fraction,
            seed=config.federation.seed,
            kind=kind,
            by=None if by is None or kind == "random" else by.astype(np.int64),
            labelled_rows=training.labelled_rows,
            labelled=table.labelled,
        )
    except DataError as error:
        raise DataError(f"table of {table.name!r}: {error}") from None
    _require_classes(config, table, split)
    facts = RunFacts(
        rows=table.num_rows,
        train_rows=len(split.train),
        validation_rows=len(split.validation),
        test_rows=len(split.test),
        unlabelled_rows=len(split.unlabelled),
        resume_epoch=0,
    )
    return split, facts


def _require_classes(config: FederationConfig, table: PartyTable, split: RowSplit) -> None:
    """Refuse a split in which some part lacks a class that its metric needs."""
    if table.labels is None or table.classes is None:
        return
    declared = config.federation.classes
    if declared is not None and declared != len(table.classes):
        raise DataError(
            f"table of {table.name!r}: label {config.primary.label!r} has {len(table.classes)} "
            f"classes, and federation.classes says {declared}; correct the file, of every party"
        )
    metric, *_ = metrics_of(config.federation.task, config.training.metric)
    for name in ("train", "validation", "test"):
        part = table.labels[getattr(split, name)]
        if metric.defined(part, len(table.classes)):
            continue
        known = table.labels if table.labelled is None else table.labels[table.labelled]
        counts = np.bincount(known.astype(np.int64), minlength=len(table.classes))
        there = np.bincount(part.astype(np.int64), minlength=len(table.classes))
        rarest = int(np.argmin(np.where(there == 0, counts, len(known) + 1)))
        kind = config.split_kind
        raise DataError(
            f"table of {table.name!r}: label {config.primary.label!r}: {counts[rarest]} of "
            f"{len(known)} rows are of class {table.classes[rarest]!r}, and none of these is for "
            f"{name}, where {metric.name} needs {metric.needs}; "
            + (
                "get more such rows"
                if kind == "stratified"
                else f'get more such rows, or another training.split than "{kind}"'
            )
            + ", or choose another training.metric"
        )


Purpose = Literal["release", "train", "validation", "test", "predict"]

ROUNDS_AHEAD: Final = 8
"""Most rounds that are announced and not yet answered, where none depends on another.

Over a line with a round trip of 50 ms one round at a time waits 50 ms for each; eight wait once. A
secondary of a frozen run keeps as many answers, so more would cost it disk.
"""


class RoundCounter:
    """Round numbers of one session; a number is given out once."""

    def __init__(self) -> None:
        self.last = 0

    def next(self) -> int:
        """Return the next round number, from 1."""
        self.last += 1
        return self.last


def active_parties(secondaries: Sized, party_dropout: float) -> int:
    """Return how many secondaries answer a training round; at least one.

    References:
        [FeT] section 5.1, party dropout: ``(1 - r_d) k``, here rounded to the nearest whole.
    """
    return max(1, round((1 - party_dropout) * len(secondaries)))


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """All that is decided before anything is sent; computed once, and handed on."""

    config: FederationConfig
    """The federation file."""

    facts: RunFacts
    """The primary's rows, and where the run starts."""

    releases: ReleasePlan
    """Everything that will be released, for the accounting."""

    noise_share_std: float
    """``tau``: what each secondary adds to its own term, in the units of the representation; 0 for
    the mechanism ``none``. Calibrating it to an epsilon is the costly part of a plan."""

    cut: CutLayer
    """The format of what crosses the cut."""

    ranks: Mapping[str, int]
    """Name to rank: the primary is 0, secondaries count from 1, third parties come after them."""

    training_rows: int
    """Rows of an epoch's training rounds: all labelled ones; fewer with
    ``training.rows = "aligned"``, once keys are linked. The accounting is of all of them."""

    @property
    def regime(self) -> Regime:
        """How encoders come by their weights, and what follows from it."""
        return self.config.regime

    @property
    def learns(self) -> bool:
        """Whether secondaries get gradients."""
        return self.regime.learns and not self.facts.predicts

    @property
    def surviving(self) -> float:
        """Share of a score's variance that survives its release, in [0, 1]; 1 without noise."""
        if self.releases.scores is not None:
            honest = self.releases.honest
            return self.releases.scores.surviving_share(self.noise_share_std, honest=honest)
        # A record's length is spread over the numbers; each secondary adds its signal and noise.
        length = self.cut.clip_norm / self.cut.slots
        return 1 / (1 + self.cut.shape[-1] * (self.noise_share_std / length) ** 2)

    @property
    def single_pass(self) -> Purpose | None:
        """What every row is released once for, if that is all that happens."""
        if self.facts.predicts:
            return "predict"
        return "release" if self.regime.releases_once else None

    def aggregation(self) -> Aggregation:
        """Return how representations are clipped, encoded and averaged."""
        kind = _aggregation_of(self.config)
        return kind(self.cut)

    @property
    def secondaries(self) -> dict[int, str]:
        """Names by rank of the secondaries that take part."""
        active = self.facts.active
        names = {self.ranks[party.name]: party.name for party in self.config.secondaries}
        return {rank: name for rank, name in names.items() if active is None or rank in active}

    @property
    def active(self) -> int:
        """How many secondaries answer a training round, of those that take part."""
        present = self.secondaries
        if self.single_pass is not None:
            return len(present)
        return active_parties(present, self.config.model.party_dropout)

    @property
    def average_positions_every(self) -> int:
        """Epochs between averages of positional encodings; 0 for none, as of frozen encoders."""
        return self.config.model.average_positions_every if self.learns else 0


_MOST_COUNT_NOISE: Final = 0.1
"""Where the noise on a number of linked rows is a larger part of all rows than this, none is said:
it would tell nothing of links, and end good runs."""


def plan_run(config: FederationConfig, facts: RunFacts) -> RunPlan:
    """Decide what a run releases, with how much noise, and how it is encoded.

    Raises:
        PrivacyError: If the promise that is asked for does not hold; see also
            :func:`securevfl.config.disclosure.require_covered_channels`.
        EncodingRangeError: If no fixed-point format holds what is released.
    """
    releases = _releases(config, facts, config.privacy)
    releases.check()
    share_std = releases.noise_share_std()
    # The same at every party: it depends on the file and on the number of rows alone.
    if releases.link_count_std(share_std) > _MOST_COUNT_NOISE * facts.rows:
        releases = replace(releases, linked_rows=None)
        share_std = releases.noise_share_std()
    return _plan(config, facts, releases, share_std)


def plan_prediction(
    config: FederationConfig, facts: RunFacts, *, noise_share_std: float
) -> RunPlan:
    """Decide what one request for predictions releases: every new row once.

    Its noise is that of the model's training, which the top model has learned to live with. Its
    epsilon is computed for what it releases or, where secondaries count how often each record is
    released, for all requests together; it is charged apart from training's. All predictions of
    one model keep ``prediction.epsilon`` or, where there is none, the run's own again.

    Args:
        config: The federation file.
        facts: How many rows are linked and predicted, and the request's id.
        noise_share_std: ``tau`` of the model.

    Raises:
        PrivacyError: If the promise does not hold.
        EncodingRangeError: If no fixed-point format holds what is released.
    """
    privacy = config.privacy
    if privacy.mechanism != "none":
        unit_privacy = replace(privacy, epsilon=None, noise_multiplier=1.0)
        budget = config.prediction.epsilon or privacy.epsilon
        if budget is None:
            share_std = _releases(config, facts, unit_privacy).noise_share_std()
            privacy = replace(unit_privacy, noise_multiplier=noise_share_std / share_std)
        else:
            privacy = replace(privacy, epsilon=budget, noise_multiplier=None)
    releases = _releases(config, facts, privacy)
    releases.check()
    return _plan(config, facts, releases, noise_share_std)


def _plan(
    config: FederationConfig, facts: RunFacts, releases: ReleasePlan, noise_share_std: float
) -> RunPlan:
    return RunPlan(
        config=config,
        facts=facts,
        releases=releases,
        noise_share_std=noise_share_std,
        cut=_cut_of(config, noise_share_std=noise_share_std),
        ranks=config.ranks,
        training_rows=facts.train_rows,
    )


def _cut_of(config: FederationConfig, *, noise_share_std: float) -> CutLayer:
    slots = config.model.neighbours if pools(config) else 1
    scores, clip_norm, parties = _scores_of(config), config.privacy.clip_norm, config.secondaries
    step = tail = 0.0
    if isinstance(scores, LaplacePlan):
        step, ends = scores.grid_step(clip_norm), reach(noise_share_std * scores.largest)
        tail = step * ends
        ring = RingFormat.of_steps(step=step, most=scores.largest + ends, parties=len(parties))
    else:
        # The accounting speaks of rows that are means over K slots; what crosses is their sum.
        ring = RingFormat.choose(
            clip_norm=clip_norm * slots,
            # Symbols are drawn before the sum, which has no noise of its own then.
            noise_share_std=0.0 if scores else noise_share_std * slots,
            parties=len(parties),
        )
    return CutLayer(
        ring=ring,
        slots=slots,
        shape=config.family.cut_shape(config.model),
        clip_norm=clip_norm,
        noise_share_std=0.0 if scores else noise_share_std,
        noise_tail=tail,
        grid_step=step,
        disjoint=config.in_blocks,
    )


def pools(config: FederationConfig) -> bool:
    """Return whether rows of the sum are pooled from records that are clipped one by one.

    Raises:
        ConfigError: As :func:`plan_run`, of the aggregation.
    """
    return _aggregation_of(config).pooled


def _releases(config: FederationConfig, facts: RunFacts, privacy: Privacy) -> ReleasePlan:
    training = config.training
    batch = training.batch_size
    # Fewer active secondaries add less noise. What a request costs is reckoned for those that
    # answer it; of training, noise is made for as few as any session may have.
    some = facts.active if facts.predicts else None
    active = len(config.secondaries if some is None else some)
    counted = config.releases_per_record if facts.predicts else None
    # Where records are counted, an entity has its releases at every secondary, asked or not.
    secondaries = active if counted is None else len(config.secondaries)
    released = facts.predicted_rows if facts.predicts else facts.rows
    if facts.predicts or config.regime.releases_once:
        rounds, row_releases, per_row = math.ceil(released / batch), released, 1
    else:
        parts = (facts.train_rows, facts.validation_rows)
        spare = int(config.reserves_budget)
        rounds = config.training.epochs * sum(math.ceil(rows / batch) for rows in parts)
        rounds += (1 + spare) * math.ceil(facts.test_rows / batch)
        row_releases = config.training.epochs * sum(parts) + (1 + spare) * facts.test_rows
        per_row = config.training.epochs + spare
        active = active_parties(config.secondaries, config.model.party_dropout)
    # A sum that is drawn back to norm C is rounded towards zero, which moves each coordinate of two
    # neighbouring sums apart by less than one unit; the ring's coarsest, since the unit is only
    # chosen once the noise is known.
    _, width = config.family.cut_shape(config.model)
    scores = _scores_of(config)
    drawn_back = math.sqrt(width) * COARSEST_STEP / config.model.neighbours
    return ReleasePlan(
        privacy=privacy,
        parties=secondaries,
        min_active=active,
        rounds=rounds,
        rows_per_round=min(batch, released),
        row_releases=row_releases,
        releases_per_row=per_row,
        links=config.model.neighbours,
        pooled=pools(config),
        contested=config.linkage.choose == "rows",
        disjoint=config.in_blocks,
        fitting=None if facts.predicts else config.fitting,
        rounding=0.0 if config.linkage.choose == "rows" else drawn_back,
        linked_rows=facts.rows if privacy.bounds_linked_rows and not facts.predicts else None,
        releases_per_record=counted,
        symbols=scores if isinstance(scores, SymbolPlan) else None,
        laplace=scores if isinstance(scores, LaplacePlan) else None,
    )


def _scores_of(config: FederationConfig) -> SymbolPlan | LaplacePlan | None:
    """Return the scores of a run that trains, which its predictions keep; None for vectors."""
    if not config.encoder_reads_labels or config.privacy.mechanism == "none":
        return None
    return choose_scores(
        config.privacy,
        config.fitting,
        parties=len(config.secondaries),
        exchanged=config.model.neighbours > 1,
        classes=1 if config.scores else config.encoder_classes,
    )


def _aggregation_of(config: FederationConfig) -> type[Aggregation]:
    """Return the aggregation that the family asks for.

    Raises:
        ConfigError: If there is none of that name, or it pools where the family does not.
    """
    family, frozen = config.family, not config.regime.learns
    name = family.aggregation(config.model, frozen=frozen)
    kind = AGGREGATIONS.get(name)
    if kind is None:
        known = ", ".join(map(repr, AGGREGATIONS))
        raise ConfigError(
            f"model.family: {family.name!r} asks for the aggregation {name!r}; there are {known}"
        )
    if kind.pooled != family.pools_records(config.model, frozen=frozen):
        raise ConfigError(
            f"model.family: {family.name!r} asks for the aggregation {name!r}, and only one of the "
            f"two pools a row's records"
        )
    return kind


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictionBudget:
    """Epsilon of one party for all predictions of one model, in addition to its training."""

    party: str
    unit: str
    """Unit that the epsilon protects."""
    delta: float
    spent: float | None
    """Epsilon; None: no bound."""
    budget: float | None
    """Epsilon that may be spent; None: no limit was set."""
    rows: int
    """Rows that were asked for."""
    most_rows: int | None
    """How many may be; None: any number."""
    releases_per_record: int | None
    """N: rows that each record is released in at most, whatever is asked for. What that costs is
    spent with the first answer, and no later one costs more. None: every request is charged."""

    @property
    def epsilon_left(self) -> float | None:
        """Epsilon that is left, at least 0; None without a limit or a bound."""
        if self.budget is None or self.spent is None:
            return None
        return max(0.0, self.budget - self.spent)


def prediction_budget(
    config: FederationConfig, asked: Sequence[Session], *, party: str
) -> PredictionBudget:
    """Return what a party's ledger says of a model's predictions.

    Args:
        config: The federation file.
        asked: The model's sessions in that ledger.
        party: Who it is.
    """
    privacy = config.privacy
    spent = epsilon_of_sessions(asked, delta=privacy.delta)
    promised = privacy.mechanism != "none"
    return PredictionBudget(
        party=party,
        unit=privacy.unit,
        delta=privacy.delta,
        spent=spent if math.isfinite(spent) else None,
        budget=(config.prediction.epsilon or privacy.epsilon) if promised else None,
        rows=sum(session.row_releases for session in asked),
        most_rows=config.prediction.rows,
        releases_per_record=config.releases_per_record,
    )


def predictions_in_words(config: FederationConfig) -> str | None:
    """Return what later predictions may show of a record; None where nothing bounds it."""
    privacy, most = config.privacy, config.releases_per_record
    if privacy.mechanism == "none":
        return None
    budget = config.prediction.epsilon or privacy.epsilon
    within = "" if budget is None else f", within epsilon = {budget:g} in addition to training"
    if most is None:
        return f"every request is charged{within}."
    return (
        f"all of them together release each record in at most {most} of their rows{within}. A "
        f"record that had them takes no part any more: its rows have other records, or noise alone."
    )
