"""An attack, its findings, and confidence intervals of their figures."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from jaxtyping import Float32, Float64, Int64
from scipy import stats
from torch import Tensor

from securevfl.config.federation import FederationConfig
from securevfl.core.errors import ConfigError
from securevfl.federation.checkpoint import DamagedError, read_state
from securevfl.federation.rounds.recording import AVERAGE, FILE
from securevfl.federation.run_plan import pools
from securevfl.runtime.run_folder import federation_of_run, read_figures


class UnavailableError(Exception):
    """An attack can't be tried on a run; the text says why."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PartyView:
    """Messages that one party received, and tensors that it holds."""

    name: str
    """Name of the party."""
    lines: list[dict[str, Any]] = field(repr=False)
    """Received messages in order, each with its ``kind``."""
    held: Mapping[str, Tensor] = field(repr=False)
    """Held tensors by name."""
    left_out: int
    """Number of messages that had no room in the record."""

    def of_kind(self, kind: str) -> Iterator[dict[str, Any]]:
        """Yield the messages of one kind, in order."""
        return (line for line in self.lines if line["kind"] == kind)

    def array(self, name: str) -> Any:
        """Return a held tensor as an array."""
        return self.held[name].numpy()


@dataclass(frozen=True, slots=True, eq=False)
class EpochGradients:
    """Gradients of one epoch, one for each training row."""

    rows: Int64[np.ndarray, " rows"]
    """Row ids."""
    gradients: Float32[np.ndarray, "rows numbers"]
    """Gradients of the loss's mean over a batch, with respect to each row's average."""
    batches: Int64[np.ndarray, " rows"]
    """Round of each row."""


