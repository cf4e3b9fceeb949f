"""Estimates before a run: links, rows per record, spellings that link more, time and bytes."""

import dataclasses
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from securevfl.config.federation import FederationConfig, link_spec
from securevfl.core.errors import SecureVflError
from securevfl.core.memory import peak_memory_bytes
from securevfl.core.progress import LinksCounted, event_fields, links_in_words, nearness_in_words
from securevfl.data.tables import KeyTable, PartyTable
from securevfl.federation.build import build_top
from securevfl.federation.run_plan import RunPlan
from securevfl.linkage.links import LinkTable
from securevfl.linkage.metrics.metric import KeySpec
from securevfl.linkage.metrics.texts import Exact, exact_texts
from securevfl.linkage.spec import LinkSpec
from securevfl.linkage.stage.candidates import count_links, link_warnings
from securevfl.linkage.stage.linkage_parts import protection_of
from securevfl.linkage.stage.linking import Linker
from securevfl.linkage.text import Spelling
from securevfl.models.alone.perceptron import BaselineConfig
from securevfl.models.tasks import TaskHead
from securevfl.stages.assist.assist import AssistConfig, cross_fit

# How many rows one record serves, and what a limit on that leaves of the links.

LIMITS: Final = (1, 2, 4)
"""Values of ``links_per_record`` that are compared."""

# Texts are compared at some million pairs a second: more are not compared only to say this.
_MOST_PAIRS: Final = 4_000_000
# Below this share of rows with a link, a warning.
_FEW: Final = 0.5
_OFTEN: Final = 90

