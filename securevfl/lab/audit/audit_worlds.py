"""Federation of an audit, whose representations are known beforehand.

Everything between a secondary's records and the primary's average is that of a real run: links,
clip, ring, noise, ledger, masks. Only the bottom model is replaced: it returns a record's features
unchanged, so that a row has the length that the audit needs.
"""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Float64, Int64
from torch import Tensor, nn

from securevfl.config.federation import FederationConfig, link_spec
from securevfl.config.reading import parse_federation
from securevfl.core.conventions import PRIMARY_RANK, stream
from securevfl.core.errors import ProtocolError
from securevfl.data.tables import PartyTable
from securevfl.federation.build import build_secondary
from securevfl.federation.messages import RoundPlan
from securevfl.federation.rounds.exchanges import Exchange
from securevfl.federation.rounds.secondary import Secondary
from securevfl.federation.run_plan import RunFacts, RunPlan, plan_run
from securevfl.federation.session.request_validator import RequestValidator, SessionLimits
from securevfl.lab.audit.audit_statistics import (
    DELTA,
    LONG,
    MIXED,
    WORLDS,
    ZERO,
    AuditSettings,
    AuditSize,
    AuditTest,
    Release,
    audit_tests,
    rows_needed,
)
from securevfl.ledger.ledger import Ledger
from securevfl.linkage.stage.linking import Linker
from securevfl.linkage.stage.party_keys import keys_of

# Two positions or two slots, so that a clip of single positions or of whole rows in the wrong
# place would show.
_LINKS: Final = 2
_WIDTH: Final = 32

# How long each kind of row is along u, over C; pooled rows have a length for each of their records.
# A mixed pooled row tells a clip of its records from one of their mean.
_LENGTHS: Final[dict[Release, dict[int, tuple[float, ...]]]] = {
    "sequence": {ZERO: (0.0,), LONG: (10.0,), MIXED: (0.5,)},
    "pooled": {ZERO: (0.0, 0.0), LONG: (10.0, 10.0), MIXED: (10.0, -0.95)},
}
_SEED: Final = 0


class ShowFeatures(nn.Module):
    """A bottom model whose representation is the records' features."""

    recordwise = True

    def forward(
        self,
        features: Float[Tensor, "batch links width"],
        _keys: Float[Tensor, "batch links dimension"],
        present: Bool[Tensor, "batch links"],
    ) -> Float[Tensor, "batch links width"]:
        """Return the features of the links that are present."""
        return features * present.unsqueeze(-1)


class AuditRounds(RequestValidator):
    """Validator that admits `rounds` rounds on the same made-up rows."""

    def __init__(self, limits: SessionLimits, *, rounds: int) -> None:
        super().__init__(limits)
        self._left = rounds

    def validate_round(self, plan: RoundPlan) -> None:
        """Take a round into account, or refuse it.

        Raises:
            ProtocolError: If its number was used, or all rounds are over.
        """
        self.take_round(plan.round_number)
        if not self._left:
            raise ProtocolError(f"round {plan.round_number}: the audit's rounds are over")
        self._left -= 1


