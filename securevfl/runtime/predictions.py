"""Predictions of the primary's rows, in the label's own words and units, and their file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from securevfl.core.errors import ConfigError
from securevfl.core.formatting import Summarised
from securevfl.data.scaling import LabelScaler
from securevfl.models.alone.choice import Used
from securevfl.models.tasks import Metrics, TaskHead, as_logit

if TYPE_CHECKING:
    import pandas as pd

FILE: Final = "predictions.csv"

NO_KEY: Final = "no key"
"""The note of a row that nothing can be linked to."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Predictions(Summarised):
    """Predictions of rows, in the order of the request."""

    rows: Sequence[Any]
    """The name of each row: its number in the table from 1 on, or what the id column holds."""

    values: np.ndarray
    """A regression's numbers in the label's unit, or each row's most probable class; (rows,)."""

    probabilities: Float64[np.ndarray, "rows classes"] | None
    """Probability of each class, in the order of ``classes``; None for a regression."""

    classes: tuple[Any, ...] | None
    """The label of each class; None for a regression."""

    row_name: str = "row"
    """The heading of ``rows`` in a file."""

    notes: Sequence[str] | None = None
    """A remark on each row, empty for most; None if there are none."""

    metrics: Metrics | None = None
    """Metrics of the rows, where they came with labels."""

    epsilon: float | None = None
    """Highest cost of the request at any party, or of all predictions of the model together, where
    each record has a number of releases; None: no bound, or nothing."""

    used: Used = "joint"
    """Model that answered: the joint one, or the primary's local one (``alone``), which costs
    nothing."""

    without: tuple[str, ...] = ()
    """Secondaries that were absent."""

    measured_without: Mapping[str, Any] | None = None
    """Figures of the model on the run's test rows without the absent secondaries: ``used``, the
    model that answered then, and each ``metric`` with its ``value`` and ``interval``; None where
    it was not measured, or no secondary was absent."""

    unknown_words: Mapping[str, int] = field(default_factory=dict)
    """How many cells of the rows hold words that the model does not know, by column."""

    library: str = "pandas"
    """Library of the frame that the rows came in, and that :meth:`frame` returns: ``pandas``,
    ``polars`` or ``pyarrow``."""

    def __len__(self) -> int:
        return len(self.values)

    def summary(self) -> tuple[str, dict[str, str]]:
        """Return how many rows were predicted and by whom, and what is known of them."""
        by = "the joint model" if self.used == "joint" else "the primary alone"
        shown = {} if self.epsilon is None else {"epsilon": f"{self.epsilon:.4g}"}
        for name, value in (self.metrics or {}).items():
            shown[name] = "undefined" if value is None else f"{value:.4f}"
        return f"{len(self):,} rows by {by}", shown

    def part(self, first: int, end: int) -> "Predictions":
        """Return those of the rows from ``first``, counted from 0, to before ``end``."""
        return replace(
            self,
            rows=self.rows[first:end],
            values=self.values[first:end],
            probabilities=None if self.probabilities is None else self.probabilities[first:end],
            notes=None if self.notes is None else self.notes[first:end],
            metrics=None,
        )

    def frame(self) -> Any:
        """Return a table of the library of the rows: their names, ``prediction``, probabilities.

        A multiclass task has ``probability_CLASS`` for each class, a binary task for the positive
        one, which is the second of ``classes``; a regression has none. Where secondaries were
        absent, ``without`` names them.
        """
        columns = {name: list(cells) for name, cells in self._columns()}
        if self.library == "polars":
            import polars

            return polars.DataFrame(columns)
        if self.library == "pyarrow":
            import pyarrow

            return pyarrow.table(columns)
        return self._as_pandas()

    def _columns(self) -> list[tuple[str, Sequence[Any] | np.ndarray]]:
        names = probability_columns(self.classes)
        columns: list[tuple[str, Any]] = [
            (self.row_name, list(self.rows)),
            ("prediction", self.values),
        ]
        if self.probabilities is not None:
            columns += zip(names, self.probabilities.T[-len(names) :], strict=True)
        if self.without:
            columns.append(("without", [" ".join(self.without)] * len(self)))
        if self.notes is not None:
            columns.append(("note", list(self.notes)))
        return columns

    def _as_pandas(self) -> "pd.DataFrame":
        import pandas as pd  # slow to load; most processes that know this class make no table

        return pd.DataFrame(dict(self._columns()))

    def metadata(self) -> dict[str, Any]:
        """Return what another process needs in addition to the file to read them back."""
        return {
            "classes": None if self.classes is None else list(self.classes),
            "row_name": self.row_name,
            "metrics": self.metrics,
            "epsilon": self.epsilon,
            "used": self.used,
            "without": list(self.without),
        }

    def write(self, path: Path) -> None:
        """Write them for this user alone; numbers come back as they are.

        Args:
            path: The file: CSV, packed where its name ends in ``.csv.gz``, or ``.parquet``.

        Raises:
            StorageError: If the disk takes no more.
        """
        from securevfl.data.frames import write_frame  # as above

        write_frame(self._as_pandas(), path)


