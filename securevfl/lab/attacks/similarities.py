"""Keys and ids from linkage and from FedSim's noised similarities.

References:
    [FedSim] section 5.2 (greedy attack: the most likely distance, each alone) and appendix B,
    which leaves attackers that read several similarities together to others; here is one.
    [VSCR13] Vatsalan et al., A Taxonomy of Privacy-preserving Record Linkage Techniques, 2013,
    section 3.4 (dictionary and frequency attacks).
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from jaxtyping import Float64, Int64

from securevfl.config.federation import link_spec
from securevfl.lab.attacks import attack
from securevfl.lab.attacks.attack import Evidence, PartyView, UnavailableError
from securevfl.lab.attacks.reconstruction import decoder, varying
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
        tried = [distances.errors(known, seed=seed) for seed in range(seeds)]
        for about in (*names, view.name):
            of_about = [trial[int(about == view.name)] for trial in tried]
            wrong, trivial = map(np.concatenate, zip(*of_about, strict=True))
            rows = len(wrong) // seeds
            near = _NEAR * LARGEST_UNIT
            value = float((wrong <= near).mean())
            medians = spec.keys.key_range().step * np.median([wrong, trivial], axis=1)
            yield attack.Leak(
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

    def errors(self, known: int, *, seed: int) -> list[tuple[Any, Any]]:
        """Place all keys from those of `known` rows.

        Returns:
            For the primary's other keys, and for the secondary's: the errors of their places, and
            of the nearest known key.
        """
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
        unknown: list[Any] = [np.setdiff1d(np.arange(len(self.places[0])), order), slice(None)]
        return [
            (
                np.linalg.norm((guess - true)[left], axis=1),
                np.linalg.norm(true[left][:, None] - taught, axis=2).min(axis=1),
            )
            for guess, true, left in zip(guesses, self.places, unknown, strict=True)
        ]


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


_KNOWN: Final = 30
"""Number of records whose keys the attacker by codes knows."""

_MOST_RECORDS: Final = 1500
"""Most records whose codes are read; a random sample of more."""

_GUESSES: Final = 10
"""Number of made-up ids for each of a secondary's own records."""


def _require_codes(evidence: Evidence) -> None:
    """Refuse runs that do not link by ids or words, or whose views are missing."""
    if not evidence.has_primary or not evidence.secondaries:
        raise UnavailableError("needs the views of the primary and of a secondary")
    views = (evidence.primary, *evidence.secondaries.values())
    if not all("link_keys" in view.held for view in views):
        raise UnavailableError(
            "parties link by numbers that have no codes, and not by ids or words"
        )


def _keys(view: PartyView) -> list[str]:
    keys: list[str] = list(view.held["link_keys"])
    return keys


def _guessed_ids(evidence: Evidence, seeds: int) -> Iterator[attack.Leak]:
    """Yield, for each secondary, the share of the primary's other ids that it finds."""
    _require_codes(evidence)
    if not all(key.isdecimal() for key in map(_whole, _keys(evidence.primary))):
        raise UnavailableError("ids are no whole numbers")
    theirs = {int(_whole(key)) for key in _keys(evidence.primary)}
    digits = len(str(max(theirs)))
    for view in evidence.secondaries.values():
        own = {int(key) for key in map(_whole, _keys(view)) if key.isdecimal()}
        wanted = sorted(theirs - own)
        if not own or not wanted:
            continue
        between = np.setdiff1d(np.arange(min(own), max(own) + 1), sorted(own))
        shares = []
        for seed in range(seeds):
            guesses = np.random.default_rng(seed).permutation(between)[: _GUESSES * len(own)]
            shares.append(float(np.isin(wanted, guesses).mean()))
        hits = round(float(np.mean(shares)) * len(wanted))
        listed = min(len(between), _GUESSES * len(own))
        yield attack.Leak(
            attacker=view.name,
            about=evidence.config.primary.name,
            channel="linkage",
            measure="share of the primary's other ids that are found",
            value=float(np.mean(shares)),
            interval=attack.exact_interval(hits, len(wanted)),
            floor=min(1.0, listed / 10**digits),
            floor_is=f"as many of all numbers of {digits} digits",
            rows=len(wanted),
            known="how ids are written",
            seeds=seeds,
        )


