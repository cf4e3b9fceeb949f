"""Check of a federation before a run: its effects, its costs and all its problems."""

import dataclasses
import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from securevfl.config.disclosure import channels
from securevfl.config.federation import FederationConfig, link_spec
from securevfl.config.rules import require_helpers, require_own_files
from securevfl.config.sections import PartySettings
from securevfl.core import files
from securevfl.core.errors import ConfigError, SecureVflError
from securevfl.core.formatting import finite_or_none
from securevfl.core.progress import LinksCounted, event_fields, links_in_words, nearness_in_words
from securevfl.data.sources.read import ignore_note
from securevfl.data.tables import KeyTable
from securevfl.desk.setup.party_check import Collected, PartyCheck, check_party
from securevfl.desk.setup.spelling import BetterSpelling, better_spelling
from securevfl.dp.labels import labels_total
from securevfl.dp.statement import of_labels
from securevfl.federation.released_labels import label_release
from securevfl.federation.run_plan import (
    RunFacts,
    RunPlan,
    plan_run,
    predictions_in_words,
    run_facts,
)
from securevfl.linkage.links import LinkTable
from securevfl.linkage.spec import LinkSpec, few_links_doubt
from securevfl.linkage.stage.candidates import count_links, link_warnings, repeated_key_warnings
from securevfl.linkage.stage.linkage_parts import protection_of
from securevfl.linkage.stage.linking import Linker
from securevfl.runtime.run_options import warnings_about

FILL_IN: Final = "# FILL IN:"
"""Beginning of a line to complete."""


# Texts are compared at some million pairs a second: more are not compared only to say this.
_MOST_PAIRS: Final = 4_000_000
# A second record that is farther than so many times the first is another one's.
_FARTHER: Final = 4.0
_NEARLY_ALL: Final = 0.9


def one_is_right(spec: LinkSpec, primary: KeyTable, own: KeyTable) -> float | None:
    """Return the share of linked rows whose nearest record is far nearer than the next one.

    If keys lay at random in a plane, it would be a sixteenth.

    Args:
        spec: How the federation links.
        primary: The primary's keys.
        own: The secondary's.

    Returns:
        None if it can't be measured, or is too small to set K to 1.

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


_LEAST: Final = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpectedLinks:
    """Expected links of one secondary, from all rows and records or from some."""

    counts: LinksCounted
    """Counts of the rows and records that were linked for this estimate."""

    all_rows: int
    all_records: int
    share: float
    """Share of all rows that get a link; estimated if only a sample was linked."""

    better: BetterSpelling | None = None
    """Settings by which more rows have a record of an equal key."""

    one_right: float | None = None
    """Share of linked rows for which only the nearest record fits, if that is nearly all and K is
    above 1; else None."""

    doubts: tuple[str, ...] = ()
    """Doubts to weigh before training on such links."""

    @property
    def complete(self) -> bool:
        """Whether all rows and records were linked."""
        return (self.counts.rows, self.counts.records) == (self.all_rows, self.all_records)

    def in_words(self) -> str:
        """Return the estimate as one line, without the secondary's name."""
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
        """Return the content of ``--json``."""
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
        """Return why a run would stop at these links, or None."""
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
        """Return warnings about training on these links, one sentence each."""
        warnings, name = list(self.doubts), self.counts.name
        if self.better is not None:
            warnings.append(f"{name}: {self.better.in_words()}")
        elif doubt := few_links_doubt(link_spec(config), self.share):
            warnings.append(f"{name}: only {self.share:.0%} of the rows get a link; {doubt}")
        if self.one_right is not None:
            warnings.append(
                f"{name}: for {self.one_right:.0%} of the linked rows one record is far nearer "
                f"than the next, and {config.model.neighbours} links blur it; set "
                f"model.neighbours = 1"
            )
        return warnings


LARGE_LINKAGE: Final = 200_000
"""Rows and records together from which linking is announced."""


