"""Check of a run folder: ledgers, countersigned statements, and privacy figures.

Chains, signatures and epsilon are computed again; no file's own claim is taken as true.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from securevfl.config.federation import FederationConfig
from securevfl.config.reading import read_federation
from securevfl.core.errors import AuthenticationError, ConfigError, PrivacyError, SecureVflError
from securevfl.core.files import read_json
from securevfl.federation.checkpoint import DamagedError, StateFolder, read_state
from securevfl.ledger.book import PROGRAM, RESTORED, recompute_figures, until_end
from securevfl.ledger.chain import Chain, read_chain
from securevfl.ledger.countersigning import COUNTERSIGNED, FORGOTTEN, require_signed
from securevfl.ledger.ledger_file import FILE
from securevfl.runtime.party import read_identities


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Result of one check."""

    check: str
    """Name of the check: ``folder``, ``chain``, ``signatures``, ``heads``, ``end``,
    ``checkpoints``, ``records`` or ``figures``."""
    party: str
    """Party whose ledger was checked."""
    good: bool | None
    """Whether the check passed; None if the evidence is missing."""
    text: str


@dataclass(frozen=True, kw_only=True)
class _File:
    """One ledger file, read and whole."""

    party: str
    path: Path
    live: bool
    """True if runs charge this file; a copy ends with the run that kept it."""
    chain: Chain
    entries: list[dict[str, Any]]


@dataclass
class _Evidence:
    """Evidence in a run folder, and the findings so far."""

    folder: Path
    config: FederationConfig
    identities: Mapping[str, Mapping[str, str]]
    metrics: Mapping[str, Any] | None
    run: str | None = None
    """The run's id; None if nothing was countersigned, as in a simulation."""
    files: list[_File] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    def note(self, check: str, party: str, good: bool | None, text: str) -> None:
        self.findings.append(Finding(check=check, party=party, good=good, text=text))

    def of(self, party: str) -> list[_File]:
        return [file for file in self.files if file.party == party]


def verify_run(folder: Path) -> list[Finding]:
    """Check a run folder and the ledgers that it names.

    Args:
        folder: The run folder.

    Returns:
        One finding a check; the run is good if none of them is false.

    Raises:
        ConfigError: If the folder holds no run, or no ledger of one is at hand.
    """
    if not (folder / "federation.toml").exists():
        raise ConfigError(f"run folder {folder}: holds no run (there is no federation.toml)")
    evidence = _Evidence(
        folder=folder,
        config=read_federation(folder / "federation.toml"),
        identities=read_identities(folder),
        metrics=read_json(folder / "metrics.json") if (folder / "metrics.json").exists() else None,
    )
    for party in evidence.config.table_parties:
        _read_ledgers(evidence, party.name)
    if all(finding.good is None for finding in evidence.findings):
        raise ConfigError(f"run folder {folder}: no party's ledger is at hand; nothing to check")
    _check_folder(evidence)
    _check_signatures(evidence)
    for file in evidence.files:
        _check_heads(evidence, file)
    for file in evidence.files:
        _check_end(evidence, file)
    for party in evidence.config.table_parties:
        _check_checkpoints(evidence, party.name)
    for party in evidence.config.secondaries:
        _check_records(evidence, party.name)
    _check_figures(evidence)
    return evidence.findings


def _read_ledgers(evidence: _Evidence, party: str) -> None:
    """Read a party's ledger, and the copy that the run folder may have."""
    own = evidence.folder / "parties" / party
    paths = {own / "ledger.jsonl": False}
    if (own / "ledger.json").exists():
        place = read_json(own / "ledger.json")
        path, run = Path(str(place.get("ledger"))), str(place.get("run"))
        evidence.run = evidence.run or run
        if run != evidence.run:
            evidence.note("chain", party, False, f"took part in another run than others, {run}")
        paths[path] = True
        if not path.exists():
            here = path.parent.exists()
            text = (
                f"there is no ledger at {path}: removed, or moved"
                if here
                else "not on this machine"
            )
            evidence.note("chain", party, False if here else None, text)
    whole = ""
    for path, live in paths.items():
        if not path.exists():
            continue
        try:
            chain, entries = read_chain(path)
        except PrivacyError as error:
            evidence.note("chain", party, False, str(error))
            continue
        file = _File(party=party, path=path, live=live, chain=chain, entries=entries)
        copies = evidence.of(party)
        evidence.files.append(file)
        lines = ", ".join(str(len(ledger_file.entries)) for ledger_file in copies)
        if all(
            chain.head_at(len(ledger_file.entries)) == ledger_file.chain.head
            for ledger_file in copies
        ):
            whole = f"{len(entries)} lines hang together ({path})"
            programs = sum(entry["kind"] == PROGRAM for entry in entries)
            whole += f", {programs} of them of programs, which have no bound" if programs else ""
            whole += f", and go on from the run's copy of {lines}" if copies else ""
            # What a copy says, the ledger that goes on from it says too.
            evidence.files = [
                ledger_file for ledger_file in evidence.files if ledger_file not in copies
            ]
        else:
            text = f"does not go on from the copy that the run kept ({lines} lines)"
            evidence.note("chain", party, False, text)
    if whole:
        evidence.note("chain", party, True, whole)


