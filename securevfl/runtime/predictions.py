"""Predictions of the primary's rows, in the label's own words and units, and their file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from securevfl.core import files
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
        """Return a table of the library of the rows: ``row``, ``prediction``, and probabilities.

        A multiclass task has ``probability_CLASS`` for each class, a binary task for the positive
        one, which is the second of ``classes``; a regression has none. Where secondaries were
        absent, ``without`` names them.
        """
        columns = {name: list(cells) for name, cells in self._columns().items()}
        if self.library == "polars":
            import polars

            return polars.DataFrame(columns)
        if self.library == "pyarrow":
            import pyarrow

            return pyarrow.table(columns)
        return self._as_pandas()

    def _columns(self) -> dict[str, Sequence[Any] | np.ndarray]:
        columns: dict[str, Any] = {self.row_name: list(self.rows), "prediction": self.values}
        if self.probabilities is not None and self.classes is not None:
            if len(self.classes) == 2:
                columns[f"probability_{self.classes[1]}"] = self.probabilities[:, 1]
            else:
                columns |= {
                    f"probability_{name}": self.probabilities[:, number]
                    for number, name in enumerate(self.classes)
                }
        if self.without:
            columns["without"] = [" ".join(self.without)] * len(self)
        if self.notes is not None:
            columns["note"] = list(self.notes)
        return columns

    def _as_pandas(self) -> "pd.DataFrame":
        import pandas as pd  # slow to load; most processes that know this class make no table

        return pd.DataFrame(self._columns())

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
        """Write them as CSV, for this user alone; numbers come back as they are.

        Raises:
            StorageError: If the disk takes no more.
        """
        files.write_text(path, self._as_pandas().to_csv(index=False, lineterminator="\n"))


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


def read_predictions(path: Path, metadata: Mapping[str, Any]) -> Predictions:
    """Return predictions that another process has written.

    Args:
        path: Its file.
        metadata: What it has sent in addition: ``classes``, ``row_name``, ``metrics``, ``epsilon``
            and ``used``.
    """
    import pandas as pd  # as above

    name = metadata["row_name"]
    # As text: Python's own reading of a number gives back the one that was written.
    frame = pd.read_csv(path, dtype=str, keep_default_na=False)
    classes = None if metadata["classes"] is None else tuple(metadata["classes"])
    probabilities = None
    if classes is not None and len(classes) == 2:
        second = _numbers(frame[f"probability_{classes[1]}"])
        probabilities = np.stack([1 - second, second], axis=1)
    elif classes is not None:
        columns = [_numbers(frame[f"probability_{label}"]) for label in classes]
        probabilities = np.stack(columns, axis=1)
    if classes is None:
        values = _numbers(frame["prediction"])
    else:
        by_text = {str(label): label for label in classes}
        values = np.array([by_text[text] for text in frame["prediction"]], dtype=object)
    return Predictions(
        rows=[int(row) for row in frame[name]] if name == "row" else frame[name].tolist(),
        values=values,
        probabilities=probabilities,
        classes=classes,
        row_name=name,
        notes=frame["note"].tolist() if "note" in frame else None,
        metrics=metadata["metrics"],
        epsilon=metadata["epsilon"],
        used=metadata["used"],
        without=tuple(metadata["without"]),
    )


def _numbers(values: "pd.Series[Any]") -> Float64[np.ndarray, " rows"]:
    return np.array([float(value) for value in values], dtype=np.float64)
