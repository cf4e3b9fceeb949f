"""What the [mpc] table goes with."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

import securevfl as sv
from securevfl.core.errors import ConfigError
from securevfl.testing import save_federation, write_federation

DEALER = {"name": "dealer", "role": "dealer"}


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
