"""Names and sentences stay readable, by bounds that ``python tools/count_names.py`` counts for."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def names() -> ModuleType:
    spec = importlib.util.spec_from_file_location("count_names", ROOT / "tools" / "count_names.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_functions_are_verbs_or_nouns(names: ModuleType) -> None:
    """``kept`` or ``told`` alone says neither what a function does nor what it returns."""
    places, functions = names.bare_participles()
    assert len(places) <= 0.005 * functions, places


def test_variables_say_what_they_hold(names: ModuleType) -> None:
    places, lines = names.empty_variables()
    assert len(places) <= lines / 1000, places


def test_docstrings_of_fields_stand_alone(names: ModuleType) -> None:
    """A reader of the page of settings sees the sentence, often without the name."""
    places = names.unfinished_docstrings()
    assert len(places) <= 30, places


def test_modules_have_one_subject(names: ModuleType) -> None:
    """A module that needs chapters is several modules."""
    headings = names.chapter_headings()
    assert [path for path, count in headings.items() if count >= 3] == []


def test_values_are_there_by_their_types(names: ModuleType) -> None:
    places = names.presence_assertions()
    assert len(places) <= 24, places


MOST_FILES = {"class_means": 15, "pretraining": 28, "psi": 3}
"""Files of the package that may name a part outside its folder; four each are wanted."""


def test_parts_of_a_run_are_named_in_their_folder(names: ModuleType) -> None:
    """A part that the core names is no part: whoever changes it has to read the core."""
    scattered = names.scattered()
    assert {part: paths for part, paths in scattered.items() if len(paths) > MOST_FILES[part]} == {}
