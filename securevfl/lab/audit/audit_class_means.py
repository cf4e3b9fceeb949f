"""Audit of the class-means stage: class sums, drawn labels and symbols of the installed code.

A primary sees a secondary's class sums behind the secondary's noise, and is set on one record,
added or removed. The secondary sees them behind the primary's noise, as it knows its own, and is
set on one label, exchanged. Scores are 0 in the one world and 1 in the other, up to noise. Labels
by randomised response are counted, and so are symbols of keys with a record and without.

Secondaries, primary and dealer are the parts of a run, each a thread of this process, over lines
without a network. Two things are the audit's own: the tables, of which everybody knows what class
sums would be without noise, and that noise is remembered by whoever drew it, so that each side's
view of the sums is that of somebody who knows its own.
"""

import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Final

import numpy as np
import torch
from jaxtyping import Float64, Int64

from securevfl.config.federation import FederationConfig, link_spec
from securevfl.config.reading import parse_federation
from securevfl.config.sections import PartySettings
from securevfl.core.conventions import stream
from securevfl.core.progress import unheard
from securevfl.data.tables import PartyTable, RowSplit
from securevfl.dp.class_sums import SumFormat
from securevfl.dp.events import SymbolRelease
from securevfl.dp.pure import largest_loss
from securevfl.dp.symbols import normal_scores
from securevfl.federation.build import bottom_at_work
from securevfl.federation.checkpoint import StateFolder
from securevfl.federation.messages import RoundPlan
from securevfl.federation.rounds.cached_release import CachedRelease
from securevfl.federation.rounds.exchanges import SimulatedExchange
from securevfl.federation.rounds.primary import PrimaryData
from securevfl.federation.run_plan import RunFacts, RunPlan, plan_run
from securevfl.lab.audit.audit_party import ThreadPeers, Wires, answer_messages, run_lives
from securevfl.lab.audit.audit_statistics import (
    DELTA,
    Audited,
    AuditSettings,
    AuditTest,
    SumsView,
    drawn_tests,
    error_bound,
    labels_needed,
    sums_tests,
    worlds_needed,
)
from securevfl.lab.audit.audit_worlds import (
    ShowFeatures,
    audited_secondary,
    parties_named,
    table_at,
)
from securevfl.ledger.ledger import Ledger
from securevfl.linkage.spec import LinkedSecondary
from securevfl.linkage.stage.linking import Linker
from securevfl.linkage.stage.party_keys import keys_of
from securevfl.models.tasks import TaskHead
from securevfl.stages.class_means.class_labels import ClassLabels, class_labels_of
from securevfl.stages.class_means.fitting import ClassMeansFitting
from securevfl.stages.class_means.parties import (
    ClassMeansPrimary,
    ClassMeansSecondary,
    MaskedLines,
    SumsUnderMasks,
    deal_class_sums,
)

_RECORDS: Final = 64
"""Number of classes whose only record is there or not, in turn."""
_LABELS: Final = 64
"""Number of class pairs; the label of one row is the first or the second, in turn."""
_CLASSES: Final = _RECORDS + 2 * _LABELS
_LINKS: Final = 2
"""Number of rows of a record, all of one class, and of records of a row."""
_FEATURES: Final = 3
_BEYOND: Final = 10.0
"""Length of a record, over the bound that it is clipped to."""
_DRAWN_CLASSES: Final = 4
_NEAR, _FAR = 0.1, 10.0
_SEED: Final = 0
_SYMBOLS_EPSILON: Final = 2.0
_SYMBOL_KEYS: Final = 1_024
"""Number of keys with a record, and of those without."""
_SYMBOLS_POWER: Final = 0.9998
"""Probability that so many keys detect symbols at twice their epsilon."""
_DEALER: Final = "dealer"


class _RecordedFitting(ClassMeansFitting):
    """A secondary's installed part, which keeps its noise and its sums."""

    drawn: Int64[np.ndarray, "bins numbers"]
    sums: Float64[np.ndarray, "bins numbers"]

    def noise(self) -> Int64[np.ndarray, "bins numbers"]:
        """Return fresh noise, and keep it."""
        self.drawn = super().noise()
        return self.drawn

    def finish(self, sums: Float64[np.ndarray, "bins numbers"]) -> None:
        """Keep the sums; nothing is fitted to them."""
        self.sums = sums


