"""``securevfl lab audit``: real rounds of the installed code, and tests of their releases.

Training behind noise is audited in one run. Every row has two records nearby, at opposite ends of
the clip: a coin decides whether the first is there, and the second takes its place where it is not.
All coins are guessed at once: from all releases of the training, as the primary has them, and from
all noised updates, which a promise covers as if they were published. How many guesses are right
bounds epsilon from below.

Links, plan, clip, ring, noise, ledger and updates are those of a run. The audit's own are the
tables, a bottom model that is linear, so that a record has weights of its own, and gradients longer
than the clip allows.

References:
    [SNJ23] T. Steinke, M. Nasr, M. Jagielski, Privacy Auditing with One (1) Training Run, NeurIPS
    2023 (arXiv:2305.08846), Algorithm 1 and Theorem 3.1.
"""

import math
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64
from scipy import stats
from torch import Tensor, nn

from securevfl.config.federation import FederationConfig
from securevfl.config.reading import parse_federation
from securevfl.core import files
from securevfl.core.errors import PrivacyError
from securevfl.core.formatting import Summarised
from securevfl.dp.events import GaussianRelease
from securevfl.dp.gaussian import gaussian_epsilon
from securevfl.federation.build import optimizer_of
from securevfl.federation.messages import RoundPlan
from securevfl.federation.rounds.exchanges import SimulatedExchange
from securevfl.federation.rounds.secondary import Secondary
from securevfl.federation.run_plan import RunFacts, RunPlan, plan_run
from securevfl.lab.audit.audit_class_means import audit_class_means
from securevfl.lab.audit.audit_statistics import (
    DELTA,
    FALSE_FAILURE,
    RELEASES,
    ROUNDS_EVENT,
    Audited,
    AuditSettings,
    AuditTest,
    Release,
)
from securevfl.lab.audit.audit_worlds import AuditStage, audited_secondary, parties_named, table_at
from securevfl.launch.process import PartyCommand
from securevfl.launch.spawn import reserved_port, run_party_processes
from securevfl.transport.identity import SHORT_LIVED_DAYS, provision

FALSE_ALARM: Final = 1e-11
"""Largest probability that one of the two tests fails a right mechanism."""

CANARIES: Final = 1024
"""m: number of records; a fair coin decides for each whether it is there."""

_GUESSED: Final = 384
"""r: number of guessed coins, half of them as "there"."""
_EPSILON: Final = 1.0
"""Epsilon of the training at delta 1e-5; a small one is refuted by few right guesses."""
_DELTA: Final = 1e-13
"""Delta at which the training's promise is tested. The noise keeps one at every delta, and at 1e-5
the theorem's part in delta alone would be far over the false alarm."""
_WIDTH: Final = 2
_LONG: Final = 1e3
"""Length of records and gradients before clipping, over the clip norm."""


def guesses_chance(
    *, canaries: int, guesses: int, right: int, epsilon: float, delta: float
) -> float:
    """Return the largest probability of `right` right guesses under (epsilon, delta)-DP.

    With B binomial of ``r`` guesses and ``q = 1 / (1 + e^-epsilon)``, the bound for v right ones is
    ``P(B >= v) + 2 m delta max_i P(v > B >= v - i) / i``, i from 1 to m.

    Args:
        canaries: m; each is there by a fair coin.
        guesses: r <= m; the others are left open.
        right: v.
        epsilon: >= 0.
        delta: In [0, 1].

    References:
        [SNJ23] Theorem 3.1.
    """
    rate = 1 / (1 + math.exp(-epsilon))
    probability = float(stats.binom.sf(right - 1, guesses, rate))
    if delta and right:
        # B is not below 0, so that more than i = v adds nothing.
        further = np.cumsum(stats.binom.pmf(np.arange(right - 1, -1, -1), guesses, rate))
        probability += 2 * canaries * delta * float(np.max(further / np.arange(1, right + 1)))
    return min(probability, 1.0)