def expected_links(
    config: FederationConfig,
    primary: KeyTable,
    own: KeyTable,
    show: Callable[[str], None] = ignore_note,
) -> ExpectedLinks:
    """Link one secondary as a run would, or a sample if that would take long.

    Args:
        config: The federation file.
        primary: The primary's keys.
        own: The secondary's.
        show: Receives a line about a linkage that may take long.

    Raises:
        DataError: If the tables can't be linked.

    Reveals:
        Nothing leaves the process, which holds both tables.
    """
    spec = link_spec(config)
    # A run counts rows with a record, whatever a secret sample holds.
    spec = dataclasses.replace(spec, choice=dataclasses.replace(spec.choice, sampling_rate=1.0))
    rows, records = primary.num_rows, own.num_rows
    if rows + records >= LARGE_LINKAGE:
        show(f"linking {own.name}: {rows:,} rows, {records:,} records")
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
    """Estimate the share of rows that all records would link from the links of some.

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


# Of a round: headers of frames, a plan, a signature of the ledger's head.
_ROUND_BYTES: Final = 600


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """Bytes of all epochs of a run; protected linkage is not counted."""

    bytes_received: int
    """Bytes of releases that the primary receives from all secondaries."""

    bytes_sent: int
    """Bytes that the primary sends to all secondaries: row numbers, gradients of trained bottom
    models, and shown keys."""


def estimate_costs(plan: RunPlan, keys: KeyTable | None) -> Costs:
    """Estimate a run's costs.

    Args:
        plan: The run.
        keys: The primary's keys; None if they are not shown.
    """
    config, releases = plan.config, plan.releases
    secondaries = len(config.secondaries)
    per_row = 8 * plan.cut.words(1024) / 1024
    received = secondaries * releases.row_releases * per_row + releases.rounds * _ROUND_BYTES
    sent = secondaries * (8 * releases.row_releases + releases.rounds * _ROUND_BYTES)
    if plan.regime.learns:
        positions, width = config.family.cut_shape(config.model)
        trained = config.training.epochs * plan.facts.train_rows
        sent += secondaries * 4 * positions * width * trained
    if keys is not None:
        sent += secondaries * _key_bytes(keys)
    return Costs(bytes_received=round(received), bytes_sent=round(sent))


def _key_bytes(keys: KeyTable) -> int:
    total = 0
    for column in keys.columns.values():
        if column.dtype == object:
            total += sum(len(str(text).encode()) + 4 for text in column if text is not None)
        else:
            total += 8 * len(column)
    return total


# Of a frozen run the noise is the same for any number of rows: each is released once.
_SOME_ROWS: Final = 1000
_PARTY_NAME: Final = re.compile(r'name = "([^"]+)"')


@dataclass(kw_only=True)
class Check:
    """Effects, costs and problems of a federation file."""

    file: Path
    problems: list[str] = field(default_factory=list)
    """Problems, one line each with the place and the remedy."""

    warnings: list[str] = field(default_factory=list)
    """Remarks that do not prevent the run."""

    config: FederationConfig | None = None
    """The checked federation; None if a setting is wrong."""

    parties: list[PartyCheck] = field(default_factory=list)
    links: dict[str, ExpectedLinks] = field(default_factory=dict)
    """Expected links by secondary, if both tables are on this machine."""

    plan: RunPlan | None = None
    """Plan of the run; None if its noise can't be computed."""

    costs: Costs | None = None
    """Estimated costs; None without the primary's table."""

    @property
    def fine(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def learns(self) -> list[dict[str, str]]:
        """Return every channel by which a party learns something."""
        return [] if self.config is None else channels(self.config)

    def privacy(self) -> dict[str, Any] | None:
        """Return the promise and its noise; None without a plan."""
        if self.plan is None:
            return None
        releases, tau = self.plan.releases, self.plan.noise_share_std
        return {
            "mechanism": self.plan.config.privacy.mechanism,
            "epsilon": finite_or_none(releases.epsilon(tau)),
            "delta": self.plan.config.privacy.delta,
            "unit": self.plan.config.privacy.unit,
            "noise_share_std": tau,
            "cells": releases.symbols.cells if releases.symbols else None,
            "sensitivity": None if releases.scores else releases.sensitivity(),
            "of": "all releases together" if self.plan.regime.releases_once else "one round",
            "clip_norm": self.plan.config.privacy.clip_norm,
            "statement": releases.statement(tau).text,
            "labels": self._labels(),
            "predictions": predictions_in_words(self.plan.config),
        }

    def _labels(self) -> str | None:
        """Return the promise for the primary's labels; None if no label is released."""
        release = None if self.config is None else label_release(self.config)
        total = labels_total([] if release is None else [release])
        if release is None or total is None:
            return None
        return of_labels(release.mechanism, total, parties=release.parties).text

    def as_json(self) -> dict[str, Any]:
        """Return the content of ``--json``."""
        return {
            "file": str(self.file),
            "fine": self.fine,
            "problems": self.problems,
            "warnings": self.warnings,
            "parties": {
                party_check.party.name: _party_json(party_check) for party_check in self.parties
            },
            "links": {name: links.as_json() for name, links in self.links.items()},
            "privacy": self.privacy(),
            "chosen": {} if self.config is None else dict(self.config.chosen),
            "base": None if self.config is None else self.config.base.estimator,
            "costs": None if self.costs is None else asdict(self.costs),
            "learns": self.learns(),
        }


def check_federation(
    path: Path,
    *,
    name: str | None = None,
    data_root: Path | None = None,
    show: Callable[[str], None] = ignore_note,
) -> Check:
    """Check a federation file: its effects, its costs and all its problems.

    Args:
        path: The federation file.
        name: Party whose table is on this machine; None: all tables are.
        data_root: Where relative paths start; default: next to the file.
        show: Receives each database's query before it is run, and what takes long.

    Raises:
        ConfigError: If ``name`` is no party of the file.

    Reveals:
        Nothing leaves the process. What is said of a table is for its owner: problems may quote a
        cell.
    """
    collected = Collected(path)
    readable = not collected.problems
    check = Check(
        file=path,
        problems=collected.problems,
        # Nothing is said of settings that were made up: a promise least of all.
        config=collected.config if readable else None,
    )
    parties = list(collected.config.parties if collected.config else collected.parties)
    if name is not None:
        known = ", ".join(party.name for party in parties)
        parties = [party for party in parties if party.name == name]
        if not parties and (collected.config is not None or known):
            raise ConfigError(f"--name {name}: is no party of {path}, which has {known}")
    unsure = _what_is_unsure(collected.mended)
    if name is None and collected.config is not None:
        try:
            require_own_files(collected.config, data_root or path.parent)
        except ConfigError as error:
            check.problems.append(str(error))
    for party in parties:
        if party.is_helper or not party.data:
            continue
        config = None if unsure else collected.config
        party_check = check_party(party, config, data_root or path.parent, show)
        check.parties.append(party_check)
        check.problems += [text for text in party_check.problems if not collected.follows(text)]
        check.warnings += party_check.warnings
    check.problems += _left_open(path, {party_check.party.name for party_check in check.parties})
    if check.config is not None:
        _see_the_run(check, check.config, show)
    return check


def _left_open(path: Path, checked: Collection[str]) -> list[str]:
    """Return what ``init`` has left open of parties whose tables are not checked."""
    try:
        lines = files.read_text(path, most=files.MOST_OF_SETTINGS).splitlines()
    except OSError:
        return []  # noted before
    problems, party = [], None
    for number, line in enumerate(lines, 1):
        if named := _PARTY_NAME.match(line):
            party = named[1]
        elif line.startswith(FILL_IN) and party is not None and party not in checked:
            problems.append(
                f"{path}: line {number}, of {party!r}, is left open: "
                f"{line.removeprefix(FILL_IN).strip()}; complete it, and drop {FILL_IN!r}"
            )
    return problems


def _what_is_unsure(mended: set[str]) -> bool:
    """Return whether the task or the keys were replaced: tables can't be checked then."""
    return not mended.isdisjoint(
        {"federation", "federation.task", "model.family", "linkage", "linkage.metric"}
    )


def _see_the_run(check: Check, config: FederationConfig, show: Callable[[str], None]) -> None:
    check.warnings = [*warnings_about(config), *check.warnings]
    try:
        require_helpers(config)
    except ConfigError as error:
        check.warnings.append(f"{error} (between processes; simulate does without)")
    by_name = {party_check.party.name: party_check for party_check in check.parties}
    primary = by_name.get(config.primary.name)
    _link(check, config, primary, by_name, show)
    _plan(check, config, primary)


def _link(
    check: Check,
    config: FederationConfig,
    primary: PartyCheck | None,
    by_name: Mapping[str, PartyCheck],
    show: Callable[[str], None],
) -> None:
    if primary is None or primary.keys is None:
        for party in config.secondaries:
            own = by_name.get(party.name)
            if own is not None and own.keys is not None:
                check.warnings += repeated_key_warnings(link_spec(config), own.keys)
        return
    for party in config.secondaries:
        own = by_name.get(party.name)
        if own is None or own.keys is None or own.keys.num_rows < config.model.neighbours:
            continue
        try:
            links = expected_links(config, primary.keys, own.keys, show)
        except SecureVflError as error:
            check.problems.append(str(error))
            continue
        check.links[party.name] = links
        if (problem := links.problem(config)) is not None:
            check.problems.append(problem)
        else:
            check.warnings += links.warnings(config)


def _plan(check: Check, config: FederationConfig, primary: PartyCheck | None) -> None:
    table = None if primary is None else primary.table
    try:
        if table is not None:
            facts = run_facts(config, table)[1]
        elif config.regime.releases_once:
            facts = RunFacts(
                rows=_SOME_ROWS, train_rows=_SOME_ROWS - 2, validation_rows=1, test_rows=1
            )
        else:
            return
        check.plan = plan_run(config, facts)
        if table is not None and primary is not None:
            shown = primary.keys if config.linkage.protection == "none" else None
            check.costs = estimate_costs(check.plan, shown)
    except SecureVflError as error:
        if str(error) not in check.problems:
            check.problems.append(str(error))


def _party_json(party_check: PartyCheck) -> dict[str, Any]:
    party: PartySettings = party_check.party
    return {
        "role": party.role,
        "rows": party_check.rows,
        "key": list(party.key),
        "columns": party_check.features,
        "unusable": party_check.unusable,
        "features": party_check.num_features,
        "dropped": party_check.dropped,
        "problems": party_check.problems,
    }
