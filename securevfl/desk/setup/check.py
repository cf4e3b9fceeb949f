"""Check of a federation before a run: its effects, its costs and all its problems."""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from securevfl.config.disclosure import channels
from securevfl.config.federation import FederationConfig, link_spec
from securevfl.config.rules import require_helpers
from securevfl.config.sections import PartySettings
from securevfl.core import files
from securevfl.core.errors import ConfigError, SecureVflError
from securevfl.core.formatting import finite_or_none
from securevfl.data.sources.read import ignore_note
from securevfl.desk.setup.estimates import Costs, ExpectedLinks, estimate_costs, expected_links
from securevfl.desk.setup.init import FILL_IN
from securevfl.desk.setup.party_check import Collected, PartyCheck, check_party
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
from securevfl.linkage.stage.candidates import repeated_key_warnings
from securevfl.runtime.run_options import warnings_about

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
            "sensitivity": releases.sensitivity(),
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
        show: Receives each database's query before it is run.

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
        _see_the_run(check, check.config)
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


def _see_the_run(check: Check, config: FederationConfig) -> None:
    check.warnings = [*warnings_about(config), *check.warnings]
    try:
        require_helpers(config)
    except ConfigError as error:
        check.warnings.append(f"{error} (between processes; simulate does without)")
    by_name = {party_check.party.name: party_check for party_check in check.parties}
    primary = by_name.get(config.primary.name)
    _link(check, config, primary, by_name)
    _plan(check, config, primary)


def _link(
    check: Check,
    config: FederationConfig,
    primary: PartyCheck | None,
    by_name: Mapping[str, PartyCheck],
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
            links = expected_links(config, primary.keys, own.keys)
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
                rows=_SOME_ROWS,
                train_rows=_SOME_ROWS - 2,
                validation_rows=1,
                test_rows=1,
            )
        else:
            return
        check.plan = plan_run(config, facts)
        if table is not None and primary is not None:
            shown = primary.keys if config.linkage.protection == "none" else None
            check.costs = estimate_costs(check.plan, table, shown)
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