def least_epsilon(*, canaries: int, guesses: int, right: int, delta: float) -> float:
    """Return a lower bound on epsilon, wrong with probability :data:`FALSE_ALARM` at most."""

    def is_refuted(epsilon: float) -> bool:
        chance = guesses_chance(
            canaries=canaries, guesses=guesses, right=right, epsilon=epsilon, delta=delta
        )
        return chance <= FALSE_ALARM

    low, high = 0.0, 64.0
    if not is_refuted(low):
        return 0.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if is_refuted(middle) else (low, middle)
    return low


class _OwnWeights(nn.Module):
    """Linear bottom model; a record with one nonzero column has its own weights."""

    recordwise = True

    def __init__(self, records: int) -> None:
        super().__init__()
        weights = torch.randn(_WIDTH, records, generator=torch.Generator().manual_seed(0))
        self.weights = nn.Parameter(weights / weights.norm(dim=0))

    def forward(
        self,
        features: Float[Tensor, "batch links records"],
        _keys: Float[Tensor, "batch links dimension"],
        present: Bool[Tensor, "batch links"],
    ) -> Float[Tensor, "batch links width"]:
        """Return each present record's numbers times its weights."""
        return (features @ self.weights.T) * present.unsqueeze(-1)


def audit_one_run(settings: AuditSettings) -> list[AuditTest]:
    """Train once on made-up records, and test the number of right guesses.

    Reveals:
        Nothing: all records are made up.
    """
    config = _federation(settings)
    facts = RunFacts(rows=CANARIES + 2, train_rows=CANARIES, validation_rows=1, test_rows=1)
    plan = plan_run(config, facts)
    there = np.random.default_rng().random(CANARIES) < 1 / 2
    scores = _scores(settings, plan, _secondary(plan, settings, there))
    releases, tau = plan.releases, plan.noise_share_std
    promised = releases.release(tau, rounds=releases.rounds, row_releases=releases.row_releases)
    assert isinstance(promised, GaussianRelease), "no record is left out by a secret sample"
    allowed = gaussian_epsilon(delta=_DELTA, noise_multiplier=promised.noise_multiplier)
    bound = partial(least_epsilon, canaries=CANARIES, guesses=_GUESSED, delta=_DELTA)
    return [
        AuditTest(
            name=f"records_not_found_in_{channel}",
            statistic=bound(right=_right(score, there)),
            threshold=allowed,
            passes_if="at most",
            # Without noise every guess is right.
            power=float(bound(right=_GUESSED) > allowed),
            against="no noise",
        )
        for channel, score in scores.items()
    ]


def _right(scores: Float64[np.ndarray, " canaries"], there: Bool[np.ndarray, " canaries"]) -> int:
    """Return how many guesses are right: "there" of the highest scores, "not" of the lowest."""
    order, half = np.argsort(np.nan_to_num(scores)), _GUESSED // 2
    return int(there[order[-half:]].sum() + (~there[order[:half]]).sum())


def _scores(
    settings: AuditSettings, plan: RunPlan, secondary: Secondary
) -> dict[str, Float64[np.ndarray, " canaries"]]:
    """Train, and return a score of each record's presence in releases and in updates.

    The sum over rounds along the direction that a record has in each is the likelihood ratio's
    logarithm, up to a factor: noise is the same in all rounds.
    """
    exchange = SimulatedExchange({1: secondary}, plan.cut)
    weights = next(secondary.bottom.parameters())
    released, updated = np.zeros(CANARIES), np.zeros(CANARIES)
    for _ in range(settings.rounds):
        before = weights.detach().T.double()
        directions = before / before.norm(dim=1, keepdim=True)
        round_plan = RoundPlan(
            round_number=exchange.rounds.next(),
            rows=np.arange(CANARIES, dtype=np.int64),
            active=exchange.ranks,
            purpose="train",
        )
        average = exchange.release(round_plan).double().squeeze(1)
        released += (average * directions).sum(dim=1).numpy()
        # At right angles to what is released, so that the clip of releases lets it through.
        across = torch.stack([-directions[:, 1], directions[:, 0]], dim=1)
        gradient = _LONG * plan.config.privacy.update_clip_norm * across
        exchange.return_gradient(round_plan, gradient.float().unsqueeze(1))
        assert weights.grad is not None, "it has learned"
        updated += (weights.grad.T.double() * across).sum(dim=1).numpy()
    secondary.close()
    return {"releases": released, "updates": updated}


