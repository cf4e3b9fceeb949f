"""What a federation file says of linking: who must take part, and what kept links belong to."""

import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.lines import Wires

from securevfl.config.federation import FederationConfig, link_spec
from securevfl.config.reading import read_federation
from securevfl.config.rules import require_helpers
from securevfl.core.errors import ConfigError
from securevfl.core.progress import unheard
from securevfl.data.tables import KeyTable
from securevfl.linkage.stage.link_cache import LinkCache, links_key
from securevfl.linkage.stage.linking import LinkageInput
from securevfl.testing import save_federation, write_federation

RANGES = [[-1.0, 11.0], [-1.0, 11.0]]


def federation(folder: Path, helpers: tuple[str, ...], **linkage: Any) -> FederationConfig:
    """Return a federation of an agency, two banks and some third parties."""
    source = tomllib.loads(write_federation(folder, rows=8, linkage=linkage).read_text())
    source["party"] += [{"name": f"the-{role}", "role": role} for role in helpers]
    return read_federation(save_federation(folder, source))


@pytest.mark.parametrize(
    ("protection", "there", "missing"),
    [("shares", ("coordinator",), "dealer"), ("paillier", (), "coordinator")],
)
def test_third_parties_are_asked_for(
    protection: str, there: tuple[str, ...], missing: str, tmp_path: Path
) -> None:
    """The lines to add are told before any process starts."""
    config = federation(tmp_path, there, protection=protection, ranges=RANGES)
    with pytest.raises(ConfigError, match=f'role = "{missing}"'):
        require_helpers(config)


def test_linking_gets_the_ranks_of_the_federation(tmp_path: Path) -> None:
    """Sealed lines and dealers go by rank: third parties in the file's order come last."""
    config = federation(tmp_path, ("dealer", "coordinator"), protection="shares", ranges=RANGES)
    assert link_spec(config).roles.ranks == config.ranks


def test_kept_links_outlive_versions(tmp_path: Path) -> None:
    """Their key is that of earlier versions, or every similarity would be noised anew."""
    config = federation(tmp_path, (), protection="none", similarity_noise=0.5)
    table = KeyTable(name="x", columns={"lon": np.arange(3.0), "lat": np.arange(3.0)})
    texts = KeyTable(name="y", columns={"name": np.array(["a", None], dtype=object)})
    key = links_key(link_spec(config), table, texts, np.ones(2, dtype=np.uint8), secret="s")
    assert key == "44f849701c69c41c895ee9c0803137e5f917a4a95c4f0189e8eb5c9033b10114"


def test_a_missing_secret_is_asked_for(tmp_path: Path) -> None:
    """Each data party has it in its own folder; no partner's file says where."""
    config = federation(tmp_path, ("coordinator",), protection="bloom", ranges=RANGES)
    table = KeyTable(name="x", columns={"lon": np.arange(3.0), "lat": np.arange(3.0)})
    place = LinkageInput(
        spec=link_spec(config), keys=table, data_root=tmp_path, cache=LinkCache(None)
    )
    asked = {"channels": Wires().of("x"), "rows": 3, "session": b"s", "observe": unheard}
    with pytest.raises(ConfigError, match=r"linkage\.secret: No such file.*openssl rand -hex 32"):
        place.with_channels(**asked)
    (tmp_path / "linkage.secret").write_text("ab" * 32)
    assert place.with_channels(**asked).secret is not None
