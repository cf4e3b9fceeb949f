"""What the parties of one run have recorded, as attacks read it."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32, Float64, Int64
from torch import Tensor

from securevfl.config.federation import FederationConfig
from securevfl.core.errors import ConfigError
from securevfl.federation.rounds.recording import AVERAGE, FILE
from securevfl.federation.run_plan import pools
from securevfl.federation.state_folder import DamagedError, read_state
from securevfl.runtime.run_folder import federation_of_run, read_figures


@dataclass(frozen=True, kw_only=True, eq=False)
class PartyView:
    """What one party received, line by line, and what it holds."""

    name: str
    lines: list[dict[str, Any]] = field(repr=False)
    held: Mapping[str, Tensor] = field(repr=False)
    left_out: int
    """Lines that a full record has not taken."""

    def of(self, kind: str) -> Iterator[dict[str, Any]]:
        """Yield the lines of one kind, in their order."""
        return (line for line in self.lines if line["kind"] == kind)

    def array(self, name: str) -> Any:
        """Return what the party holds under a name."""
        return self.held[name].numpy()


@dataclass(frozen=True, slots=True, eq=False)
class EpochGradients:
    """The gradients of one epoch, a line a training row."""

    rows: Int64[np.ndarray, " rows"]
    gradients: Float32[np.ndarray, "rows numbers"]
    """Gradients of the loss's mean over a batch, with respect to each row's average."""
    batches: Int64[np.ndarray, " rows"]
    """Round that each row was in."""


class Evidence:
    """A run's folder, with the views that lie in it."""

    def __init__(self, folder: Path) -> None:
        """Read the folder of a finished run.

        Raises:
            ConfigError: If it is no such folder, or no party of it has recorded anything.
        """
        self.folder = folder
        self.config: FederationConfig = federation_of_run(folder, None)
        self.figures = read_figures(folder)
        self.run = ""
        helper = self.config.helper("coordinator")
        self.coordinator = None if helper is None else self._view(helper.name)
        named = {party.name: self._view(party.name) for party in self.config.table_parties}
        views = {name: view for name, view in named.items() if view is not None}
        if not views:
            raise ConfigError(
                f"run folder {folder}: no party has recorded what it received; simulate or train "
                f"with --record-views MIB"
            )
        self.primary = views.pop(self.config.primary.name, None)
        self.secondaries = views

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
    def attacker(self) -> PartyView | None:
        """A secondary whose view is here: gradients are the same at all of them."""
        return next(iter(self.secondaries.values()), None)

    @property
    def privacy(self) -> Mapping[str, Any]:
        """What the run promised, as its figures have it."""
        privacy: Mapping[str, Any] = self.figures["privacy"]
        return privacy

    @property
    def parties(self) -> int:
        """Number of secondaries."""
        return len(self.config.secondaries)

    # Labels.

    @property
    def classes(self) -> int:
        """How many classes labels have; 0 for numbers."""
        if self.config.federation.task == "regression":
            return 0
        return int(self.labels.max()) + 1

    @cached_property
    def labels(self) -> Int64[np.ndarray, " rows"]:
        """The primary's labels as class numbers."""
        assert self.primary is not None, "attacks on labels ask for the primary's view"
        labels: Int64[np.ndarray, " rows"] = self.primary.array("targets").astype(np.int64)
        return labels

    @cached_property
    def train(self) -> Int64[np.ndarray, " train"]:
        """Row ids of training rows."""
        assert self.primary is not None, "attacks on labels ask for the primary's view"
        rows: Int64[np.ndarray, " train"] = self.primary.array("train")
        return rows

    @cached_property
    def other_rows(self) -> Int64[np.ndarray, " others"]:
        """Row ids of validation and test rows."""
        assert self.primary is not None, "attacks on labels ask for the primary's view"
        parts = [self.primary.array(name) for name in ("validation", "test")]
        rows: Int64[np.ndarray, " others"] = np.concatenate(parts)
        return rows

    @property
    def taught_by(self) -> str | None:
        """The channel from which encoders have learned something of labels; None if from none."""
        if not self.config.family.learns_by_gradients:
            return "residuals"
        if self.config.regime.learns:
            return "gradients"
        return "labels that class means are fitted to" if self.config.encoder_reads_labels else None

    def gradients(self, view: PartyView) -> list[EpochGradients]:
        """Return the gradients that a secondary received, by epoch."""
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

    # Averages, and what they would be without noise.

    def own_columns(self, view: PartyView) -> Float64[np.ndarray, "rows columns"]:
        """Return a secondary's columns by the primary's rows: the mean of a row's records."""
        links, features = view.array("links"), view.array("features").astype(np.float64)
        there = links >= 0
        summed = (features[np.maximum(links, 0)] * there[..., None]).sum(axis=1)
        columns: Float64[np.ndarray, "rows columns"] = summed / np.maximum(there.sum(1), 1)[:, None]
        return columns

    @property
    def with_links(self) -> list[PartyView]:
        """The views of secondaries that were recorded to the run's end, with their links."""
        return [secondary for secondary in self.secondaries.values() if "links" in secondary.held]

    def linked_rows(self, view: PartyView) -> Any:
        """Return which of the primary's rows have a record of a secondary's."""
        return (view.array("links") >= 0).any(axis=1)

    @cached_property
    def released_averages(
        self,
    ) -> tuple[Int64[np.ndarray, " rows"], Float64[np.ndarray, "rows numbers"]]:
        """Row ids, and the averages that were released for them by the encoders of the end.

        They are all rows of a frozen run, and the test rows of any other.
        """
        assert self.primary is not None, "attacks on averages ask for the primary's view"
        last = ("release",) if self.config.regime.releases_once else ("test",)
        lines = [line for line in self.primary.of(AVERAGE) if line["purpose"] in last]
        if not lines:
            return np.empty(0, dtype=np.int64), np.empty((0, 0))
        rows = np.concatenate([line["rows"].numpy() for line in lines])
        averages = np.concatenate([line["average"].flatten(1).numpy() for line in lines])
        return rows, averages.astype(np.float64)

    @cached_property
    def last_averages(
        self,
    ) -> tuple[Int64[np.ndarray, " rows"], Float64[np.ndarray, "rows numbers"]]:
        """Row ids, and the last average that the primary received of each."""
        assert self.primary is not None, "attacks on averages ask for the primary's view"
        last: dict[int, Any] = {}
        for line in self.primary.of(AVERAGE):
            averages = line["average"].flatten(1).numpy()
            last |= dict(zip(line["rows"].tolist(), averages, strict=True))
        rows = np.array(sorted(last), dtype=np.int64)
        return rows, np.array([last[row] for row in rows.tolist()], dtype=np.float64)

    @property
    def knows_terms(self) -> bool:
        """Whether all secondaries' views are here, with the terms of the end."""
        views = self.secondaries.values()
        return len(views) == self.parties and all("terms" in view.held for view in views)

    def without_noise(
        self, rows: Int64[np.ndarray, " some"]
    ) -> Float64[np.ndarray, "some numbers"]:
        """Return what the averages of rows would be without noise."""
        terms = [view.held["terms"][rows].flatten(1).double() for view in self.secondaries.values()]
        total: Float64[np.ndarray, "some numbers"] = sum(terms[1:], terms[0]).numpy()
        return total / self.parties

    @property
    def longest_change(self) -> float:
        """How far one record moves an average at most, if it is there or not.

        Where a row is clipped as a whole, this is how far all its records together move it.
        """
        slots = self.config.model.neighbours if pools(self.config) else 1
        return float(self.privacy["clip_norm"]) / (self.parties * slots)

    @property
    def noise_deviation(self) -> float:
        """Promised standard deviation of the noise in each number of an average."""
        return float(self.privacy["noise_share_std"]) / math.sqrt(self.parties)
