"""Distances and places of records from FedSim's noised similarities.

References:
    [FedSim] section 5.2 (greedy attack: the most likely distance, each alone) and appendix B,
    which leaves attackers that read several similarities together to others; here is one.
"""

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from jaxtyping import Float64, Int64

from securevfl.config.federation import link_spec
from securevfl.lab.attacks import attack
from securevfl.lab.attacks.attack import Evidence, PartyView, UnavailableError
from securevfl.linkage.metrics.metric import LARGEST_UNIT
from securevfl.linkage.spec import LinkSpec
from securevfl.stages.encrypted_linkage.block_search import cell_units

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


DISTANCES: Final = "LINK_SHARE"
"""Kind of a coordinator's messages with sums of two shares."""

CELLS: Final = "LINK_CELLS"
"""Kind of a coordinator's messages with grid cells."""

_MOST: Final = 1000
"""Most rows and most records that are placed; a random sample of more."""

_ANCHORS: Final = 100
"""Most keys by which another key is placed."""

_LEAST_SPREAD: Final = 100.0
"""Least spread of these keys in every direction, in units of quantised keys."""

_PASSES: Final = 10
"""Number of times that keys are placed if they are known to within a cell at first."""

_NEAR: Final = 0.01
"""Largest error of a right guess, as a share of the keys' widest range."""

Places = Float64[np.ndarray, "keys key_dim"]
"""Places in units of quantised keys; NaN where a place is unknown."""


