"""All attacks on one recorded run, channel by channel: ``securevfl lab audit RUN``."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from securevfl.config.disclosure import channels, status
from securevfl.core import checks, files
from securevfl.core.errors import ConfigError
from securevfl.lab.attacks import attack, gradients, own_models, told_labels
from securevfl.lab.attacks.evidence import Evidence
from securevfl.lab.attacks.ids_and_codes import CodeFrequencies, CodePlaces, GuessedIds
from securevfl.lab.attacks.presence import LinkedOrNot
from securevfl.lab.attacks.promised_noise import NoiseAgain, NoiseSize, SampleAgain, Worlds
from securevfl.lab.attacks.properties import ColumnMeans
from securevfl.lab.attacks.reconstruction import Reconstruction
from securevfl.lab.attacks.shadow_runs import ShadowRuns, Shadows
from securevfl.lab.attacks.similarities import SimilarityDistance, SimilarityPlace
from securevfl.lab.attacks.trilateration import Trilateration
from securevfl.runtime.run_folder import AUDIT, MEASURED_FORMAT
from securevfl.version import __version__

TRAIN_ANEW: Final = ("shadow-rows", "shadow-records")
"""Attacks that take many trainings, and are tried only if they are named."""


def all_attacks(
    other: Evidence | None = None, shadows: Shadows | None = None
) -> dict[str, attack.Attack]:
    """Return every attack by name.

    Args:
        other: Another run of the same federation, whose noise must be another.
        shadows: What shadow runs are trained on; None trains none.
    """
    attacks: Sequence[attack.Attack] = (
        gradients.GradientNorm(),
        gradients.GradientDirection(),
        gradients.GradientClusters(),
        own_models.ModelCompletion(),
        own_models.OwnClusters(),
        told_labels.ClassSums(),
        told_labels.ResidualSigns(),
        told_labels.RowNumbers(),
        Reconstruction(),
        ColumnMeans(),
        SimilarityDistance(),
        SimilarityPlace(),
        LinkedOrNot(),
        GuessedIds(),
        CodeFrequencies(),
        CodePlaces(),
        Trilateration(),
        Worlds(),
        NoiseSize(),
        NoiseAgain(other),
        SampleAgain(),
        ShadowRuns("rows", shadows),
        ShadowRuns("records", shadows),
    )
    return {candidate.name: candidate for candidate in attacks}


def chosen(names: str | None) -> list[str]:
    """Return the names of attacks in a comma-separated list; for None all that train nothing.

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
    """What attacks found out on one run."""

    run: str
    channels: list[dict[str, Any]]
    """Every way in which a party learns something, with its status and its findings."""
    findings: list[dict[str, Any]]
    not_tried: dict[str, str]
    """Attacks that cannot be tried on this run, and why."""
    violations: list[str]
    """Promises that the run breaks; none is how it must be."""
    epsilon: float | None
    delta: float
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """Return all fields by name."""
        return {
            "format": MEASURED_FORMAT,
            "version": __version__,
            "run": self.run,
            "epsilon": self.epsilon,
            "delta": self.delta,
            "violations": self.violations,
            "channels": self.channels,
            "findings": self.findings,
            "not_tried": self.not_tried,
            "seconds": self.seconds,
        }


def audit_run(
    folder: Path,
    names: Sequence[str],
    *,
    seeds: int = 3,
    beside: Path | None = None,
    shadows: Shadows | None = None,
    tell: Callable[[str], None] = lambda _text: None,
) -> RunAudit:
    """Try attacks on what a run's parties have recorded, and write ``audit.json``.

    An attack that is done is not tried again: its file lies in ``attacks/`` of the run folder.

    Args:
        folder: Of a finished run.
        names: Of attacks.
        seeds: How often what an attack draws at random is drawn.
        beside: Folder of another recorded run of the same federation.
        shadows: What shadow runs are trained on, for the attacks that need some.
        tell: Hears what is tried.

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
        made_from = [__version__, evidence.run, seeds, "" if other is None else other.run]
        if name in TRAIN_ANEW:
            made_from.append(0 if shadows is None else shadows.runs)
        done = _done(folder, name, made_from)
        if done is None:
            missing = attacks[name].missing(evidence)
            attempted = [] if missing else attack.attempt(attacks[name], evidence, seeds=seeds)
            done = {
                "made_from": made_from,
                "missing": missing,
                "findings": [
                    {"aim": attacks[name].aim, **finding.as_json()} for finding in attempted
                ],
            }
            files.write_json(folder / attack.FOLDER / f"{name}.json", done)
        if done["missing"] is not None:
            not_tried[name] = done["missing"]
        findings += done["findings"]
    privacy = evidence.privacy
    audit = RunAudit(
        run=evidence.run,
        channels=[_of_channel(channel, findings, privacy) for channel in channels(evidence.config)],
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


def _done(folder: Path, name: str, made_from: list[Any]) -> dict[str, Any] | None:
    """Return what an attack found before, on the same record with the same seeds."""
    path = folder / attack.FOLDER / f"{name}.json"
    if not path.exists():
        return None
    saved = files.read_json(path)
    return saved if saved.get("made_from") == made_from else None


def _of_channel(
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