def probability_columns(classes: Sequence[Any] | None) -> list[str]:
    """Return the headings of probabilities; of two classes, the second one's alone."""
    shown = list(classes or ())
    return [f"probability_{name}" for name in (shown[1:] if len(shown) == 2 else shown)]


def require_free_name(id_column: str, classes: Sequence[Any] | None) -> None:
    """Refuse a column that names rows and is called as a column of their predictions.

    Raises:
        ConfigError: Naming it.
    """
    if id_column in ("prediction", *probability_columns(classes), "without", "note"):
        raise ConfigError(
            f"--id {id_column}: predictions have a column of that name themselves; rename yours"
        )


def predictions_of(
    outputs: Tensor,
    head: TaskHead,
    *,
    classes: tuple[Any, ...] | None,
    label_scaler: LabelScaler | None,
    threshold: float,
    rows: Sequence[Any],
) -> Predictions:
    """Return a model's outputs as predictions.

    Args:
        outputs: Shape (rows, outputs).
        head: The task.
        classes: The label of each class number; None for a regression.
        label_scaler: Brings a regression's outputs back to the label's unit; None: they are in it.
        threshold: Probability above which a row counts as the second class, of two.
        rows: The name of each row.
    """
    scores = outputs.detach().double().cpu()
    probabilities = None
    if head.task == "regression":
        scaler = label_scaler or LabelScaler(mean=0.0, deviation=1.0)
        values = scores[:, 0].numpy() * scaler.deviation + scaler.mean
    else:
        if head.task == "binary":
            second = torch.sigmoid(scores[:, 0])
            probabilities = torch.stack([1 - second, second], dim=1).numpy()
            # On logits, as metrics compare them.
            number = (scores[:, 0] > as_logit(threshold)).long().numpy()
        else:
            probabilities = torch.softmax(scores, dim=1).numpy()
            number = probabilities.argmax(axis=1)
        values = np.array(classes or range(probabilities.shape[1]), dtype=object)[number]
    return Predictions(
        rows=rows,
        values=values,
        probabilities=probabilities,
        classes=classes,
    )


def read_predictions(
    path: Path, metadata: Mapping[str, Any], *, rows: Sequence[Any] | None
) -> Predictions:
    """Return predictions that another process has written.

    Args:
        path: Its file.
        rows: The name of each row; None: their numbers from 1 on.
        metadata: What it has sent in addition: ``classes``, ``row_name``, ``metrics``, ``epsilon``
            and ``used``.
    """
    import pandas as pd  # as above

    # As text: Python's own reading of a number gives back the one that was written.
    frame = pd.read_csv(path, dtype=str, keep_default_na=False)
    classes = None if metadata["classes"] is None else tuple(metadata["classes"])
    probabilities = None
    if classes is not None:
        columns = [_numbers(frame[name]) for name in probability_columns(classes)]
        columns = [1 - columns[0], *columns] if len(classes) == 2 else columns
        probabilities = np.stack(columns, axis=1)
    if classes is None:
        values = _numbers(frame["prediction"])
    else:
        by_text = {str(label): label for label in classes}
        values = np.array([by_text[text] for text in frame["prediction"]], dtype=object)
    return Predictions(
        rows=range(1, len(frame) + 1) if rows is None else rows,
        values=values,
        probabilities=probabilities,
        classes=classes,
        row_name=metadata["row_name"],
        notes=frame["note"].tolist() if "note" in frame else None,
        metrics=metadata["metrics"],
        epsilon=metadata["epsilon"],
        used=metadata["used"],
        without=tuple(metadata["without"]),
    )


def _numbers(values: "pd.Series[Any]") -> Float64[np.ndarray, " rows"]:
    return np.array([float(value) for value in values], dtype=np.float64)