class AuditStage:
    """Rounds of one kind of release, with their data, parties and tests."""

    def __init__(self, settings: AuditSettings, release: Release) -> None:
        self.settings = settings
        self.release = release
        self.rows_per_round = WORLDS * rows_needed(
            noise=settings.noise_multiplier,
            parties=settings.secondaries,
            rounds=settings.rounds,
            width=_WIDTH,
        )
        self.config = self._federation()
        self.plan = plan_run(self.config, self.facts)

    @property
    def is_pooled(self) -> bool:
        """Whether the release code averages the records of a row."""
        return self.release == "pooled"

    @property
    def facts(self) -> RunFacts:
        """The primary's rows: all rounds have the same ones, or each its own if released once."""
        rows = self.rows_per_round * (self.settings.rounds if self.is_pooled else 1)
        return RunFacts(rows=rows, train_rows=rows - 2, validation_rows=1, test_rows=1)

    @property
    def size(self) -> AuditSize:
        """The numbers that thresholds and powers depend on."""
        settings = self.settings
        average_std = settings.noise_multiplier * settings.clip_norm
        slots = _LINKS if self.is_pooled else 1
        return AuditSize(
            noise=settings.noise_multiplier,
            parties=settings.secondaries,
            rounds=settings.rounds,
            rows=self.rows_per_round // WORLDS,
            width=_WIDTH,
            step=self.plan.cut.ring.granularity / (settings.secondaries * slots * average_std),
        )

    def secondary(self, rank: int, ledger_folder: Path | None) -> Secondary:
        """Build a secondary as a run does, with a bottom model of the audit."""
        name = self.settings.names[rank]
        path = None if ledger_folder is None else ledger_folder / f"{name}-{self.release}.jsonl"
        rounds = self.settings.rounds
        return audited_secondary(
            self.plan, self._records(name), ShowFeatures(), rounds=rounds, ledger_path=path
        )

    def run(self, exchange: Exchange) -> Float32[np.ndarray, "r b width"]:
        """Release all rounds and return the averages, a row flattened.

        Reveals:
            To the primary: averages of made-up rows, noised.
        """
        revealed = []
        for number in range(self.settings.rounds):
            start = number * self.rows_per_round if self.is_pooled else 0
            plan = RoundPlan(
                round_number=exchange.rounds.next(),
                rows=np.arange(start, start + self.rows_per_round, dtype=np.int64),
                active=exchange.ranks,
                purpose="release",
            )
            revealed.append(exchange.release(plan).flatten(1).numpy())
        return np.stack(revealed)

    def tests(self, revealed: Float32[np.ndarray, "r b width"]) -> list[AuditTest]:
        """Test revealed averages with the primary's knowledge alone."""
        clip_norm = self.settings.clip_norm
        averages = revealed.astype(np.float64)
        kept = self._lengths.clip(-1.0, 1.0)
        # What the ring makes of a row: every part is cut to whole units, towards zero.
        unit = self.plan.cut.ring.granularity
        parts = np.trunc(kept[..., None] * clip_norm * self._direction / unit) * unit
        expected = parts.mean(axis=1)[self._kinds(self.rows_per_round)]
        return audit_tests(
            (averages - expected) / clip_norm,
            averages @ self._direction / clip_norm,
            self.size,
            mixed_score=float(kept[MIXED].mean()),
        )

    @cached_property
    def _direction(self) -> Float64[np.ndarray, " width"]:
        """Return u, a dense unit vector over a released row."""
        u = stream(_SEED, "audit direction", self.release).normal(size=_WIDTH)
        return u / np.linalg.norm(u)

    @property
    def _lengths(self) -> Float64[np.ndarray, "kinds parts"]:
        lengths = _LENGTHS[self.release]
        return np.array([lengths[kind] for kind in range(WORLDS)])

    def _kinds(self, rows: int) -> Int64[np.ndarray, " rows"]:
        return np.arange(rows) % WORLDS

    def _records(self, name: str) -> PartyTable:
        """Return records for which the K nearest to each row make up its release.

        Pooled: each of the K carries its part. Else each carries one position of the row's only
            part. Their keys stand in this order, nearest first.
        """
        rows = self.facts.rows
        parts = self._lengths[self._kinds(rows)][..., None] * self._direction
        keys = np.arange(rows)[:, None] + 0.1 * np.arange(_LINKS)
        return table_at(
            name, keys.reshape(-1), self.settings.clip_norm * parts.reshape(rows * _LINKS, -1)
        )

    def _federation(self) -> FederationConfig:
        settings = self.settings
        # A noise multiplier is measured by what it protects (docs/privacy.md, section 3). With a
        # frozen encoder a row's links move the sum by k C, so it is tau sqrt(k) / (k C), that of
        # the average; with a trained one every row of a round may change, and by twice as much.
        multiplier = settings.noise_multiplier
        if not self.is_pooled:
            multiplier /= 2 * self.rows_per_round**0.5
        source = {
            "federation": {"name": "audit", "task": "regression", "seed": _SEED},
            "model": {
                "family": "fet",
                "neighbours": _LINKS,
                "hidden": _WIDTH if self.is_pooled else _WIDTH // _LINKS,
                "release": self.release,
            },
            # Twice as many epochs as rounds, so that the plan of a trained encoder has room.
            "training": {"batch_size": self.rows_per_round, "epochs": 2 * settings.rounds},
            "base": {"estimator": "none"},
            "privacy": {
                "noise_multiplier": multiplier,
                "delta": DELTA,
                "clip_norm": settings.clip_norm,
                "unit": "linked-row",
                "encoder": "frozen" if self.is_pooled else "trained",
            },
            "linkage": {"protection": "none"},
            "runtime": {
                "join_timeout_s": settings.timeout_s,
                "idle_timeout_s": settings.timeout_s,
                "silence_timeout_s": settings.timeout_s,
            },
            "party": parties_named(settings.names),
        }
        config = parse_federation(source, file="federation of the audit")
        positions, _ = config.family.cut_shape(config.model)
        assert positions == (1 if self.is_pooled else _LINKS)
        return config


def parties_named(names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the parties' sections of an audit's federation file, the primary first."""
    return [
        {
            "name": name,
            "role": "primary" if rank == PRIMARY_RANK else "secondary",
            "data": f"{name}.csv",
            "key": ["place"],
            "scaling": "none",
            **({"label": "label", "address": "127.0.0.1:0"} if rank == PRIMARY_RANK else {}),
        }
        for rank, name in enumerate(names)
    ]


def audited_secondary(
    plan: RunPlan,
    records: PartyTable,
    bottom: nn.Module,
    *,
    rounds: int,
    ledger_path: Path | None = None,
    places: Int64[np.ndarray, " rows"] | None = None,
) -> Secondary:
    """Build a secondary as a run does, with a given bottom model and number of rounds.

    Args:
        plan: Plan of the audit.
        records: The secondary's table.
        bottom: The bottom model, which learns only with an optimizer, and is not fitted.
        rounds: Number of admitted rounds.
        ledger_path: Path of the ledger; None keeps it in memory.
        places: Keys of the primary's rows; None: 0, 1 and so on.
    """
    rows = np.arange(plan.facts.rows, dtype=np.float64) if places is None else places.astype(float)
    spec = link_spec(plan.config)
    link = Linker(spec, keys_of(spec.keys, table_at("primary", rows, rows[:, None])))
    ledger = Ledger(
        ledger_path, party=records.name, plan=plan.releases, noise_share_std=plan.noise_share_std
    )
    secondary = build_secondary(
        plan,
        plan.config.party(records.name),
        records,
        link(keys_of(spec.keys, records)),
        ledger,
        device=torch.device("cpu"),
    )
    secondary.bottom, secondary.optimizer = bottom, None
    if secondary.kept is not None:
        secondary.kept.fit = None
    limits = SessionLimits.of(plan, party=records.name)
    secondary.validator = AuditRounds(limits, rounds=rounds)
    return secondary


def table_at(
    name: str, places: Float64[np.ndarray, " rows"], features: Float64[np.ndarray, "rows width"]
) -> PartyTable:
    """Return a made-up table whose rows lie at certain places."""
    return PartyTable(
        name=name,
        key_names=("place",),
        keys=places[:, None],
        feature_names=tuple(f"x{axis}" for axis in range(features.shape[1])),
        features=features.astype(np.float32),
    )