def audit_class_means(settings: AuditSettings) -> dict[Audited, Sequence[AuditTest]]:
    """Make class sums, draw labels and symbols, and test each side's view of them.

    Args:
        settings: Settings of the audit. Raises:
        SecureVflError: If a party fails.

    Reveals:
        Nothing: all records and labels are made up.
    """
    records, labels = _SumsStage(settings).views()
    return {
        "class_sums": sums_tests(records, what="record"),
        "label_sums": sums_tests(labels, what="label"),
        "drawn_labels": _test_label_draws(settings),
        "symbols": _test_symbols(),
    }


class _SumsStage:
    """Class sums under a dealer's masks, as primary and secondaries each see them."""

    def __init__(self, settings: AuditSettings) -> None:
        self._settings = settings
        self._config = _federation(settings, labels="shares", classes=_CLASSES)
        rows = _LINKS * _RECORDS + _LABELS
        self._plan = _plan(self._config, rows=rows)
        of_records = np.repeat(np.arange(_RECORDS), _LINKS)
        of_labels = _RECORDS + 2 * np.arange(_LABELS) + self._second_of_pair
        self._data = _data(np.concatenate([of_records, of_labels]), classes=_CLASSES)

    @property
    def _present(self) -> np.ndarray:
        """True for each class whose record is there."""
        return np.arange(_RECORDS) % 2 == 1

    @property
    def _second_of_pair(self) -> np.ndarray:
        """True for each row with the second label of its pair."""
        return np.arange(_LABELS) % 2 == 1

    def views(self) -> tuple[SumsView, SumsView]:
        """Return the primaries' views of records, and the secondaries' views of labels.

        Raises:
            SecureVflError: If a party fails.
        """
        settings, parties = self._settings, len(self._plan.secondaries)
        label_noise = settings.label_noise
        of_labels = worlds_needed(label_noise) / (_LABELS // 2)
        # Each round gives two sums behind a secondary's own noise.
        of_records = worlds_needed(settings.noise_multiplier) / (_RECORDS // 2) / 2
        rounds = max(2, math.ceil(max(of_labels, of_records) / parties))
        by_primary, by_secondaries = [], []
        for _ in range(rounds):
            for shown, secondary_sums in self._round():
                by_primary.extend(shown)
                by_secondaries.append(secondary_sums)
        vector = self._vector
        length = float(np.linalg.norm(vector))
        records = np.stack(by_primary) - self._expected_sums
        labels = np.stack(by_secondaries) - self._expected_sums
        of_record, of_label = _LINKS * length, math.sqrt(2) * length
        # The whole of what each change moves, along which the two worlds are furthest apart.
        along = np.stack(by_primary)[:, :_RECORDS] @ vector / length / of_record
        pairs = np.stack(by_secondaries)[:, _RECORDS:-1] @ vector / length
        moved = (pairs[:, 1::2] - pairs[:, ::2]) / math.sqrt(2) / of_label
        return (
            SumsView(
                noise=settings.noise_multiplier,
                residual=records / of_record,
                scores=along,
                made=self._present,
            ),
            SumsView(
                noise=label_noise,
                residual=labels / of_label,
                scores=moved + 0.5,
                made=self._second_of_pair,
            ),
        )

    def _round(self) -> list[tuple[list[np.ndarray], np.ndarray]]:
        """Make every secondary's class sums once.

        Returns:
            For each secondary: its sums as the primary sees them, under masks and by labels that
            were shown; and as it sees them itself.
        """
        plan, config = self._plan, self._config
        wires = Wires(self._settings.timeout_s)
        fittings = [
            self._recorded_fitting(plan.config.party(name)) for name in plan.secondaries.values()
        ]
        hidden: list[Int64[np.ndarray, "bins numbers"]] = []
        whole = self._class_labels.label_noise
        assert whole is not None, "labels stay at home"

        def record_sums(sums: SumFormat) -> Int64[np.ndarray, "bins numbers"]:
            hidden.append(whole(sums))
            return hidden[-1]

        class_labels = replace(self._class_labels, label_noise=record_sums)
        primary = config.primary.name

        def fit(name: str, class_means: ClassMeansFitting) -> None:
            lines = MaskedLines(wires.of(name), _DEALER)
            part = ClassMeansSecondary(plan, class_means, lines)
            answer_messages(part.beside_rounds, lines.channels, primary, count=1)

        lives: dict[str, Callable[[], object]] = {
            name: partial(fit, name, class_means)
            for name, class_means in zip(plan.secondaries.values(), fittings, strict=True)
        }
        lines = wires.of(primary)
        lives[primary] = ClassMeansPrimary(
            plan,
            ThreadPeers(lines, plan.secondaries),
            lambda _due: class_labels,
            sums=SumsUnderMasks(plan, lines, _DEALER),
            observe=unheard,
        ).before_release
        lives[_DEALER] = partial(deal_class_sums, config, wires.of(_DEALER), plan.facts)
        run_lives(lives)
        seen = []
        # The primary takes secondaries in this order, and so draws noise for them.
        for class_means, noise in zip(fittings, hidden, strict=True):
            secondary_sums = class_means.sums - class_means.drawn
            shown = [
                class_means.sums - noise,
                class_means.by_labels(class_labels.bins_of_rows, keep=None),
            ]
            seen.append((shown, secondary_sums))
        return seen

    @cached_property
    def _class_labels(self) -> ClassLabels:
        with tempfile.TemporaryDirectory(prefix="securevfl-audit-") as text:
            return _class_labels(self._plan, self._data, _ledger(self._plan, "primary"), text)

    def _recorded_fitting(self, party: PartySettings) -> _RecordedFitting:
        """Return a secondary's part in one round."""
        at_work = bottom_at_work(self._plan, party, self._records, device=torch.device("cpu"))
        kept = CachedRelease(
            None,
            _ledger(self._plan, party.name),
            bottom=at_work.bottom,
            links=self._linked_secondary.source,
            records={"features": torch.from_numpy(at_work.features)},
            fit=None,
        )
        return _RecordedFitting(self._plan, party, kept)

    @cached_property
    def _direction(self) -> Float64[np.ndarray, " features"]:
        """A dense unit vector, along which all records lie."""
        drawn = stream(_SEED, "audit direction", "votes").normal(size=_FEATURES)
        return np.asarray(drawn / np.linalg.norm(drawn))

    @cached_property
    def _vector(self) -> Float64[np.ndarray, " numbers"]:
        """Contribution of a record, or of a row with two, to a class sum, in units."""
        sums = self._recorded_fitting(self._config.secondaries[0]).format
        return sums.radius * 2.0**sums.bits * np.concatenate([[0.5], self._direction])

    @cached_property
    def _expected_sums(self) -> Float64[np.ndarray, "bins numbers"]:
        """Class sums without noise, but for rounding."""
        weights = np.zeros(_CLASSES + 1)
        weights[:_RECORDS] = _LINKS * self._present
        weights[_RECORDS + 2 * np.arange(_LABELS) + self._second_of_pair] = 1.0
        return weights[:, None] * self._vector

    @cached_property
    def _places(self) -> Float64[np.ndarray, " rows"]:
        """Keys of rows: those of one record are neighbours, all others are isolated."""
        of_records = _FAR * np.repeat(np.arange(_RECORDS), _LINKS)
        of_records[1::2] += 2 * _NEAR
        others = _FAR * (_RECORDS + np.arange(_LABELS + 2))
        return np.concatenate([of_records, others])

    @cached_property
    def _records(self) -> PartyTable:
        """A secondary's table: one record between two rows, or two at one."""
        between = _FAR * np.flatnonzero(self._present) + _NEAR
        rows = _FAR * (_RECORDS + np.arange(_LABELS))
        places = np.concatenate([between, rows - _NEAR, rows + _NEAR])
        length = _BEYOND * math.sqrt(_FEATURES)
        return table_at("records", places, np.tile(length * self._direction, (len(places), 1)))

    @cached_property
    def _linked_secondary(self) -> LinkedSecondary:
        spec = link_spec(self._config)
        primary = table_at("primary", self._places, np.zeros((len(self._places), 1)))
        return Linker(spec, keys_of(spec.keys, primary))(keys_of(spec.keys, self._records))


def _test_label_draws(settings: AuditSettings) -> list[AuditTest]:
    """Test labels by randomised response, drawn once and again after the run is resumed."""
    epsilon, classes = settings.label_epsilon, _DRAWN_CLASSES
    each = labels_needed(epsilon, classes=classes)
    config = _federation(settings, labels="randomised", classes=classes)
    plan = _plan(config, rows=2 * each)
    data = _data(np.repeat([0, 1], each), classes=classes)
    ledger = _ledger(plan, "primary")
    with tempfile.TemporaryDirectory(prefix="securevfl-audit-") as text:
        # A session of its own each: nothing is known but what lies in the run's folder.
        once, again = (
            _class_labels(plan, data, ledger, text).bins_of_rows[: 2 * each] for _ in range(2)
        )
    return drawn_tests(once[:each], once[each:], again, epsilon=epsilon, classes=classes)


def _federation(settings: AuditSettings, *, labels: str, classes: int) -> FederationConfig:
    """Return a federation whose class sums have the noise of ``noise_multiplier``."""
    parties = parties_named(settings.names)
    if labels == "shares":
        parties.append({"name": _DEALER, "role": "dealer"})
    source = {
        "federation": {"name": "audit", "task": "multiclass", "seed": _SEED},
        "model": {
            "family": "fet",
            "neighbours": _LINKS,
            "hidden": classes,
            "heads": 1,
            "release": "pooled",
            "top": "tied",
            "keys_as_features": False,
        },
        "base": {"estimator": "linear"},
        # With half of the squared mu, fittings have the noise of releases.
        "encoder": {
            "method": "class-means",
            "labels": labels,
            "label_epsilon": settings.label_epsilon,
            "share": 0.5,
        },
        "privacy": {
            "noise_multiplier": settings.noise_multiplier,
            "delta": DELTA,
            "encoder": "frozen",
            "unit": "secondary-record",
            "links_per_record": _LINKS,
        },
        "linkage": {"protection": "none", "choose": "records", "max_distance": 2 * _NEAR},
        "party": parties,
    }
    return parse_federation(source, file="federation of the audit")


def _plan(config: FederationConfig, *, rows: int) -> RunPlan:
    """Return the plan of a run with `rows` training rows, one validation row and one test row."""
    facts = RunFacts(rows=rows + 2, train_rows=rows, validation_rows=1, test_rows=1)
    return plan_run(config, facts)


def _data(labels: Int64[np.ndarray, " rows"], *, classes: int) -> PrimaryData:
    """Return a primary's table of labels alone; the last two rows validate and test."""
    rows = len(labels)
    return PrimaryData(
        features=torch.zeros(rows + 2, 0),
        keys=torch.zeros(rows + 2, 0),
        targets=torch.from_numpy(np.concatenate([labels, [0, 0]]).astype(np.int64)),
        head=TaskHead(task="multiclass", num_classes=classes),
        split=RowSplit(
            train=np.arange(rows, dtype=np.int64),
            validation=np.array([rows], dtype=np.int64),
            test=np.array([rows + 1], dtype=np.int64),
        ),
    )


def _ledger(plan: RunPlan, party: str) -> Ledger:
    return Ledger(None, party=party, plan=plan.releases, noise_share_std=plan.noise_share_std)


def _class_labels(plan: RunPlan, data: PrimaryData, ledger: Ledger, folder: str) -> ClassLabels:
    state = StateFolder(Path(folder), settings_digest="")
    labels = data.targets.numpy()
    table = table_at(
        "primary", np.arange(len(labels), dtype=np.float64), np.zeros((len(labels), 1))
    )
    return class_labels_of(plan, data, replace(table, labels=labels), ledger, state, ())


def _test_symbols() -> list[AuditTest]:
    """Release symbols once, and test what one reveals of a record's presence.

    Every key has two rows, and every other key a record, all in one cell. A primary that knows this
    counts how often that cell is sent with the record and without it.
    """
    keys, plan = 2 * _SYMBOL_KEYS, _symbols_plan(keys=2 * _SYMBOL_KEYS)
    charged = plan.releases.release(plan.noise_share_std, rounds=1, row_releases=1)
    assert isinstance(charged, SymbolRelease), "scores leave as symbols"
    # The order of rows is no order of keys.
    places = np.random.default_rng(0).permutation(np.repeat(np.arange(keys), 2))
    symbols = _sent_symbols(plan, places, cells=charged.cells)
    _, firsts = np.unique(places, return_index=True)
    own = symbols[firsts] == charged.cells - 1
    return [
        AuditTest(
            name="symbols_not_too_distinguishable",
            statistic=least_loss(int(own[::2].sum()), int(own[1::2].sum()), _SYMBOL_KEYS),
            threshold=largest_loss(charged),
            passes_if="at most",
            power=_SYMBOLS_POWER,
            against="symbols are drawn at twice their epsilon",
        ),
        AuditTest(
            name="rows_of_a_key_have_one_symbol",
            statistic=float((symbols != symbols[firsts][places]).sum()),
            threshold=0.0,
            passes_if="at most",
            power=1 - charged.cells**-_SYMBOL_KEYS,
            against="each row of a key draws a symbol of its own",
        ),
    ]


def least_loss(there: int, absent: int, keys: int) -> float:
    """Return a lower confidence bound on the privacy loss of a symbol, in either direction.

    Args:
        there: Keys with a record whose symbol is the record's cell.
        absent: Keys without one whose symbol is that cell.
        keys: Number of keys of either kind.
    """
    counts = np.array([[there, keys - there], [absent, keys - absent]])
    upper = error_bound(counts, keys)
    lower = np.maximum(1 - upper[:, ::-1], 1e-300)
    return max(0.0, float(np.log(lower / upper[::-1]).max()))


def _sent_symbols(plan: RunPlan, places: np.ndarray, *, cells: int) -> np.ndarray:
    """Return the symbol of each row, whose key is its place; even keys have a record."""
    own = np.unique(places)[::2]
    records = table_at("bank", own.astype(np.float64), np.full((len(own), 1), 10.0))
    secondary = audited_secondary(plan, records, ShowFeatures(), rounds=1, places=places)
    exchange = SimulatedExchange({1: secondary}, plan.cut)
    asked = RoundPlan(
        round_number=exchange.rounds.next(),
        rows=np.arange(len(places), dtype=np.int64),
        active=exchange.ranks,
        purpose="release",
    )
    sent = exchange.release(asked).flatten().double().numpy()
    secondary.close()
    means = normal_scores(cells)
    read = means / means[-1] * plan.config.privacy.clip_norm
    return np.abs(sent[:, None] - read).argmin(axis=1)


def _symbols_plan(*, keys: int) -> RunPlan:
    """Return the plan of a run with two rows a key."""
    rows = 2 * keys
    facts = RunFacts(rows=rows, train_rows=rows - 2, validation_rows=1, test_rows=1)
    source = {
        "federation": {"name": "audit", "task": "binary", "seed": 0},
        "model": {"family": "class-means", "keys_as_features": False, "top": "tied"},
        "training": {"batch_size": rows},
        "base": {"estimator": "linear"},
        "encoder": {"method": "class-means", "labels": "plaintext"},
        "privacy": {
            "epsilon": _SYMBOLS_EPSILON,
            "delta": DELTA,
            "encoder": "frozen",
            "unit": "secondary-record",
            "links_per_record": 1,
        },
        "linkage": {"protection": "none", "choose": "records", "max_distance": 0.5},
        "party": parties_named(["primary", "bank"]),
    }
    return plan_run(parse_federation(source, file="federation of the audit"), facts)
