"""The primary's rows by class, as class sums take them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from jaxtyping import Float, Float64, Int64

from securevfl.config.federation import FederationConfig
from securevfl.core.errors import ConfigError, PrivacyError
from securevfl.data.tables import PartyTable
from securevfl.dp.class_sums import SumFormat
from securevfl.dp.gaussian import gaussian_noise_multiplier
from securevfl.dp.labels import digest_of_labels, keep_probability, randomised_labels
from securevfl.federation.base import own_inputs
from securevfl.federation.checkpoint import StateFolder
from securevfl.federation.released_labels import charge_labels, drawn_once
from securevfl.federation.rounds.primary import PrimaryData
from securevfl.federation.run_plan import RunPlan
from securevfl.ledger.ledger import Ledger
from securevfl.stages.class_means.policy import encoder_of, labels_released

_RETURNED: Final = "returned.pt"

_ALIKE: Final = 40
"""Fewest rows that a label is ranked among; 20 to 80 did as well
(research/class_means/README.md)."""

LabelNoise = Callable[[SumFormat], Int64[np.ndarray, "bins numbers"]]
"""Returns the noise that hides labels in a secondary's class sums, fresh each time."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ClassLabels:
    """The primary's rows by class, and how much of that secondaries may learn."""

    bins_of_rows: Int64[np.ndarray, " rows"] = field(repr=False)
    """Class of every row, and the number of classes for rows that are not for learning."""
    bins: int
    """Classes, and one more."""
    label_noise: LabelNoise | None = None
    """Noise on class sums before they go back, where labels stay at home. None: the bins go out as
    they are here."""
    note_returned: Callable[[str], None] = lambda _name: None
    """Called with a secondary's name before its class sums go back to it."""


def bins_of(config: FederationConfig) -> int:
    """Return how many lines class sums have: classes, and one for rows not for learning."""
    return config.encoder_classes + 1


def keep_of(config: FederationConfig) -> float | None:
    """Return with which probability randomised response keeps a row's class; None: labels are true.

    Raises:
        ConfigError: If what a label may cost leaves too little for a row.
    """
    if encoder_of(config).labels != "randomised":
        return None
    classes = config.encoder_classes
    return keep_probability(encoder_of(config).label_epsilon / config.labels_moved, classes)


def label_noise_std(config: FederationConfig, sums: SumFormat) -> float:
    """Return the deviation of the noise that hides labels in class sums, in units of these.

    Raises:
        ConfigError: If what a label may cost is no epsilon.
    """
    release = labels_released(config)
    multiplier = gaussian_noise_multiplier(
        epsilon=encoder_of(config).label_epsilon, delta=release.delta
    )
    return multiplier * sums.change_of_label(config.labels_moved)


def class_labels_of(
    plan: RunPlan,
    data: PrimaryData,
    table: PartyTable,
    ledger: Ledger,
    files: StateFolder,
    due: Sequence[str],
) -> ClassLabels:
    """Charge the release of labels, and return the rows by class.

    Args:
        plan: The run, whose encoders are class means.
        data: The primary's table as tensors.
        table: The same as it was read: standardised labels depend on all others'.
        ledger: Its own.
        files: Its own: labels by randomised response are drawn once a run, and class sums go back
            to a secondary once.
        due: The secondaries that say that they are not fitted yet.

    Raises:
        ConfigError: If encoders have not one number for each class.
        PrivacyError: If labels were drawn for other rows than the table has now, or one of those
            due has had class sums in this run.
        StorageError: If the disk takes no more.
    """
    release = labels_released(plan.config)
    returned: list[str] = list(files.read(_RETURNED)["names"]) if files.holds(_RETURNED) else []
    again = [name for name in due if name in returned]
    if again:
        raise PrivacyError(
            f"{', '.join(again)}: had class sums of this run and says that it has none; two noises "
            f"on one sum average out. Start another run with another --out"
        )
    bins = _classes_of(plan.config, data, table)
    classes = plan.config.encoder_classes
    moved = plan.config.labels_moved
    if release.epsilon is None:
        charge_labels(ledger, release)
        return ClassLabels(bins_of_rows=bins, bins=classes + 1)
    if release.mechanism == "randomised":
        rows, epsilon = np.flatnonzero(bins < classes), release.epsilon / moved
        bins[rows] = drawn_once(
            files, rows, lambda: randomised_labels(bins[rows], classes, epsilon)
        )
        charge_labels(ledger, replace(release, digest=digest_of_labels(bins)))
        return ClassLabels(bins_of_rows=bins, bins=classes + 1)
    charge_labels(ledger, release)

    def noise(sums: SumFormat) -> Int64[np.ndarray, "bins numbers"]:
        return sums.noise(label_noise_std(plan.config, sums))

    def note(name: str) -> None:
        returned.append(name)
        files.write(_RETURNED, {"names": returned})

    return ClassLabels(bins_of_rows=bins, bins=classes + 1, label_noise=noise, note_returned=note)


