"""Membership by shadow runs: whether a model was trained on a row, or on a secondary's record.

The recorded federation is trained again, each time without a random half of the rows, or of one
secondary's records. Every kept model then predicts all rows, with all records there. Each run once
is the one that is attacked; the others, of which the attacker knows what they have learned from,
say how sure of a row's class a model is that has learned from it, and one that has not.

References:
    [CCN22] Carlini et al., Membership Inference Attacks From First Principles, Algorithm 1 (the
    online attack): the ratio of two normal densities of log(p / (1 - p)), p being the probability
    of the right class. Variances are those of all rows together, as the paper has it for few runs.
"""

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from jaxtyping import Float64, Int64
from scipy import stats

from securevfl.core import files
from securevfl.core.conventions import stream
from securevfl.core.errors import ConfigError
from securevfl.data.tables import PartyTable
from securevfl.federation.run_plan import run_facts
from securevfl.lab.attacks import attack, labels
from securevfl.lab.attacks.attack import Evidence, UnavailableError
from securevfl.runtime.run_options import RunOptions
from securevfl.runtime.simulation import simulate_federation

FEWEST: Final = 8
"""Least number of shadow runs."""

_FALSE_POSITIVES: Final = (0.1, 0.01)
_UNBOUNDED: Final = 1e9
"""Epsilon that predictions of shadow runs may spend: their tables are the attacker's own."""
_LEAST: Final = 1e-12
"""Smallest probability whose logarithm is taken."""
_UNKNOWN: Final = -1


@dataclass(frozen=True, kw_only=True, eq=False)
class Shadows:
    """Tables and number of shadow runs."""

    tables: Mapping[str, PartyTable]
    """Every party's table, by name."""
    runs: int = 16
    """Number of shadow runs."""
    tell: Callable[[str], None] = lambda _text: None
    """Callback for a line before each run."""

    def __post_init__(self) -> None:
        if self.runs < FEWEST:
            raise ConfigError(f"shadows must be at least {FEWEST}, got {self.runs}")


@dataclass(frozen=True, kw_only=True, eq=False)
class ShadowAnswers:
    """Confidences of all shadow runs in all rows' classes."""

    confidences: Float64[np.ndarray, "runs rows"]
    """log(p / (1 - p)) of the right class's probability p."""
    members: Int64[np.ndarray, "runs rows"]
    """1 for rows that a run has trained on, 0 for absent rows, -1 for rows that are left out."""

    def ratios(self) -> Float64[np.ndarray, "runs rows"]:
        """Return the log likelihood ratio of each row in each run, from the other runs.

        NaN where the row is left out, or fewer than two other runs had it or lacked it.
        """
        runs, _ = self.members.shape
        ratios = np.full(self.members.shape, np.nan)
        for run in range(runs):
            others = np.arange(runs) != run
            densities = []
            for inside in (1, 0):
                there = (self.members == inside) & others[:, None]
                count = there.sum(axis=0)
                mean = np.where(there, self.confidences, 0).sum(axis=0) / np.maximum(count, 1)
                off = np.where(there & (count > 1), self.confidences - mean, 0)
                freedom = np.maximum(count - 1, 0).sum()
                deviation = math.sqrt((off**2).sum() / max(freedom, 1)) or 1.0
                density = stats.norm.logpdf(self.confidences[run], mean, deviation)
                densities.append(np.where(count > 1, density, np.nan))
            ratios[run] = densities[0] - densities[1]
        ratios[self.members == _UNKNOWN] = np.nan
        return ratios


