"""What is lost between pooled trees and a release, step by step: ``frontier.py --waterfall``.

At every step the local baseline is fitted anew, to the primary's columns and to further numbers.
"""

from collections.abc import Sequence

import numpy as np
from scipy.spatial import cKDTree
from scipy.special import ndtri
from scipy.stats import rankdata

from research.common.linked_tables import Tables
from securevfl.config.federation import FederationConfig
from securevfl.data.tables import PartyTable
from securevfl.federation.base import own_inputs, targets_of, task_head
from securevfl.federation.run_plan import run_facts
from securevfl.models.alone.choice import fit_alone
from securevfl.models.alone.margins import OwnInputs
from securevfl.stages.class_means.class_labels import classes_among_alike


class Enlarged:
    """The local baseline of a primary that has further numbers of its rows."""

    def __init__(self, config: FederationConfig, tables: Tables) -> None:
        self.own, self.seed = tables.parties[0], config.federation.seed
        self.split, _ = run_facts(config, self.own)
        self.head = task_head(config, self.own, self.split)
        self.targets = targets_of(self.own, self.split, self.head).numpy()

    def reached(self, *numbers: np.ndarray) -> float:
        """Return the metric of test rows; none of ``numbers`` is the primary alone."""
        columns = [own_inputs(self.own).values, *numbers]
        inputs = OwnInputs(values=np.hstack(columns).astype(np.float64))
        alone = fit_alone(
            inputs,
            self.targets,
            self.head,
            train=self.split.train,
            validation=self.split.validation,
            seed=self.seed,
        )
        test = self.split.test
        found = alone.measure(inputs.take(test), self.targets[test])
        return self.head.headline(found[alone.chosen])

    def scores(self, records: np.ndarray) -> np.ndarray:
        """Return records' class-mean scores: exact, without a bound on length.

        One number for two classes, of columns by rank; else one a class, of scaled columns.
        """
        rows, labels = self.split.train, self.targets
        if self.head.task == "regression":
            labels = np.zeros(len(labels), dtype=np.int64)
            own = own_inputs(self.own).values[rows]
            labels[rows] = classes_among_alike(self.targets[rows], own, 2)
        labels = labels.astype(np.int64)
        if labels.max() == 1:
            values = ndtri(rankdata(records, axis=0) / (len(records) + 1))
        else:
            low, high = records.min(axis=0), records.max(axis=0)
            values = (records - low) / np.where(high > low, high - low, 1) * 2 - 1
        centre = values[rows].mean(axis=0)
        means = [values[rows][labels[rows] == one].mean(axis=0) for one in np.unique(labels[rows])]
        found: np.ndarray = (values - centre) @ (np.array(means) - centre).T
        return found[:, 1:] - found[:, :1] if found.shape[1] == 2 else found


def at_full_length(scores: np.ndarray) -> np.ndarray:
    """Return vectors of length 1: angles of one score's ranks, or directions of several."""
    if scores.shape[1] > 1:
        return scores / np.maximum(np.linalg.norm(scores, axis=1, keepdims=True), 1e-12)
    ranks = rankdata(scores, axis=0) / (len(scores) + 1)
    angles = np.pi / 2 * np.clip(1.5 * (2 * ranks - 1), -1, 1)
    return np.hstack([np.sin(angles), np.cos(angles)])


def matched(own: PartyTable, other: PartyTable, *, true: bool) -> np.ndarray:
    """Return each row's record, or -1: the true match, or the nearest of those it is nearest to."""
    found = np.full(own.num_rows, -1)
    if true:
        assert own.entities is not None, "there is a truth"
        assert other.entities is not None, "there is a truth"
        records = {entity: record for record, entity in enumerate(other.entities.tolist())}
        return np.array([records.get(entity, -1) for entity in own.entities.tolist()])
    distances, rows = cKDTree(own.keys).query(other.keys)
    farthest_first = np.argsort(-distances)
    found[np.asarray(rows)[farthest_first]] = farthest_first
    return found


STEPS = ("pooled", "linked", "direction", "length", "noise")
"""What the primary has beside its columns: partners' of true matches; of linked records;
their exact scores; summed at full length; behind the noise of epsilon 8."""


def steps(config: FederationConfig, tables: Tables, *, noise: float, seed: int) -> dict[str, float]:
    """Return what the local baseline reaches alone, and at every one of :data:`STEPS`.

    Args:
        config: The federation file, for the split and the label.
        tables: Every party's.
        noise: Deviation, in lengths of a record's vector.
        seed: Of the noise.
    """
    enlarged, (own, *others) = Enlarged(config, tables), tables.parties
    near, true = (
        [matched(own, other, true=true) for other in others] for true in (False, tables.truth)
    )
    linked, found = columns_of(others, near), {"alone": enlarged.reached()}
    found["linked"] = found["pooled"] = enlarged.reached(*linked)
    if not all(map(np.array_equal, near, true)):
        found["pooled"] = enlarged.reached(*columns_of(others, true))
    scores = [enlarged.scores(records) for records in linked]
    found["direction"] = enlarged.reached(*scores)
    vectors = [
        at_full_length(score) * (at[:, None] >= 0) for score, at in zip(scores, near, strict=True)
    ]
    released = np.sum(vectors, axis=0)
    found["length"] = enlarged.reached(released)
    drawn = np.random.default_rng(seed).normal(size=released.shape)
    found["noise"] = enlarged.reached(released + noise * drawn)
    return found


def columns_of(others: Sequence[PartyTable], records: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the columns of each row's record at every party; means where there is none."""
    return [
        np.where(at[:, None] >= 0, other.features[at], other.features.mean(axis=0))
        for other, at in zip(others, records, strict=True)
    ]