def _classes_of(
    config: FederationConfig, data: PrimaryData, table: PartyTable
) -> Int64[np.ndarray, " rows"]:
    """Return the class of every row, and the number of classes for rows that are not for learning.

    Labels of a regression fall into as many classes as encoders have numbers, by rank among rows
    that are alike: so a class says what the primary's own columns do not.
    """
    classes = config.encoder_classes
    labels, train = table.labels, data.split.train
    assert labels is not None, "the primary's table has labels"
    if data.head.task == "regression":
        known = classes_among_alike(labels[train], own_inputs(table).values[train], classes)
    else:
        there = max(2, data.head.outputs)
        if classes != there:
            raise ConfigError(
                f"model.numbers: class means have one number a class, and the label has {there}; "
                f"write numbers = {there}, got {classes}"
            )
        known = labels[train].astype(np.int64)
    bins = np.full(len(labels), classes, dtype=np.int64)
    bins[train] = known
    return bins


def classes_among_alike(
    values: Float[np.ndarray, " rows"],
    columns: Float64[np.ndarray, "rows columns"],
    classes: int,
) -> Int64[np.ndarray, " rows"]:
    """Return classes by rank among similar rows, so that a class adds to what columns say.

    An addition to the papers. Rows that are alike are those of one leaf of a k-d tree over the
    columns' ranks: 40 to 80 rows, or all of fewer. No value has a part in that, so an exchanged
    one moves rows as in :func:`classes_by_rank`.

    Args:
        values: Of the rows; each must be a function of its own row alone.
        columns: Of the rows.
        classes: >= 1.
    """
    from scipy.stats import rankdata
    from sklearn.neighbors import KDTree

    if not columns.size:
        return classes_by_rank(values, classes)
    _, rows, nodes, _ = KDTree(rankdata(columns, axis=0), leaf_size=_ALIKE).get_arrays()
    ranked = np.empty(len(values), dtype=np.int64)
    for leaf in nodes[nodes["is_leaf"] == 1]:
        alike = np.sort(rows[leaf["idx_start"] : leaf["idx_end"]])
        ranked[alike] = classes_by_rank(values[alike], classes)
    return ranked


def classes_by_rank(values: Float[np.ndarray, " rows"], classes: int) -> Int64[np.ndarray, " rows"]:
    """Return classes of equally many rows, the lowest values first.

    Equal values are ordered by their rows' places, so no two rows are level, and a value that is
    exchanged for another moves its own row, and at most one more over each border between classes.

    Args:
        values: Of the rows; each must be a function of its own row alone.
        classes: >= 1.
    """
    ranks = np.empty(len(values), dtype=np.int64)
    ranks[np.argsort(values, kind="stable")] = np.arange(len(values))
    ranked: Int64[np.ndarray, " rows"] = ranks * classes // max(1, len(values))
    return ranked
