"""Advice before a run: partners' information that survives the noise at an epsilon.

One row's release under a small epsilon is a local promise: its noise is as long as what one record
writes, or longer. What is left of a signal behind it follows from the plan alone, before anybody's
table is read; research/frontier/README.md, "What can survive", derives the formulas.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

from securevfl.config.disclosure import require_covered_channels
from securevfl.config.federation import FederationConfig
from securevfl.config.reading import parse_federation
from securevfl.core import checks
from securevfl.core.errors import ConfigError, PrivacyError
from securevfl.core.formatting import format_figure
from securevfl.dp.release_plan import ReleasePlan
from securevfl.dp.sensitivity import honest_parties
from securevfl.federation.run_plan import RunFacts, RunPlan, plan_run, run_facts
from securevfl.lab.rehearsal import (
    Cast,
    RehearsedRun,
    chosen_settings,
    merge_settings,
    rehearse,
    settings_for,
)
from securevfl.runtime.run_tables import read_party

HALF: Final = 0.5
"""The share at which signal and noise are equally strong."""

CLEAR: Final = 2.0
"""Standard errors, or deviations, from zero at which a gain is called clear."""

EXPLAINED: Final = 0.01
"""Share of the primary's residual variance that :func:`rows_to_see` assumes by default."""

_MOST_PARTNERS: Final = 10_000


def noise_a_number(
    plan: ReleasePlan, noise_share_std: float, *, secondaries: int | None = None
) -> float:
    """Return z: the deviation of one released number's noise, over a record's length in the sum.

    A record writes a vector of length C, or C/K if a row is the mean over K slots; the sum carries
    the noise of all secondaries' shares, helpers of the primary included, since the top model knows
    none of them. With another number of secondaries the noise multiplier stays, and the noise
    follows the sensitivity: for ``secondary-record`` it does not grow with them, for the other
    units it does (:func:`securevfl.dp.sensitivity.row_change`). Of scores it is the noise that
    would leave as much.

    Args:
        plan: Plan of the releases.
        noise_share_std: ``tau`` of that plan; 0 without noise.
        secondaries: Number of secondaries instead of the plan's; more than ``colluding``.

    Returns:
        Dimensionless, >= 0.
    """
    checks.non_negative(noise_share_std=noise_share_std)
    if plan.scores is not None:
        # Noise that would leave as much of one number. Every secondary adds its own, whose variance
        # goes with the number of those that do not collude.
        parties = secondaries or plan.parties
        honest = honest_parties(active=parties, colluding=plan.privacy.colluding)
        share = plan.scores.surviving_share(noise_share_std, honest=honest)
        return math.sqrt((1 - share) / share * parties)
    record = plan.privacy.clip_norm / (plan.links if plan.pooled else 1)
    noise = noise_share_std * math.sqrt(plan.parties)
    if secondaries is not None:
        if plan.privacy.accounting == "as-published":
            # The papers' noise is one on the average.
            return noise / record * secondaries / plan.parties
        colluding = plan.privacy.colluding
        other = replace(plan, parties=secondaries, min_active=secondaries)
        noise *= other.sensitivity() / plan.sensitivity()
        # Of k shares k - c must do; the sum carries all k.
        noise *= math.sqrt(
            (secondaries / (secondaries - colluding)) * (plan.parties - colluding) / plan.parties
        )
    return noise / record