class Evidence:
    """Recorded views in a run's folder; a view that an attack needs may be missing."""

    def __init__(self, folder: Path) -> None:
        """Read the folder of a finished run.

        Raises:
            ConfigError: If the folder is not that of a run, or no party has recorded anything.
        """
        self.folder = folder
        """Folder of the run."""
        self.config: FederationConfig = federation_of_run(folder, None)
        """The run's federation."""
        self.figures = read_figures(folder)
        """The run's figures."""
        self.run = ""
        """Id of the run."""
        helper = self.config.helper("coordinator")
        self._coordinator = None if helper is None else self._view(helper.name)
        named = {party.name: self._view(party.name) for party in self.config.table_parties}
        views = {name: view for name, view in named.items() if view is not None}
        if not views:
            raise ConfigError(
                f"run folder {folder}: no party has recorded what it received; simulate or train "
                f"with --record-views MIB"
            )
        self._primary = views.pop(self.config.primary.name, None)
        self.secondaries = views
        """Recorded views of secondaries, by name."""

    def _view(self, name: str) -> PartyView | None:
        """Read a party's record; return None if it has none."""
        path = self.folder / "parties" / name / FILE
        try:
            kept = read_state(path)
        except FileNotFoundError:
            return None
        except DamagedError as error:
            raise ConfigError(f"{error}; train again with --record-views") from None
        if self.run not in ("", kept["run"]):
            raise ConfigError(f"{path}: is the record of another run than the others'")
        self.run = kept["run"]
        return PartyView(
            name=name, lines=kept["lines"], held=kept["held"], left_out=kept["left_out"]
        )

    @property
    def has_primary(self) -> bool:
        """Whether the primary has recorded its view."""
        return self._primary is not None

    @property
    def primary(self) -> PartyView:
        """The primary's view.

        Raises:
            UnavailableError: If it was not recorded.
        """
        if self._primary is None:
            raise UnavailableError("needs the view of the primary")
        return self._primary

    @property
    def coordinator(self) -> PartyView:
        """The coordinator's view.

        Raises:
            UnavailableError: If it was not recorded.
        """
        if self._coordinator is None:
            raise UnavailableError("needs the view of a coordinator")
        return self._coordinator

    @property
    def attacker(self) -> PartyView:
        """View of the first secondary; all secondaries receive the same gradients.

        Raises:
            UnavailableError: If no secondary has recorded its view.
        """
        for view in self.secondaries.values():
            return view
        raise UnavailableError("needs the view of a secondary")

    @property
    def privacy(self) -> Mapping[str, Any]:
        """Privacy section of the run's figures."""
        privacy: Mapping[str, Any] = self.figures["privacy"]
        return privacy

    @property
    def parties(self) -> int:
        """Number of secondaries."""
        return len(self.config.secondaries)

    @property
    def classes(self) -> int:
        """Number of classes; 0 if labels are numbers."""
        if self.config.federation.task == "regression":
            return 0
        return int(self.labels.max()) + 1

    @cached_property
    def labels(self) -> Int64[np.ndarray, " rows"]:
        """The primary's labels as class numbers."""
        labels: Int64[np.ndarray, " rows"] = self.primary.array("targets").astype(np.int64)
        return labels

    @cached_property
    def train(self) -> Int64[np.ndarray, " train"]:
        """Row ids of training rows."""
        rows: Int64[np.ndarray, " train"] = self.primary.array("train")
        return rows

    @cached_property
    def other_rows(self) -> Int64[np.ndarray, " others"]:
        """Row ids of validation and test rows."""
        parts = [self.primary.array(name) for name in ("validation", "test")]
        rows: Int64[np.ndarray, " others"] = np.concatenate(parts)
        return rows

    @property
    def label_channel(self) -> str | None:
        """Channel through which encoders have learned labels; None if there is none."""
        if self.config.regime.learns:
            return "gradients"
        return "labels that class means are fitted to" if self.config.encoder_reads_labels else None

    def gradients(self, view: PartyView) -> list[EpochGradients]:
        """Return the gradients of each epoch that a secondary received."""
        epochs: list[EpochGradients] = []
        parts: list[tuple[Any, Any, Any]] = []
        rows = None
        for line in view.lines:
            if line["kind"] == "PLAN" and line["purpose"] == "train":
                rows = line["rows"].numpy()
            elif line["kind"] == "GRADIENT" and rows is not None:
                flat = line["gradient"].flatten(1).numpy()
                parts.append((rows, flat, np.full(len(rows), line["round_number"])))
                rows = None
            elif line["kind"] == "EPOCH" and parts:
                epochs.append(EpochGradients(*map(np.concatenate, zip(*parts, strict=True))))
                parts = []
        return epochs

    def own_columns(self, view: PartyView) -> Float64[np.ndarray, "rows columns"]:
        """Return the mean of a secondary's linked records for each of the primary's rows."""
        links, features = view.array("links"), view.array("features").astype(np.float64)
        there = links >= 0
        summed = (features[np.maximum(links, 0)] * there[..., None]).sum(axis=1)
        columns: Float64[np.ndarray, "rows columns"] = summed / np.maximum(there.sum(1), 1)[:, None]
        return columns

    @property
    def with_links(self) -> list[PartyView]:
        """Views of secondaries that were recorded to the run's end, with their links."""
        return [secondary for secondary in self.secondaries.values() if "links" in secondary.held]

    def linked_rows(self, view: PartyView) -> Any:
        """Return which of the primary's rows are linked to a record of a secondary."""
        return (view.array("links") >= 0).any(axis=1)

    @cached_property
    def released_averages(
        self,
    ) -> tuple[Int64[np.ndarray, " rows"], Float64[np.ndarray, "rows numbers"]]:
        """Row ids, and their averages by the encoders of the run's end.

        A frozen run has averages of all rows, any other run of its test rows.
        """
        last = ("release",) if self.config.regime.releases_once else ("test",)
        lines = [line for line in self.primary.of_kind(AVERAGE) if line["purpose"] in last]
        if not lines:
            return np.empty(0, dtype=np.int64), np.empty((0, 0))
        rows = np.concatenate([line["rows"].numpy() for line in lines])
        averages = np.concatenate([line["average"].flatten(1).numpy() for line in lines])
        return rows, averages.astype(np.float64)

    @cached_property
    def last_averages(
        self,
    ) -> tuple[Int64[np.ndarray, " rows"], Float64[np.ndarray, "rows numbers"]]:
        """Row ids, and the last average of each that the primary received."""
        last: dict[int, Any] = {}
        for line in self.primary.of_kind(AVERAGE):
            averages = line["average"].flatten(1).numpy()
            last |= dict(zip(line["rows"].tolist(), averages, strict=True))
        rows = np.array(sorted(last), dtype=np.int64)
        return rows, np.array([last[row] for row in rows.tolist()], dtype=np.float64)

    @property
    def knows_terms(self) -> bool:
        """Whether all secondaries have recorded their final terms."""
        views = self.secondaries.values()
        return len(views) == self.parties and all("terms" in view.held for view in views)

    def without_noise(
        self, rows: Int64[np.ndarray, " some"]
    ) -> Float64[np.ndarray, "some numbers"]:
        """Return the averages of rows without noise."""
        terms = [view.held["terms"][rows].flatten(1).double() for view in self.secondaries.values()]
        total: Float64[np.ndarray, "some numbers"] = sum(terms[1:], terms[0]).numpy()
        return total / self.parties

    @property
    def longest_change(self) -> float:
        """Longest change of an average when one record is added or removed.

        If rows are clipped as a whole, it is the longest change by all records of a row together.
        """
        slots = self.config.model.neighbours if pools(self.config) else 1
        return float(self.privacy["clip_norm"]) / (self.parties * slots)

    @property
    def noise_deviation(self) -> float:
        """Promised standard deviation of the noise in each number of an average; 0 for scores."""
        if self.privacy["noise_multiplier"] is None:
            return 0.0
        return float(self.privacy["noise_share_std"]) / math.sqrt(self.parties)


