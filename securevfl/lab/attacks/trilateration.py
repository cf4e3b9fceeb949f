"""Where keys lie, from the distances that a coordinator computes and a few keys that it knows.

With d + 1 known rows in general position every squared distance of a record is a linear equation in
the record's place; records that are found then do the same for other rows. Where grid cells keep
most pairs from being compared, places spread from block to block, and known rows give away the
shift of the grid, and with it every other key to within a cell.

References:
    [VSCR13] Vatsalan et al., A Taxonomy of Privacy-preserving Record Linkage Techniques, 2013,
    section 3.4, on what a third party infers from distances.
"""

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from jaxtyping import Float64, Int64

from securevfl.config.federation import link_spec
from securevfl.lab.attacks import attack
from securevfl.lab.attacks.evidence import Evidence, PartyView
from securevfl.linkage.metrics.metric import LARGEST_UNIT
from securevfl.linkage.spec import LinkSpec
from securevfl.stages.encrypted_linkage.grid_cells import cell_units

DISTANCES: Final = "LINK_SHARE"
"""Name of a coordinator's line of the sums of two shares."""

CELLS: Final = "LINK_CELLS"

_MOST: Final = 1000
"""Rows and records that are looked at; more are drawn from."""

_ANCHORS: Final = 100
"""Keys by which another one is placed; more do not place it better."""

_LEAST_SPREAD: Final = 100.0
"""How far these must lie apart in every direction, in units of quantised keys."""

_PASSES: Final = 10
"""How often keys are placed anew where they are known to within a cell at first."""

_NEAR: Final = 0.01
"""Within which share of the keys' widest range a key counts as found."""

Places = Float64[np.ndarray, "keys key_dim"]
"""In units of quantised keys; NaN where nothing is known."""


class Trilateration:
    """A coordinator places all keys by squared distances, from those of some of the rows."""

    name = "trilateration"
    aim: attack.Aim = "keys"

    def missing(self, evidence: Evidence) -> str | None:
        """Return why it cannot be tried."""
        seen = evidence.coordinator
        if seen is None:
            return "needs the view of a coordinator"
        if next(seen.of(DISTANCES), None) is None:
            return "the coordinator has computed no distances of numbers"
        if evidence.primary is None or not evidence.secondaries:
            return "needs the views of the primary and of a secondary, to know what is right"
        return None

    def findings(self, evidence: Evidence, *, seeds: int) -> Iterator[attack.Leak]:
        """Yield which share of each secondary's keys is found; by the first, of the primary's."""
        assert evidence.coordinator is not None, "asked before"
        assert evidence.primary is not None, "asked before"
        spec = link_spec(evidence.config)
        names = [evidence.primary.name]
        for view in evidence.secondaries.values():
            seen = _Seen(spec, evidence.coordinator, evidence.primary, view)
            known = min(2 * (seen.places[0].shape[1] + 1), len(seen.places[0]) // 2)
            tried = [seen.guesses(known, seed=seed) for seed in range(seeds)]
            for about in (*names, view.name):
                side = int(about == view.name)
                wrong = np.concatenate([trial.wrong[side] for trial in tried])
                trivial = np.concatenate([trial.trivial[side] for trial in tried])
                rows = len(wrong) // seeds
                near = _NEAR * LARGEST_UNIT
                value = float((wrong <= near).mean())
                medians = spec.keys.key_range().step * np.median([wrong, trivial], axis=1)
                yield attack.Leak(
                    attack=self.name,
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
    """How far guesses are from keys that were not known, at the primary and at a secondary."""

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


class _Seen:
    """What a coordinator has seen of the primary and one secondary, and what is right."""

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
        for line in coordinator.of(DISTANCES):
            if line["of"] == view.name:
                self._take(line, chosen)
        self._cells: list[np.ndarray] = []
        for line in coordinator.of(CELLS):
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
        """Place all keys from those of so many rows."""
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
    """Return keys placed by others whose place is known; unchanged where these are too few.

    Args:
        before: Where they were thought to be.
        by: Places of others.
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
