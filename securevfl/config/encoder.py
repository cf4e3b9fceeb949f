"""The ``[encoder]`` table, and the settings that ``method = "auto"`` chooses.

They are filled in where a file leaves them out, by one rule (measured in
research/class_means/README.md), before anything else is read: a run's own file names what was
chosen.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Final, Literal

from securevfl.core import checks
from securevfl.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderSettings:
    """The ``[encoder]`` table; without it frozen encoders are the family's own random ones.

    With ``method = "auto"`` this table, ``[model]``, ``privacy.encoder``,
    ``privacy.links_per_record``, ``linkage.choose`` and ``training.batch_size`` get what suits the
    federation, where the file leaves them out; see :mod:`securevfl.config.encoder`.
    """

    method: Literal["random", "principal", "class-means"]
    """``random``: a projection drawn without data. Others are fitted to each secondary's records
    behind noise that epsilon counts. ``principal``: leading principal components. ``class-means``:
    one score a record for a label of two classes or a number, else one number for each class, that
    all secondaries write into."""

    layout: Literal["blocks", "sum"] | None = None
    """``blocks``: every secondary has its own coordinates, ``hidden`` over their number. ``sum``:
    all write into all. Default: ``sum`` for ``class-means``, else ``blocks``."""

    labels: Literal["shares", "randomised", "plaintext"] | None = None
    """How class means use labels. ``shares``: under a dealer's masks; noised sums come back, and no
    secondary sees a label. ``randomised``: labels behind randomised response. ``plaintext``: labels
    as they are."""

    label_epsilon: Annotated[float, checks.positive, partial(checks.at_most, 1e4)] = 2.0
    """Epsilon of these labels: for ``shares`` against each secondary, for ``randomised`` against
    all together; at most 10,000: noise for more could not be drawn, and promises nothing."""

    share: checks.OpenUnit = 0.05
    """Part of the run's privacy, in squared mu, that fitting may use."""

    def __post_init__(self) -> None:
        checks.require_limits(self)
        if self.method != "class-means":
            if self.labels is not None:
                raise ConfigError(
                    f'encoder.labels: only method = "class-means" uses it; leave it out with '
                    f"{self.method!r}"
                )
            return
        if self.labels is None:
            raise ConfigError(
                'encoder.labels: class means need labels; write "shares" (a dealer\'s masks '
                'hide them), "randomised" (randomised response) or "plaintext" (every secondary '
                "sees them)"
            )
        if self.layout == "blocks":
            raise ConfigError(
                "encoder.layout: class means are numbers that all secondaries write into; take "
                '"sum", or leave it out'
            )

    @property
    def in_blocks(self) -> bool:
        """Whether every secondary writes into coordinates of its own."""
        return (self.layout or ("sum" if self.method == "class-means" else "blocks")) == "blocks"


AUTO: Final = "auto"
_FAMILY: Final = "class-means"
NEIGHBOURS: Final = 4
_RELEASED_AT_ONCE: Final = 1024
"""Rows of a round where nothing trains by rounds, and each round has its own cost."""
_OF_NUMBERS: Final = ("euclidean", "great-circle")
"""Metrics whose keys a model can take as inputs."""


def resolve(source: Mapping[str, Any]) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """Return a parsed federation file with the settings that it leaves to the rule written out.

    Args:
        source: The file; each table is one.

    Returns:
        The file, as it was if it asks for nothing, and what was chosen: a value by ``table.name``.

    Raises:
        ConfigError: If the rule needs what the file does not say.
    """
    encoder = source.get("encoder")
    if not isinstance(encoder, Mapping) or encoder.get("method") != AUTO:
        return source, {}
    settings = {name: value for name, value in encoder.items() if name != "method"}
    written = {**source, "encoder": settings}
    filled: dict[str, Any] = {**written}
    chosen: dict[str, Any] = {}
    for table, fields in _chosen_settings(source).items():
        own = written.get(table, {})
        if not isinstance(own, Mapping):
            raise ConfigError(f"[{table}]: must be a table of settings, got {own!r}")
        new = {name: value for name, value in fields.items() if name not in own}
        filled[table] = {**own, **new}
        chosen |= {f"{table}.{name}": value for name, value in new.items()}
    return filled, chosen


def _chosen_settings(source: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return what :func:`recommend` says of a parsed file."""
    federation = source.get("federation")
    if not isinstance(federation, Mapping):
        raise ConfigError('encoder.method: "auto" follows from [federation]; add that section')
    task, classes = federation.get("task"), federation.get("classes")
    if task == "multiclass" and not isinstance(classes, int):
        raise ConfigError(
            'federation.classes: is missing; encoder.method = "auto" needs the number of classes '
            "of a multiclass label"
        )
    if task != "multiclass":
        classes = 2
    roles = [party.get("role") for party in source.get("party", []) if isinstance(party, Mapping)]
    linkage = source.get("linkage")
    metric = linkage.get("metric", "euclidean") if isinstance(linkage, Mapping) else "euclidean"
    settings = recommend(classes=classes, metric=metric, dealer="dealer" in roles)
    model = source.get("model")
    family = model.get("family", _FAMILY) if isinstance(model, Mapping) else _FAMILY
    if family != _FAMILY:
        raise ConfigError(
            f"model.family: encoder.method = {AUTO!r} chooses {_FAMILY!r}, which trains no "
            f"network, got {family!r}; leave [model] out, or [encoder]"
        )
    if isinstance(model, Mapping) and model.get("top", "mixed") not in ("tied", "mixed"):
        del settings["training"]
    return settings


def recommend(*, classes: int | None, metric: Any, dealer: bool) -> dict[str, dict[str, Any]]:
    """Return the settings, by table and name, that did best where such a federation was measured.

    Encoders are class means, with one secondary too: what all of them write is one score, or as
    many numbers as the label has classes, so no epsilon is spent on what is unrelated to it. A
    score is of a row with one record, which costs less than the best of several.

    Args:
        classes: Number of classes of the label, 2 of a number; None if it is unknown.
        metric: ``linkage.metric``.
        dealer: Whether the federation has a dealer.
    """
    return {
        "model": {
            "family": _FAMILY,
            "neighbours": 1 if classes == 2 or metric == "exact" else NEIGHBOURS,
            "numbers": 1 if classes == 2 else classes,
            "top": "mixed",
            **({} if metric in _OF_NUMBERS else {"keys_as_features": False}),
        },
        "encoder": {
            "method": "class-means",
            "layout": "sum",
            "labels": "shares" if dealer else "randomised",
        },
        "privacy": {"encoder": "frozen", "links_per_record": 1},
        "linkage": {"choose": "records"},
        "training": {"batch_size": _RELEASED_AT_ONCE},
    }
