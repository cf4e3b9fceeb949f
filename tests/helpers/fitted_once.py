"""The primary's own models, fitted once in a session of tests for the same rows.

Every run fits them, to weigh the joint model with: a quarter of the time of tests of whole runs,
whose made-up tables are few. Processes of a session share what one of them has fitted. Tests of the
fit call :func:`securevfl.models.alone.choice.fit_alone`, which fits each time.
"""

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

FOLDER_VARIABLE = "SECUREVFL_TESTS_FITTED"
"""Names the folder of a session; without it each run fits its own."""

_USED_IN = "securevfl.federation.base"


def begin_session() -> None:
    """Make the folder, which processes that are started later find."""
    os.environ[FOLDER_VARIABLE] = tempfile.mkdtemp(prefix="securevfl-fitted-")


def end_session() -> None:
    """Remove it."""
    shutil.rmtree(os.environ.pop(FOLDER_VARIABLE), ignore_errors=True)


def fit_runs_once() -> None:
    """Let runs of this process take what was fitted before, where what they need is loaded."""
    if _USED_IN in sys.modules:
        setattr(sys.modules[_USED_IN], "fit_alone", _fit_once)  # noqa: B010


def _fit_once(*arguments: Any, **options: Any) -> Any:
    import joblib  # type: ignore[import-untyped]

    from securevfl.models.alone.choice import fit_alone

    folder = os.environ.get(FOLDER_VARIABLE)
    if folder is None:
        return fit_alone(*arguments, **options)
    path = Path(folder, joblib.hash((arguments, options)))
    if path.exists():
        return joblib.load(path)
    fitted = fit_alone(*arguments, **options)
    handle, unfinished = tempfile.mkstemp(dir=folder)
    with os.fdopen(handle, "wb") as file:
        joblib.dump(fitted, file)
    Path(unfinished).replace(path)
    return fitted
