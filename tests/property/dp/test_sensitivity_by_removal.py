"""Sensitivities against every possible removal and exchange in small random federations.

Linking is written here as two plain loops, apart from the linkage package: every record is
eligible for its own m nearest rows, and a row takes the K nearest eligible records.
"""

import itertools
import math
import zlib

import numpy as np
import pytest

from securevfl.dp.events import Neighbouring, Unit
from securevfl.dp.sensitivity import row_change, rows_changed, sum_sensitivity

ROWS, RECORDS, WIDTH = 7, 6, 3


def links_of(rows: np.ndarray, records: dict[int, np.ndarray], *, cap: int, k: int) -> list[tuple]:
    """Return for each row the ids of its linked records, nearest first."""
    eligible: list[list[int]] = [[] for _ in rows]
    for record, key in records.items():
        nearest = sorted(range(len(rows)), key=lambda row: (abs(rows[row] - key), row))
        for row in nearest[:cap]:
            eligible[row].append(record)
    return [
        tuple(sorted(ids, key=lambda one: (abs(rows[row] - records[one]), one))[:k])
        for row, ids in enumerate(eligible)
    ]


def vector_of(*ids: object) -> np.ndarray:
    """Return an arbitrary vector of norm 1 that depends on all of ``ids``: a worst-case model."""
    vector = np.random.default_rng(zlib.crc32(repr(("model", *ids)).encode())).normal(size=WIDTH)
    return vector / np.linalg.norm(vector)


def released(links: list[tuple], *, k: int, pooled: bool) -> np.ndarray:
    """Return one secondary's clipped term, shape (rows, width), at clip norm 1."""
    if pooled:
        return np.array(
            [sum((vector_of(one) for one in ids), np.zeros(WIDTH)) / k for ids in links]
        )
    return np.array([vector_of(row, ids) for row, ids in enumerate(links)])


def federations(seed: int):
    """Yield rows' keys and a secondary's records (two of them spare, for exchanges)."""
    generator = np.random.default_rng(seed)
    for _ in range(12):
        rows = generator.normal(size=ROWS)
        yield rows, {one: generator.normal() for one in range(RECORDS + 2)}


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize(("cap", "k"), [(1, 1), (1, 3), (2, 2), (3, 2), (7, 3)])
def test_no_removal_or_exchange_moves_the_sum_further_than_reported(
    cap: int, k: int, pooled: bool
) -> None:
    """Each record removed, and each exchanged for each spare one: rows and distance in bounds."""
    reach = {
        relation: sum_sensitivity(
            clip_norm=1.0,
            active=1,
            unit=Unit.SECONDARY_RECORD,
            links_per_record=cap,
            rows=ROWS,
            neighbouring=relation,
            pooled_links=k if pooled else None,
        )
        for relation in Neighbouring
    }
    for rows, everything in federations(seed=cap * 10 + k):
        records = {one: key for one, key in everything.items() if one < RECORDS}
        spare = [one for one in everything if one >= RECORDS]
        whole = links_of(rows, records, cap=cap, k=k)
        term = released(whole, k=k, pooled=pooled)
        for out, into in itertools.product(records, [None, *spare]):
            changed = {one: key for one, key in records.items() if one != out}
            relation = Neighbouring.ADD_REMOVE
            if into is not None:
                changed[into] = everything[into]
                relation = Neighbouring.REPLACE_ONE
            other = links_of(rows, changed, cap=cap, k=k)
            moved = released(other, k=k, pooled=pooled) - term

            touched = int((np.linalg.norm(moved, axis=1) > 1e-12).sum())
            assert touched <= rows_changed(links_per_record=cap, rows=ROWS, neighbouring=relation)
            assert np.linalg.norm(moved) <= reach[relation] * (1 + 1e-12)


@pytest.mark.parametrize(("cap", "k"), [(1, 1), (2, 2), (3, 4), (7, 3)])
def test_uncontested_slots_move_by_half_as_much_when_a_record_goes(cap: int, k: int) -> None:
    """All eligible records added up and drawn back to the ball: C/K a row for each one removed."""

    def drawn_back(links: list[tuple]) -> np.ndarray:
        rows = released(links, k=k, pooled=True)
        norms = np.linalg.norm(rows, axis=1, keepdims=True)
        return rows / np.maximum(norms, 1.0)

    reach = row_change(
        clip_norm=1.0,
        active=1,
        unit=Unit.SECONDARY_RECORD,
        pooled_links=k,
        contested=False,
    ) * math.sqrt(rows_changed(links_per_record=cap, rows=ROWS))
    for rows, everything in federations(seed=100 + cap * 10 + k):
        whole = drawn_back(links_of(rows, everything, cap=cap, k=len(everything)))
        for out in everything:
            rest = {one: key for one, key in everything.items() if one != out}
            other = drawn_back(links_of(rows, rest, cap=cap, k=len(everything)))

            assert np.linalg.norm(other - whole) <= reach * (1 + 1e-12)


def test_the_pooled_bound_is_reached() -> None:
    """Two opposite vectors, one leaving and one entering: 2C/K exactly, nothing given away."""
    k, vector = 4, np.array([1.0, 0.0])
    with_it, without_it = (vector + 0) / k, (-vector) / k

    assert np.linalg.norm(with_it - without_it) == row_change(
        clip_norm=1.0, active=1, unit=Unit.SECONDARY_RECORD, pooled_links=k
    )


def test_rounding_the_pooled_mean_can_pass_the_bound_and_is_charged() -> None:
    """Negative control: towards-zero rounding after the mean needs its sqrt(width) units."""
    k, granularity, width = 50, 2.0**-10, 64
    generator = np.random.default_rng(5)
    bare = 2 / k
    charged = row_change(
        clip_norm=1.0,
        active=1,
        unit=Unit.SECONDARY_RECORD,
        pooled_links=k,
        rounding=math.sqrt(width) * granularity,
    )
    worst = 0.0
    for _ in range(200):
        rest = generator.normal(size=width) * 0.02
        step = generator.normal(size=width)
        step /= np.linalg.norm(step)
        pair = [np.trunc((rest + sign * step / k) / granularity) for sign in (1, -1)]
        worst = max(worst, float(np.linalg.norm(pair[0] - pair[1])) * granularity)

    assert bare < worst <= charged


def test_a_greedy_cap_would_break_the_bound() -> None:
    """Negative control: with a cap counted while rows choose, one removal changes more than m."""

    def greedy(rows: np.ndarray, records: dict[int, float], cap: int, k: int) -> list[tuple]:
        left = dict.fromkeys(records, cap)
        chosen = []
        for row in rows:
            free = sorted(
                (one for one in records if left[one]), key=lambda one: abs(row - records[one])
            )
            chosen.append(tuple(free[:k]))
            for one in free[:k]:
                left[one] -= 1
        return chosen

    most = 0
    for rows, everything in federations(seed=3):
        records = {one: key for one, key in everything.items() if one < RECORDS}
        before = greedy(rows, records, cap=1, k=1)
        for out in records:
            rest = {one: key for one, key in records.items() if one != out}
            after = greedy(rows, rest, cap=1, k=1)
            most = max(most, sum(a != b for a, b in zip(before, after, strict=True)))

    assert most > 1