def _check_folder(evidence: _Evidence) -> None:
    """Check that federation file, figures and ledgers are of one run."""
    config, metrics = evidence.config, evidence.metrics or {}
    own = {party.name for party in config.parties}
    wrong = [
        (path.name, "is no party of federation.toml")
        for path in sorted(evidence.folder.glob("parties/*"))
        if path.name not in own
    ]
    run = metrics.get("run")
    if metrics.get("federation", config.federation.name) != config.federation.name:
        wrong.append((config.primary.name, "metrics.json is of another federation"))
    if None not in (run, evidence.run) and run != evidence.run:
        wrong.append((config.primary.name, f"metrics.json is of run {run}, not {evidence.run}"))
    for file in evidence.files if run is not None else ():
        opened = [e for e in file.entries if e["kind"] == "open" and e["run"] == run]
        if not opened:
            wrong.append((file.party, f"its ledger has no run {run}, which metrics.json is of"))
        elif any(entry["settings"] != config.settings_digest for entry in opened):
            wrong.append((file.party, "its ledger has the run under other settings"))
    for party, text in wrong:
        evidence.note("folder", party, False, f"{text}: files of several runs")


def _check_signatures(evidence: _Evidence) -> None:
    """Check the signatures of all statements in ledgers, and their identities in this run."""
    config = evidence.config
    for file in evidence.files:
        count = pinned = 0
        try:
            for entry in _countersigned_entries(file):
                for statement, signed in zip(
                    require_signed(entry), entry["statements"], strict=True
                ):
                    count += 1
                    if entry["run"] != evidence.run:
                        continue
                    keys = evidence.identities.get(entry["digest"], {})
                    if keys.get(statement.party) != signed["identity"]:
                        raise AuthenticationError(
                            f"{statement.party!r} signed at {statement.point} with an identity "
                            f"that this run does not pin"
                        )
                    pinned += 1
        except (AuthenticationError, ConfigError, PrivacyError) as error:
            evidence.note("signatures", file.party, False, str(error))
            continue
        text = f"{count} statements of others, {pinned} of them of this run by identities it pins"
        evidence.note("signatures", file.party, True if count else None, text)
    kept = evidence.identities.get(config.digest)
    file_pins = {party.name: party.identity for party in config.parties}
    if evidence.identities and kept != file_pins:
        text = "federation.toml pins other identities than identities.json keeps for it"
        evidence.note("signatures", config.primary.name, False, text)


def _check_heads(evidence: _Evidence, file: _File) -> None:
    """Compare a ledger with the other parties' countersigned statements."""
    agreed = 0
    for witness in evidence.files:
        if witness.party == file.party:
            continue
        for entry, statement in _statements_about(evidence, file, witness):
            if file.chain.head_at(statement["lines"]) == bytes.fromhex(statement["head"]):
                agreed += 1
                continue
            difference = f"has {len(file.entries)} lines, and {statement['lines']} were"
            if statement["lines"] <= len(file.entries):
                difference = f"is not, at line {statement['lines']}, what was"
            evidence.note(
                "heads",
                file.party,
                False,
                f"{file.path.name} {difference} countersigned by {witness.party} at "
                f"{entry['point']} on {entry['time']}: rolled back, emptied or rewritten",
            )
            return
    text = f"as others countersigned it, {agreed} times" if agreed else "no other's is at hand"
    evidence.note("heads", file.party, True if agreed else None, text)


def _statements_about(
    evidence: _Evidence, file: _File, witness: _File
) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Yield a witness's ledger lines and statements that a ledger must agree with."""
    name = evidence.config.federation.name
    lines = [entry for entry in witness.entries if entry.get("federation") == name]
    forgotten = ends = 0
    for number, entry in enumerate(lines, 1):
        if entry["kind"] == FORGOTTEN and entry["party"] == file.party:
            forgotten = number
        if entry.get("run") == evidence.run:
            ends = number
    # A copy ends with its run, and knows nothing of what was signed later.
    for entry in lines[forgotten : len(lines) if file.live else ends]:
        if entry["kind"] == COUNTERSIGNED:
            for statement in entry["statements"]:
                if statement["party"] == file.party:
                    yield entry, statement


