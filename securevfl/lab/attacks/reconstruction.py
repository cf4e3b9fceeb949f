"""Columns of a secondary and their means, from the averages that the primary receives.

References:
    [LWX21] Luo et al., Feature Inference Attack on Model Predictions in Vertical Federated
    Learning, section IV; here from averages, with a regression in the place of a generator.
"""

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from jaxtyping import Float64, Int64
from sklearn.kernel_ridge import KernelRidge
from sklearn.linear_model import RidgeCV
from sklearn.model_selection import cross_val_predict
from sklearn.preprocessing import StandardScaler

from securevfl.lab.attacks import attack
from securevfl.lab.attacks.attack import Evidence, PartyView

_KNOWN_SHARE: Final = 0.2
"""Share of the linked rows whose columns the attacker knows."""

_LEAST_KNOWN: Final = 20
_MOST_KNOWN: Final = 1000
_MOST_ROWS: Final = 5000
_ALPHAS: Final = (0.1, 1.0, 10.0, 100.0, 1000.0)


def _reconstruction(evidence: Evidence, seeds: int) -> Iterator[attack.Leak]:
    """Yield, for each secondary, the share of its columns' variance that is explained.

    The floor is the same decoder of the primary's own columns; the ceiling has averages without
    noise.
    """
    rows, averages = evidence.last_averages
    attack.require_links(evidence)
    own = evidence.primary.array("features").astype(np.float64)
    clear = evidence.without_noise(rows) if evidence.knows_terms else None
    for view in evidence.with_links:
        there = np.flatnonzero(evidence.linked_rows(view)[rows])
        there = np.random.default_rng(0).permutation(there)[:_MOST_ROWS]
        targets = varying(evidence.own_columns(view)[rows[there]])
        inputs = {"own": own[rows[there]], "seen": averages[there]}
        if clear is not None and evidence.noise_deviation:
            inputs["clear"] = clear[there]
        yield from _decoding_leaks(evidence, view, inputs, targets, seeds=seeds)


def _decoding_leaks(
    evidence: Evidence,
    view: PartyView,
    inputs: dict[str, Float64[np.ndarray, "rows numbers"]],
    targets: Float64[np.ndarray, "rows columns"],
    *,
    seeds: int,
) -> Iterator[attack.Leak]:
    errors: dict[str, list[Float64[np.ndarray, " left"]]] = {name: [] for name in inputs}
    spreads = []
    known = min(_MOST_KNOWN, int(_KNOWN_SHARE * len(targets)))
    if known < _LEAST_KNOWN or not targets.shape[1]:
        return
    for seed in range(seeds):
        order = np.random.default_rng(seed).permutation(len(targets))
        taught, left = order[:known], order[known:]
        spreads.append(((targets[left] - targets[taught].mean(axis=0)) ** 2).sum(axis=1))
        for name, numbers in inputs.items():
            # A primary that has averages also has its own columns.
            whole = numbers if name == "own" else np.hstack([numbers, inputs["own"]])
            guess = decoder(whole, targets, taught)(left)
            errors[name].append(((targets[left] - guess) ** 2).sum(axis=1))

    shares = {
        name: float(np.mean([*map(attack.explained_share, of_seeds, spreads)]))
        for name, of_seeds in errors.items()
    }
    ends = [*map(attack.explained_interval, errors["seen"], spreads)]
    low, high = np.mean(ends, axis=0)
    yield attack.Leak(
        attacker=evidence.config.primary.name,
        about=view.name,
        channel="aggregates",
        measure="R2; share of the columns' variance that is explained",
        value=shares["seen"],
        interval=(float(low), float(high)),
        floor=max(shares["own"], 0.0),
        floor_is="the same decoder of its own columns",
        ceiling=shares.get("clear"),
        rows=len(spreads[0]),
        known=f"the secondary's columns of {known} rows",
        seeds=seeds,
    )


def varying(columns: Float64[np.ndarray, "rows every"]) -> Float64[np.ndarray, "rows columns"]:
    """Return columns that vary, each with mean 0 and deviation 1."""
    spread = columns.std(axis=0)
    centred: Float64[np.ndarray, "rows columns"] = (columns - columns.mean(axis=0))[:, spread > 0]
    return centred / spread[spread > 0]


def decoder(
    inputs: Float64[np.ndarray, "rows numbers"],
    targets: Float64[np.ndarray, "rows columns"],
    taught: Int64[np.ndarray, " taught"],
) -> Any:
    """Return the better of a linear and a kernel regression, by cross-validation."""
    if not inputs.shape[1]:
        mean = targets[taught].mean(axis=0)
        return lambda asked: np.broadcast_to(mean, (len(asked), targets.shape[1]))
    scaler = StandardScaler().fit(inputs[taught])
    known, wanted = scaler.transform(inputs[taught]), targets[taught]
    gamma = 0.5 / known.shape[1]
    candidates = [RidgeCV(_ALPHAS)]
    candidates += [KernelRidge(alpha=alpha, kernel="rbf", gamma=gamma) for alpha in (0.1, 1.0)]
    errors = [
        float(((cross_val_predict(candidate, known, wanted, cv=3) - wanted) ** 2).sum())
        for candidate in candidates
    ]
    best = candidates[int(np.argmin(errors))].fit(known, wanted)
    return lambda asked: best.predict(scaler.transform(inputs[asked])).reshape(len(asked), -1)


RECONSTRUCTION = attack.Attack("reconstruction", "columns", _reconstruction)
"""Attack on columns of a row's records, by its average and the primary's own columns."""


_KNOWN_ROWS: Final = 60
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
        seen = _mean_errors(np.hstack([averages[there], own_inputs]), targets, seeds=seeds)
        by_own = _mean_errors(own_inputs, targets, seeds=seeds)
        yield attack.Leak(
            attacker=evidence.config.primary.name,
            about=view.name,
            channel="aggregates",
            measure="share of the squared error of known rows' means that is taken away; over "
            "columns",
            value=_error_saving(seen),
            interval=attack.bootstrap_interval(
                lambda chosen, errors=seen: _error_saving(errors[:, chosen]),  # type: ignore[misc]
                seen.shape[1],
            ),
            floor=max(_error_saving(by_own), 0.0),
            floor_is="the same from its own columns",
            rows=len(there),
            known=f"the secondary's columns of {_KNOWN_ROWS} rows",
            seeds=seeds,
        )


def _mean_errors(
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
        known = np.random.default_rng(seed).permutation(len(targets))[:_KNOWN_ROWS]
        guess = decoder(inputs, targets, known)(np.arange(len(targets)))
        corrected = guess.mean(axis=0) + (targets[known] - guess[known]).mean(axis=0)
        right = targets.mean(axis=0)
        errors += [(corrected - right) ** 2, (targets[known].mean(axis=0) - right) ** 2]
    return errors


def _error_saving(errors: Float64[np.ndarray, "two columns"]) -> float:
    return float(1 - errors[0].sum() / errors[1].sum())


COLUMN_MEANS = attack.Attack("column-means", "columns", _column_means)
"""Attack on means: decoded values of all rows, corrected by their error on known rows.

A mean over few known rows differs from that of all rows. What averages say of all rows corrects it,
as a survey's estimate is corrected by what is known of everyone.
"""
