"""Links equal a brute-force search, for every storage order and every way to sample."""

import numpy as np
from helpers.linking import round_linker
from helpers.nearest import nearest_records
from hypothesis import given, settings
from hypothesis import strategies as st

from securevfl.linkage.links import NO_RECORD, LinkTable
from securevfl.linkage.sampling import PoissonSampler


@st.composite
def keys(draw: st.DrawFn, most: int = 60) -> tuple[np.ndarray, np.ndarray]:
    """Two parties' keys: continuous, on a grid (heavy ties), or nearly all at one place."""
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    shape = (draw(st.integers(1, most)), draw(st.integers(1, most)), draw(st.integers(1, 4)))
    kind = draw(st.sampled_from(["continuous", "grid", "heap", "tiny", "huge"]))
    rows, records = (rng.normal(size=(count, shape[2])) for count in shape[:2])
    if kind == "grid":
        return np.round(rows), np.round(records)
    if kind == "heap":
        return rows * (rng.random(rows.shape) < 0.1), records * (rng.random(records.shape) < 0.1)
    scale = {"continuous": 1.0, "tiny": 1e-160, "huge": 1e140}[kind]
    return rows * scale, records * scale


def brute_force(rows: np.ndarray, records: np.ndarray, k: int, chosen: np.ndarray) -> LinkTable:
    """Sort all chosen records of every row by (distance, number): the readable twin."""
    indices = np.full((len(rows), k), NO_RECORD)
    distances = np.full((len(rows), k), np.inf)
    for row, key in enumerate(rows):
        distance = np.sqrt(((records - key) ** 2).sum(axis=-1))
        best = sorted(chosen, key=lambda record: (distance[record], record))[:k]
        indices[row, : len(best)] = best
        distances[row, : len(best)] = distance[best]
    return LinkTable(indices=indices, distances=distances)


def assert_equal(got: LinkTable, expected: LinkTable) -> None:
    assert np.array_equal(got.indices, expected.indices)
    assert np.array_equal(got.distances, expected.distances)


@settings(deadline=None, max_examples=200)
@given(keys(), st.data())
def test_nearest_records_equal_a_brute_force_search(
    pair: tuple[np.ndarray, np.ndarray], data: st.DataObject
) -> None:
    """To the last bit of the distance, with any records eligible."""
    rows, records = pair
    k = data.draw(st.integers(1, len(records)))
    eligible = np.array(
        data.draw(st.lists(st.booleans(), min_size=len(records), max_size=len(records)))
    )
    expected = brute_force(rows, records, k, np.flatnonzero(eligible))

    assert_equal(nearest_records(rows, records, k, eligible=eligible), expected)
    assert_equal(
        nearest_records(rows, records, k), brute_force(rows, records, k, np.arange(len(records)))
    )


@settings(deadline=None, max_examples=50)
@given(keys(most=200), st.integers(0, 2**32 - 1))
def test_rows_do_not_depend_on_one_another(pair: tuple[np.ndarray, np.ndarray], seed: int) -> None:
    """Linking rows in another order, or a part of them, changes nothing for a row."""
    rows, records = pair
    k = min(5, len(records))
    chosen = np.random.default_rng(seed).permutation(len(rows))[: max(1, len(rows) // 2)]

    assert_equal(
        nearest_records(rows[chosen], records, k), nearest_records(rows, records, k).take(chosen)
    )


@settings(deadline=None, max_examples=60)
@given(keys(most=80), st.sampled_from([0.05, 0.3, 0.5, 0.9, 1.0]), st.integers(0, 2**32 - 1))
def test_every_way_to_link_a_sample_is_exact(
    pair: tuple[np.ndarray, np.ndarray], rate: float, seed: int
) -> None:
    """Filtered lists with their fallback, and searching anew, equal a search of the sample."""
    rows, records = pair
    k = min(6, len(records))
    sampler = PoissonSampler(len(records), rate, insecure_seed=seed)
    linkers = [round_linker(rows, records, k, rate=rate, method=m) for m in ("list", "rebuild")]
    for _ in range(3):
        sample = sampler.draw()
        chosen = np.random.default_rng(seed).permutation(len(rows))[:20]
        expected = brute_force(rows[chosen], records, k, np.flatnonzero(sample))
        for linker in linkers:
            assert_equal(linker.link(chosen, sample), expected)


def test_the_fallback_is_reached_and_exact() -> None:
    """Samples far below the promised rate run lists dry; the links stay exact."""
    rng = np.random.default_rng(0)
    rows, records = rng.random((50, 2)), rng.random((2000, 2))
    linker = round_linker(rows, records, 10, rate=0.5, method="list")
    sample = PoissonSampler(2000, 0.05, insecure_seed=1).draw()
    links = linker.link(np.arange(50), sample)

    assert linker.redone > 25
    assert_equal(links, brute_force(rows, records, 10, np.flatnonzero(sample)))


def test_lists_seldom_run_dry_at_their_rate() -> None:
    """At the rate they were made for, at most 0.5 % of rows are linked anew (0.1 % expected).

    The seed is fixed; with another, 6,400 rows exceed 0.5 % by chance in less than one case in a
    billion if rows were independent, and neighbouring rows are not, hence the wide margin.
    """
    rng = np.random.default_rng(0)
    rows, records = rng.random((640, 2)), rng.random((3000, 2))
    linker = round_linker(rows, records, 20, rate=0.4, method="list")
    sampler = PoissonSampler(3000, 0.4, insecure_seed=2)
    for _ in range(10):
        linker.link(np.arange(640), sampler.draw())

    assert linker.redone <= 32
