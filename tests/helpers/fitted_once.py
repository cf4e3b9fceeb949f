"""The primary's own models and a plan's figures, computed once in a session for the same input.

Every run fits the models, to weigh the joint one with: a quarter of the time of tests of whole
runs, whose made-up tables are few. Every party computes the epsilons and symbols of its plan, a
CPU-second where releases are sampled. Processes of a session share what one of them has computed.
Tests of the fit call :func:`securevfl.models.alone.choice.fit_alone`, which fits each time.
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
_SHARED = {
    "securevfl.dp.accountant": "_pld_epsilon",
    "securevfl.federation.run_plan": "choose_scores",
}
"""Functions of a few numbers, by the module that calls them."""
_SKOPS = "skops.io._utils"
_MARGINS = "securevfl.models.alone.margins"


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

    from securevfl.models.alone.choice import fit_alone

    return _once(
        lambda: joblib.hash((arguments, options)), lambda: fit_alone(*arguments, **options)
    )


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

        def fitted() -> dict[str, Any]:
            fit(model, *data, **options)
            return vars(model)

        import joblib

        vars(model).update(_once(lambda: joblib.hash((model, data)), fitted))

    setattr(fit_once, "shared", True)  # noqa: B010
    return fit_once


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