def _secondary(
    plan: RunPlan, settings: AuditSettings, there: Bool[np.ndarray, " canaries"]
) -> Secondary:
    """Build the secondary, whose first records are those that a coin has left."""
    places = np.arange(CANARIES, dtype=np.float64)
    columns = _LONG * settings.clip_norm * np.eye(CANARIES)
    records = table_at(
        settings.names[1],
        np.concatenate([places[there], places + 0.1]),
        np.concatenate([columns[there], -columns]),
    )
    secondary = audited_secondary(plan, records, _OwnWeights(CANARIES), rounds=settings.rounds)
    secondary.optimizer = optimizer_of(plan.config, secondary.bottom)
    return secondary


def _federation(settings: AuditSettings) -> FederationConfig:
    return parse_federation(
        {
            "federation": {"name": "one-run audit", "task": "regression", "seed": 0},
            "model": {"family": "fet", "neighbours": 1, "hidden": _WIDTH, "release": "pooled"},
            "training": {"batch_size": CANARIES, "epochs": settings.rounds},
            "base": {"estimator": "none"},
            "privacy": {
                "epsilon": _EPSILON,
                "delta": DELTA,
                "clip_norm": settings.clip_norm,
                "unit": "secondary-record",
                "links_per_record": 1,
                "encoder": "dp-trained",
            },
            "linkage": {"protection": "none", "max_distance": 0.3},
            "party": parties_named(settings.names[:2]),
        },
        file="federation of the one-run audit",
    )


PARTY_PROGRAM: Final = (sys.executable, "-m", "securevfl.lab.audit.audit_party")
"""Command of each party's process; a folder and the party's name follow."""


