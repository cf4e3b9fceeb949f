"""A secondary's own page: releases from its table, their cost, and the remaining budget.

It is made from the federation file and that party's own facts and ledger.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import jinja2

from securevfl.config.disclosure import channels, leaves_secondary
from securevfl.config.federation import FederationConfig
from securevfl.config.reading import read_federation
from securevfl.core import files
from securevfl.core.errors import ConfigError
from securevfl.core.formatting import epsilon_in_words, format_figure
from securevfl.core.progress import LinksCounted, links_in_words
from securevfl.dp.statement import suspicion_in_words
from securevfl.federation.run_plan import PredictionBudget, prediction_budget
from securevfl.ledger.book import LedgerBook, Session, epsilon_of_sessions
from securevfl.ledger.ledger_file import LedgerFile
from securevfl.runtime.run_folder import OWN_FACTS, own_folders, read_figures

TEMPLATES: Final = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
)
"""Environment of the report's templates; inserted values are escaped."""

TEMPLATES.filters["written"] = format_figure


PAGE: Final = "report.html"

_PLAIN: Final = {
    "aggregates": "Numbers that a model made of your records, added up with the other partners'",
    "masks": "Random numbers that hide your part of each sum",
    "positional-encoding averaging": "Weights of how keys are encoded, averaged over partners",
    "linkage": "What it takes to find which records belong to which rows",
    "number of linked rows": "How many of the primary's rows have a record of yours",
    "record counts": "How many records you have",
    "records near rows": "How many of your records lie near the primary's rows",
    "kept links": "Whether your table is the same as in an earlier run",
    "aligned rows": "Which of the primary's rows have one of your records",
    "similarities": "How near your records are to the primary's rows",
    "sizes and times": "Sizes and times of messages",
    "failures": "That your program failed, and why in one sentence",
    "ledgers": "How many lines your ledger has",
    "publication of the model": "What a copy of the finished model shows",
    "pretraining, to the primary": "Vectors of your records, before training",
    "pretraining, aggregation of models": "Weights of your model, averaged over partners",
    "fitting of encoders": "Statistics of your records, to fit what represents them",
}


def least_left(run: Path, config: FederationConfig) -> PredictionBudget | None:
    """Return the smallest remaining prediction budget of all parties; None if there is no bound.

    Args:
        run: A run folder, with the ledgers of parties on this machine.
        config: The run's federation file.

    Raises:
        PrivacyError: If a ledger was altered.
    """
    model = read_figures(run)["run"]
    limited = []
    for path in sorted(run.glob("parties/*/ledger.jsonl")):
        ledger = LedgerFile(path, read_only=True)
        try:
            sessions = ledger.book.sessions
        finally:
            ledger.close()
        asked = [session for session in sessions if session.model == model and session.has_spent]
        budget = prediction_budget(config, asked, party=path.parent.name)
        if budget.epsilon_left is not None:
            limited.append((budget.epsilon_left, budget))
    return min(limited, key=lambda pair: pair[0])[1] if limited else None


def write_secondary_pages(folder: Path, config: FederationConfig | None = None) -> list[Path]:
    """Write the pages of all secondaries that a folder has facts of; see the next function.

    Args:
        folder: A secondary's own, or a run's.
        config: The run's federation file; None reads it.
    """
    return [write_secondary_page(party, config) for party in own_folders(folder)]


def write_secondary_page(party: Path, config: FederationConfig | None = None) -> Path:
    """Write ``report.html`` in a secondary's own folder, for its user alone, and return its path.

    Args:
        party: The party's folder in its run folder, with ``party.json`` and a ledger.
        config: The run's federation file; None reads it.

    Raises:
        ConfigError: If the folder is not that of a secondary which was linked, or is damaged.
        PrivacyError: If its ledger was altered.
    """
    facts = _facts(party)
    config = config or read_federation(party.parent.parent / "federation.toml")
    ledger = LedgerFile(party / "ledger.jsonl", read_only=True)
    try:
        book, head = ledger.book, ledger.head
    finally:
        ledger.close()
    run = facts["run"]
    trained = [session for session in book.sessions if session.run == run and not session.model]
    asked = [session for session in book.sessions if session.model == run and session.has_spent]
    privacy = config.privacy
    runs = len(book.runs(unit=privacy.unit)) + len(book.programs)
    page = TEMPLATES.get_template("secondary.html.j2").render(
        facts=facts,
        config=config,
        began=trained[0].time if trained else "before anything was planned",
        links=None if facts["links"] is None else links_in_words(LinksCounted(**facts["links"])),
        left=_channel_rows(config, trained, facts),
        cost=_cost(
            trained,
            book.total(privacy.unit, delta=privacy.delta),
            runs=runs,
            predictions=prediction_budget(config, asked, party=facts["party"]),
        ),
        limit=_limit(book, privacy.unit, table=facts["table"]),
        predictions=_predictions(config, asked, party=facts["party"]),
        ledger=_ledger_place(party),
        head=head,
    )
    path = party / PAGE
    files.write_text(path, page)
    return path


