"""Means of a secondary's columns, from averages and a few known rows."""

from collections.abc import Iterator
from typing import Final

import numpy as np
from jaxtyping import Float64

from securevfl.lab.attacks import attack
from securevfl.lab.attacks.evidence import Evidence, PartyView
from securevfl.lab.attacks.reconstruction import decoder, varying

_KNOWN: Final = 60
"""Number of rows whose columns the attacker knows."""

_LEAST_ROWS: Final = 200


def _column_means(evidence: Evidence, seeds: int) -> Iterator[attack.Leak]:
    """Yield, for each secondary, the reduction of the known rows' squared error.

    The floor is the same from the primary's own columns.
    """
    rows, averages = evidence.last_averages
    attack.require_links(evidence)
    own = evidence.primary.array("features").astype(np.float64)
    for view in evidence.with_links:
        there = np.flatnonzero(evidence.linked_rows(view)[rows])
        targets = varying(evidence.own_columns(view)[rows[there]])
        if len(there) < _LEAST_ROWS or not targets.shape[1]:
            continue
        own_inputs = own[rows[there]]
        yield _leak(
            COLUMN_MEANS.name,
            evidence,
            view,
            _errors(np.hstack([averages[there], own_inputs]), targets, seeds=seeds),
            _errors(own_inputs, targets, seeds=seeds),
            rows=len(there),
            seeds=seeds,
        )


def _errors(
    inputs: Float64[np.ndarray, "rows numbers"],
    targets: Float64[np.ndarray, "rows columns"],
    *,
    seeds: int,
) -> Float64[np.ndarray, "two columns"]:
    """Return the squared errors of each column's mean: of the guess, and of the known rows' mean.

    Several sets of known rows stand for each seed: one mean says little.
    """
    errors = np.zeros((2, targets.shape[1]))
    for seed in range(4 * seeds):
        known = np.random.default_rng(seed).permutation(len(targets))[:_KNOWN]
        guess = decoder(inputs, targets, known)(np.arange(len(targets)))
        corrected = guess.mean(axis=0) + (targets[known] - guess[known]).mean(axis=0)
        right = targets.mean(axis=0)
        errors += [(corrected - right) ** 2, (targets[known].mean(axis=0) - right) ** 2]
    return errors


def _leak(
    name: str,
    evidence: Evidence,
    view: PartyView,
    seen: Float64[np.ndarray, "two columns"],
    own: Float64[np.ndarray, "two columns"],
    *,
    rows: int,
    seeds: int,
) -> attack.Leak:
    def error_saving(errors: Float64[np.ndarray, "two columns"]) -> float:
        return float(1 - errors[0].sum() / errors[1].sum())

    return attack.Leak(
        attack=name,
        attacker=evidence.config.primary.name,
        about=view.name,
        channel="aggregates",
        measure="share of the squared error of known rows' means that is taken away; over columns",
        value=error_saving(seen),
        interval=attack.bootstrap_interval(
            lambda chosen: error_saving(seen[:, chosen]), seen.shape[1]
        ),
        floor=max(error_saving(own), 0.0),
        floor_is="the same from its own columns",
        rows=rows,
        known=f"the secondary's columns of {_KNOWN} rows",
        seeds=seeds,
    )


COLUMN_MEANS = attack.Attack("column-means", "columns", _column_means)
"""Attack on means: decoded values of all rows, corrected by their error on known rows.

A mean over few known rows differs from that of all rows. What averages say of all rows corrects it,
as a survey's estimate is corrected by what is known of everyone.
"""
