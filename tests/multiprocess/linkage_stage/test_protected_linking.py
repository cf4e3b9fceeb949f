"""Protected linkage between processes: the links of one process, and a run that trains on them."""

import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from securevfl.config.federation import link_spec
from securevfl.config.reading import read_federation
from securevfl.core.progress import RoundDone
from securevfl.federation.checkpoint import read_state
from securevfl.linkage.stage.linking import Linker
from securevfl.linkage.stage.party_keys import keys_of
from securevfl.runtime.launching import train_in_processes
from securevfl.runtime.run_options import RunOptions
from securevfl.runtime.run_tables import read_tables
from securevfl.testing import save_federation, write_federation

pytestmark = pytest.mark.multiprocess

RANGES = [[-1.0, 11.0], [-1.0, 11.0]]
WAYS: dict[str, dict[str, Any]] = {
    "bloom": {
        "secondaries": 1,
        "linkage": {"similarity_noise": 0.5},
        "model": {"neighbours": 4},
    },
    "shares": {
        "secondaries": 2,
        "privacy": {"mechanism": "none", "encoder": "trained", "links_per_record": 3},
    },
    "paillier": {"secondaries": 1, "rows": 40},
}


def protected(folder: Path, protection: str) -> Path:
    """Write a federation with the third parties that a protection needs."""
    way = dict(WAYS[protection])
    linkage = {"protection": protection, "ranges": RANGES, **way.pop("linkage", {})}
    (folder / "linkage.secret").write_text("ab" * 32)
    path = write_federation(
        folder, rows=way.pop("rows", 120), linkage=linkage, training={"epochs": 1}, **way
    )
    source = tomllib.loads(path.read_text())
    roles = ["coordinator", "dealer"] if protection == "shares" else ["coordinator"]
    source["party"] += [{"name": role, "role": role} for role in roles]
    if protection == "bloom":
        source["model"] = {"family": "fedsim", "neighbours": 4, "kernel": 3}
    return save_federation(folder, source)


def arrays_of(path: Path) -> dict[str, np.ndarray]:
    """Read a file of arrays and close it: one left open fails whichever test runs later."""
    with np.load(path, allow_pickle=False) as archive:
        return dict(archive)


@pytest.mark.parametrize("protection", WAYS)
def test_links_are_those_of_one_process(protection: str, tmp_path: Path) -> None:
    """Every party its own process, third parties between them: the same links, row by row."""
    path = protected(tmp_path, protection)
    config = read_federation(path)
    losses: list[float] = []

    def observe(event: Any) -> None:
        if isinstance(event, RoundDone):
            losses.append(event.loss)

    options = RunOptions(
        run_folder=tmp_path / "run", data_root=tmp_path, observe=observe, record_mib=16
    )
    train_in_processes(config, options)
    folder = tmp_path / "run" / "parties"
    seen = read_state(folder / "coordinator" / "view.pt")["lines"]
    assert {line["kind"] for line in seen} == {
        "LINK_CODES" if protection == "bloom" else "LINK_SHARE"
    }
    assert {line["of"] for line in seen} == {party.name for party in config.secondaries}
    assert not (folder / "dealer" / "view.pt").exists()
    found = [arrays_of(file) for file in folder.glob("coordinator/links-*.npz")]
    tables = read_tables(config, tmp_path)
    # Without similarities, whose noise would put the links of a row into another order.
    source = tomllib.loads(path.read_text())
    source["model"] = {"family": "fet", "neighbours": 4}
    spec = link_spec(read_federation(save_federation(tmp_path, source)))
    link = Linker(spec, keys_of(spec.keys, tables["agency"]), data_root=tmp_path)

    assert losses
    assert np.isfinite(losses).all()
    assert len(found) == len(config.secondaries)
    for party in config.secondaries:
        links = link(keys_of(spec.keys, tables[party.name])).source
        wanted = links.link(np.arange(tables["agency"].num_rows)).indices
        assert any(np.array_equal(wanted, one["indices"]) for one in found)
        lines = (folder / party.name / "log.jsonl").read_text().splitlines()
        events = {line["event"]: line for line in map(json.loads, lines)}
        assert "without distances" in events["linked"]["learned"][0]
        assert not list((folder / party.name).glob("links-*.npz"))
    if protection == "bloom":
        assert (np.diff(found[0]["values"], axis=1) <= 0).all()