def surviving_share(
    *,
    noise: float,
    numbers: int = 1,
    secondaries: int = 1,
    agreement: float = 0.0,
    sampling_rate: float = 1.0,
) -> float:
    """Return the share of signal in a released number's variance: s^2 / (s^2 + z^2).

    The numbers of a record share its length, so each has a deviation of at most 1/sqrt(w) of it.
    Where k secondaries write into one number, their signals add up against noise that is paid
    once: to k times the variance of one where they are uncorrelated, and to k^2 times where all
    write the same. Of records that are drawn at a rate of q, so much of the signal is not there.

    Args:
        noise: ``z``, from :func:`noise_a_number`; of the sum that all of them write into.
        numbers: ``w``, over which the length is spread evenly, >= 1; 1 has all of it in one.
        secondaries: ``k`` that share the number, >= 1; 1 for coordinates of a secondary's own.
        agreement: Correlation between two secondaries' signals, in [0, 1].
        sampling_rate: ``q``, of the secret sample of records; 1 has all of them.

    Returns:
        In [0, 1]. No linear reader, and of a normal quantity no reader at all, explains more of
        the signal's variance.

    References:
        [CT06] sections 9.1 (capacity) and 10.3.2 (rate distortion); research/frontier/README.md,
        "What can survive".

    Examples:
        >>> surviving_share(noise=1.0)
        0.5
        >>> surviving_share(noise=2.0, secondaries=4)
        0.5
        >>> surviving_share(noise=2.0, secondaries=4, agreement=1.0)
        0.8
    """
    checks.non_negative(noise=noise)
    checks.whole(numbers=numbers, secondaries=secondaries)
    checks.at_least(1, numbers=numbers, secondaries=secondaries)
    checks.rate(sampling_rate=sampling_rate)
    others = (secondaries - 1) * agreement
    signal = secondaries * (1 + others) / numbers
    written = sampling_rate * secondaries * (1 + sampling_rate * others) / numbers
    return sampling_rate**2 * signal / (written + noise**2)


def partners_for_half(plan: ReleasePlan, noise_share_std: float, *, numbers: int = 1) -> int | None:
    """Return the fewest secondaries whose signals, in shared coordinates, half survive.

    Their signals are taken as uncorrelated; the noise grows with their number.

    Args:
        plan: Plan of the releases of secondaries that share coordinates (``disjoint`` is False).
        noise_share_std: ``tau`` of that plan.
        numbers: As for :func:`surviving_share`.

    Returns:
        None if no number is enough, as for units whose noise grows with every secondary.
    """

    def share(secondaries: int) -> float:
        noise = noise_a_number(plan, noise_share_std, secondaries=secondaries)
        return surviving_share(
            noise=noise,
            numbers=numbers,
            secondaries=secondaries,
            sampling_rate=plan.privacy.sampling_rate,
        )

    fewest = plan.privacy.colluding + 1
    # Where the noise grows with their number, the first is the best of all.
    if plan.privacy.unit != "secondary-record" or plan.privacy.accounting == "as-published":
        return fewest if share(fewest) >= HALF else None
    if share(_MOST_PARTNERS) < HALF:
        return None
    low, high = fewest - 1, _MOST_PARTNERS
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if share(middle) >= HALF else (middle, high)
    return high


def rows_to_see(share: float, *, explained: float = EXPLAINED) -> int | None:
    """Return the approximate number of training rows that show a signal by two standard errors.

    A released number that correlates by r with what is left open has, over n rows, a t value of
    ``r sqrt(n / (1 - r^2))`` in expectation; r^2 is what the signal would explain without noise,
    times the share of it that survives.

    Args:
        share: From :func:`surviving_share`.
        explained: Share of the primary's residual variance that the signal explains without noise,
            in (0, 1).

    Returns:
        At least 1; None if nothing survives.
    """
    squared = share * explained
    if squared == 0:
        return None
    return max(1, math.ceil(CLEAR**2 * (1 - squared) / squared))


Outcome = Literal["clear", "unclear", "none", "loss"]
"""RehearsalResult gain: above zero by two deviations, by one, by less, or below it by one."""

NO_PROMISE: Final = (
    "A rehearsal is no promise. It shows what partners with columns like those set aside would "
    "add; real partners' columns are other columns, and how well their keys link is not known. "
    "It protects no one, and need not: all columns are the primary's own."
)


