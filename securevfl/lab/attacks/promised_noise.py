"""Tests for the promised noise in a run's releases, and for fresh noise each time.

The residual of an average is the average minus the secondaries' terms. It must be as large as
promised, differ from row to row, and from another run's; two worlds that differ as far as the clip
allows must be as hard to tell apart as the ledger says.
"""

from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Final

import numpy as np
from jaxtyping import Float64
from scipy import stats

from securevfl.dp.gaussian import gaussian_epsilon
from securevfl.lab.attacks import attack
from securevfl.lab.attacks.attack import Evidence, UnavailableError
from securevfl.lab.audit.audit_statistics import (
    FALSE_FAILURE,
    coordinate_correlation,
    distinguishability,
    round_correlation,
    row_correlation,
    variance_bounds,
)

_SMALLEST_MU: Final = 1e-3
_ROUNDS: Final = 8
"""Most rounds that are searched for equal noise."""


def _residuals(evidence: Evidence) -> Float64[np.ndarray, "rows numbers"]:
    """Return the noise of the released averages, divided by its promised deviation.

    Raises:
        UnavailableError: If the run promised no noise, or a view is missing.
    """
    if not evidence.has_primary or not evidence.knows_terms:
        raise UnavailableError("needs the views of all parties to the run's end")
    if not evidence.noise_deviation:
        raise UnavailableError("the run promised no noise")
    rows, averages = evidence.released_averages
    if len(rows) < 2:
        raise UnavailableError("no average came from the encoders of the run's end")
    if any(len(line["active"]) < evidence.parties for line in evidence.primary.lines):
        raise UnavailableError(
            "not all secondaries answered each round, and the noise was another then"
        )
    return (averages - evidence.without_noise(rows)) / evidence.noise_deviation


def _noise_size(evidence: Evidence, _seeds: int) -> Iterator[attack.Leak]:
    """Yield the ratio of the variances; a right run's is within the bounds of chi-square."""
    noise = _residuals(evidence)
    low, high = variance_bounds(noise.size)
    value = float(np.mean(noise**2))
    violated = None
    if value < low:
        violated = f"noise of {value:.3g} times the promised variance; at least {low:.3g}"
    elif value > high:
        violated = (
            f"averages are {value:.3g} times the promised variance off what encoders made; at "
            f"most {high:.3g}: released were others' numbers than those of the saved encoders"
        )
    low, high = (float(stats.chi2.ppf(level, noise.size)) for level in (0.025, 0.975))
    interval = (value * noise.size / high, value * noise.size / low)
    yield _leak(evidence, "variance over the promised one", value, interval, 1.0, violated)


def _membership(evidence: Evidence, seeds: int) -> Iterator[attack.Leak]:
    """Yield a lower bound on epsilon of one release, compared with the promised one."""
    noise = _residuals(evidence)
    longest = evidence.longest_change
    mu, delta = longest / evidence.noise_deviation, float(evidence.privacy["delta"])
    random = np.random.default_rng(0)
    distances, accuracy = [], []
    for _ in range(seeds):
        direction = random.normal(size=noise.shape[1])
        # In units of the distance between both worlds.
        scores = noise @ (direction / np.linalg.norm(direction)) / mu
        order = random.permutation(len(scores))
        zero, shifted = scores[order[::2]], scores[order[1::2]] + 1
        distances.append(distinguishability(zero, shifted))
        accuracy.append(np.mean([(zero <= 1 / 2).mean(), (shifted > 1 / 2).mean()]))
    # Each of several directions may raise a false alarm, of 3.2e-11.
    bound = max(distances)
    violated = None
    if bound > mu:
        violated = (
            f"two worlds of mu = {mu:.3g} are told apart as if mu were {bound:.3g}: epsilon is "
            f"at least {_epsilon(bound, delta):.3g}, and the run promised "
            f"{evidence.privacy['epsilon']:.3g}"
        )
    hits = round(float(np.mean(accuracy)) * len(noise))
    yield _leak(
        evidence,
        f"right guesses; is the record there or not, of one release; promised at most "
        f"{stats.norm.cdf(mu / 2):.3f}; epsilon of one release at least "
        f"{_epsilon(bound, delta):.3g}, promised {_epsilon(mu, delta):.3g}",
        float(np.mean(accuracy)),
        attack.exact_interval(hits, len(noise)),
        0.5,
        violated,
    )


def _epsilon(mu: float, delta: float) -> float:
    return 0.0 if mu < _SMALLEST_MU else gaussian_epsilon(delta=delta, noise_multiplier=1 / mu)


def _noise_again(
    evidence: Evidence, _seeds: int, *, other: Evidence | None
) -> Iterator[attack.Leak]:
    """Yield the largest correlation over its bound; a right run has at most 1."""
    noise = _residuals(evidence)
    batch = evidence.config.training.batch_size
    rounds = [noise[start : start + batch] for start in range(0, len(noise), batch)]
    whole = [round_noise for round_noise in rounds if len(round_noise) == batch][:_ROUNDS]
    if len(whole) < 2:
        half = len(noise) // 2
        whole = [noise[:half], noise[half : 2 * half]]
    together = np.stack(whole)
    correlations = {
        "rows": row_correlation(together) if together.shape[1] > 1 else 0.0,
        "numbers of a row": coordinate_correlation(together),
        "rounds": round_correlation(together),
    }
    with suppress(UnavailableError):
        others = noise[:0] if other is None else _residuals(other)
        some = min(len(noise), len(others))
        if some and noise.shape[1] == others.shape[1]:
            correlations["two runs"] = round_correlation(np.stack([noise[:some], others[:some]]))
    where = max(correlations, key=lambda name: correlations[name])
    value = correlations[where]
    violated = f"the same noise in several {where}" if value > 1 else None
    yield _leak(
        evidence,
        f"largest correlation over its bound; of {', '.join(correlations)}",
        value,
        (value, value),
        1.0,
        violated,
    )


