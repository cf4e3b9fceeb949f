"""Distances and places of records from FedSim's noised similarities.

References:
    [FedSim] section 5.2 (greedy attack: the most likely distance, each alone) and appendix B,
    which leaves attackers that read several similarities together to others; here is one.
"""

from collections.abc import Iterator
from typing import Final

import numpy as np
from jaxtyping import Float64, Int64

from securevfl.lab.attacks import attack
from securevfl.lab.attacks.evidence import Evidence, PartyView, UnavailableError

_MOST_ROWS: Final = 400
"""Most rows for which a linked record is placed; a random sample of more."""

_TOGETHER: Final = 20
"""Number of near rows of the primary whose similarities are combined."""

_NEVER: Final = 0.02
"""Share of fits that fail for reasons outside the model."""

_CANDIDATES: Final = 400
"""Number of places that are tried for each record."""


def _secondaries(evidence: Evidence) -> list[PartyView]:
    """Return the views of secondaries whose similarities can be attacked.

    Raises:
        UnavailableError: If there are none.
    """
    if "similarities" not in evidence.primary.held:
        raise UnavailableError("no similarity was sent")
    if evidence.config.linkage.metric != "euclidean":
        raise UnavailableError("is written for Euclidean distances of keys")
    attack.require_links(evidence)
    return evidence.with_links


class _Similarities:
    """Similarities that the primary has of one secondary, with true distances and places.

    ``rows`` are those with a record in every slot.
    """

    def __init__(self, evidence: Evidence, view: PartyView) -> None:
        place = [secondary.name for secondary in evidence.config.secondaries].index(view.name)
        links = view.array("links")
        own = evidence.primary.array("keys").astype(np.float64)
        self.sent = evidence.primary.array("similarities")[:, place].astype(np.float64)
        self.rows = np.flatnonzero((links >= 0).all(axis=1) & np.isfinite(self.sent).all(axis=1))
        self.keys = own
        records = view.array("keys").astype(np.float64)
        self.places = records[links]
        self.distances = np.linalg.norm(records[links] - own[:, None], axis=2)
        taught = np.intersect1d(evidence.primary.array("train"), self.rows)
        of_training = self.distances[taught]
        self.mean, self.deviation = float(of_training.mean()), float(of_training.std())
        exact = (self.mean - self.distances[taught]) / self.deviation
        # In units of the deviation. What is sent has no other part.
        self.noise = float(np.std(self.sent[taught] - exact))

    def guess_distances(self) -> Float64[np.ndarray, "rows links"]:
        """Return the most likely distance of each similarity, with a standard normal prior."""
        similarities: Float64[np.ndarray, "rows links"]
        similarities = self.mean - self.deviation * self.sent / (1 + self.noise**2)
        return similarities


def _similarity_distance(evidence: Evidence, _seeds: int) -> Iterator[attack.Leak]:
    """Yield, for each secondary, the share of the distances' variance that is explained."""
    for view in _secondaries(evidence):
        known = _Similarities(evidence, view)
        right, guess = known.distances[known.rows], known.guess_distances()[known.rows]
        yield _leak(
            SIMILARITY_DISTANCE.name,
            evidence,
            view,
            "R2; share of the distances' variance that is explained",
            (right - guess) ** 2,
            (right - known.mean) ** 2,
            "the mean distance, which is known",
        )


def _similarity_place(evidence: Evidence, seeds: int) -> Iterator[attack.Leak]:
    """Yield, for each secondary, the gain of guesses over the row's own key."""
    for view in _secondaries(evidence):
        known = _Similarities(evidence, view)
        random = np.random.default_rng(0)
        rows = random.permutation(known.rows)[:_MOST_ROWS]
        slots = random.integers(known.sent.shape[1], size=len(rows))
        right = known.places[rows, slots]
        guess = np.mean([_places(known, rows, slots, seed=seed) for seed in range(seeds)], axis=0)
        yield _leak(
            SIMILARITY_PLACE.name,
            evidence,
            view,
            "R2; share of the squared way from a row's key to a linked record's",
            ((right - guess) ** 2).sum(axis=1),
            ((right - known.keys[rows]) ** 2).sum(axis=1),
            "the row's own key",
            seeds=seeds,
        )


def _places(
    known: _Similarities,
    rows: Int64[np.ndarray, " some"],
    slots: Int64[np.ndarray, " some"],
    *,
    seed: int,
) -> Float64[np.ndarray, "some dimension"]:
    random = np.random.default_rng(seed)
    guessed = np.maximum(known.guess_distances(), 0.0)
    # Of a distance that was guessed: noise that the prior has not taken away.
    blur = known.deviation * max(known.noise / np.sqrt(1 + known.noise**2), 0.05)
    centres = []
    for row, slot in zip(rows.tolist(), slots.tolist(), strict=True):
        own = known.keys[row]
        apart = np.linalg.norm(known.keys[known.rows] - own, axis=1)
        near = known.rows[np.argsort(apart)[:_TOGETHER]]
        way = random.normal(size=(_CANDIDATES, len(own)))
        way /= np.linalg.norm(way, axis=1, keepdims=True)
        far = np.abs(guessed[row, slot] + blur * random.normal(size=_CANDIDATES))
        places = own + far[:, None] * way
        distances = np.linalg.norm(places[:, None] - known.keys[near], axis=2)
        misfit = np.abs(distances[..., None] - guessed[near]).min(axis=2) / blur
        # A record that is nearer to a row than its furthest link is linked to it too, so that some
        # similarity must fit; how often one does by chance is what a fit is worth.
        furthest = guessed[near].max(axis=1)
        chance = np.minimum(2.0 * blur * guessed.shape[1] / np.maximum(furthest, blur), 1.0)
        fits = np.log((np.exp(-(misfit**2) / 2) + _NEVER) / (chance + _NEVER))
        likely = np.where(distances < furthest, fits, 0.0).sum(axis=1)
        weights = np.exp(likely - likely.max())
        centres.append(weights @ places / weights.sum())
    return np.array(centres)


def _leak(
    name: str,
    evidence: Evidence,
    view: PartyView,
    measure: str,
    errors: Float64[np.ndarray, "rows ..."],
    trivial: Float64[np.ndarray, "rows ..."],
    floor_is: str,
    *,
    seeds: int = 1,
) -> attack.Leak:
    return attack.Leak(
        attack=name,
        attacker=evidence.config.primary.name,
        about=view.name,
        channel="similarities",
        measure=measure,
        value=attack.explained_share(errors, trivial),
        interval=attack.explained_interval(errors, trivial),
        floor=0.0,
        floor_is=floor_is,
        rows=len(errors),
        known="mean and deviation of distances",
        seeds=seeds,
    )


SIMILARITY_DISTANCE = attack.Attack("similarity-greedy", "keys", _similarity_distance)
"""[FedSim]'s greedy attack: the most likely distance of each similarity alone."""

SIMILARITY_PLACE = attack.Attack("similarity-places", "keys", _similarity_place)
"""Attack by several near rows' similarities, which together say where a record lies.

Records have no numbers, so nothing says which similarities are of one record. A place is the more
likely, the better each near row has some similarity that is as far. The guess is the mean of places
around the row, weighted by that likelihood.
"""
