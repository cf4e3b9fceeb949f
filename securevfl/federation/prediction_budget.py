"""Budget of predictions: what those of one model have spent at one party, and what is left."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from securevfl.config.federation import FederationConfig
from securevfl.ledger.book import Session, epsilon_of_sessions


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictionBudget:
    """Epsilon of one party for all predictions of one model, in addition to its training."""

    party: str
    unit: str
    """Unit that the epsilon protects."""
    delta: float
    spent: float | None
    """Epsilon; None: no bound."""
    budget: float | None
    """Epsilon that may be spent; None: no limit was set."""
    rows: int
    """Rows that were asked for."""
    most_rows: int | None
    """How many may be; None: any number."""
    releases_per_record: int | None
    """N: rows that each record is released in at most, whatever is asked for. What that costs is
    spent with the first answer, and no later one costs more. None: every request is charged."""

    @property
    def epsilon_left(self) -> float | None:
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
        releases_per_record=config.releases_per_record,
    )


def predictions_in_words(config: FederationConfig) -> str | None:
    """Return what later predictions may show of a record; None where nothing bounds it."""
    privacy, most = config.privacy, config.releases_per_record
    if privacy.mechanism == "none":
        return None
    budget = config.prediction.epsilon or privacy.epsilon
    within = "" if budget is None else f", within epsilon = {budget:g} in addition to training"
    if most is None:
        return f"every request is charged{within}."
    return (
        f"all of them together release each record in at most {most} of their rows{within}. A "
        f"record that had them takes no part any more: its rows have other records, or noise alone."
    )
