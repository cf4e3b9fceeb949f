"""A search's figures: what validation rows say of each trial, and the best trial's own run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from securevfl.core import files
from securevfl.studies.runs.figures import by_name, cell, csv_of_runs, markdown, over_seeds
from securevfl.studies.sweep.search import Found
from securevfl.studies.sweep.settings import text_of
from securevfl.studies.sweep.sweep import ALONE, Sweep
from securevfl.studies.sweep.table import settings_of
from securevfl.version import __version__

# No column of test rows: whoever sorts trials by these chooses by them.
_CSV_FIELDS: Final = ("seed", "metric", "validation", "train", "epsilon", "epochs", "best_epoch")


def search_summary(sweep: Sweep, found: Found) -> dict[str, Any]:
    """Return a search as one JSON object.

    Returns:
        ``metric``, the validation metric that trials are chosen by; ``settings`` with the range of
        each; ``trials``, each with ``number``, ``settings`` and ``validation``, the mean over
        ``seed_numbers`` (None if it failed); ``best``, the trial with the best one, and with
        ``test``, the figures of its own runs; ``alone``, the same of the primary alone, None where
        settings change what that is; and ``left_out`` with reasons. No other trial's test rows are
        in it.
    """
    runs = by_name(found.results)
    return {
        "federation": sweep.config.federation.name,
        "task": sweep.config.federation.task,
        "metric": sweep.metrics[0].name,
        "higher_is_better": sweep.metrics[0].higher_is_better,
        "chosen_by": found.results[0]["metric"],
        "seed_numbers": list(sweep.seeds),
        "settings": {setting.name: setting.text for setting in sweep.settings},
        "trials": [
            {
                "number": trial.number,
                "settings": dict(trial.point.settings),
                "validation": trial.validation,
            }
            for trial in found.trials
        ],
        "best": {
            "number": found.best.number,
            "name": found.best.point.name,
            "settings": dict(found.best.point.settings),
            "validation": found.best.validation,
            "test": over_seeds(runs[found.best.point.name], sweep.metrics),
        },
        "alone": over_seeds(runs[ALONE], sweep.metrics) if ALONE in runs else None,
        "left_out": {
            one.name: {"status": one.status, "reason": one.reason}
            for one in found.left_out.values()
        },
        "version": __version__,
    }


def trial_rows(figures: Mapping[str, Any]) -> list[list[str]]:
    """Return the trials for people, the best first, beneath a heading.

    Args:
        figures: What :func:`search_summary` returned.
    """
    sign = -1 if figures["higher_is_better"] else 1
    known = [trial for trial in figures["trials"] if trial["validation"] is not None]
    failed = [trial for trial in figures["trials"] if trial["validation"] is None]
    ordered = [*sorted(known, key=lambda trial: sign * trial["validation"]), *failed]
    return [
        ["trial", *figures["settings"], f"validation {figures['metric']}"],
        *(
            [
                str(trial["number"]),
                *(text_of(value) for value in trial["settings"].values()),
                "failed"
                if trial["validation"] is None
                else cell({"mean": trial["validation"], "std": None}),
            ]
            for trial in ordered
        ),
    ]


def write_search(folder: Path, figures: Mapping[str, Any], found: Found) -> None:
    """Write ``search.json``, ``search.csv`` (a row a run, validation alone) and ``search.md``."""
    points = {trial.point.name: {"settings": dict(trial.point.settings)} for trial in found.trials}
    names = list(figures["settings"])
    rows = [
        {**result, "run": result["name"], **settings_of(points, result["name"])}
        for result in found.results
    ]
    text = csv_of_runs(rows, first=("run", *names, *_CSV_FIELDS), splits=("validation",))
    files.write_text(folder / "search.csv", text, for_others=True)
    files.write_text(folder / "search.md", markdown(trial_rows(figures)), for_others=True)
    files.write_json(folder / "search.json", figures, for_others=True)