@dataclass(frozen=True, kw_only=True)
class _ShadowAttack:
    """Attack on rows of the primary, or on records of the first recorded secondary."""

    unit: Literal["rows", "records"]
    shadows: Shadows

    @property
    def name(self) -> str:
        """Name of the attack."""
        return f"shadow-{self.unit}"

    def findings(self, evidence: Evidence, _seeds: int) -> Iterator[attack.Leak]:
        """Yield the AUC, and the share of members found at two rates of false positives."""
        labels.require_labels(evidence)
        if self.unit == "records":
            attack.require_links(evidence)
        answers = self._answers(evidence)
        ratios, members = answers.ratios(), answers.members == 1
        rows = np.flatnonzero(np.isfinite(ratios).any(axis=0))
        privacy, about = evidence.privacy, evidence.config.primary.name
        if self.unit == "records":
            about = evidence.with_links[0].name
        measured: dict[str, tuple[float, Callable[[Any, Any], float]]] = {"AUC": (0.5, attack.auc)}
        for rate in _FALSE_POSITIVES:
            measured[f"members found at {rate:g} false positives"] = (
                rate,
                partial(true_positive_rate, rate=rate),
            )

        def of(chosen: Any, statistic: Callable[[Any, Any], float]) -> float:
            there = np.isfinite(ratios[:, chosen])
            return statistic(members[:, chosen][there], ratios[:, chosen][there])

        for measure, (floor, statistic) in measured.items():
            covered = self.unit == "records" and privacy["epsilon"] is not None
            if covered and privacy["unit"] != "linked-row" and floor < 0.5:
                most = min(1.0, floor * math.exp(privacy["epsilon"]) + privacy["delta"])
                measure += f"; the promise allows {most:.2g}"
            yield attack.Leak(
                attacker="recipients of predictions",
                about=about,
                channel="publication of the model",
                measure=measure,
                value=of(rows, statistic),
                interval=attack.bootstrap_interval(
                    lambda some, bound_statistic=statistic: of(rows[some], bound_statistic),  # type: ignore[misc]
                    len(rows),
                ),
                floor=floor,
                floor_is="a coin",
                rows=len(rows),
                known=f"labels, and {len(members) - 1} runs on halves of the same tables",
                seeds=len(members),
            )

    def _answers(self, evidence: Evidence) -> ShadowAnswers:
        """Return confidences of all shadow runs; finished ones are read."""
        folder = evidence.folder / attack.FOLDER / self.name
        files.make_folder(folder)
        confidences, members = [], []
        for number in range(self.shadows.runs):
            path = folder / f"{evidence.run}-{number}.npz"
            if not path.exists():
                self.shadows.tell(f"{self.name}: shadow run {number + 1} of {self.shadows.runs}")
                confidence, inside = self._train_shadow(evidence, self.shadows.tables, number)
                files.write_arrays(path, {"confidences": confidence, "members": inside})
            with np.load(path, allow_pickle=False) as kept:
                confidences.append(kept["confidences"])
                members.append(kept["members"])
        return ShadowAnswers(confidences=np.stack(confidences), members=np.stack(members))

    def _train_shadow(
        self, evidence: Evidence, tables: Mapping[str, PartyTable], number: int
    ) -> tuple[Float64[np.ndarray, " rows"], Int64[np.ndarray, " rows"]]:
        """Train one shadow run; return its confidences in all rows, and which it has trained on."""
        config = evidence.config
        primary = tables[config.primary.name]
        if primary.labels is None or not np.array_equal(primary.labels, evidence.labels):
            raise ConfigError(f"table of {primary.name!r}: is not the one that the run was of")
        halved = primary.name if self.unit == "rows" else evidence.with_links[0].name
        random = stream(config.federation.seed, self.name, str(number))
        kept = random.random(tables[halved].num_rows) < 1 / 2
        config = replace(
            config,
            federation=replace(config.federation, seed=int(random.integers(2**31))),
            prediction=replace(config.prediction, epsilon=_UNBOUNDED, rows=None),
        )
        half = {**tables, halved: tables[halved].take(np.flatnonzero(kept))}
        learned = np.full(primary.num_rows, _UNKNOWN)
        split, _ = run_facts(config, half[primary.name])
        if self.unit == "rows":
            learned[~kept] = 0
            learned[np.flatnonzero(kept)[split.train]] = 1
        else:
            nearest = evidence.with_links[0].array("links")[:, 0]
            learned[split.train] = kept[nearest[split.train]]
            learned[nearest < 0] = _UNKNOWN
        with tempfile.TemporaryDirectory(prefix="securevfl-shadow-") as place:
            options = RunOptions(run_folder=Path(place))
            run = simulate_federation(config, half, options, with_alone=False)
            assert run.trained is not None, "its models are kept"
            predicted = replace(run.trained, tables=tables).predict(primary)
        assert predicted.probabilities is not None, "classes are guessed"
        right = np.zeros(predicted.probabilities.shape, dtype=bool)
        right[np.arange(len(right)), evidence.labels] = True
        of_right = np.where(right, predicted.probabilities, 0).sum(axis=1)
        of_others = np.where(right, 0, predicted.probabilities).sum(axis=1)
        return np.log(of_right + _LEAST) - np.log(of_others + _LEAST), learned


def shadow_attack(unit: Literal["rows", "records"], shadows: Shadows | None) -> attack.Attack:
    """Return the attack on membership of `unit`, which can't be tried without `shadows`."""
    name = f"shadow-{unit}"

    def refuse(_evidence: Evidence, _seeds: int) -> Iterator[attack.Leak]:
        raise UnavailableError(
            f"trains anew on all parties' tables, so only if named: --attacks {name}"
        )

    if shadows is None:
        return attack.Attack(name, "members", refuse)
    return attack.Attack(name, "members", _ShadowAttack(unit=unit, shadows=shadows).findings)


def true_positive_rate(inside: Any, scores: Any, rate: float) -> float:
    """Return the share of members found at a rate of false positives."""
    return float((scores[inside] > np.quantile(scores[~inside], 1 - rate)).mean())