@dataclass(frozen=True, kw_only=True, repr=False)
class AuditReport(Summarised):
    """The outcome of an audit."""

    settings: AuditSettings
    """Settings of the audit."""

    tests: Mapping[Audited, Sequence[AuditTest]]
    """Every test's outcome, by the kind of release."""

    rows: int
    """Rows released, over all rounds between processes."""

    refusal: str | None = None
    """Reason for unfinished rounds, if the installed code refused its own output."""

    seconds: float
    """Wall time of the whole audit; starting processes takes most of it."""

    round_seconds: float | None = None
    """Wall time of the rounds alone, between processes."""

    def summary(self) -> tuple[str, dict[str, str]]:
        """Return the number of passed tests, and the refusal if there was one."""
        tests = [outcome for outcomes in self.tests.values() for outcome in outcomes]
        passed = sum(test.verdict == "pass" for test in tests)
        shown = {} if self.refusal is None else {"refused": self.refusal}
        return f"{passed} of {len(tests)} tests passed, {self.rows:,} rows", shown

    @property
    def rounds_finished(self) -> AuditTest:
        """Test that the rounds of every kind were finished without a refusal."""
        done = 0
        if self.refusal is None:
            done = sum(release in self.tests for release in RELEASES)
        return AuditTest(
            name="rounds_finished",
            statistic=float(done),
            threshold=float(len(RELEASES)),
            passes_if="at least",
            power=1.0,
            against="rows that reach the encoding unclipped",
        )

    @property
    def verdict(self) -> Literal["pass", "fail"]:
        """``pass`` if every test passes."""
        return "fail" if self.failed_tests else "pass"

    @property
    def failed_tests(self) -> list[str]:
        """Names of the tests that failed, without repetition."""
        outcomes = [
            self.rounds_finished,
            *(test for tests in self.tests.values() for test in tests),
        ]
        return list(dict.fromkeys(test.name for test in outcomes if test.verdict == "fail"))

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain figures and words."""
        tests = [
            {"release": release, **test.as_dict()}
            for release, outcomes in self.tests.items()
            for test in outcomes
        ]
        one_run = len(self.tests.get("one_run", ()))
        return {
            "verdict": self.verdict,
            "tests": [{"release": "all", **self.rounds_finished.as_dict()}, *tests],
            "settings": asdict(self.settings),
            "rows": self.rows,
            "false_failure_per_test": FALSE_FAILURE,
            "false_failure_at_most": FALSE_FAILURE * (len(tests) - one_run) + FALSE_ALARM * one_run,
            "refusal": self.refusal,
            "seconds": round(self.seconds, 3),
            "round_seconds": self.round_seconds and round(self.round_seconds, 3),
        }


def audit(
    settings: AuditSettings | None = None, *, program: Sequence[str] = PARTY_PROGRAM
) -> AuditReport:
    """Run real rounds on made-up rows, and test the noise and the clip of the releases.

    Every party is its own process, with TLS, masks and CrypTen's reveal between them. Class sums
    for class means are made, and labels drawn, by the parties' parts as threads of this process.
    The training whose records are guessed is the simulator's.

    Args:
        settings: Settings of the audit; default: :class:`AuditSettings`.
        program: Command of each party's process.

    Raises:
        ConfigError: If the settings are impossible.
        ProtocolError: If a process is lost.
        SecureVflError: If class sums are refused.

    Reveals:
        Nothing: all rows are made up.
    """
    settings = settings or AuditSettings()
    started = time.monotonic()
    stages = {release: AuditStage(settings, release) for release in RELEASES}
    class_means = audit_class_means(settings)
    one_run = audit_one_run(settings)
    with tempfile.TemporaryDirectory(prefix="securevfl-audit-") as text, reserved_port() as port:
        folder = Path(text)
        job = {
            "settings": asdict(settings),
            "pinned": provision(settings.names, folder, valid_days=SHORT_LIVED_DAYS),
            "port": port,
        }
        files.write_json(folder / "job.json", job)
        commands = [
            PartyCommand(
                name=name,
                arguments=[*program, str(folder), name],
                log_path=folder / name / "output.log",
                environment={"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            )
            for name in settings.names
        ]
        refusal = None
        seconds: list[float] = []

        def on_event(_name: str, event: Mapping[str, Any]) -> None:
            if event.get("event") == ROUNDS_EVENT:
                seconds.append(float(event["seconds"]))

        try:
            run_party_processes(commands, deadline_s=settings.timeout_s, on_event=on_event)
        except PrivacyError as error:
            refusal = str(error)
        revealed = {
            release: np.load(path, allow_pickle=False)
            for release in RELEASES
            if (path := folder / f"{release}.npy").exists()
        }
    report = report_of(stages, revealed, started=started, refusal=refusal)
    return replace(
        report,
        tests={**report.tests, **class_means, "one_run": one_run},
        round_seconds=seconds[0] if seconds else None,
    )


def report_of(
    stages: Mapping[Release, AuditStage],
    revealed: Mapping[Release, np.ndarray],
    *,
    started: float,
    refusal: str | None,
) -> AuditReport:
    """Return the report on the revealed averages.

    Args:
        stages: Stage of each kind of release.
        revealed: The averages that the primary learned, by the kind of release; shape
            (rounds, rows, ...).
        started: Start of the audit on the monotonic clock.
        refusal: Reason for unfinished rounds, if the installed code refused its own output.
    """
    return AuditReport(
        settings=next(iter(stages.values())).settings,
        tests={release: stages[release].tests(averages) for release, averages in revealed.items()},
        rows=sum(averages.shape[0] * averages.shape[1] for averages in revealed.values()),
        refusal=refusal,
        seconds=time.monotonic() - started,
    )
