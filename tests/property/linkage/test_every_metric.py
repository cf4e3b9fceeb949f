"""Caps and samples keep their promises under every metric."""

import numpy as np
import pytest

from securevfl.linkage.links import NO_RECORD, LinkTable
from securevfl.linkage.metrics.exact import numbered_keys
from securevfl.linkage.metrics.metric import ComparedKeys, Field
from securevfl.linkage.metrics.points import EarthKeys, EuclideanKeys
from securevfl.linkage.sampling import PoissonSampler, RoundLinker, eligible_pairs
from securevfl.linkage.spec import LinkageSecret
from securevfl.stages.bloom.codes import CodeKeys, TextCode, encode_keys
from securevfl.stages.fuzzy_keys.edits import TextKeys
from securevfl.stages.fuzzy_keys.mixed import MixedKeys

METRICS = ("euclidean", "earth", "text", "mixed", "code")
ALL_METRICS = (*METRICS, "exact")  # which links equal keys alone, so not all pairs
ROWS, RECORDS = 40, 60


def words(count: int, rng: np.random.Generator) -> list[str]:
    return ["".join(rng.choice(list("abc"), rng.integers(1, 7))) for _ in range(count)]


def make(kind: str, *, without: int | None = None) -> ComparedKeys:
    """Return the same small tables as keys of one kind, perhaps without one record."""
    rng = np.random.default_rng(7)
    points = [np.round(rng.uniform(-80, 80, size=(count, 2))) for count in (ROWS, RECORDS)]
    names = [words(count, rng) for count in (ROWS, RECORDS)]
    if without is not None:
        points[1] = np.delete(points[1], without, axis=0)
        del names[1][without]
    if kind == "euclidean":
        return EuclideanKeys(primary=points[0], records=points[1])
    if kind == "earth":
        return EarthKeys.of(points[0], points[1])
    if kind == "text":
        return TextKeys.of(names[0], names[1])
    if kind == "exact":
        return numbered_keys(*([word[:2] for word in column] for column in names))
    columns = [{"name": n, "x": p[:, 0].copy()} for n, p in zip(names, points, strict=True)]
    if kind == "mixed":
        fields = (Field(name="name", kind="text"), Field(name="x", kind="number", scale=50.0))
        return MixedKeys.of(columns[0], columns[1], fields)
    codes, secret = {"name": TextCode(bits=128)}, LinkageSecret(b"s" * 32)
    mine, theirs = (encode_keys(column, codes, secret) for column in columns)
    return CodeKeys(primary=mine, records=theirs, backend="numpy")


def linked(links: LinkTable, removed: int | None = None) -> list[frozenset[int]]:
    return [
        frozenset(int(r) + (removed is not None and r >= removed) for r in row if r != NO_RECORD)
        for row in links.indices
    ]


@pytest.mark.parametrize("kind", METRICS)
def test_a_metric_counts_and_swaps(kind: str) -> None:
    """Swapping twice changes nothing, and distances are symmetric."""
    metric = make(kind)
    there = metric.nearest(None, RECORDS)
    back = metric.swap_roles().nearest(None, ROWS)
    distance = np.empty((ROWS, RECORDS))
    np.put_along_axis(distance, there.indices, there.distances, axis=1)
    swapped = np.empty((RECORDS, ROWS))
    np.put_along_axis(swapped, back.indices, back.distances, axis=1)

    assert (metric.num_rows, metric.num_records) == (ROWS, RECORDS)
    assert (metric.swap_roles().num_rows, metric.swap_roles().num_records) == (RECORDS, ROWS)
    assert np.array_equal(distance, swapped.T)
    assert isinstance(metric, ComparedKeys)


@pytest.mark.parametrize("kind", ALL_METRICS)
def test_chosen_rows_are_linked_as_among_all(kind: str) -> None:
    """Rows do not depend on one another."""
    metric = make(kind)
    chosen = np.array([7, 3, 3, 30])

    assert np.array_equal(
        metric.nearest(chosen, 5).indices, metric.nearest(None, 5).take(chosen).indices
    )


@pytest.mark.parametrize("kind", ALL_METRICS)
def test_the_cap_bounds_what_any_record_changes(kind: str) -> None:
    """Every record is removed in turn: at most m rows change, by one out and one in."""
    rows = np.arange(make(kind).num_rows)
    before = linked(eligible_pairs(make(kind), cap=2).links(rows, 3))
    for removed in range(RECORDS):
        pairs = eligible_pairs(make(kind, without=removed), cap=2)
        after = linked(pairs.links(rows, 3), removed)
        changed = [(old, new) for old, new in zip(before, after, strict=True) if old != new]

        assert len(changed) <= 2
        for old, new in changed:
            assert old - new == {removed}
            assert len(new - old) <= 1


@pytest.mark.parametrize("kind", ALL_METRICS)
def test_samples_are_linked_exactly(kind: str) -> None:
    """Filtered lists, with and without their fallback, equal a search of the sample."""
    metric = make(kind)
    rows = np.arange(ROWS)
    linker = RoundLinker(metric, 4, rate=0.5, method="list")
    for rate in (0.5, 0.1):
        sample = PoissonSampler(RECORDS, rate, insecure_seed=3).draw()
        expected = metric.nearest(rows, 4, eligible=sample)
        links = linker.link(rows, sample)

        assert np.array_equal(links.indices, expected.indices)
        assert np.array_equal(links.distances, expected.distances)
    assert linker.redone > 0
