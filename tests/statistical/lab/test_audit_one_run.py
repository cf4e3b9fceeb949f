"""The one-run audit bounds epsilon as its theorem says, and finds a training without its noise.

False alarm: each of both tests fails a right mechanism with probability at most 1e-11, by the
theorem. Miss: without noise all guesses are right, so none.
"""

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from helpers.altered_mechanisms import scaled, without_noise

from securevfl.federation.build import build_secondary
from securevfl.federation.rounds.secondary import Secondary
from securevfl.lab.audit import audit_report as one_run
from securevfl.lab.audit import audit_worlds
from securevfl.lab.audit.audit_report import AuditReport
from securevfl.lab.audit.audit_statistics import AuditSettings

pytestmark = pytest.mark.statistical

SETTINGS = AuditSettings(rounds=2)
BOTH = {"records_not_found_in_releases", "records_not_found_in_updates"}


def by_hand(m: int, r: int, v: int, q: Fraction, delta: Fraction) -> Fraction:
    """Return the theorem's bound in whole fractions, term by term and for every i up to m."""

    def between(low: int, high: int) -> Fraction:
        terms = (math.comb(r, k) * q**k * (1 - q) ** (r - k) for k in range(max(low, 0), high))
        return sum(terms, Fraction(0))

    tail = between(v, r + 1)
    return tail + 2 * m * delta * max(between(v - i, v) / i for i in range(1, m + 1))


@pytest.mark.parametrize("right", [0, 1, 9, 14, 20])
@pytest.mark.parametrize("delta", [Fraction(0), Fraction(1, 1000)])
def test_the_bound_is_the_theorem(right: int, delta: Fraction) -> None:
    """For q = 2/3, epsilon = log 2, and 20 guesses of 25 coins."""
    found = one_run.guesses_chance(
        canaries=25, guesses=20, right=right, epsilon=math.log(2), delta=float(delta)
    )
    expected = min(by_hand(25, 20, right, Fraction(2, 3), delta), Fraction(1))
    assert found == pytest.approx(float(expected), rel=1e-9)


def test_right_guesses_alone_have_a_closed_form() -> None:
    """At delta 0 the chance is q^r, so that epsilon is log(q / (1 - q)) with q = p^(1/r)."""
    q = one_run.FALSE_ALARM ** (1 / 400)
    found = one_run.least_epsilon(canaries=1000, guesses=400, right=400, delta=0.0)
    assert found == pytest.approx(math.log(q / (1 - q)), abs=1e-5)
    assert one_run.least_epsilon(canaries=1000, guesses=400, right=200, delta=0.0) == 0
    # Some chance that nothing is promised leaves no proof at this confidence.
    assert one_run.least_epsilon(canaries=1000, guesses=400, right=400, delta=1e-3) == 0


def test_randomised_response_is_not_refuted() -> None:
    """The mechanism that the theorem is tight for: chance 1e-11 that the bound passes its epsilon.

    All guesses are right with probability q, independently; 200 trials, 2e-9 in all, with a seed.
    """
    random, epsilon = np.random.default_rng(0), 1.0
    rights = random.binomial(384, 1 / (1 + math.exp(-epsilon)), size=200)
    bounds = [
        one_run.least_epsilon(canaries=384, guesses=384, right=int(one), delta=0.0)
        for one in rights
    ]
    assert 0 < np.median(bounds) < max(bounds) < epsilon


def failed(monkeypatch: pytest.MonkeyPatch, alter: Callable[[Secondary], object]) -> set[str]:
    """Return the tests that a training fails whose secondary is altered when it is built."""

    def build(*arguments: Any, **options: Any) -> Secondary:
        secondary = build_secondary(*arguments, **options)
        alter(secondary)
        return secondary

    monkeypatch.setattr(audit_worlds, "build_secondary", build)
    tests = one_run.audit_one_run(SETTINGS)
    assert {test.name for test in tests} == BOTH
    assert all(test.power == 1 for test in tests)
    # What fails here fails the report, and so ends the command with exit code 4.
    report = AuditReport(settings=SETTINGS, tests={"one_run": tests}, rows=0, seconds=0.0)
    return set(report.failed_tests) - {report.rounds_finished.name}


def plain_updates(secondary: Secondary) -> None:
    """Updates are sums alone, and the ledger says what it always says."""
    noise = secondary.gradient_noise
    assert noise is not None
    vars(noise)["add_noise"] = lambda total: (total * noise.granularity).float()


def test_what_is_installed_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """False alarm 2e-11."""
    assert failed(monkeypatch, lambda _secondary: None) == set()


@pytest.mark.parametrize(
    ("alter", "found"),
    [
        (without_noise, {"records_not_found_in_releases"}),
        # A twentieth of the noise: of 384 guesses hardly any is wrong.
        (scaled(0.05), {"records_not_found_in_releases"}),
        (plain_updates, {"records_not_found_in_updates"}),
    ],
)
@pytest.mark.usefixtures("fixed_noise")
def test_noise_that_is_off_behind_a_valid_ledger_is_found(
    monkeypatch: pytest.MonkeyPatch, alter: Callable[[Secondary], object], found: set[str]
) -> None:
    """By the channel that lacks it, and by that alone."""
    assert failed(monkeypatch, alter) == found
