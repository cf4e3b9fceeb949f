"""What the predictions of one model have spent at one party, and what is left for them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from securevfl.config.federation import FederationConfig
from securevfl.federation.ledger_book import Session, epsilon_of_sessions


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictionBudget:
    """Of one party, for all predictions of one model together and beside its training."""

    party: str
    unit: str
    """What the epsilon protects."""
    delta: float
    spent: float | None
    """Epsilon; None: no bound."""
    budget: float | None
    """What may be spent; None: no limit was set."""
    rows: int
    """Rows that were asked for."""
    most_rows: int | None
    """How many may be; None: any number."""

    @property
    def left(self) -> float | None:
        """Epsilon that is left, at least 0; None without a limit or a bound."""
        if self.budget is None or self.spent is None:
            return None
        return max(0.0, self.budget - self.spent)


def prediction_budget(
    config: FederationConfig, asked: Sequence[Session], *, party: str
) -> PredictionBudget:
    """Return what a party's ledger says of a model's predictions.

    Args:
        config: The federation file.
        asked: The model's sessions in that ledger.
        party: Who it is.
    """
    privacy = config.privacy
    spent = epsilon_of_sessions(asked, delta=privacy.delta)
    promised = privacy.mechanism != "none"
    return PredictionBudget(
        party=party,
        unit=privacy.unit,
        delta=privacy.delta,
        spent=spent if math.isfinite(spent) else None,
        budget=(config.prediction.epsilon or privacy.epsilon) if promised else None,
        rows=sum(session.row_releases for session in asked),
        most_rows=config.prediction.rows,
    )