LEVEL: Final = 0.95
"""Confidence level of every interval."""

FOLDER: Final = "attacks"
"""Folder in the run folder: one file for each shadow run."""

_RESAMPLES: Final = 400

Aim = Literal["labels", "columns", "keys", "links", "members", "noise"]
"""Target of an attack; "noise" is whether the promised noise is there, and no guess."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Leak:
    """Success of one attack, and of a trivial guess."""

    attack: str = ""
    """Name of the attack; empty for the one that yields the leak, until it has ended."""
    attacker: str
    """Party that can run the attack."""
    about: str
    """Party whose labels or records are guessed."""
    channel: str
    """Channel of :mod:`securevfl.config.disclosure` that leaks."""
    measure: str
    """Meaning of ``value``, in words."""
    value: float
    """Success of the attack; higher is worse for the run."""
    interval: tuple[float, float]
    """Interval of ``value`` over rows with confidence :data:`LEVEL`; seeds are averaged."""
    floor: float
    """Success of a guess that needs nothing of the run."""
    floor_is: str
    """Basis of the trivial guess, in words."""
    ceiling: float | None = None
    """Success of the attack without the run's defence; None if the run has no defence."""
    rows: int
    """Number of guessed rows or records."""
    known: str = ""
    """Further knowledge that the attacker needs."""
    seeds: int = 1
    """Number of seeds that ``value`` is averaged over."""
    violates: str | None = None
    """Promise that the run breaks; None if it breaks none."""

    @property
    def beats_floor(self) -> bool:
        """Whether the interval lies above the trivial guess."""
        return bool(self.interval[0] > self.floor)

    def as_json(self) -> dict[str, Any]:
        """Return all fields by name, and whether the floor is beaten."""
        return {**asdict(self), "interval": list(self.interval), "beats_floor": self.beats_floor}


@dataclass(frozen=True, slots=True)
class Attack:
    """One attack on a recorded run."""

    name: str
    """Name of the attack, and of its file."""
    aim: Aim
    """Target of the attack."""
    findings: Callable[[Evidence, int], Iterable[Leak]]
    """Function of a run's evidence and a number of seeds for random choices. It raises
    :class:`securevfl.lab.attacks.attack.UnavailableError` if the attack can't be tried."""


def bootstrap_interval(statistic: Callable[[Any], float], rows: int) -> tuple[float, float]:
    """Return the interval of a statistic over resampled rows.

    Args:
        statistic: Function of resampled row numbers.
        rows: Number of rows.
    """
    random = np.random.default_rng(0)
    samples = [statistic(random.integers(rows, size=rows)) for _ in range(_RESAMPLES)]
    low, high = np.nanquantile(samples, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def exact_interval(hits: int, trials: int) -> tuple[float, float]:
    """Return the interval of a probability, by Clopper and Pearson [CP34]."""
    ends = stats.binomtest(hits, trials).proportion_ci(LEVEL, method="exact")
    return float(ends.low), float(ends.high)


def require_links(evidence: Evidence) -> None:
    """Refuse runs on which guesses of a secondary's records can't be scored.

    Raises:
        UnavailableError: If no secondary has recorded its links.
    """
    if not evidence.with_links:
        raise UnavailableError(
            "needs the view of a secondary to the run's end, to know what is right"
        )


def explained_share(
    errors: Float64[np.ndarray, "rows ..."], trivial: Float64[np.ndarray, "rows ..."]
) -> float:
    """Return 1 minus the squared errors of a guess over those of a trivial guess."""
    return float(1 - errors.sum() / trivial.sum())


def explained_interval(
    errors: Float64[np.ndarray, "rows ..."], trivial: Float64[np.ndarray, "rows ..."]
) -> tuple[float, float]:
    """Return the interval of :func:`explained_share`."""
    return bootstrap_interval(
        lambda chosen: explained_share(errors[chosen], trivial[chosen]), len(errors)
    )


def auc(positive: Any, scores: Any) -> float:
    """Return the share of pairs whose positive row scores higher; ties count half."""
    ranks = stats.rankdata(scores)
    true, false = int(positive.sum()), int((~positive).sum())
    if not true or not false:
        return float("nan")
    return float((ranks[positive].sum() - true * (true + 1) / 2) / (true * false))
