"""One-run audit of training behind noise: guesses at the records that were there.

Every row has two records nearby, at opposite ends of the clip: a coin decides whether the first is
there, and the second takes its place where it is not. All coins are guessed at once: from all
releases of the training, as the primary has them, and from all noised updates, which a promise
covers as if they were published. How many guesses are right bounds epsilon from below.

Links, plan, clip, ring, noise, ledger and updates are those of a run. The audit's own are the
tables, a bottom model that is linear, so that a record has weights of its own, and gradients longer
than the clip allows.

References:
    [SNJ23] T. Steinke, M. Nasr, M. Jagielski, Privacy Auditing with One (1) Training Run, NeurIPS
    2023 (arXiv:2305.08846), Algorithm 1 and Theorem 3.1.
"""

import math
from functools import partial
from typing import Final

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64
from scipy import stats
from torch import Tensor, nn

from securevfl.config.federation import FederationConfig
from securevfl.config.reading import parse_federation
from securevfl.dp.events import GaussianRelease
from securevfl.dp.gaussian import gaussian_epsilon
from securevfl.federation.build import optimizer_of
from securevfl.federation.messages import RoundPlan
from securevfl.federation.rounds.exchanges import SimulatedExchange
from securevfl.federation.rounds.secondary import Secondary
from securevfl.federation.run_plan import RunFacts, RunPlan, plan_run
from securevfl.lab.audit.audit_statistics import DELTA, AuditSettings, AuditTest
from securevfl.lab.audit.audit_worlds import audited_secondary, parties_named, table_at

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
