"""``top`` of ``[model]`` where it is an estimator, which any family with frozen encoders may have.

A family's own ``top``, as that of ``fet``, names one of its networks, and is read by the family.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

from securevfl.config.base import OWN, described
from securevfl.core.errors import ConfigError
from securevfl.models.alone.margins import Named

_OWN: Final = f"{OWN}: "
_TIED: Final = "tied"


@dataclass(frozen=True, kw_only=True, slots=True)
class TopEstimator:
    """An estimator in place of a top network."""

    name: Named | Literal["tied", "python"]
    """``tied`` is :mod:`securevfl.models.tied_top`; ``python`` is one that only Python can hand
    over."""

    described: str | None = None
    """Of ``python``: the estimator's class and parameters."""

    @property
    def corrects(self) -> bool:
        """Whether it says what the base lacks, and is no model by itself."""
        return self.name == "tied"


def without_top(model: Mapping[str, Any]) -> tuple[dict[str, Any], TopEstimator | None]:
    """Return a ``[model]`` table as its family reads it, and the estimator that it names, if any.

    Args:
        model: The table.
    """
    top, fields = model.get("top"), dict(model)
    if isinstance(top, str) and top.startswith(_OWN):
        del fields["top"]
        return fields, TopEstimator(name="python", described=top.removeprefix(_OWN))
    for name in (*get_args(Named), _TIED):
        if top == name:
            del fields["top"]
            return fields, TopEstimator(name=name)
    return fields, None


def top_source(top: Any) -> str:
    """Return what ``top`` of ``[model]`` is for what Python was handed: a name, or an estimator.

    Raises:
        ConfigError: If it is neither.
    """
    if isinstance(top, str):
        return top
    if not hasattr(top, "fit") or not hasattr(top, "get_params"):
        raise ConfigError(
            f'top: must be "boosting", "linear", "tied" or an estimator of scikit-learn, '
            f"got {top!r:.60}"
        )
    return f"{_OWN}{described(top)}"