def _facts(party: Path) -> dict[str, Any]:
    if not (party / OWN_FACTS).exists():
        raise ConfigError(
            f"folder {party}: has no {OWN_FACTS}; it is not that of a secondary which was linked "
            f"in a run between processes"
        )
    facts = files.read_json(party / OWN_FACTS)
    missing = sorted({"party", "run", "table", "links", "ended"} - set(facts))
    if missing:
        raise ConfigError(f"{party / OWN_FACTS}: has no {missing[0]!r}; it is of another version")
    return facts


def _ledger_place(party: Path) -> str:
    place = party / "ledger.json"
    return str(files.read_json(place).get("ledger", "")) if place.exists() else "unknown"


def _channel_rows(
    config: FederationConfig, trained: Sequence[Session], facts: dict[str, Any]
) -> list[dict[str, str]]:
    """Return a row for each channel through which others learned about this party."""
    counts = {
        "aggregates": f"{sum(session.rounds for session in trained):,} releases, "
        f"{sum(session.row_releases for session in trained):,} rows in all",
        "linkage": f"{facts['records']:,} records took part",
        "fitting of encoders": f"{sum(session.fits for session in trained):,}",
    }
    if facts["bytes_sent"] is not None:
        counts["sizes and times"] = f"{facts['bytes_sent']:,} bytes sent"
    return [
        {
            "plain": _PLAIN.get(channel["channel"], channel["channel"]),
            "reveals": channel["reveals"],
            "guarantee": channel["guarantee"].replace("not covered", "no guarantee"),
            "count": counts.get(channel["channel"], ""),
        }
        for channel in channels(config)
        if leaves_secondary(channel)
    ]


def _cost(
    trained: Sequence[Session], total: float, *, runs: int, predictions: PredictionBudget
) -> dict[str, Any]:
    """Return the run's cost as a plain sentence, a statement and figures.

    The sentence is of the training and all predictions together, which it adds: each holds at its
    delta, both together at the sum of these ([DR14] Theorem 3.16).
    """
    if not any(session.has_spent for session in trained):
        plain = "Nothing was released, and nothing was spent."
        return {"plain": plain, "statement": None, "warned": False}
    last = trained[-1]
    privacy = last.plan.privacy
    spent = epsilon_of_sessions(trained, delta=privacy.delta)
    statement = last.plan.statement(
        last.noise_share_std,
        spent=spent if math.isfinite(spent) else 0.0,
        total_epsilon=total if runs > 1 else None,
    )
    if statement.hides is None:
        plain = "Nothing bounds what a partner may find out: no noise was added."
    else:
        training, more = max(spent, last.plan.epsilon(last.noise_share_std)), predictions.budget
        together = training + (more or 0.0)
        parts = f"{epsilon_in_words(training)} by the training"
        if more is not None:
            parts += f" and up to {more:g} by all predictions of its model"
        plain = (
            f"A partner who is 1 % sure that {statement.hides} may become "
            f"{suspicion_in_words(together)} sure by all that this run shows: epsilon = "
            f"{epsilon_in_words(together)}, {parts}, except with a probability of delta = "
            f"{privacy.delta * (1 if more is None else 2):g}."
        )
    return {
        "plain": plain,
        "statement": statement.text,
        "warned": statement.warning is not None,
        "epsilon": epsilon_in_words(spent),
        "delta": f"{privacy.delta:g}",
        "unit": privacy.unit,
        "total": epsilon_in_words(total),
        "runs": runs,
    }


def _limit(book: LedgerBook, unit: str, *, table: str) -> str:
    """Return the rest of the owner's limit on all runs, in words."""
    limit = book.limits.get(unit)
    if limit is None:
        return (
            f"The owner has set no limit for all runs together; securevfl ledger limit {table} "
            f"--epsilon E sets one."
        )
    spent = book.total(unit, delta=limit.delta)
    return (
        f"Of the owner's limit of epsilon = {limit.epsilon:g} (delta = {limit.delta:g}, unit "
        f"{unit}) all runs together have spent {epsilon_in_words(spent)}; "
        f"{book.epsilon_left(unit):.4g} is left."
    )


def _predictions(config: FederationConfig, asked: Sequence[Session], *, party: str) -> str:
    """Return the past and allowed cost of the model's predictions, in words."""
    budget = prediction_budget(config, asked, party=party)
    requests = "1 request" if len(asked) == 1 else f"{len(asked):,} requests"
    so_far = f"So far {requests} of {budget.rows:,} rows"
    if budget.releases_per_record is not None:
        so_far = f"So far {budget.rows:,} rows, each record in {budget.releases_per_record} at most"
    if budget.budget is None:
        return f"{so_far}. Nothing bounds what predictions show: no noise is added."
    most = "" if budget.most_rows is None else f", and ask for at most {budget.most_rows:,} rows"
    return (
        f"{so_far}, which spent epsilon = {epsilon_in_words(budget.spent)}. All predictions of "
        f"this model together may spend epsilon = {budget.budget:g} in addition to training{most}; "
        f"what they spend counts against the owner's limit."
    )