def _sample_again(evidence: Evidence, _seeds: int) -> Iterator[attack.Leak]:
    """Yield, for each secondary, the share of nearest records of a pass that the next samples."""
    if evidence.privacy["sampling_rate"] == 1:
        raise UnavailableError("no record is left out of a round")
    views = list(evidence.secondaries.values())
    if all(next(view.of_kind("LINKS"), None) is None for view in views):
        raise UnavailableError("needs the view of a secondary")
    rate = float(evidence.privacy["sampling_rate"])
    for view in views:
        first: dict[int, int] = {}
        again: dict[int, bool] = {}
        taken: set[int] = set()
        for line in view.of_kind("LINKS"):
            for row, links in zip(line["rows"].tolist(), line["links"].tolist(), strict=True):
                nearest = links[0] if links else -1
                if row in first:
                    again.setdefault(row, first[row] in links)
                elif nearest >= 0 and nearest not in taken:
                    # Each record once, so that all draws are independent.
                    first[row] = nearest
                    taken.add(nearest)
        trials, hits = len(again), sum(again.values())
        if not trials:
            continue
        most = int(stats.binom.isf(FALSE_FAILURE, trials, rate))
        violated = None
        if hits > most:
            violated = (
                f"{hits} of {trials} records were drawn again; at rate {rate:g} at most {most}"
            )
        yield attack.Leak(
            attacker=view.name,
            about=view.name,
            channel="aggregates",
            measure="share that the next pass samples too",
            value=hits / trials,
            interval=attack.exact_interval(hits, trials),
            floor=rate,
            floor_is="the sampling rate",
            rows=trials,
            violates=violated,
        )


def _leak(
    evidence: Evidence,
    measure: str,
    value: float,
    interval: tuple[float, float],
    floor: float,
    violated: str | None,
) -> attack.Leak:
    return attack.Leak(
        attacker=evidence.config.primary.name,
        about="all secondaries",
        channel="aggregates",
        measure=measure,
        value=value,
        interval=interval,
        floor=floor,
        floor_is="what was promised" if floor == 1 else "a coin",
        rows=len(evidence.released_averages[0]),
        violates=violated,
    )


NOISE_SIZE = attack.Attack("noise-size", "noise", _noise_size)
"""Test of the mean square of the noise against the promised one."""

MEMBERSHIP = attack.Attack("membership", "members", _membership)
"""Likelihood ratio test of membership: a record that is as long as the clip allows, or none.

The noise of each half of the released rows stands for one world. From how often the test errs
follows a lower bound on mu of Gaussian DP, and so on epsilon, with false-alarm probability 3.2e-11.
"""

SAMPLE_AGAIN = attack.Attack("sample-again", "noise", _sample_again)
"""Test whether records of a row's secret sample in one epoch are in the next one's too."""


def noise_again(other: Evidence | None) -> attack.Attack:
    """Return the test for equal noise in several rows, numbers or rounds, or in another run.

    Args:
        other: Another run of the same federation, whose noise must differ; None compares no runs.
    """
    return attack.Attack("noise-again", "noise", partial(_noise_again, other=other))


def _linked_or_not(evidence: Evidence, _seeds: int) -> Iterator[attack.Leak]:
    """Yield, for each secondary, the AUC of the average's length."""
    _require_both_kinds(evidence)
    rows, averages = evidence.released_averages
    lengths = np.linalg.norm(averages, axis=1)
    clear = np.linalg.norm(evidence.without_noise(rows), axis=1)
    for view in evidence.secondaries.values():
        linked = evidence.linked_rows(view)[rows]
        if linked.all() or not linked.any():
            continue
        yield attack.Leak(
            attacker=evidence.config.primary.name,
            about=view.name,
            channel="aggregates",
            measure="AUC",
            value=attack.auc(linked, lengths),
            interval=attack.bootstrap_interval(
                lambda chosen, truth=linked: attack.auc(truth[chosen], lengths[chosen]),  # type: ignore[misc]
                len(rows),
            ),
            floor=0.5,
            floor_is="a coin",
            ceiling=attack.auc(linked, clear) if evidence.noise_deviation else None,
            rows=len(rows),
        )


def _require_both_kinds(evidence: Evidence) -> None:
    """Refuse runs without linked and unlinked rows among the released averages."""
    rows, _ = evidence.released_averages
    if not evidence.knows_terms:
        raise UnavailableError(
            "needs the views of all secondaries to the end, to know what is right"
        )
    if not len(rows):
        raise UnavailableError("no average came from the encoders of the run's end")
    linked = np.any(
        [evidence.linked_rows(secondary)[rows] for secondary in evidence.secondaries.values()],
        axis=0,
    )
    if linked.all() or not linked.any():
        raise UnavailableError("all rows are linked, or none")


LINKED_OR_NOT = attack.Attack("linked-or-not", "links", _linked_or_not)
"""Attack on links: an average of no record is short."""