def _check_end(evidence: _Evidence, file: _File) -> None:
    """Note whether all parties have signed the end of the run."""
    own = [entry for entry in _countersigned_entries(file) if entry["run"] == evidence.run]
    if not own and evidence.run is None:
        evidence.note("end", file.party, None, "a simulation: no other party signs")
        return
    points = [entry["point"] for entry in own]
    if "end" in points:
        evidence.note("end", file.party, True, f"{len(points)} points of this run, to its end")
        return
    finished = evidence.metrics is not None and not _was_restored(evidence, file.party)
    text = f"{len(points)} points of this run, and its end is not among them"
    evidence.note("end", file.party, False if finished else None, text)


def _check_checkpoints(evidence: _Evidence, party: str) -> None:
    """Check that the ledger heads in a party's checkpoints are in its ledger."""
    files = evidence.of(party)
    count = 0
    folder = evidence.folder / "parties" / party
    for name in StateFolder(folder, settings_digest="").names():
        path = folder / name
        try:
            head = read_state(path).get("ledger_head")
        except DamagedError:
            evidence.note("checkpoints", party, False, f"{name}: is damaged")
            return
        if not head:
            continue
        count += 1
        if not any(file.chain.contains(head) for file in files):
            text = f"{path.name}: was made with releases that the ledger lacks"
            booked = _was_restored(evidence, party)
            text += ", and has booked since it was restored" if booked else ""
            evidence.note("checkpoints", party, None if booked else False, text)
            return
    if count:
        evidence.note("checkpoints", party, True, f"{count} lie on the chain")


def _check_records(evidence: _Evidence, party: str) -> None:
    """Check a secondary's record counts of predictions against its ledger."""
    path, run = evidence.folder / "parties" / party / FILE, (evidence.metrics or {}).get("run")
    booked: list[str] = []
    model = None
    for file in evidence.of(party):
        for entry in file.entries:
            model = entry.get("model") if entry["kind"] == "open" else model
            if entry["kind"] == RESTORED:
                # Counts of any time go on from here: all that they may lack is booked.
                booked.clear()
            if "counts" in entry and model == run:
                booked.append(entry["counts"])
    if not booked and not path.exists():
        return
    try:
        chain, entries = read_chain(path)
    except (ConfigError, PrivacyError) as error:
        evidence.note("records", party, False, str(error))
        return
    heads = [entry["ledger"] for entry in entries if entry["kind"] == "released"]
    if not all(map(chain.contains, booked)):
        text = f"{FILE} lacks releases that the ledger has booked: cut, or exchanged"
        evidence.note("records", party, False, text)
    elif not (
        _was_restored(evidence, party)
        or all(any(file.chain.contains(head) for file in evidence.of(party)) for head in heads)
    ):
        text = f"{FILE} was counted beside lines that the ledger lacks"
        evidence.note("records", party, False if evidence.of(party) else None, text)
    else:
        text = f"{len(entries)} lines count records in {len(heads)} releases, all of this ledger"
        evidence.note("records", party, True, text)


def _check_figures(evidence: _Evidence) -> None:
    """Compute the run's privacy figures from the primary's ledger, and compare."""
    metrics, primary = evidence.metrics, evidence.config.primary.name
    files = evidence.of(primary)
    if metrics is None or not files:
        missing = "the run has no metrics.json" if metrics is None else "its ledger is not at hand"
        evidence.note("figures", primary, None, f"not computed: {missing}")
        return
    privacy = metrics["privacy"]
    labels = {f"labels.{name}": value for name, value in privacy.get("labels", {}).items()}
    stated = {**privacy, **labels}
    try:
        by_ledger = recompute_figures(until_end(files[0].entries, metrics["run"]), metrics["run"])
    except SecureVflError as error:
        evidence.note("figures", primary, False, f"do not follow from the ledger: {error}")
        return
    for name, value in by_ledger.items():
        if not _equal(stated.get(name), value):
            text = (
                f"{name} is {stated.get(name)} in metrics.json, and {value} by the ledger's lines"
            )
            evidence.note("figures", primary, False, text)
            return
    epsilon = "no bound" if by_ledger["epsilon"] is None else f"{by_ledger['epsilon']:.4f}"
    text = (
        f"epsilon ({epsilon}) and {by_ledger['releases']} releases follow from the ledger's lines"
    )
    evidence.note("figures", primary, True, text)


def _was_restored(evidence: _Evidence, party: str) -> bool:
    """Return whether a party has booked the losses of a restored ledger."""
    return any(entry["kind"] == RESTORED for file in evidence.of(party) for entry in file.entries)


def _countersigned_entries(file: _File) -> list[dict[str, Any]]:
    return [entry for entry in file.entries if entry["kind"] == COUNTERSIGNED]


def _equal(stated: Any, computed: float | None) -> bool:
    if stated is None or computed is None:
        return stated is None and computed is None
    return isinstance(stated, int | float) and math.isclose(stated, computed, rel_tol=1e-9)
