"""What each partner of a finished run is worth, measured without asking anybody."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from securevfl.core import checks
from securevfl.core.errors import ConfigError
from securevfl.core.progress import CoalitionsValued, Observer, Pace, Stage, unheard
from securevfl.core.summary import Summarised
from securevfl.data.tables import PartyTable
from securevfl.models.task_metrics import LEVEL
from securevfl.runtime.coalitions import (
    LEAST_PERMUTATIONS,
    NEVER_FEWER,
    KeptModels,
    Releases,
    Worth,
    solve,
    source_of,
)
from securevfl.runtime.entry import FederationSource, trained_run
from securevfl.runtime.released_table import COST
from securevfl.runtime.run_folder import read_figures, write_contribution
from securevfl.runtime.simulation import RunResult
from securevfl.runtime.trained_run import TrainedRun

PERMUTATIONS: Final = 32
"""Drawn where there are too many partners for exact Shapley values."""

EXACT_TRAINED: Final = 5
"""Up to so many partners all sets of them are trained again: 30 trainings for five."""

EXACT_KEPT: Final = 10
"""Up to so many partners the kept model is asked for all sets of them."""

_NOT_SENT: Final = "nothing: the run promises nothing, and all of it is computed in this process"


@dataclass(frozen=True, kw_only=True, repr=False)
class Contribution(Summarised):
    """What each partner of a run adds to its model."""

    run: str
    """The run's id."""
    metric: str
    """Which training goes by; what figures have beside it is the loss."""
    higher_is_better: bool
    rows: int
    """Test rows."""
    seed: int
    """Of permutations and of resamples."""
    threshold: float
    """Of the primary alone, of a binary task."""
    gone: Worth
    """If it is gone tomorrow: the kept model answers without it."""
    again: Worth | None
    """If it leaves, and the model is trained again without it; None where that would take another
    run."""
    cost: str
    """What measuring this cost, in words."""
    notes: tuple[str, ...]
    """What a reader must know."""

    def summary(self) -> tuple[str, dict[str, str]]:
        """Return what was measured on how many rows; the figures are in :meth:`as_json`."""
        return f"{self.metric} on {self.rows:,} test rows", {"cost": self.cost}

    def as_json(self) -> dict[str, Any]:
        """Return it as ``contribution.json`` has it."""
        return {
            "run": self.run,
            "metric": self.metric,
            "higher_is_better": self.higher_is_better,
            "rows": self.rows,
            "seed": self.seed,
            "threshold": self.threshold,
            "level": LEVEL,
            "gone": self.gone.as_json(),
            "again": None if self.again is None else self.again.as_json(),
            "cost": self.cost,
            "notes": list(self.notes),
        }


def contribution(
    run: str | Path | RunResult,
    *,
    permutations: int = PERMUTATIONS,
    seed: int | None = None,
    federation: FederationSource | None = None,
    parties: Iterable[PartyTable] | None = None,
    data_root: Path | None = None,
    device: str = "cpu",
    observe: Observer = unheard,
) -> Contribution:
    """Measure what each secondary adds to the model of a finished run, on its test rows.

    Two questions have two answers. *Gone tomorrow*: the model that was kept answers without the
    secondary. *Trained again*: the secondary leaves, and the top model is trained again on the
    others' released numbers. Each has the value of all partners less that of all others (leave one
    out), and Shapley values, which add up to what the joint model gains over the primary alone;
    both with intervals of paired resamples of the test rows.

    It is free where the answer lies at the primary: a frozen run whose secondaries write into
    coordinates of their own (``encoder.layout = "blocks"``, or a single secondary). Of a simulation
    without a promise the kept models say who is missed tomorrow. The result is written to
    ``contribution.json`` in the run folder.

    Args:
        run: The run folder, or what :func:`securevfl.simulate` returned.
        permutations: Orders that Shapley values are taken over, where there are more than
            :data:`EXACT_TRAINED` partners (:data:`EXACT_KEPT` for the kept model).
        seed: Of permutations and resamples; None: the run's.
        federation: The federation file; default: that of the run.
        parties: The parties' tables, of a run that was simulated on tables in memory; others are
            read again.
        data_root: Where relative data paths start; default: the current folder.
        device: ``"cpu"`` or ``"cuda"``.
        observe: Hears of progress.

    Raises:
        ConfigError: If the folder is not that of a finished run, or it would take another run.
        DataError: If a table is not the one of training.
        PrivacyError: If it would take further releases, or the primary's ledger was altered.

    Reveals:
        Nothing: nobody is asked, and no ledger is charged.

    References:
        Ghorbani and Zou, Data Shapley, ICML 2019: a model's metric as the game. Wang et al.,
        A Principled Approach to Data Valuation for Federated Learning, 2020: parties as players.
    """
    if isinstance(run, RunResult):
        if run.trained is None:
            raise ConfigError("the run has pretrained encoders, and no model to measure")
        trained = run.trained
    else:
        trained = trained_run(
            run, federation=federation, parties=parties, data_root=data_root, device=device
        )
    measured = _measured(trained, permutations=permutations, seed=seed, observe=observe)
    write_contribution(trained.folder, measured.as_json())
    return measured


def _measured(
    trained: TrainedRun, *, permutations: int, seed: int | None, observe: Observer
) -> Contribution:
    # Before anything long begins.
    checks.whole(permutations=permutations)
    checks.at_least(LEAST_PERMUTATIONS, permutations=permutations)
    config, folder = trained.config, trained.folder
    figures = read_figures(folder)
    if "untested" in figures:
        raise ConfigError(f"run folder {folder}: {figures['untested']}, so nothing can be compared")
    model = trained.model(config.primary.name)
    seed = config.federation.seed if seed is None else seed
    again, notes = None, []
    source = source_of(trained, model, figures)
    cost = COST if isinstance(source, Releases) else _NOT_SENT
    if isinstance(source, KeptModels) and config.model.party_dropout == 0:
        notes.append(NEVER_FEWER)
    if config.privacy.mechanism != "none":
        notes.append(
            "noise of the released numbers is that of all secondaries, also where one is taken "
            "out: with fewer, predictions would have a little less of it"
        )
    data, names = source.data, [party.name for party in config.secondaries]
    targets = source.alone.tested
    common = {"permutations": permutations, "seed": seed}
    gone = solve(
        names,
        source.gone(),
        data.head,
        targets,
        exact_up_to=EXACT_KEPT,
        heard=Pace(observe, CoalitionsValued, name="without partners"),
        **common,
    )
    if isinstance(source, Releases):
        observe(Stage(text="training without partners"))
        again = solve(
            names,
            source.again(folder / "parties" / config.primary.name),
            data.head,
            targets,
            exact_up_to=EXACT_TRAINED,
            heard=Pace(observe, CoalitionsValued, name="training without partners"),
            **common,
        )
    if gone.used[frozenset(names)] == "alone":
        notes.append(
            "the primary alone answers in this run, so nobody is missed, and all values are 0"
        )
    return Contribution(
        run=model.run,
        metric=data.head.metric_name,
        higher_is_better=data.head.higher_is_better,
        rows=len(targets),
        seed=seed,
        threshold=source.alone.threshold,
        gone=gone,
        again=again,
        cost=cost,
        notes=tuple(notes),
    )