@dataclass(frozen=True, kw_only=True)
class Bound:
    """Signal that can survive at one epsilon, from the plan alone."""

    epsilon: float | None
    """None: without noise."""

    noise: float
    """Deviation of the noise in one number of the sum, over a record's length."""

    blocks: float
    """Share of the signal that survives in a secondary's own coordinates, with all length in one
    number."""

    blocks_spread: float
    """Share that survives if the length is spread evenly over a secondary's numbers."""

    shared: float
    """Share that survives in coordinates shared by all secondaries, with uncorrelated signals and
    all length in one number."""

    partners: int | None
    """Least number of secondaries whose signals half survive in shared coordinates; None if no
    number is enough."""

    rows: int | None
    """Training rows that show a signal worth 1 % of the residual variance by two standard errors,
    in the settings' layout; None if no number is enough."""

    settings: Mapping[str, Any]
    """Settings that a run would use at this epsilon."""

    refused: str | None
    """Reason why the file would be refused at this epsilon, or None."""


@dataclass(frozen=True, kw_only=True)
class RehearsalResult:
    """Results of the rehearsal at one epsilon."""

    epsilon: float | None
    metric: str
    alone: float
    """Mean over seeds of the primary alone, on the columns that were left to it."""

    test: float
    """Mean over seeds of the model that answers."""

    gain: float
    """Mean gain over seeds; positive is better."""

    deviation: float | None
    """Standard deviation of the gain over seeds; None with one seed."""

    gains: tuple[float, ...]
    """Gain with each seed."""

    used: int
    """Seeds with which the joint model answered, and not alone."""

    outcome: Outcome | None
    """Name of the gain; None with one seed."""

    def verdict(self) -> str:
        """Return the result in one line."""
        at = "without noise" if self.epsilon is None else f"epsilon {self.epsilon:g}"
        gain = format_figure(self.gain, sign="+", digits=3) + (
            ""
            if self.deviation is None
            else f" ± {format_figure(self.deviation, digits=3)} over {len(self.gains)} seeds"
        )
        sentence = (
            f"{at}: partners of such information gain {gain} ({self.metric}, positive is better;"
        )
        sentence += f" alone {format_figure(self.alone, digits=3)})"
        match self.outcome:
            case "clear":
                return f"{sentence}: a clear gain"
            case "unclear":
                return f"{sentence}: perhaps a gain, not a clear one"
            case "loss":
                return f"{sentence}: no gain, and perhaps a loss"
            case "none" if self.used == 0:
                return f"{sentence}: nothing; the primary's own model answered with every seed"
            case "none":
                return f"{sentence}: nothing that chance would not explain"
            case None:
                return f"{sentence}: one seed says nothing of chance"


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Bounds at each epsilon, and the results of the rehearsal."""

    file: Path
    config: FederationConfig
    training_rows: int
    bounds: list[Bound]
    casts: list[Cast] = field(default_factory=list)
    rehearsed: list[RehearsalResult] = field(default_factory=list)

    @property
    def notes(self) -> list[str]:
        """Remarks on the bounds and the rehearsal, one sentence each."""
        notes = []
        reasons = dict.fromkeys(bound.refused for bound in self.bounds if bound.refused)
        notes += [f"as it stands, the file would be refused: {reason}" for reason in reasons]
        if self.config.regime.learns:
            notes.append(
                "encoders that train release a row in every epoch; what survives is told of one "
                "release"
            )
        if not self.casts:
            return notes
        planned = len(self.config.secondaries)
        fewest = min(len(cast.aside) for cast in self.casts)
        if fewest < planned:
            notes.append(
                f"{fewest} of {planned} secondaries were pretended; there are too few columns for "
                f"more"
            )
        share = statistics.mean(cast.predictable_share for cast in self.casts)
        notes.append(
            f"{share:.0%} of what the columns set aside hold is told already, to a linear model, "
            f"by the keys and columns that were left"
            + (
                "; partners who know other things may add much more than was rehearsed"
                if share >= HALF
                else ""
            )
        )
        if any(cast.taken for cast in self.casts):
            most = max(len(cast.taken) for cast in self.casts)
            notes.append(
                f"the ranges of {most} column{'s' if most > 1 else ''} were taken from the table, "
                f"which may serve for a rehearsal only: partners declare theirs without looking at "
                f"their records"
            )
        return notes

    def worth(self) -> str:
        """Return one line on whether training with partners is worth its cost."""
        played = [rehearsal for rehearsal in self.rehearsed if rehearsal.epsilon is not None]
        if not played:
            return "no answer: nothing was rehearsed; leave --seeds at 3"
        if all(rehearsal.outcome is None for rehearsal in played):
            return "no answer: one seed says nothing of chance; leave --seeds at 3"
        planned = self.config.privacy.epsilon
        clear = sorted(
            rehearsal.epsilon
            for rehearsal in played
            if rehearsal.epsilon and rehearsal.outcome == "clear"
        )
        epsilons = ", ".join(f"{epsilon:g}" for epsilon in clear)
        own = [rehearsal.outcome for rehearsal in played if rehearsal.epsilon == planned]
        if clear and (planned in clear or not own):
            return f"worth it: at epsilon {epsilons} partners of such information gain clearly"
        where = f" at the file's epsilon {planned:g}" if own else " at any epsilon tried"
        if clear:
            return (
                f"not worth it{where}: a clear gain at epsilon {epsilons} alone; that promise, or "
                f"more training rows, would make it so"
            )
        if "unclear" in (own or [rehearsal.outcome for rehearsal in played]):
            return f"perhaps{where}: a gain that chance may explain; more rows or --seeds tell more"
        free = next((rehearsal for rehearsal in self.rehearsed if rehearsal.epsilon is None), None)
        if free is not None and free.outcome == "clear":
            return (
                f"not worth it{where}: the noise hides what partners of such information gain "
                f"without it; more training rows, more partners or a larger epsilon would make it "
                f"so"
            )
        return (
            f"not worth it{where}: partners of such information gain nothing that is sure, even "
            f"without noise; only partners who know other things would make it so"
        )

    def as_json(self) -> dict[str, Any]:
        """Return the content of ``--json``."""
        return {
            "file": str(self.file),
            "worth": self.worth(),
            "unit": self.config.privacy.unit,
            "delta": self.config.privacy.delta,
            "secondaries": len(self.config.secondaries),
            "training_rows": self.training_rows,
            "explained": EXPLAINED,
            "bounds": [asdict(bound) for bound in self.bounds],
            "rehearsal": {
                "casts": [
                    {
                        "seed": cast.seed,
                        "own": list(cast.own),
                        "set_aside": dict(cast.aside),
                        "told": cast.predictable_share,
                    }
                    for cast in self.casts
                ],
                "epsilons": [
                    {**asdict(rehearsal), "verdict": rehearsal.verdict()}
                    for rehearsal in self.rehearsed
                ],
                "no_promise": NO_PROMISE,
            }
            if self.casts
            else None,
            "notes": self.notes,
        }


def advise(
    path: Path,
    config: FederationConfig,
    *,
    epsilons: Sequence[float],
    seeds: int,
    key_noise: float = 0.0,
    data_root: Path,
    done: Callable[[RehearsedRun], None] = lambda _: None,
) -> Advice:
    """Bound the surviving signal at each epsilon, and rehearse it on the primary's own columns.

    Args:
        path: Path of the federation file, for messages.
        config: The federation.
        epsilons: Epsilons to compare; a run without noise is added.
        seeds: Number of the rehearsal's seeds, counting up from the file's; 0 rehearses nothing.
        key_noise: Deviation of the noise on pretended secondaries' numeric keys, in deviations of
            each key.
        data_root: Folder at which relative data paths start. Only the primary's table is read.
        done: Callback for each simulated run.

    Raises:
        ConfigError: If a setting is impossible.
        DataError: If the primary's table can't be read, or has too few columns.
        PrivacyError: If a promise would not hold, whatever partners declare.

    Reveals:
        Nothing leaves the process, which holds the primary's table alone. Figures are for its
        owner: the rehearsal is of that table, and no noise protects what is told of it.
    """
    checks.at_least(0, seeds=seeds)
    checks.non_negative(key_noise=key_noise)
    for epsilon in epsilons:
        checks.positive(epsilon=epsilon)
    table = read_party(config, config.primary, data_root)
    facts = run_facts(config, table)[1]
    asked = [*sorted(set(epsilons)), None]
    bounds = [_compute_bound(config, facts, epsilon, file=str(path)) for epsilon in asked]
    casts, played = rehearse(config, table, asked, seeds=seeds, key_noise=key_noise, done=done)
    return Advice(
        file=path,
        config=config,
        training_rows=facts.train_rows,
        bounds=bounds,
        casts=casts,
        rehearsed=[_summary(epsilon, played) for epsilon in asked] if casts else [],
    )


def _compute_bound(
    config: FederationConfig, facts: RunFacts, epsilon: float | None, *, file: str
) -> Bound:
    planned = parse_federation(
        merge_settings(config.source, settings_for(config, epsilon)), file=file
    )
    plan = plan_run(planned, facts)
    positions, width = planned.family.cut_shape(planned.model)
    secondaries = len(planned.secondaries)
    numbers = positions * width // (secondaries if plan.releases.disjoint else 1)
    own, shared = (_noise(plan, disjoint=disjoint) for disjoint in (True, False))
    noise = own if plan.releases.disjoint else shared
    together = replace(plan.releases, disjoint=False)
    rate = planned.privacy.sampling_rate
    in_blocks = surviving_share(noise=own, sampling_rate=rate)
    in_shared = surviving_share(noise=shared, secondaries=secondaries, sampling_rate=rate)
    return Bound(
        epsilon=epsilon,
        noise=noise,
        blocks=in_blocks,
        blocks_spread=surviving_share(noise=own, numbers=max(1, numbers), sampling_rate=rate),
        shared=in_shared,
        partners=partners_for_half(together, together.noise_share_std()),
        rows=rows_to_see(in_blocks if plan.releases.disjoint else in_shared),
        settings=chosen_settings(planned),
        refused=_refusal(planned),
    )


def _noise(plan: RunPlan, *, disjoint: bool) -> float:
    releases = plan.releases
    if releases.disjoint == disjoint:
        return noise_a_number(releases, plan.noise_share_std)
    other = replace(releases, disjoint=disjoint)
    return noise_a_number(other, other.noise_share_std())


def _refusal(config: FederationConfig) -> str | None:
    try:
        require_covered_channels(config)
    except PrivacyError as error:
        return str(error)
    return None


def _summary(epsilon: float | None, played: Sequence[RehearsedRun]) -> RehearsalResult:
    runs = [rehearsal for rehearsal in played if rehearsal.epsilon == epsilon]
    gains = tuple(rehearsal.gain for rehearsal in runs)
    gain = statistics.mean(gains)
    deviation = statistics.stdev(gains) if len(gains) > 1 else None
    return RehearsalResult(
        epsilon=epsilon,
        metric=runs[0].metric,
        alone=statistics.mean(rehearsal.alone for rehearsal in runs),
        test=statistics.mean(rehearsal.test for rehearsal in runs),
        gain=gain,
        deviation=deviation,
        gains=gains,
        used=sum(rehearsal.used == "joint" for rehearsal in runs),
        outcome=None if deviation is None else outcome_of(gain, deviation),
    )


def outcome_of(gain: float, deviation: float) -> Outcome:
    """Return the name of a mean gain, by its deviation over seeds."""
    if gain > CLEAR * deviation:
        return "clear"
    if gain > deviation:
        return "unclear"
    return "loss" if gain < -deviation else "none"


def epsilons_from(text: str) -> list[float]:
    """Read epsilons as the command line takes them: numbers with commas between.

    Raises:
        ConfigError: If one is no positive number.
    """
    epsilons = []
    for word in text.split(","):
        try:
            value = float(word)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value > 0):
            raise ConfigError(
                f"--epsilon: must be positive numbers with commas between, such as 1,2,4; got "
                f"{word.strip()!r}"
            )
        epsilons.append(value)
    return epsilons
