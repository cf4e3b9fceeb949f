"""What the primary brings to the fitting of votes: which row is of which class."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch
from jaxtyping import Int64

from securevfl.config.federation import FederationConfig
from securevfl.core.errors import ConfigError
from securevfl.dp.class_sums import SumFormat
from securevfl.dp.label_release import LabelRelease, label_noise_multiplier
from securevfl.dp.labels import digest_of_labels, keep_probability, randomised_labels
from securevfl.federation.ledger import Ledger
from securevfl.federation.ledger_labels import charge_labels
from securevfl.federation.primary import PrimaryData
from securevfl.federation.run_plan import RunPlan
from securevfl.federation.state_files import StateFolder

_DRAWN: Final = "labels.pt"

LabelNoise = Callable[[SumFormat], Int64[np.ndarray, "bins numbers"]]
"""Returns the noise that hides labels in a secondary's class sums, fresh each time."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Ballot:
    """The primary's rows by class, and how much of that secondaries may learn."""

    bins_of_rows: Int64[np.ndarray, " rows"] = field(repr=False)
    """Class of every row, and the number of classes for rows that are not for learning."""
    bins: int
    """Classes, and one more."""
    keep: float | None = None
    """Where labels go out behind randomised response: with which probability one was kept."""
    label_noise: LabelNoise | None = None
    """Where labels stay at home: what is added to class sums before they go back. None: the bins
    go out as they are here."""


def ballot_of(plan: RunPlan, data: PrimaryData, ledger: Ledger, files: StateFolder) -> Ballot:
    """Charge for what secondaries will learn of labels, and return it.

    Args:
        plan: The run, whose encoders vote.
        data: The primary's table.
        ledger: Its own.
        files: Its own: labels by randomised response are drawn once a run.

    Raises:
        ConfigError: If votes have not one number for each class.
        StorageError: If the disk takes no more.
    """
    encoder = plan.config.encoder
    assert encoder is not None, "encoders vote"
    bins = _classes_of(plan.config, data)
    classes, parties = plan.cut.shape[1], len(plan.secondaries)
    epsilon, delta = encoder.label_epsilon, plan.releases.privacy.delta
    match encoder.labels:
        case "shown":
            charge_labels(
                ledger, LabelRelease(mechanism="shown", epsilon=None, delta=0.0, parties=parties)
            )
            return Ballot(bins_of_rows=bins, bins=classes + 1)
        case "randomised":
            drawn = _drawn_once(files, bins, classes, epsilon)
            charge_labels(
                ledger,
                LabelRelease(
                    mechanism="randomised",
                    epsilon=epsilon,
                    delta=0.0,
                    parties=parties,
                    digest=digest_of_labels(drawn),
                ),
            )
            keep = keep_probability(epsilon, classes)
            return Ballot(bins_of_rows=drawn, bins=classes + 1, keep=keep)
        case _:
            charge_labels(
                ledger,
                LabelRelease(mechanism="shares", epsilon=epsilon, delta=delta, parties=parties),
            )
            multiplier = label_noise_multiplier(epsilon, delta)

            def noise(sums: SumFormat) -> Int64[np.ndarray, "bins numbers"]:
                return sums.noise(multiplier * sums.change_of_label)

            return Ballot(bins_of_rows=bins, bins=classes + 1, label_noise=noise)


def _drawn_once(
    files: StateFolder, bins: Int64[np.ndarray, " rows"], classes: int, epsilon: float
) -> Int64[np.ndarray, " rows"]:
    """Return labels by randomised response, those of the run's first session if there was one."""
    if files.holds(_DRAWN):
        known: Int64[np.ndarray, " rows"] = files.read(_DRAWN)["labels"].numpy()
        if len(known) == len(bins):
            return known
    drawn = randomised_labels(bins, classes, epsilon)
    files.write(_DRAWN, {"labels": torch.from_numpy(drawn)})
    return drawn


def _classes_of(config: FederationConfig, data: PrimaryData) -> Int64[np.ndarray, " rows"]:
    """Return the class of every row, and the number of classes for rows that are not for learning.

    Labels of a regression fall into as many classes as votes have numbers, equally many training
    rows in each.
    """
    _, classes = config.family.cut_shape(config.model)
    targets, train = data.targets.cpu().numpy(), data.split.train
    if data.head.task == "regression":
        inner = np.quantile(targets[train], np.arange(1, classes) / classes)
        found = np.searchsorted(inner, targets, side="right")
    else:
        there = max(2, data.head.outputs)
        if classes != there:
            raise ConfigError(
                f"model.hidden: votes have one number for each class, and the label has {there}; "
                f"write hidden = {there}, got {classes}"
            )
        found = targets.astype(np.int64)
    bins = np.full(len(targets), classes, dtype=np.int64)
    bins[train] = found[train]
    return bins
