"""The ``[base]`` table: the model of the primary alone, which the joint model is weighed with."""

import json
from dataclasses import dataclass
from typing import Any, Literal

from securevfl.core.errors import ConfigError

OWN = "python"
"""What stands in a federation file for an estimator that only Python can hand over."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseSettings:
    """The ``[base]`` table: the model of the primary alone beside which the joint model answers."""

    estimator: Literal["best", "boosting", "linear", "none", "python"] = "best"
    """The model of the primary's own columns and numeric keys: ``boosting``, scikit-learn's
    histogram boosting; ``linear``, a ridge or logistic regression; ``best``, the best of these and
    a perceptron, or an average of those that are level on the validation rows; ``none``, as in the
    papers: outputs are those of the family alone, and nothing decides whether they are used.
    With a base, the joint model answers only where it is better than the primary's local baseline
    and than the same network without partners on validation rows. ``python`` stands in the file of
    a run for an estimator that :func:`securevfl.simulate` was handed."""

    described: str | None = None
    """Of ``python``: the estimator's class and parameters."""

    def __post_init__(self) -> None:
        if (self.estimator == OWN) != (self.described is not None):
            raise ConfigError(
                'described: goes with estimator = "python", which securevfl.simulate(base=...) '
                "writes; a federation file that trains names another estimator"
            )

    @property
    def exists(self) -> bool:
        """Whether there is a base."""
        return self.estimator != "none"

    def in_words(self) -> str:
        """Return what it does, for people."""
        if not self.exists:
            return "none: the joint model answers, whether it is better than a local model or not"
        return (
            f"{self.estimator} on the primary's own columns and keys; the joint model answers "
            "where it improves on the local baseline (linear, boosting, network or their average), "
            "else that one answers"
        )


def base_source(base: Any) -> dict[str, str]:
    """Return the ``[base]`` table for what Python was handed: a name, or an estimator.

    Raises:
        ConfigError: If it is neither.
    """
    if isinstance(base, str):
        return {"estimator": base}
    if not hasattr(base, "fit") or not hasattr(base, "get_params"):
        raise ConfigError(
            'base: must be "best", "boosting", "linear", "none" or an estimator of scikit-learn, '
            f"got {base!r:.60}"
        )
    return {"estimator": OWN, "described": described(base)}


def described(estimator: Any) -> str:
    """Return an estimator's class and parameters, by which the digest of a model knows it."""
    kind = type(estimator)
    # Every parameter, not those alone that are printed.
    params = json.dumps(estimator.get_params(), sort_keys=True, default=repr)
    return f"{kind.__module__}.{kind.__qualname__} {params}"