WHAT_MORE_COSTS: Final = (
    "Two rows a record take 1.4 times the noise for the same epsilon, four take twice the noise, "
    "and where it was measured they gained less than they cost: stay at 1 under a promise. Without "
    'one (mechanism = "none"), leave links_per_record and linkage.choose out'
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowsServed:
    """What linking one secondary without a limit, and with several, found."""

    median: float
    """Rows whose nearest record it is, of a record that is nearest to any: half serve no more."""

    often: float
    """The same of nine in ten of these records."""

    linked: tuple[float, ...]
    """The share of rows that get a link, for each of :data:`LIMITS`."""

    def in_words(self) -> str:
        """Return one sentence."""
        first, *others = (f"{share:.0%}" for share in self.linked)
        rows = f"{self.median:g} row" + ("" if self.median == 1 else "s")
        more = ", ".join(f"{share} at {m}" for m, share in zip(LIMITS[1:], others, strict=True))
        return (
            f"a record that is nearest to any row is nearest to {rows} in the "
            f"median, nine in ten to at most {self.often:.0f}; {first} of the rows get a link at "
            f"links_per_record = {LIMITS[0]}, {more}"
        )

    @property
    def few(self) -> bool:
        """Whether most rows go without a link where a record has one row."""
        return self.linked[0] < _FEW

    def warning(self, party: str) -> str | None:
        """Return what to think of where most rows get no link; None if enough do."""
        if not self.few:
            return None
        return (
            f"{party}: at links_per_record = 1 only {self.linked[0]:.0%} of the rows get a link; "
            f"the others gain nothing. {WHAT_MORE_COSTS}"
        )


def rows_served(spec: LinkSpec, primary: KeyTable, own: KeyTable) -> RowsServed | None:
    """Link a secondary's records to the primary's rows; None if it can't be said, or takes long.

    Args:
        spec: How the proposed federation file links.
        primary: The primary's keys.
        own: The secondary's.

    Reveals:
        Nothing leaves the process, which holds both tables.
    """
    if not spec.keys.metric.quick and primary.num_rows * own.num_rows > _MOST_PAIRS:
        return None
    try:
        metric = Linker(spec, primary).metric(own)
        nearest = metric.nearest(None, 1)
        picked = metric.swap_roles().nearest(None, min(max(LIMITS), metric.num_rows))
    except SecureVflError:
        return None  # check names what is wrong with them
    records = nearest.indices[nearest.present]
    if not len(records):
        return None
    served = np.bincount(records)
    served = served[served > 0]
    rows = metric.num_rows
    return RowsServed(
        median=float(np.median(served)),
        often=math.floor(np.percentile(served, _OFTEN)),
        linked=tuple(
            len(np.unique(picked.indices[:, :limit][picked.present[:, :limit]])) / rows
            for limit in LIMITS
        ),
    )


# Which spelling of text keys would link more, found where both tables are.

# What links fewer rows more than this share is not worth a setting.
_MORE: Final = 0.05
# Where so many rows have a record, spelling is not looked into.
_ENOUGH: Final = 0.9
# Different keys of a table that stay different.
_KEPT: Final = 0.99
# In larger tables settings are tried one by one, not in pairs.
_LARGE: Final = 400_000
_SETTINGS: Final[tuple[dict[str, Any], ...]] = (
    {"fold": True},
    {"strip_zeros": True},
    {"dates": "day-first"},
    {"dates": "month-first"},
    {"digits_only": True},
)
"""From what changes least of a key to what leaves out most of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BetterSpelling:
    """Settings of ``[linkage]`` under which more rows have a record of an equal key."""

    settings: dict[str, Any]
    """By name."""

    share: float
    """Share of the primary's rows that have a record of an equal key under these settings."""

    share_now: float
    """Share of the primary's rows that have a record of an equal key now."""

    def in_words(self) -> str:
        """Return what to write, and what it changes."""
        settings_text = " and ".join(
            f"linkage.{name} = {str(value).lower() if value is True else repr(value)}"
            for name, value in self.settings.items()
        ).replace("'", '"')
        return (
            f"with {settings_text}, {self.share:.0%} of the rows have a record with an equal key "
            f"(now {self.share_now:.0%})"
        )


def better_spelling(spec: KeySpec, primary: KeyTable, own: KeyTable) -> BetterSpelling | None:
    """Return the settings that give most rows a record of an equal key; None if none gives more.

    A setting that makes keys of one table equal that were not is passed over: it would link other
    people.

    Args:
        spec: Which keys are compared.
        primary: The primary's keys.
        own: The secondary's.

    Reveals:
        Nothing leaves the process, which holds both tables.
    """
    if "text" not in spec.kinds.values():
        return None
    if not isinstance(spec.metric, Exact):
        # Other metrics compare texts without case anyway.
        spec = dataclasses.replace(spec, fold=True)
    both = [_as_texts(keys) for keys in (primary, own)]
    now = _shares(spec, both, least=(0, 0))
    if now.rows >= _ENOUGH:
        return None
    known = {"fold"} if spec.fold else set()
    single = [
        setting for setting in _SETTINGS if not (known | set(spec.spelling.settings)) & set(setting)
    ]
    pairs = [
        first | other for first, other in combinations(single, 2) if not set(first) & set(other)
    ]
    large = sum(keys.num_rows for keys in both) > _LARGE
    best = None
    for settings in single if large else (*single, *pairs):
        share = _shares(_with(spec, settings), both, least=now.different).rows
        if share > _MORE + (now.rows if best is None else best.share):
            best = BetterSpelling(settings=settings, share=share, share_now=now.rows)
    return best


def _with(spec: KeySpec, settings: dict[str, Any]) -> KeySpec:
    spelled = {name: value for name, value in settings.items() if name != "fold"}
    return dataclasses.replace(
        spec,
        fold=settings.get("fold", spec.fold),
        spelling=Spelling(**{**spec.spelling.settings, **spelled}),
    )


def _as_texts(keys: KeyTable) -> KeyTable:
    """Return keys with numbers as texts; a missing one stays missing."""
    return dataclasses.replace(
        keys,
        columns={
            name: column
            if column.dtype == object
            else np.array(
                [None if number != number else f"{number:.17g}" for number in column], object
            )
            for name, column in keys.columns.items()
        },
    )


class _Shares(NamedTuple):
    rows: float
    """Share of the primary's rows that have a record of an equal key."""

    different: tuple[int, int]
    """Different keys of the primary, and of the secondary."""


def _shares(spec: KeySpec, both: Sequence[KeyTable], *, least: tuple[int, int]) -> _Shares:
    """Compare keys; no row is linked where a table has fewer different keys than it should."""
    texts = [
        exact_texts(spec, dataclasses.replace(keys, columns=spec.spelling.of_columns(keys.columns)))
        for keys in both
    ]
    mine, theirs = set(texts[0]) - {None}, set(texts[1]) - {None}
    different = len(mine), len(theirs)
    merged = any(now < _KEPT * before for now, before in zip(different, least, strict=True))
    linked = 0 if merged else sum(text in theirs for text in texts[0])
    return _Shares(rows=linked / len(texts[0]), different=different)


# Whether the nearest record is the right one, and further ones stand in for nothing.

# A second record that is farther than so many times the first is another one's.
_FARTHER: Final = 4.0
_NEARLY_ALL: Final = 0.9


def one_is_right(spec: LinkSpec, primary: KeyTable, own: KeyTable) -> float | None:
    """Return the share of linked rows whose nearest record is far nearer than the next one.

    Of rows whose keys fell at random in a plane, a sixteenth are so.

    Args:
        spec: How the federation links.
        primary: The primary's keys.
        own: The secondary's.

    Returns:
        None where it can't be found out, or most rows have no such record: K then stays.

    Reveals:
        Nothing leaves the process, which holds both tables. No run does this between processes: K
        is a setting of the file.
    """
    if own.num_rows < 2:
        return None
    if not spec.keys.metric.quick and primary.num_rows * own.num_rows > _MOST_PAIRS:
        primary = _some(primary, _MOST_PAIRS // own.num_rows)
    try:
        distances = Linker(spec, primary).metric(own).nearest(None, 2).distances
    except SecureVflError:
        return None  # check names what is wrong with them
    first, second = distances[np.isfinite(distances[:, 0])].T
    if not len(first):
        return None
    share = float(((second > 0) & (_FARTHER * first <= second)).mean())
    return share if share >= _NEARLY_ALL else None


# About how many links a federation will have, found by linking where all tables are here.

_LEAST: Final = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpectedLinks:
    """What linking one secondary gives, of all rows and records or of a part of them."""

    counts: LinksCounted
    """Counts of the rows and records that were linked for this estimate."""

    all_rows: int
    all_records: int
    share: float
    """Share of all rows that get a link; estimated where a part was linked."""

    better: BetterSpelling | None = None
    """Settings by which more rows have a record of an equal key."""

    one_right: float | None = None
    """Share of linked rows for which one record is right, where that is nearly all of them, and
    they have more links."""

    doubts: tuple[str, ...] = ()
    """Doubts to weigh before training on such links."""

    @property
    def complete(self) -> bool:
        """Whether all rows and records were linked."""
        return (self.counts.rows, self.counts.records) == (self.all_rows, self.all_records)

    def in_words(self) -> str:
        """Return one line for people, without the secondary's name."""
        if self.complete:
            return links_in_words(self.counts).partition(": ")[2]
        near = ""
        if self.counts.median_distance is not None:
            near = nearness_in_words(self.counts)
            near = f"; half of the nearest {near}" if self.counts.unit else f", {near}"
        return (
            f"about {self.share:.0%} of {self.all_rows:,} rows get a link (estimated from "
            f"{self.counts.rows:,} rows and {self.counts.records:,} records, drawn at random){near}"
        )

    def as_json(self) -> dict[str, Any]:
        """Return all of it for ``--json``."""
        return {
            **event_fields(self.counts),
            "all_rows": self.all_rows,
            "all_records": self.all_records,
            "share": self.share,
            "better": None if self.better is None else dataclasses.asdict(self.better),
            "one_right": self.one_right,
            "doubts": list(self.doubts),
        }

    def problem(self, config: FederationConfig) -> str | None:
        """Return why a run would end at these links; None if it would not."""
        if self.share >= config.linkage.least_linked:
            return None
        cure = "compare how both parties write their keys"
        if self.better is not None:
            cure = self.better.in_words()
        return (
            f"links of {self.counts.name}: {self.in_words()}; less than linkage.least_linked = "
            f"{config.linkage.least_linked:g}, so a run ends there; {cure}"
        )

    def warnings(self, config: FederationConfig) -> list[str]:
        """Return what to think of before training on these links, one sentence each."""
        warnings, name = list(self.doubts), self.counts.name
        if self.better is not None:
            warnings.append(f"{name}: {self.better.in_words()}")
        elif self.share < _FEW:
            text = f"{name}: only {self.share:.0%} of the rows get a link; the others gain nothing"
            if config.privacy.links_per_record is not None and config.linkage.metric != "exact":
                text += (
                    "; where one record serves many rows, a larger privacy.links_per_record links "
                    "more of them, for more noise than that gains at the same epsilon"
                )
            warnings.append(text)
        if self.one_right is not None:
            warnings.append(
                f"{name}: for {self.one_right:.0%} of the linked rows one record is far nearer "
                f"than the next, and {config.model.neighbours} links blur it; set "
                f"model.neighbours = 1"
            )
        return warnings


def expected_links(config: FederationConfig, primary: KeyTable, own: KeyTable) -> ExpectedLinks:
    """Link one secondary as a run would, or a part of it where that would take long.

    Args:
        config: The federation file.
        primary: The primary's keys.
        own: The secondary's.

    Raises:
        DataError: If the tables can't be linked.

    Reveals:
        Nothing leaves the process, which holds both tables.
    """
    spec = link_spec(config)
    # A run counts rows with a record, whatever a secret sample holds.
    spec = dataclasses.replace(spec, choice=dataclasses.replace(spec.choice, sampling_rate=1.0))
    rows, records = primary.num_rows, own.num_rows
    better = better_spelling(spec.keys, primary, own)
    mine, theirs = primary, own
    if not spec.keys.metric.quick and rows * records > _MOST_PAIRS:
        # Whoever chooses is drawn from, among all of the others: a choice stays what it is.
        if config.linkage.choose == "records":
            theirs = _some(own, _MOST_PAIRS // rows)
        else:
            mine = _some(primary, _MOST_PAIRS // records)
    linked = Linker(spec, mine)(theirs)
    protection = protection_of(spec)
    unit = None if protection.helpers else protection.unit(spec)
    counts = count_links(spec, theirs, linked, unit=unit)
    share = counts.rows_linked / counts.rows
    if theirs.num_rows < records:
        links = linked.source.link(np.arange(rows, dtype=np.int64))
        share = _share_of_all(links, drawn=theirs.num_rows, records=records)
    return ExpectedLinks(
        counts=counts,
        all_rows=rows,
        all_records=records,
        share=share,
        better=better,
        one_right=one_is_right(spec, primary, own) if config.model.neighbours > 1 else None,
        doubts=tuple(link_warnings(spec, own, counts, meet=linked.meet)),
    )


def _share_of_all(links: LinkTable, *, drawn: int, records: int) -> float:
    """Return the share of rows that all records would link, of those that a part of them links.

    How many rows are within reach is estimated after Chao (1984, doi:10.2307/4615964) from rows
    with one and with two of the drawn records; all records then meet them as if by chance. Where no
    two met in a row, every further record has a row of its own.
    """
    per_row = links.present.sum(axis=1)
    linked, once, twice = (int((per_row >= 1).sum()), *((per_row == n).sum() for n in (1, 2)))
    if not linked:
        return 0.0
    picks = records * float(per_row.sum()) / drawn
    reach = linked + once**2 / (2 * twice) if twice else math.inf
    expected = picks if math.isinf(reach) else reach * -math.expm1(-picks / reach)
    return float(min(max(expected, linked), links.num_rows)) / links.num_rows


def _some(keys: KeyTable, count: int) -> KeyTable:
    drawn = np.random.default_rng(0).permutation(keys.num_rows)[: max(count, _LEAST)]
    return keys.take(np.sort(drawn))


# About what a run will cost: bytes on the wire, time and memory.

_STEPS: Final = 8
_WARM_UP: Final = 2
# Of a round: headers of frames, a plan, a signature of the ledger's head.
_ROUND_BYTES: Final = 600
# A perceptron's step beside one of the top model, which holds about such a perceptron.
_NETWORK_STEP: Final = 0.6
# The optimizer's part of a step beside forward and backward; loading one takes longer than a check.
_UPDATE: Final = 0.3
_FITTED_ROWS: Final = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """Estimates; a real run stops early, waits for others, and shares its machine."""

    bytes_received: int
    """By the primary of all secondaries, in releases."""

    bytes_sent: int
    """By the primary to all secondaries: which rows, gradients where bottom models train, and keys
    where they are shown."""

    step_seconds: float
    """One training step of the primary's model, timed on this machine; with assisted boosting one
    round of all secondaries' models, as if their tables were as wide as the primary's."""

    seconds: float
    """Upper bound: all epochs in one process and the local baseline, without linking."""

    memory_bytes: int | None
    """That this process has had, with all tables that are here; None where the system does not
    tell."""


def estimate_costs(plan: RunPlan, table: PartyTable, keys: KeyTable | None) -> Costs:
    """Estimate what a run costs.

    Args:
        plan: The run.
        table: The primary's table.
        keys: Its keys; None where they are not shown.

    Raises:
        ConfigError: If the family can't build its top model.
    """
    config, releases = plan.config, plan.releases
    secondaries = len(config.secondaries)
    per_row = 8 * plan.cut.words(1024) / 1024
    received = secondaries * releases.row_releases * per_row + releases.rounds * _ROUND_BYTES
    sent = secondaries * (8 * releases.row_releases + releases.rounds * _ROUND_BYTES)
    steps: float = config.epochs * -(-plan.facts.train_rows // config.training.batch_size)
    if not plan.frozen:
        positions, width = config.family.cut_shape(config.model)
        trained = config.epochs * plan.facts.train_rows
        sent += secondaries * 4 * positions * width * trained
    if keys is not None:
        sent += secondaries * _key_bytes(keys)
    # Of the primary alone, the network: trees take a few seconds where it takes a minute.
    network = BaselineConfig()
    network_steps = network.epochs * -(-plan.facts.train_rows // network.batch_size)
    parties = 1 if plan.frozen else 1 + secondaries
    if isinstance(config.model, AssistConfig):
        # Beside a fit it is not known what a step of a network takes, which is little.
        step, steps = secondaries * _fit_seconds(config.model, table, plan), config.epochs
    else:
        step = _step_seconds(config, table, plan)
        steps = steps * parties + _NETWORK_STEP * network_steps
    return Costs(
        bytes_received=round(received),
        bytes_sent=round(sent),
        step_seconds=step,
        seconds=step * steps,
        memory_bytes=peak_memory_bytes(),
    )


def _key_bytes(keys: KeyTable) -> int:
    total = 0
    for column in keys.columns.values():
        if column.dtype == object:
            total += sum(len(str(text).encode()) + 4 for text in column if text is not None)
        else:
            total += 8 * len(column)
    return total


def _fit_seconds(settings: AssistConfig, table: PartyTable, plan: RunPlan) -> float:
    """Time the fit of one local model to some made-up rows, and scale it to all of them."""
    rows = min(_FITTED_ROWS, plan.facts.train_rows)
    random = np.random.default_rng(0)
    inputs = random.normal(size=(rows, settings.neighbours * max(1, table.num_features)))
    residuals = random.normal(size=(rows, settings.outputs)).astype(np.float32)
    started = time.perf_counter()
    cross_fit(settings, inputs, residuals, seed=0)
    return (time.perf_counter() - started) * plan.facts.train_rows / rows


def _step_seconds(config: FederationConfig, table: PartyTable, plan: RunPlan) -> float:
    """Time the primary's part of a training step, on made-up numbers."""
    if config.top is not None:
        return 0.0  # an estimator is fitted once, in about the time that solo takes
    rows = min(config.training.batch_size, plan.facts.train_rows)
    classes = len(table.classes or ()) if config.federation.task == "multiclass" else 1
    top = build_top(config, table, TaskHead(task=config.federation.task, num_classes=classes))
    random = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random)

    features, keys = numbers(rows, table.num_features), numbers(rows, table.key_dim)
    aggregate = numbers(rows, *config.family.cut_shape(config.model))
    similarities = None
    if config.family.needs_similarities(config.model):
        similarities = numbers(rows, len(config.secondaries), config.model.neighbours)
    started = 0.0
    for step in range(_WARM_UP + _STEPS):
        if step == _WARM_UP:
            started = time.perf_counter()
        loss = top(features, keys, aggregate, similarities).square().mean()
        loss.backward()
    return (1 + _UPDATE) * (time.perf_counter() - started) / _STEPS
