"""Link tables and their figures on a case small enough to count by hand."""

import numpy as np
import pytest

from securevfl.core.errors import DataError
from securevfl.lab.links_alone import link_quality
from securevfl.linkage.links import NO_RECORD, LinkTable

LINKS = LinkTable(
    indices=np.array([[2, 0], [0, 1], [1, NO_RECORD], [NO_RECORD, NO_RECORD]]),
    distances=np.array([[0.5, 1.0], [2.0, 2.0], [4.0, np.inf], [np.inf, np.inf]]),
)


def test_figures_without_truth() -> None:
    """Counts, ties and quantiles come from the links alone."""
    quality = link_quality(LINKS, num_records=5)

    assert quality["rows_short"] == 2
    assert quality["rows_without_links"] == 1
    assert quality["tied_rows"] == 1
    assert quality["records_used"] == 3
    assert quality["most_used"] == [2, 2, 1, 0, 0]
    assert quality["reduction_ratio"] == 1 - 5 / 20
    assert quality["first_distance_quantiles"]["0.5"] == 2.0
    assert quality["last_distance_quantiles"]["1"] == 4.0
    assert quality["recall_at_1"] is None
    assert quality["rows_with_a_match"] is None


def test_recall_counts_rows_that_can_be_matched() -> None:
    """Row 0 finds its match second, row 1 first, row 2 has none, row 3 finds none of two."""
    quality = link_quality(
        LINKS,
        num_records=5,
        primary_entities=np.array([7, 7, 99, 8]),
        record_entities=np.array([7, 5, 6, 8, 8]),
    )

    assert quality["rows_with_a_match"] == 3
    assert quality["recall_at_1"] == pytest.approx(1 / 3)
    assert quality["recall_at_k"] == pytest.approx(2 / 3)
    assert quality["pairs_completeness"] == pytest.approx(2 / 4)


def test_no_common_entity() -> None:
    """Recall of nothing is not a number, and not zero either."""
    quality = link_quality(
        LINKS,
        num_records=5,
        primary_entities=np.arange(4),
        record_entities=np.arange(10, 15),
    )

    assert quality["rows_with_a_match"] == 0
    assert quality["recall_at_1"] is None


def test_truth_must_fit() -> None:
    """At both parties, and as long as the tables."""
    with pytest.raises(DataError, match="both parties or at none"):
        link_quality(LINKS, num_records=5, primary_entities=np.arange(4))
    with pytest.raises(DataError, match="has 3 rows and 5 records, the links 4 and 5"):
        link_quality(
            LINKS, num_records=5, primary_entities=np.arange(3), record_entities=np.arange(5)
        )


def test_links_are_cut_and_taken() -> None:
    """``first`` keeps columns, ``take`` rows, ``most_uses`` counts rows of one record."""
    assert LINKS.links(None, 1).indices.tolist() == [[2], [0], [1], [NO_RECORD]]
    assert LINKS.take(np.array([2, 0])).indices.tolist() == [[1, NO_RECORD], [2, 0]]
    assert LINKS.most_uses(5) == 2
    assert LINKS.take(np.array([3])).most_uses(5) == 0
    assert repr(LINKS) == "LinkTable(4 rows, 2 links each)"
