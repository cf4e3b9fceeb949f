"""The benchmark runs, and what it compares is equal."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("phe", reason="phe is an optional dependency")
pytest.importorskip("faiss", reason="faiss is an optional dependency")

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "linkage.py"


def load() -> Any:
    spec = importlib.util.spec_from_file_location("linkage_benchmark", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


BENCHMARK = load()


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
