"""The benchmarks of linkage run, and what they compare is equal."""

import pytest

pytest.importorskip("phe", reason="phe is an optional dependency")
pytest.importorskip("faiss", reason="faiss is an optional dependency")

from research.linkage import large_tables, linkage, protected
from securevfl.config.reading import parse_federation


@pytest.mark.parametrize("name", linkage.MEASUREMENTS)
def test_what_is_timed_is_equal(name: str) -> None:
    """Small tables; every answer equals its baseline's."""
    figures = linkage.MEASUREMENTS[name](linkage.Sizes(fast=True))
    nested = [value for value in figures.values() if isinstance(value, dict)]
    compared = [
        value for group in [figures, *nested] for key, value in group.items() if "equal" in key
    ]

    assert compared
    assert all(value == 1 for value in compared)


def test_every_protection_is_compared_on_one_federation() -> None:
    """The files of the downstream comparison are valid and differ in protection alone."""
    for data in protected.RANGES:
        for family in protected.FAMILIES:
            sources = [
                protected.federation(data, family, protection, seed=1, epochs=2)
                for protection in protected.PROTECTIONS
            ]
            for source in sources:
                parse_federation(source, file="comparison")
                for name in ("protection", "code_bits"):
                    source["linkage"].pop(name, None)
            assert all(source == sources[0] for source in sources)


@pytest.mark.parametrize("kind", ["numbers", "texts", "ids"])
def test_tables_of_every_size_are_linked(kind: str) -> None:
    """Through the very command that is timed, and to the right records."""
    found = large_tables.linked(kind, 200, None)

    assert found["recall_at_k"] > 0.95
    assert ("blocking" in found) == (kind == "texts")
