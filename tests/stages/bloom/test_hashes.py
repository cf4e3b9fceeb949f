"""Hashes under a secret of the data parties: equal keys are linked, and nothing else is shown."""

import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.lines import SECRET, link_as_threads
from helpers.linking import hidden_spec, link_spec

from securevfl.config.disclosure import channels
from securevfl.config.reading import read_federation
from securevfl.config.rules import require_helpers
from securevfl.core.errors import ConfigError
from securevfl.data.tables import KeyTable
from securevfl.linkage.spec import LinkageSecret
from securevfl.linkage.stage.linkage_parts import reveals_of
from securevfl.linkage.stage.linking import Linker
from securevfl.stages.bloom.by_codes import CodeKind, Hashes
from securevfl.testing import save_federation, write_federation


def keys(name: str, **columns: Sequence[str | None]) -> KeyTable:
    """Return a party's key columns as they are read."""
    return KeyTable(
        name=name, columns={key: np.array(column, object) for key, column in columns.items()}
    )


def two_column_tables() -> dict[str, KeyTable]:
    """Return three tables that share their first ten keys, some twice, and lack some others."""
    tables = {}
    for name in ("agency", "bank", "shop"):
        lon = [f"{10**16 + row}" for row in range(10)] * 2 + [f"{name}{row}" for row in range(10)]
        tables[name] = keys(name, lon=[*lon[:-1], None], lat=["1"] * 30)
    return tables


@pytest.mark.parametrize("changes", [{}, {"links_per_record": 1}, {"sampling_rate": 0.5}])
def test_hashes_give_the_links_of_shown_keys(changes: dict[str, Any]) -> None:
    """Between parties and in one process; the coordinator gets hashes, all different where due."""
    shown = link_spec("none", metric="exact", **changes)
    spec, tables = (
        hidden_spec("hashes", metric="exact", ranges=None, **changes),
        two_column_tables(),
    )
    found, wires = link_as_threads(spec, tables)
    rows = np.arange(30)
    alone = Linker(spec, tables["agency"], secret=SECRET)(tables["bank"]).source.link(rows)
    plain = Linker(shown, tables["agency"])(tables["bank"]).source.link(rows)
    codes = {a: m.tensors["codes"] for a, b, m in wires.travelled if m.kind is CodeKind.LINK_CODES}

    if "sampling_rate" not in changes:
        assert np.array_equal(plain.indices, alone.indices)
        assert np.array_equal(plain.indices, found["bank"].source.link(rows).indices)
        assert plain.present[:10].any(axis=1).all()
        assert not plain.present[20:].any()
    assert {name: len(np.unique(code, axis=0)) for name, code in codes.items()} == dict.fromkeys(
        tables, 20
    )
    assert {code.shape[1] for code in codes.values()} == {32}


def test_hashes_of_two_secrets_have_nothing_in_common() -> None:
    """And that of a missing key is the same in every run, and no other party's."""
    spec, tables = hidden_spec("hashes", metric="exact", ranges=None), two_column_tables()
    first, again = (Hashes().encode(spec, tables["bank"], SECRET) for _ in range(2))
    other = Hashes().encode(spec, tables["bank"], LinkageSecret(b"o" * 32))
    shop = Hashes().encode(spec, tables["shop"], SECRET)

    assert np.array_equal(first, again)
    assert not (first == other).all(axis=1).any()
    assert (first[:20] == shop[:20]).all()
    assert not (first[29] == shop[29]).all()


def test_a_run_says_who_learns_what_from_hashes(tmp_path: Path) -> None:
    """The coordinator and the secret are asked for; nobody is told of nearest keys that differ."""
    path = write_federation(tmp_path, linkage={"metric": "exact", "protection": "hashes"})
    source = tomllib.loads(path.read_text())
    source["model"] = {"family": "top1sim"}
    source["training"]["rows"] = "aligned"
    with pytest.raises(ConfigError, match='role = "coordinator"'):
        require_helpers(read_federation(save_federation(tmp_path, source)))
    source["party"].append({"name": "broker", "role": "coordinator"})
    config = read_federation(save_federation(tmp_path, source))
    (linkage,) = [one for one in channels(config) if one["channel"] == "linkage"]

    assert "the coordinator: which keys are equal, within a table" in linkage["reveals"]
    spec = replace(hidden_spec("hashes", metric="exact"), tells_rows=True)
    for limit in (0.0, np.inf):
        limited = replace(spec, choice=replace(spec.choice, max_distance=limit))
        for role in ("primary", "secondary"):
            assert not any(" key" in one and "nearest" in one for one in reveals_of(limited, role))
            assert not any("largest distance" in one for one in reveals_of(limited, role))
