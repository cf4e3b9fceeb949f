"""The benchmarks of linkage run, and what they compare is equal."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("phe", reason="phe is an optional dependency")
pytest.importorskip("faiss", reason="faiss is an optional dependency")

from securevfl.config.reading import parse_federation

SCRIPTS = Path(__file__).parents[3] / "research" / "linkage"


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


BENCHMARK = load("linkage")


@pytest.mark.parametrize("name", BENCHMARK.MEASUREMENTS)
def test_what_is_timed_is_equal(name: str) -> None:
    """Small tables; every answer equals its baseline's."""
    figures = BENCHMARK.MEASUREMENTS[name](BENCHMARK.Sizes(fast=True))
    nested = [value for value in figures.values() if isinstance(value, dict)]
    compared = [
        value for group in [figures, *nested] for key, value in group.items() if "equal" in key
    ]

    assert compared
    assert all(value == 1 for value in compared)


def test_every_protection_is_compared_on_one_federation() -> None:
    """The files of the downstream comparison are valid and differ in protection alone."""
    compared = load("protected")
    for data in compared.RANGES:
        for family in compared.FAMILIES:
            sources = [
                compared.federation(data, family, protection, seed=1, epochs=2)
                for protection in compared.PROTECTIONS
            ]
            for source in sources:
                parse_federation(source, file="comparison")
                for name in ("protection", "code_bits"):
                    source["linkage"].pop(name, None)
            assert all(source == sources[0] for source in sources)


SCALE = load("large_tables")


@pytest.mark.parametrize("kind", ["numbers", "texts", "ids"])
def test_tables_of_every_size_are_linked(kind: str) -> None:
    """Through the very command that is timed, and to the right records."""
    found = SCALE.linked(kind, 200, None)

    assert found["recall_at_k"] > 0.95
    assert ("blocking" in found) == (kind == "texts")
