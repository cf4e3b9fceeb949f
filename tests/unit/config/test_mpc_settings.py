"""What the [mpc] table goes with."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
from helpers.ring_keys import random_pair_keys

import securevfl as sv
from securevfl.core.errors import ConfigError
from securevfl.federation.over_star import sum_from_secondary
from securevfl.federation.run_plan import RunFacts, plan_run
from securevfl.mpc.on_shares import SharedSum
from securevfl.testing import save_federation, write_federation
from securevfl.transport.star import SecondaryTransport

DEALER = {"name": "dealer", "role": "dealer"}
FACTS = RunFacts(rows=40, train_rows=30, validation_rows=5, test_rows=5)


@pytest.mark.parametrize(
    ("said", "secondaries", "sections"),
    [
        (r"mpc.engine: .* there is one", 1, {"mpc": {"engine": "crypten"}}),
        (r"mpc.engine: must be", 2, {"mpc": {"engine": "gloo"}}),
        (r'party.role: a "dealer" goes with', 2, {"party": [DEALER]}),
    ],
)
def test_what_does_not_go_together_is_refused(
    tmp_path: Path, said: str, secondaries: int, sections: dict[str, Any]
) -> None:
    source = tomllib.loads(write_federation(tmp_path, secondaries=secondaries).read_text())
    source["party"] += sections.pop("party", [])
    with pytest.raises(ConfigError, match=said):
        sv.read_federation(save_federation(tmp_path, {**source, **sections}))


@pytest.mark.parametrize(
    ("engine", "secondaries", "sections"),
    [
        ("masked", 2, {}),
        ("masked", 2, {"mpc": {}}),
        ("crypten", 2, {"mpc": {}, "party": [DEALER]}),
        ("masked", 1, {"mpc": {}, "party": [DEALER]}),
        ("masked", 2, {"mpc": {"engine": "masked"}, "party": [DEALER]}),
        ("crypten", 2, {"mpc": {"engine": "crypten"}}),
        ("crypten", 2, {"linkage": {"protection": "shares", "ranges": [[-9.0, 9.0]] * 2}}),
    ],
)
def test_a_dealer_makes_crypten_the_engine(
    tmp_path: Path, engine: str, secondaries: int, sections: dict[str, Any]
) -> None:
    """Also the dealer that a simulation stands for; one secondary has nobody to share with."""
    source = tomllib.loads(write_federation(tmp_path, secondaries=secondaries).read_text())
    source["party"] += sections.get("party", [])
    source |= {name: value for name, value in sections.items() if name != "party"}
    config = sv.read_federation(save_federation(tmp_path, source))
    keys = random_pair_keys(tuple(range(1, secondaries + 1)))[1]
    transport = object.__new__(SecondaryTransport)
    sum_to, _ = sum_from_secondary(transport, plan_run(config, FACTS), keys, rank=1)

    assert config.engine == engine
    assert isinstance(sum_to, SharedSum) == (engine == "crypten")
