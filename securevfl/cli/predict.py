"""What ``securevfl predict`` does: new rows in, predictions out."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from securevfl.config.reading import read_federation
from securevfl.core.errors import ConfigError
from securevfl.core.formatting import written
from securevfl.models.task_metrics import metrics_of
from securevfl.report.secondary_page import write_secondary_pages
from securevfl.runtime.entry import predict_file
from securevfl.runtime.predictions import Predictions
from securevfl.runtime.shown_progress import RunProgress


def run_predict(
    run: Path,
    *,
    rows: Path,
    out: Path,
    id_column: str | None,
    without: Sequence[str],
    federation: Path | None,
    identity: Path | None,
    listen: str | None,
    data_root: Path | None,
    device: str,
    as_json: bool,
) -> None:
    """Predict a file of new rows with the model that a run has kept."""
    path = run / "federation.toml" if federation is None else federation
    if not path.exists():
        raise ConfigError(
            f"run folder {run}: has no federation.toml; is it the folder of a finished run?"
        )
    config = read_federation(path)
    with RunProgress(metric=metrics_of(config.federation.task, config.training.metric)[0].name) as (
        progress
    ):
        predictions = predict_file(
            config,
            run,
            rows=rows,
            out=out,
            id_column=id_column,
            without=without,
            identity=identity,
            listen=listen,
            data_root=data_root,
            device=device,
            observe=progress,
        )
    print_predictions(predictions, out, as_json=as_json)
    # What was spent stands on the pages of the secondaries of this machine.
    write_secondary_pages(run)


def summary_of(predictions: Predictions, out: Path) -> dict[str, Any]:
    """Return what ``--json`` prints."""
    return {
        "predictions": str(out),
        "rows": len(predictions),
        "metrics": predictions.metrics,
        "epsilon": predictions.epsilon,
        "used": predictions.used,
        "without": list(predictions.without),
        "measured_without": predictions.measured_without,
        "unknown_words": dict(predictions.unknown_words),
    }


def print_predictions(predictions: Predictions, out: Path, *, as_json: bool) -> None:
    """Say where the predictions are, what they cost, and how good they are if that is known."""
    if as_json:
        print(json.dumps(summary_of(predictions, out)))
        return
    spent = predictions.epsilon
    cost = "" if spent is None else f"; epsilon {spent:.4g} charged for the request"
    if predictions.used == "alone":
        cost = " by the primary alone: nothing was sent to anybody, and no ledger was charged"
    print(f"securevfl: {len(predictions)} rows predicted{cost}", file=sys.stderr)
    if predictions.without:
        print(f"securevfl: {_absence(predictions)}", file=sys.stderr)
    if predictions.metrics:
        table = Table("metric", "of these rows")
        for name, value in predictions.metrics.items():
            table.add_row(name, "not defined" if value is None else written(value))
        Console().print(table)
    print(out)


def _absence(predictions: Predictions) -> str:
    """Say who was absent, and what predictions without them are worth."""
    who = f"without {', '.join(predictions.without)}"
    measured = predictions.measured_without
    if measured is None:
        return f"{who}: not measured what such predictions are worth"
    found = []
    for name, figure in measured["metrics"].items():
        value = f"{name} {figure['value']:.4g}"
        ends = figure["interval"]
        found.append(value if ends is None else f"{value} ({ends[0]:.4g} to {ends[1]:.4g})")
    by = "the primary alone, who does better then" if measured["used"] == "alone" else "the others"
    return f"{who}, answered by {by}: on the run's test rows {', '.join(found)}"
