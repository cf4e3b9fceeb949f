"""What the [mpc] table and verified clipping go with."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
from helpers.federations import save, write_federation

import securevfl as sv
from securevfl.config.rules import require_helpers
from securevfl.core.errors import ConfigError, EncodingRangeError
from securevfl.federation import run_plan
from securevfl.runtime.run_options import warnings_about

DEALER = {"name": "dealer", "role": "dealer"}


def read(
    folder: Path, *, secondaries: int = 2, dealer: bool = False, **sections: Any
) -> sv.config.federation.FederationConfig:
    source = tomllib.loads(write_federation(folder, secondaries=secondaries).read_text())
    for name, section in sections.items():
        source[name] = {**source.get(name, {}), **section}
    source["party"] += [DEALER] if dealer else []
    return sv.read_federation(save(folder, source))


CRYPTEN = {"engine": "crypten"}
VERIFIED = {"mechanism": "none", "encoder": "trained", "verify_clip": True}


@pytest.mark.parametrize(
    ("said", "sections"),
    [
        (r"mpc.engine: .* there is one", {"secondaries": 1, "mpc": CRYPTEN}),
        (r"mpc.engine: must be", {"mpc": {"engine": "gloo"}}),
        (r"verify_clip: compares on shares", {"privacy": VERIFIED}),
        (r'party.role: a "dealer" goes with', {"dealer": True}),
    ],
)
def test_what_does_not_go_together_is_refused(
    tmp_path: Path, said: str, sections: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=said):
        read(tmp_path, **sections)


def test_a_check_between_parties_needs_a_dealer(tmp_path: Path) -> None:
    """A simulation does without."""
    config = read(tmp_path, mpc=CRYPTEN, privacy=VERIFIED)
    with pytest.raises(ConfigError, match=r"verify_clip: needs a party that holds no table"):
        require_helpers(config)
    require_helpers(read(tmp_path, mpc=CRYPTEN, privacy=VERIFIED, dealer=True))


def test_what_a_check_does_not_cover_is_said(tmp_path: Path) -> None:
    """Averages of weights and pretraining; in every run's warnings."""
    said = "averages of weights"
    averaging = read(tmp_path, mpc=CRYPTEN, privacy=VERIFIED, model={"average_positions_every": 1})
    assert [said in text for text in warnings_about(averaging)].count(True) == 1
    plain = read(tmp_path, mpc=CRYPTEN, privacy=VERIFIED, model={"average_positions_every": 0})
    assert not [text for text in warnings_about(plain) if said in text]


def test_a_round_of_one_secondary_is_not_checked(tmp_path: Path) -> None:
    """It would check itself."""
    config = read(tmp_path, mpc=CRYPTEN, privacy=VERIFIED, model={"party_dropout": 0.5})
    facts = run_plan.RunFacts(run="r", rows=60, train_rows=40, validation_rows=10, test_rows=10)
    with pytest.raises(ConfigError, match="nobody else checks the rows"):
        run_plan.plan_run(config, facts)


def test_noise_whose_squares_would_wrap_is_refused_before_the_run(tmp_path: Path) -> None:
    noise = {"encoder": "trained", "noise_multiplier": 3000.0, "delta": 1e-4, "verify_clip": True}
    path = write_federation(tmp_path, privacy=noise, model={"average_positions_every": 0})
    source = {**tomllib.loads(path.read_text()), "mpc": CRYPTEN}
    with pytest.raises(EncodingRangeError, match=r"verify_clip: squares of .* would leave"):
        sv.simulate(save(tmp_path, source))
