"""Families by name: the package's own, and those that installed packages register."""

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers.installed import register

import securevfl as sv
from securevfl.core.errors import ConfigError
from securevfl.lab.methods import IN_ONE_PLACE, known_methods
from securevfl.models.family import FamilySettings
from securevfl.models.registry import (
    FAMILIES,
    GROUP,
    family_named,
    family_names,
    family_of,
    load_family,
)

GOOD = """
from dataclasses import dataclass
from torch import nn
from securevfl.models import Family

@dataclass(frozen=True)
class Settings:
    neighbours: int = 2
    cut_shape = (2, 4)
    party_dropout: float = 0.0
    average_positions_every = 0
    keys_as_features = False

class Own(Family[Settings]):
    name = "own"
    settings_class = Settings

    def build_bottom(self, settings, **_):
        return nn.Identity()

    def build_top(self, settings, **_):
        return nn.Identity()
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of installed packages; what is loaded from it is forgotten afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_family", raising=False)
    load_family.cache_clear()
    return tmp_path


def installed(site: Path, module: str, **entries: str) -> None:
    """Install one package with a module and its families."""
    (site / "own_family.py").write_text(module)
    register(site, "own-family", {GROUP: entries or {"own": "own_family:Own"}})


def refusal(site: Path, module: str, **entries: str) -> str:
    """Return why the family that a package registers is not taken."""
    installed(site, module, **entries)
    with pytest.raises(ConfigError) as raised:
        family_named(next(iter(entries), "own"))
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_an_installed_family_is_taken_by_its_name(site: Path) -> None:
    """It stands behind the package's own, and is one object however often it is asked for."""
    assert "own" not in family_names()
    installed(site, GOOD)
    family = family_named("own")

    assert family_names() == (*FAMILIES, "own")
    assert "own" in known_methods({})
    assert family is family_named("own")
    assert family.settings_from({"neighbours": 3}).neighbours == 3
    assert family_of(family.settings_class()) is family


def test_names_are_listed_without_loading_anything(site: Path) -> None:
    """Another package's broken family is no reason for this one's not to be found."""
    installed(site, "raise RuntimeError('loaded')")
    with pytest.raises(ConfigError, match=r"must be one of 'fet', .*, 'own'; got 'owm'"):
        family_named("owm")
    assert family_named("fet") is FAMILIES["fet"]
    assert family_of(sv.models.FeT()) is FAMILIES["fet"]
    assert "own_family" not in sys.modules


@pytest.mark.parametrize("name", ["os:path", "own_family:Own", "own_family", "../own", "Own", ""])
def test_a_name_in_a_file_imports_nothing_by_itself(site: Path, name: str) -> None:
    """Only an entry point leads to an import."""
    (site / "own_family.py").write_text("raise RuntimeError('loaded')")
    with pytest.raises(ConfigError, match="must be one of 'fet'"):
        family_named(name)


def test_packages_that_can_not_be_loaded_are_named(site: Path) -> None:
    """In one line, with the error and the place."""
    text = refusal(site, "import torch\n\nraise RuntimeError('no\\nlicence')\n")
    assert "model.family: 'own', own_family:Own of the installed package 'own-family'" in text
    assert f"RuntimeError: no licence ({site / 'own_family.py'}:3)" in text


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("own_famly:Own", "ModuleNotFoundError: No module named 'own_famly'"),
        ("own_family:Mine", "has no attribute 'Mine'"),
        ("own_family:Settings", "must be a subclass of securevfl.models.Family, got"),
        ("own_family", "must be a subclass of securevfl.models.Family, got <module"),
    ],
)
def test_entry_points_must_lead_to_a_family(site: Path, value: str, words: str) -> None:
    """Not to a module, nor to another class."""
    assert words in refusal(site, GOOD, own=value)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("    def build_top", "    def build_tpo", "lacks these methods of a family: build_top"),
        ('    name = "own"\n', "", "lacks name"),
        ("    settings_class = Settings\n", "", "lacks settings_class"),
        ('name = "own"', 'name = "other"', "calls itself 'other'; the two names must be equal"),
        ("    neighbours: int = 2\n", "", "its settings Settings lack neighbours;"),
        ("    party_dropout: float = 0.0\n    average_positions_every = 0\n", "",
         "lack average_positions_every, party_dropout;"),
        ("@dataclass(frozen=True)", "@dataclass", "is not frozen"),
        ("@dataclass(frozen=True)", "", "must be a frozen dataclass, got <class"),
        ("neighbours: int = 2", "neighbours: 'Whole' = 2", "NameError: name 'Whole'"),
        ('name = "own"', 'name = "own"; pretraining = ("local",)', "and has no build_learner"),
        ('name = "own"', 'name = "own"; pretraining = ("distil",)', "'aggregate'; got 'distil'"),
        ('name = "own"', 'name = "own"; max_distance = -1.0', "max_distance must be"),
        ('name = "own"', 'name = "own"\n    def __init__(self, size): pass', "missing 1 required"),
    ],
)  # fmt: skip
def test_half_a_family_is_refused(site: Path, old: str, new: str, words: str) -> None:
    """What is missing is named before anything runs."""
    assert old in GOOD
    text = refusal(site, GOOD.replace(old, new, 1))
    assert text.startswith("model.family: 'own', own_family:Own of the installed package 'own-fam")
    assert words in text


def test_nobody_takes_the_name_of_another_family(site: Path) -> None:
    """Neither a built-in one's, which would train something else, nor another package's."""
    installed(site, GOOD, fet="own_family:Own", own="own_family:Own")
    register(site, "other-family", {GROUP: {"own": "other_family:Other"}})
    with pytest.raises(ConfigError, match="'fet' is registered by securevfl itself and by 'own-f"):
        family_named("fet")
    with pytest.raises(ConfigError, match=r"'own' is registered by '.*' and by '.*'.*rename all"):
        family_named("own")
    assert "own_family" not in sys.modules


@pytest.mark.parametrize("name", IN_ONE_PLACE)
def test_names_of_methods_are_taken(site: Path, name: str) -> None:
    """``boosting`` in a comparison is the package's own."""
    installed(site, GOOD, **{name: "own_family:Own"})
    with pytest.raises(ConfigError, match=f"'{name}' (trains on one|is registered by securevfl)"):
        family_named(name)


def test_settings_of_no_family_are_refused() -> None:
    """The message says what is taken."""

    @dataclass(frozen=True)
    class Homeless:
        neighbours: int = 3

    with pytest.raises(ConfigError, match=r"model: must be one of FeTConfig, .*; got Homeless"):
        family_of(Homeless())


@pytest.mark.parametrize("name", FAMILIES)
def test_built_in_families_are_whole(name: str) -> None:
    """They hold to what others are held to."""
    family = FAMILIES[name]

    assert family.name == name
    assert isinstance(family.settings_class(), FamilySettings)
    assert family.settings_from({}) == family.settings_class()
    assert repr(family) == f"{type(family).__name__}()"


def test_public_names_are_shown() -> None:
    """``dir`` and completion find families and what a new one needs."""
    assert {"FeT", "FedSim", "FedHSSL", "Family", "FamilySettings"} <= set(dir(sv.models))
    assert all(getattr(sv.models, name) is not None for name in dir(sv.models))
