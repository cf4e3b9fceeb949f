"""The primary's own models and a plan's figures, computed once in a session for the same input.

Every run fits the models, to weigh the joint one with: a quarter of the time of tests of whole
runs, whose made-up tables are few and small: boosting of runs has a quarter of its rounds, and a
network a few epochs of patience. Every party computes the epsilons and symbols of its plan, a
CPU-second where releases are sampled. Processes of a session share what one of them has computed.
Tests of the fit call :func:`securevfl.models.alone.choice.fit_alone`, which fits each time, in
full.
"""

import functools
import hashlib
import os
import pickle  # noqa: TID251 - of this session's own files; joblib's is written in Python, and slow
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

FOLDER_VARIABLE = "SECUREVFL_TESTS_FITTED"
"""Names the folder of a session; without it each run fits its own."""

_USED_IN = "securevfl.federation.base"
_SHARED = {
    "securevfl.dp.accountant": "_pld_epsilon",
    "securevfl.federation.run_plan": "choose_scores",
}
"""Functions of a few numbers, by the module that calls them."""
_SKOPS = "skops.io._utils"
_MARGINS = "securevfl.models.alone.margins"
_ROUNDS = 25
"""Rounds of boosting in a run, on tables that are too small to stop early."""
_STEPS_TO_WAIT = 10
"""Optimizer steps that a run's network waits for a better metric, at least."""

_in_full = False
_for_a_run = False


def begin_session() -> None:
    """Make the folder, which processes that are started later find."""
    os.environ[FOLDER_VARIABLE] = tempfile.mkdtemp(prefix="securevfl-fitted-")


def end_session() -> None:
    """Remove it."""
    shutil.rmtree(os.environ.pop(FOLDER_VARIABLE), ignore_errors=True)


def fit_runs_once(*, in_full: bool = False) -> None:
    """Let runs of this process take what was computed before, where what they need is loaded.

    Args:
        in_full: Whether runs from now on fit their models as long as those of users.
    """
    global _in_full
    _in_full = in_full
    if _USED_IN in sys.modules:
        setattr(sys.modules[_USED_IN], "fit_alone", _fit_once)  # noqa: B010
    for place, name in _SHARED.items():
        module = sys.modules.get(place)
        if module is not None and not hasattr(vars(module)[name], "shared"):
            setattr(module, name, _shared(vars(module)[name]))
    margins = sys.modules.get(_MARGINS)
    if margins is not None and not hasattr(margins._fit_estimator, "shared"):
        setattr(margins, "_fit_estimator", _boosted_once(margins._fit_estimator))  # noqa: B010
    skops = sys.modules.get(_SKOPS)
    if skops is not None and not hasattr(skops.whichmodule, "cache_info"):
        # It looks for each function of a kept model in all that is loaded.
        setattr(skops, "whichmodule", functools.cache(skops.whichmodule))  # noqa: B010


def _fit_once(*arguments: Any, **options: Any) -> Any:
    import joblib  # type: ignore[import-untyped]

    return _once(
        lambda: joblib.hash((arguments, options, _in_full)), lambda: _fit(*arguments, **options)
    )


def _fit(*arguments: Any, **options: Any) -> Any:
    """Fit the models of a run."""
    from securevfl.models.alone import choice, margins

    if _in_full:
        return choice.fit_alone(*arguments, **options)
    with (
        patch.object(sys.modules[__name__], "_for_a_run", True),
        patch.object(margins, "_STEPS_TO_WAIT", _STEPS_TO_WAIT),
    ):
        return choice.fit_alone(*arguments, **options)


def _shared(compute: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function of a few numbers: one process computes a value, and all others read it."""

    @functools.cache
    def shared(*asked: Any, **options: Any) -> Any:
        text = repr((compute.__qualname__, asked, sorted(options.items())))
        return _once(
            lambda: hashlib.sha256(text.encode()).hexdigest(), lambda: compute(*asked, **options)
        )

    setattr(shared, "shared", True)  # noqa: B010
    return shared


def _boosted_once(fit: Callable[..., None]) -> Callable[..., None]:
    """Wrap the fit of an estimator: boosting with a seed, which is most of it, is fitted once."""

    @functools.wraps(fit)
    def fit_once(model: Any, *data: Any, **options: Any) -> None:
        if getattr(model, "random_state", None) is None or not hasattr(model, "max_leaf_nodes"):
            fit(model, *data, **options)
            return
        if _for_a_run and model.early_stopping is False:
            model.set_params(max_iter=min(model.max_iter, _ROUNDS))

        def fitted() -> dict[str, Any]:
            fit(model, *data, **options)
            return vars(model)

        import joblib

        vars(model).update(_once(lambda: joblib.hash((model, data)), fitted))

    setattr(fit_once, "shared", True)  # noqa: B010
    return fit_once


def _once(key: Callable[[], str], compute: Callable[[], Any]) -> Any:
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder is None:
        return compute()
    path = Path(folder, key())
    if path.exists():
        return pickle.loads(path.read_bytes())
    computed = compute()
    handle, unfinished = tempfile.mkstemp(dir=folder)
    with os.fdopen(handle, "wb") as file:
        pickle.dump(computed, file, pickle.HIGHEST_PROTOCOL)
    Path(unfinished).replace(path)
    return computed
