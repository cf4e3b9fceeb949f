"""A round stays short: ``python tools/count_walks.py`` counts the frames of both its ways."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def walks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("count_walks", ROOT / "tools" / "count_walks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("way", "most"), [("forward", 12), ("gradient", 10)])
def test_a_round_is_few_frames_deep(walks: ModuleType, way: str, most: int) -> None:
    (ends,) = (ends for name, ends in walks.DEPTHS.items() if name.startswith(way))
    frames = walks.stack_at(ends)
    assert 5 <= len(frames) <= most, frames