def _whole(key: str) -> str:
    """Return an id without ``.0``: whole numbers of a column with gaps are read as floats."""
    return key.removesuffix(".0")


def _code_frequencies(evidence: Evidence, _seeds: int) -> Iterator[attack.Leak]:
    """Yield, for each secondary, the share of its records whose key is guessed right."""
    _require_codes(evidence)
    coordinator = evidence.config.helper("coordinator")
    if coordinator is None:
        raise UnavailableError("no coordinator is sent codes")
    primary_keys = _keys(evidence.primary)
    if len(set(primary_keys)) == len(primary_keys):
        raise UnavailableError("no two rows have equal keys")
    ranked = [key for key, _ in Counter(primary_keys).most_common()]
    for view in evidence.secondaries.values():
        keys = _keys(view)
        # A code's own bits are not read: codes are equal or not.
        codes = [code for code, _ in Counter(keys).most_common()]
        guess = dict(zip(codes, ranked, strict=False))
        hits = sum(guess.get(key) == key for key in keys)
        yield attack.Leak(
            attacker=coordinator.name,
            about=view.name,
            channel="linkage",
            measure="share of records whose key is guessed",
            value=hits / len(keys),
            interval=attack.exact_interval(hits, len(keys)),
            floor=keys.count(ranked[0]) / len(keys),
            floor_is="always the most frequent key",
            rows=len(keys),
            known="how frequent keys are at the primary",
        )


def _code_places(evidence: Evidence, seeds: int) -> Iterator[attack.Leak]:
    """Yield, for each secondary, the share of its keys' variance that is explained."""
    if evidence.config.linkage.protection != "bloom":
        raise UnavailableError("no coordinator is sent codes of numbers")
    coordinator = evidence.coordinator
    if not any("own_keys" in view.held for view in evidence.secondaries.values()):
        raise UnavailableError("needs the view of a secondary that links by numbers")
    codes_of = {line["of"]: line["records"].numpy() for line in coordinator.of_kind("LINK_CODES")}
    for view in evidence.secondaries.values():
        if "own_keys" not in view.held or len(view.array("own_keys")) < 2 * _KNOWN:
            continue
        chosen = np.random.default_rng(0).permutation(len(view.array("own_keys")))
        keys = view.array("own_keys")[chosen[:_MOST_RECORDS]]
        bits = np.unpackbits(codes_of[view.name][chosen[:_MOST_RECORDS]], axis=1)
        bits = bits.astype(np.float64)
        targets = varying(keys)
        errors, spread = [], []
        for seed in range(seeds):
            order = np.random.default_rng(seed).permutation(len(keys))
            known, left = order[:_KNOWN], order[_KNOWN:]
            guess = decoder(bits, targets, known)(left)
            errors.append(((targets[left] - guess) ** 2).sum(axis=1))
            mean = targets[known].mean(axis=0)
            spread.append(((targets[left] - mean) ** 2).sum(axis=1))
        wrong, trivial = np.mean(errors, axis=0), np.mean(spread, axis=0)
        yield attack.Leak(
            attacker=coordinator.name,
            about=view.name,
            channel="linkage",
            measure="R2; share of the keys' variance that is explained",
            value=attack.explained_share(wrong, trivial),
            interval=attack.explained_interval(wrong, trivial),
            floor=0.0,
            floor_is="the mean of known keys",
            rows=len(wrong),
            known=f"the keys of {_KNOWN} records",
            seeds=seeds,
        )


GUESSED_IDS = attack.Attack("guessed-ids", "links", _guessed_ids)
"""Attack by a secondary that adds made-up ids to its table: links show which the primary has.

The ids are whole numbers between its least and its largest id. No protection prevents it: all of
them compute equality in the tables that parties bring.
"""

CODE_FREQUENCIES = attack.Attack("code-frequencies", "keys", _code_frequencies)
"""Attack by the ranks of codes: the most frequent code is that of the most frequent key.

The coordinator has codes of both sides and knows how frequent keys are in general; the other side's
table stands for that knowledge.
"""

CODE_PLACES = attack.Attack("code-places", "keys", _code_places)
"""Attack by near codes: near numbers have near codes, and known keys decode the others."""
