"""Which federation files let a run go on without a secondary, and how few may be left."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
from helpers.federations import FROZEN

from securevfl import read_federation
from securevfl.config.disclosure import channels
from securevfl.config.federation import FederationConfig
from securevfl.core.errors import ConfigError
from securevfl.testing import save_federation, write_federation

NOISED = {"epsilon": 50.0, "delta": 1e-4, "encoder": "trained"}
GOES_ON = {"on_loss": "continue"}


def config_of(folder: Path, *, secondaries: int = 4, **sections: Any) -> FederationConfig:
    sections = {"runtime": GOES_ON, **sections}
    return read_federation(write_federation(folder, rows=20, secondaries=secondaries, **sections))


def test_how_few_may_go_on(tmp_path: Path) -> None:
    def least(**sections: Any) -> int:
        return config_of(tmp_path, **sections).least_in_training

    assert least(runtime={"on_loss": "wait"}) == 4
    assert least() == 3
    # Beside two that collude there are always two that do not.
    assert least(secondaries=6, privacy={**NOISED, "colluding": 3}) == 5
    assert least(secondaries=3) == 2
    assert least(privacy=NOISED, runtime={**GOES_ON, "least_secondaries": 1}) == 1
    assert least(runtime={**GOES_ON, "least_secondaries": 2}) == 2


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"runtime": {**GOES_ON, "least_secondaries": 1}}, "at least 2 .*and no noise"),
        (
            {
                "runtime": {**GOES_ON, "least_secondaries": 2},
                "privacy": {**NOISED, "colluding": 2},
            },
            "at least 3 with privacy.colluding = 2, got 2",
        ),
        ({"runtime": {**GOES_ON, "least_secondaries": 4}}, "none could ever be missing"),
        ({"secondaries": 2, "privacy": NOISED}, "by default 2 must stay.*write 1 if all agree"),
        ({"secondaries": 2}, "none could ever be missing"),
        ({"runtime": {"on_loss": "wait", "least_secondaries": 3}}, "goes with on_loss"),
        ({"privacy": FROZEN}, 'frozen encoders release each row once.*write on_loss = "wait"'),
        ({"model": {"family": "fedhssl", "hidden": 8, "encoder_hidden": 8}}, "pretrains encoders"),
        ({"model": {"family": "fedsim", "neighbours": 4}}, "reads similarities"),
        ({"training": {"rows": "aligned"}}, "linked at every secondary"),
    ],
)
def test_what_could_not_go_on_is_refused_when_it_is_read(
    tmp_path: Path, sections: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        config_of(tmp_path, **sections)


def test_a_helper_that_has_left_could_not_link_again(tmp_path: Path) -> None:
    path = write_federation(tmp_path, rows=20, secondaries=3, runtime=GOES_ON)
    source = tomllib.loads(path.read_text(encoding="utf-8"))
    source["party"].append({"name": "broker", "role": "coordinator"})
    source["linkage"] = {
        "protection": "bloom",
        "ranges": [[0.0, 10.0], [0.0, 10.0]],
    }
    with pytest.raises(ConfigError, match=r"coordinator leaves when links are made.*on_loss"):
        read_federation(save_federation(tmp_path, source))


def test_the_report_says_what_going_on_shows(tmp_path: Path) -> None:
    def told(**sections: Any) -> dict[str, dict[str, str]]:
        return {one["channel"]: one for one in channels(config_of(tmp_path, **sections))}

    said = told()["who takes part"]
    assert "down to 3 of 4" in said["reveals"]
    assert said["guarantee"] == "not covered: no noise"
    assert told(privacy=NOISED)["who takes part"]["guarantee"].startswith("covered by epsilon")
    assert "who takes part" not in told(runtime={"on_loss": "wait"})