def _trilaterate(evidence: Evidence, seeds: int) -> Iterator[attack.Leak]:
    """Yield the share of each secondary's keys that is placed, and first of the primary's."""
    if next(evidence.coordinator.of_kind(DISTANCES), None) is None:
        raise UnavailableError("the coordinator has computed no distances of numbers")
    if not evidence.has_primary or not evidence.secondaries:
        raise UnavailableError(
            "needs the views of the primary and of a secondary, to know what is right"
        )
    spec = link_spec(evidence.config)
    names = [evidence.primary.name]
    for view in evidence.secondaries.values():
        distances = _Distances(spec, evidence.coordinator, evidence.primary, view)
        known = min(2 * (distances.places[0].shape[1] + 1), len(distances.places[0]) // 2)
        tried = [distances.guesses(known, seed=seed) for seed in range(seeds)]
        for about in (*names, view.name):
            side = int(about == view.name)
            wrong = np.concatenate([trial.wrong[side] for trial in tried])
            trivial = np.concatenate([trial.trivial[side] for trial in tried])
            rows = len(wrong) // seeds
            near = _NEAR * LARGEST_UNIT
            value = float((wrong <= near).mean())
            medians = spec.keys.key_range().step * np.median([wrong, trivial], axis=1)
            yield attack.Leak(
                attack=TRILATERATION.name,
                attacker=evidence.coordinator.name,
                about=about,
                channel="linkage",
                measure=f"share of keys that are found to within {_NEAR:.0%} of their range, "
                f"median error {medians[0]:.2g}, of the trivial guess {medians[1]:.2g}",
                value=value,
                interval=attack.exact_interval(round(value * rows), rows),
                floor=float((trivial <= near).mean()),
                floor_is="the nearest known key",
                rows=rows,
                known=f"the keys of {known} rows of {evidence.primary.name}",
                seeds=seeds,
            )
        names = []


class _Guesses:
    """Errors of guesses of the primary's and a secondary's unknown keys."""

    def __init__(
        self, guesses: list[Places], right: list[Places], known: Int64[np.ndarray, " some"]
    ) -> None:
        taught = right[0][known]
        unknown = [np.setdiff1d(np.arange(len(right[0])), known), np.arange(len(right[1]))]
        pairs = [
            (guess[left], true[left])
            for guess, true, left in zip(guesses, right, unknown, strict=True)
        ]
        self.wrong = [np.linalg.norm(guess - true, axis=1) for guess, true in pairs]
        self.trivial = [
            np.linalg.norm(true[:, None] - taught, axis=2).min(axis=1) for _, true in pairs
        ]


class _Distances:
    """A coordinator's distances between the primary's and one secondary's keys, and true places."""

    def __init__(
        self, spec: LinkSpec, coordinator: PartyView, primary: PartyView, view: PartyView
    ) -> None:
        keys, self._width = spec.keys.key_range(), cell_units(spec)
        random = np.random.default_rng(0)
        self.places, chosen = [], []
        for party_view in (primary, view):
            units = keys.quantise(party_view.array("own_keys")).astype(np.float64)
            drawn = np.sort(random.permutation(len(units))[:_MOST])
            self.places.append(units[drawn])
            # Where each key stands among those that are looked at; -1 for others.
            where = np.full(len(units), -1)
            where[drawn] = np.arange(len(drawn))
            chosen.append(where)
        self.squared = np.full([len(place) for place in self.places], np.nan)
        for line in coordinator.of_kind(DISTANCES):
            if line["of"] == view.name:
                self._take(line, chosen)
        self._cells: list[np.ndarray] = []
        for line in coordinator.of_kind(CELLS):
            if line["of"] == view.name:
                both = (line["rows"].numpy(), line["records"].numpy())
                self._cells = [cells[at >= 0] for cells, at in zip(both, chosen, strict=True)]

    def _take(self, line: dict[str, Any], chosen: list[np.ndarray]) -> None:
        rows, records, squared = (line[name].numpy() for name in ("rows", "records", "squared"))
        ends = np.cumsum(line["sizes"].numpy(), axis=0)
        starts, pairs = ends - line["sizes"].numpy(), 0
        for (row, record), (row_end, record_end) in zip(
            starts.tolist(), ends.tolist(), strict=True
        ):
            mine, theirs = chosen[0][rows[row:row_end]], chosen[1][records[record:record_end]]
            block = squared[pairs : pairs + len(mine) * len(theirs)]
            pairs += len(block)
            block = block.reshape(len(mine), len(theirs))[mine >= 0][:, theirs >= 0]
            self.squared[np.ix_(mine[mine >= 0], theirs[theirs >= 0])] = block

    def guesses(self, known: int, *, seed: int) -> _Guesses:
        """Place all keys from those of `known` rows."""
        order = np.random.default_rng(seed).permutation(len(self.places[0]))[:known]
        guesses = [np.full_like(place, np.nan) for place in self.places]
        taught = guesses[0][order] = self.places[0][order]
        if self._cells:
            cells, width = self._cells, self._width
            # Each known row lies in its cell: the shift is between the narrowest bounds.
            least = cells[0][order] * width - taught
            shift = (least.max(axis=0) + least.min(axis=0) + width) / 2
            guesses = [(cell + 0.5) * width - shift for cell in cells]
        for _ in range(_PASSES if self._cells else 1):
            # Records by rows, then rows by records.
            guesses[1] = _place_keys(guesses[1], by=guesses[0], squared=self.squared)
            guesses[0] = _place_keys(guesses[0], by=guesses[1], squared=self.squared.T)
            # Distances leave a common shift open, which known rows say.
            apart = (taught - guesses[0][order]).mean(axis=0)
            guesses = [guess + apart for guess in guesses]
        guesses = [np.where(np.isnan(guess), taught.mean(axis=0), guess) for guess in guesses]
        return _Guesses(guesses, self.places, order)


def _place_keys(before: Places, *, by: Places, squared: Float64[np.ndarray, "by asked"]) -> Places:
    """Return keys placed by other keys; unchanged where too few others are placed.

    Args:
        before: Earlier guesses of the places.
        by: Places of the other keys.
        squared: Squared distances; NaN where two were not compared.
    """
    there, places = ~np.isnan(by[:, 0]), before.copy()
    for number in range(len(before)):
        anchors = np.flatnonzero(there & ~np.isnan(squared[:, number]))[:_ANCHORS]
        if (place := _locate_key(by[anchors], squared[anchors, number])) is not None:
            places[number] = place
    return places


def _locate_key(
    anchors: Float64[np.ndarray, "some key_dim"], squared: Float64[np.ndarray, " some"]
) -> Float64[np.ndarray, " key_dim"] | None:
    """Return the place at these distances, by least squares; None if it is not determined."""
    if len(anchors) <= anchors.shape[1]:
        return None
    centre = anchors.mean(axis=0)
    apart = anchors - centre
    if np.linalg.svd(apart, compute_uv=False)[-1] < _LEAST_SPREAD:
        return None
    lengths = (apart**2).sum(axis=1) - squared
    ways: Float64[np.ndarray, " key_dim"]
    ways = np.linalg.lstsq(2 * apart, lengths - lengths.mean(), rcond=None)[0]
    return centre + ways


TRILATERATION = attack.Attack("trilateration", "keys", _trilaterate)
"""Attack by a coordinator, which places all keys by squared distances from a few known ones."""
