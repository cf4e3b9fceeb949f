"""The primary's own models and epsilons, computed once in a session of tests for the same input.

Every run fits the models, to weigh the joint one with: a quarter of the time of tests of whole
runs, whose made-up tables are few. Every party computes the epsilons of its plan, a CPU-second
where releases are sampled. Processes of a session share what one of them has computed. Tests of the
fit call :func:`securevfl.models.alone.choice.fit_alone`, which fits each time.
"""

import functools
import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER_VARIABLE = "SECUREVFL_TESTS_FITTED"
"""Names the folder of a session; without it each run fits its own."""

_USED_IN = "securevfl.federation.base"
_ACCOUNTANT = "securevfl.dp.accountant"


def begin_session() -> None:
    """Make the folder, which processes that are started later find."""
    os.environ[FOLDER_VARIABLE] = tempfile.mkdtemp(prefix="securevfl-fitted-")


def end_session() -> None:
    """Remove it."""
    shutil.rmtree(os.environ.pop(FOLDER_VARIABLE), ignore_errors=True)


def fit_runs_once() -> None:
    """Let runs of this process take what was computed before, where what they need is loaded."""
    if _USED_IN in sys.modules:
        setattr(sys.modules[_USED_IN], "fit_alone", _fit_once)  # noqa: B010
    accountant = sys.modules.get(_ACCOUNTANT)
    if accountant is not None and not hasattr(accountant._pld_epsilon, "shared"):
        setattr(accountant, "_pld_epsilon", _shared(accountant._pld_epsilon))  # noqa: B010


def _fit_once(*arguments: Any, **options: Any) -> Any:
    import joblib  # type: ignore[import-untyped]

    from securevfl.models.alone.choice import fit_alone

    return _once(
        lambda: joblib.hash((arguments, options)), lambda: fit_alone(*arguments, **options)
    )


def _shared(epsilon: Callable[..., float]) -> Callable[..., float]:
    """Wrap an accountant: one process computes an epsilon, and all others read it."""

    @functools.cache
    def shared(*asked: Any) -> float:
        value: float = _once(
            lambda: hashlib.sha256(repr(asked).encode()).hexdigest(), lambda: epsilon(*asked)
        )
        return value

    setattr(shared, "shared", True)  # noqa: B010
    return shared


def _once(key: Callable[[], str], compute: Callable[[], Any]) -> Any:
    import joblib

    folder = os.environ.get(FOLDER_VARIABLE)
    if folder is None:
        return compute()
    path = Path(folder, key())
    if path.exists():
        return joblib.load(path)
    computed = compute()
    handle, unfinished = tempfile.mkstemp(dir=folder)
    with os.fdopen(handle, "wb") as file:
        joblib.dump(computed, file)
    Path(unfinished).replace(path)
    return computed
