"""Whole numbers that size memory or time: bounded when the file is read, by the setting's name."""

import dataclasses
from typing import Any, get_type_hints

import pytest

from securevfl import read_federation
from securevfl.config.encoder import EncoderSettings
from securevfl.config.linkage import LinkageSettings
from securevfl.config.sections import (
    FederationSettings,
    PartySettings,
    PredictionSettings,
    RuntimeSettings,
    TrainingSettings,
)
from securevfl.core.errors import ConfigError
from securevfl.core.settings import read_settings
from securevfl.lab.methods import BoostingConfig
from securevfl.models.alone.margins import BaselineConfig
from securevfl.models.family import PretrainingSettings
from securevfl.models.registry import FAMILIES
from securevfl.testing import write_federation

HUGE = 10**9
NEEDED: dict[type[Any], dict[str, Any]] = {
    FederationSettings: {"name": "n", "task": "multiclass"},
    PartySettings: {"name": "n", "role": "secondary", "data": "n.csv", "key": ["id"]},
    LinkageSettings: {"protection": "none"},
    EncoderSettings: {"method": "principal"},
}
SECTIONS = [
    *NEEDED,
    PredictionSettings,
    RuntimeSettings,
    TrainingSettings,
    PretrainingSettings,
    BaselineConfig,
    BoostingConfig,
    *dict.fromkeys(family.settings_class for family in FAMILIES.values()),
]
TAKES_NO_ROOM = {
    "seed",
    "labelled_rows",  # compared with the table's
    "rows",
    "releases_per_record",
    "least_secondaries",
    "smallest_leaf",
    "average_positions_every",
}


def cases() -> list[tuple[type[Any], str, Any]]:
    found: list[tuple[type[Any], str, Any]] = []
    for kind in SECTIONS:
        hints = get_type_hints(kind)
        for field in dataclasses.fields(kind):
            hint = str(hints[field.name])
            if field.name in TAKES_NO_ROOM:
                continue
            if hints[field.name] in (int, int | None):
                found.append((kind, field.name, HUGE))
            elif "tuple[int" in hint:
                found += [(kind, field.name, [HUGE]), (kind, field.name, [1] * 100)]
    return found


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    cases(),
    ids=[f"{kind.__name__}-{name}-{type(value).__name__}" for kind, name, value in cases()],
)
def test_a_number_with_too_many_digits_is_refused_by_name(
    kind: type[Any], name: str, value: Any
) -> None:
    with pytest.raises(ConfigError, match=name) as caught:
        read_settings(kind, {**NEEDED.get(kind, {}), name: value}, where="section")
    assert "most" in str(caught.value) or name == "neighbours"
    assert "\n" not in str(caught.value)


def test_two_sizes_that_are_too_large_together_are_refused(tmp_path: Any) -> None:
    path = write_federation(tmp_path, model={"neighbours": 5000, "hidden": 8000, "heads": 1})
    with pytest.raises(ConfigError, match=r"5000 x 8000 .* lower model.neighbours or model.hidden"):
        read_federation(path)
