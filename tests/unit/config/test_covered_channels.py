"""What covers each channel of a run, and the runs that a promise of epsilon refuses."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
from helpers.federations import FROZEN

from securevfl import read_federation
from securevfl.config.disclosure import channels, require_covered_channels
from securevfl.config.federation import FederationConfig
from securevfl.core.errors import PrivacyError
from securevfl.testing import save_federation, write_federation

RANGES = [[-1.0, 11.0], [-1.0, 11.0]]
HELPERS = {"shares": ("coordinator", "dealer"), "paillier": ("coordinator",)}


def config_of(folder: Path, **linkage: Any) -> FederationConfig:
    path = write_federation(folder, privacy=FROZEN, linkage=linkage)
    source = tomllib.loads(path.read_text())
    for party in source["party"][1:]:
        party |= {"scaling": "bounds", "bounds": [-4.0, 4.0]}
    roles = HELPERS.get(linkage["protection"], ())
    source["party"] += [{"name": role, "role": role} for role in roles]
    return read_federation(save_federation(folder, source))


def guarantees(config: FederationConfig) -> dict[str, str]:
    return {one["channel"]: one["guarantee"] for one in channels(config)}


@pytest.mark.parametrize("protection", ["shares", "paillier"])
def test_cells_are_refused_beside_an_epsilon(protection: str, tmp_path: Path) -> None:
    """Exact numbers of records near each row reach the primary; without cells, one number does."""
    settings = {"protection": protection, "ranges": RANGES}
    require_covered_channels(config_of(tmp_path, **settings))
    config = config_of(tmp_path, **settings, cell=0.5)
    assert guarantees(config)["records near rows"] == "not covered"
    with pytest.raises(
        PrivacyError, match=r"linkage\.cell: .*near its rows.*leave it out"
    ) as error:
        require_covered_channels(config)
    assert error.value.exit_code == 4


@pytest.mark.parametrize(
    ("settings", "shown"),
    [
        ({"protection": "none"}, False),
        ({"protection": "psi", "metric": "exact"}, True),
        ({"protection": "psi", "metric": "exact", "pad_to": 500}, False),
        ({"protection": "shares", "ranges": RANGES}, True),
        ({"protection": "paillier", "ranges": RANGES}, True),
    ],
)
def test_record_counts_are_named(settings: dict[str, Any], shown: bool, tmp_path: Path) -> None:
    """The protection's own messages say so."""
    config = config_of(tmp_path, **settings) if settings.get("metric") != "exact" else None
    if config is None:
        path = write_federation(
            tmp_path,
            privacy={"mechanism": "none", "encoder": "trained"},
            model={"family": "top1sim"},
            linkage=settings,
        )
        config = read_federation(path)
    told = guarantees(config)["record counts"]
    assert told.startswith("not covered") is shown
    assert (told == "nothing is sent") is not shown
