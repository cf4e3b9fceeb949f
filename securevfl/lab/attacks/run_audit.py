"""All attacks on one recorded run, channel by channel: ``securevfl lab audit RUN``."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from securevfl.config.disclosure import channels, status
from securevfl.core import checks, files
from securevfl.core.errors import ConfigError
from securevfl.lab.attacks import attack, labels, promised_noise, similarities
from securevfl.lab.attacks.attack import Evidence, UnavailableError
from securevfl.lab.attacks.promised_noise import LINKED_OR_NOT
from securevfl.lab.attacks.reconstruction import COLUMN_MEANS, RECONSTRUCTION
from securevfl.lab.attacks.shadow_runs import Shadows, shadow_attack
from securevfl.lab.attacks.similarities import TRILATERATION
from securevfl.runtime.run_folder import AUDIT, MEASURED_FORMAT
from securevfl.version import __version__

TRAIN_ANEW: Final = ("shadow-rows", "shadow-records")
"""Attacks with many trainings, which are tried only if they are named."""


def all_attacks(
    other: Evidence | None = None, shadows: Shadows | None = None
) -> dict[str, attack.Attack]:
    """Return every attack by name.

    Args:
        other: Another run of the same federation, whose noise must differ.
        shadows: Tables and number of shadow runs; None trains none.
    """
    attacks = (
        labels.GRADIENT_NORM,
        labels.GRADIENT_DIRECTION,
        labels.GRADIENT_CLUSTERS,
        labels.MODEL_COMPLETION,
        labels.OWN_CLUSTERS,
        labels.CLASS_SUMS,
        labels.ROW_NUMBERS,
        RECONSTRUCTION,
        COLUMN_MEANS,
        similarities.SIMILARITY_DISTANCE,
        similarities.SIMILARITY_PLACE,
        LINKED_OR_NOT,
        similarities.GUESSED_IDS,
        similarities.CODE_FREQUENCIES,
        similarities.CODE_PLACES,
        TRILATERATION,
        promised_noise.MEMBERSHIP,
        promised_noise.NOISE_SIZE,
        promised_noise.noise_again(other),
        promised_noise.SAMPLE_AGAIN,
        shadow_attack("rows", shadows),
        shadow_attack("records", shadows),
    )
    return {candidate.name: candidate for candidate in attacks}


def attack_names(names: str | None) -> list[str]:
    """Return the names of attacks in a comma-separated list; for None, all without trainings.

    Raises:
        ConfigError: If one is unknown.
    """
    known = [*all_attacks()]
    if names is None:
        return [name for name in known if name not in TRAIN_ANEW]
    wanted = [name.strip() for name in names.split(",")]
    for name in wanted:
        if name not in known:
            raise ConfigError(
                f"--attacks: there is no attack {name!r}{checks.did_you_mean(name, known)}; there "
                f"are {', '.join(known)}"
            )
    return wanted


@dataclass(frozen=True, kw_only=True, eq=False)
class RunAudit:
    """Findings of attacks on one run."""

    run: str
    """Id of the run."""
    epsilon: float | None
    """Epsilon that the run promised; None without a promise."""
    delta: float
    """Delta of that promise."""
    violations: list[str]
    """Promises that the run breaks; empty for a right run."""
    channels: list[dict[str, Any]]
    """Channels through which a party learns something, each with its status and findings."""
    findings: list[dict[str, Any]]
    """Findings of all attacks, as dictionaries of a leak's fields."""
    not_tried: dict[str, str]
    """Reason for each attack that can't be tried on this run."""
    seconds: float
    """Duration of the audit."""

    def as_json(self) -> dict[str, Any]:
        """Return all fields by name."""
        return {"format": MEASURED_FORMAT, "version": __version__, **asdict(self)}


def audit_run(
    folder: Path,
    names: Sequence[str],
    *,
    seeds: int = 3,
    beside: Path | None = None,
    shadows: Shadows | None = None,
    tell: Callable[[str], None] = lambda _text: None,
) -> RunAudit:
    """Attack the recorded views of a run's parties, and write ``audit.json``.

    Args:
        folder: Folder of a finished run.
        names: Names of attacks.
        seeds: Number of seeds for attacks that draw at random.
        beside: Folder of another recorded run of the same federation.
        shadows: Tables and number of shadow runs, for the attacks that need them.
        tell: Callback for a line before each attack.

    Raises:
        ConfigError: If nothing was recorded.
    """
    checks.whole_from(1, seeds=seeds)
    start = time.monotonic()
    evidence = Evidence(folder)
    other = None if beside is None else Evidence(beside)
    attacks = all_attacks(other, shadows)
    findings, not_tried = [], {}
    for number, name in enumerate(names, 1):
        tell(f"{number}/{len(names)} {name}")
        begun = time.monotonic()
        try:
            leaks = list(attacks[name].findings(evidence, seeds))
        except UnavailableError as error:
            not_tried[name] = str(error)
            continue
        own = {"aim": attacks[name].aim, "seconds": round(time.monotonic() - begun, 2)}
        findings += [{**leak.as_json(), **own, "attack": leak.attack or name} for leak in leaks]
    privacy = evidence.privacy
    audit = RunAudit(
        run=evidence.run,
        channels=[
            _channel_findings(channel, findings, privacy) for channel in channels(evidence.config)
        ],
        findings=findings,
        not_tried=not_tried,
        violations=[
            f"{finding['attack']}: {finding['violates']}"
            for finding in findings
            if finding["violates"]
        ],
        epsilon=privacy["epsilon"],
        delta=privacy["delta"],
        seconds=round(time.monotonic() - start, 1),
    )
    files.write_json(folder / AUDIT, audit.as_json())
    return audit


def _channel_findings(
    channel: dict[str, str], findings: Sequence[dict[str, Any]], privacy: Any
) -> dict[str, Any]:
    measured = [finding for finding in findings if finding["channel"] == channel["channel"]]
    guarantee = channel["guarantee"]
    if guarantee.startswith("covered by epsilon,"):
        guarantee += f": {privacy['epsilon']:.4g} at delta {privacy['delta']:g}"
    clear = sorted({finding["attack"] for finding in measured if finding["beats_floor"]})
    return {
        **channel,
        "guarantee": guarantee,
        "status": status(channel, measured=bool(measured)),
        "measured_by": sorted({finding["attack"] for finding in measured}),
        "beaten_by": clear,
    }
