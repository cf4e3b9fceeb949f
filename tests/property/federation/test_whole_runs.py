"""One record removed or exchanged, through a whole run and requests: what every party receives.

Tables as read, split, links, fits and class sums, rounds of training, validation and test, and
requests for predictions, several where secondaries count how often a record is released. Sums
before noise keep to the change that their noise is made for, in units of the ledger's sensitivity;
given the same answers behind noise, all else that any party receives is the same to the bit.
"""

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from helpers.removal import WholeRun, whole_run

from securevfl import read_federation
from securevfl.config.federation import FederationConfig
from securevfl.data.tables import PartyTable
from securevfl.ledger.ledger_file import RecordCounts
from securevfl.testing import read_tables, save_federation, write_federation

ROWS = 48
CAP = 2
PRIVACY = {"noise_multiplier": 1.0, "delta": 1e-4, "encoder": "frozen", "links_per_record": CAP}
POOLED = {"release": "pooled", "hidden": 4, "neighbours": 2, "heads": 1}
DIRECTIONS = {**POOLED, "top": "additive"}
RECORDS_CHOOSE = {"protection": "none", "choose": "records"}
CLASS_MEANS: dict[str, Any] = {
    "model": {**POOLED, "hidden": 3, "top": "tied"},
    "linkage": RECORDS_CHOOSE,
    "base": {"estimator": "linear"},
}

RUNS: dict[str, dict[str, Any]] = {
    "random": {"model": DIRECTIONS, "encoder": {"method": "random"}},
    "principal": {
        "model": DIRECTIONS,
        "encoder": {"method": "principal", "share": 0.3},
        "linkage": RECORDS_CHOOSE,
    },
    "class means, shares": {
        **CLASS_MEANS,
        "encoder": {"method": "class-means", "labels": "shares", "share": 0.3},
    },
    "class means, randomised": {
        **CLASS_MEANS,
        "encoder": {"method": "class-means", "labels": "randomised", "share": 0.3},
    },
    "scores, shares": {
        **CLASS_MEANS,
        "federation": {"task": "regression"},
        "model": {**POOLED, "hidden": 1, "top": "tied"},
        "privacy": {"epsilon": 2.0, "delta": 1e-4, "encoder": "frozen", "links_per_record": CAP},
        "encoder": {"method": "class-means", "labels": "shares", "share": 0.3},
    },
    "scores, Laplace": {
        **CLASS_MEANS,
        "secondaries": 3,
        "federation": {"task": "regression"},
        "model": {**POOLED, "hidden": 1, "top": "tied"},
        "privacy": {"epsilon": 8.0, "delta": 1e-4, "encoder": "frozen", "links_per_record": CAP},
        "encoder": {"method": "class-means", "labels": "randomised", "share": 0.6},
    },
    "dp-trained": {
        "model": {**POOLED, "dropout": 0.2},
        "privacy": {**PRIVACY, "encoder": "dp-trained"},
    },
    "entity": {
        "model": DIRECTIONS,
        "encoder": {"method": "random"},
        "privacy": {**PRIVACY, "unit": "entity"},
    },
    "entity, counted": {
        "model": DIRECTIONS,
        "encoder": {"method": "random"},
        "privacy": {**PRIVACY, "unit": "entity"},
        "linkage": RECORDS_CHOOSE,
    },
}
MECHANISMS = {
    "random": {"rows"},
    "principal": {"rows", "moments"},
    "class means, shares": {"rows", "class sums"},
    "class means, randomised": {"rows", "class sums"},
    "scores, shares": {"symbols", "ranks", "class sums"},
    "scores, Laplace": {"steps", "ranks", "class sums"},
    "dp-trained": {"rows", "update"},
    "entity": {"rows"},
    "entity, counted": {"rows"},
}


def federation(folder: Path, name: str) -> tuple[FederationConfig, dict[str, PartyTable]]:
    """Write and read a federation in which records have fewer rows than want them."""
    settings = {"privacy": PRIVACY, "training": {"batch_size": 16, "epochs": 2}, **RUNS[name]}
    path = write_federation(folder, rows=ROWS, **settings)
    source = tomllib.loads(path.read_text())
    for party in source["party"][1:]:
        party |= {"scaling": "bounds", "bounds": [-0.3, 0.3]}
        # Few records for many rows: without a limit one would be linked to more than it may.
        table = folder / party["data"]
        pd.read_csv(table).head(ROWS // 3).to_csv(table, index=False)
    if "shares" in name:
        source["party"].append({"name": "dealer", "role": "dealer"})
    config = read_federation(save_federation(folder, source))
    return config, dict(read_tables(config, folder))


def without(table: PartyTable, record: int) -> PartyTable:
    return table.take(np.delete(np.arange(table.num_rows), record))


def exchanged(table: PartyTable, record: int) -> PartyTable:
    """Return the table with other values, far out, in one record."""
    features = table.features.copy()
    features[record] = np.where(features[record] > 0, -1e6, 1e6)
    return dataclasses.replace(table, features=features)


def require_kept(name: str, here: WholeRun, there: WholeRun, *, changes: int) -> dict[str, float]:
    """Check what a removed record, or two changes, may do to a run; return the ratios."""
    assert there.received == here.received
    ratios = here.ratios(there)
    assert set(ratios) == MECHANISMS[name]
    assert max(ratios.values(), default=0) <= changes + 1e-9, ratios
    return ratios


REQUESTS = ((0, 1, 2), (2, 1), (0,), tuple(range(ROWS)), (40, 0, 7), (0, 1, 2))
"""Of a counted model: rows once more, one by one, and all of them."""


@pytest.mark.parametrize("name", RUNS)
def test_a_record_moves_no_more_than_its_promise_counts(name: str, tmp_path: Path) -> None:
    """Removed: by the sensitivity at most. Exchanged: by a removal and an addition."""
    config, tables = federation(tmp_path, name)
    requests = REQUESTS[:1] if config.releases_per_record is None else REQUESTS
    here = whole_run(config, tables, tmp_path / "here", requests=requests)
    assert len(here.plans) == 1 + len(requests), "a run and requests"
    touched = {"bank-1", "bank-2"} if config.privacy.unit == "entity" else {"bank-1"}
    furthest: dict[str, float] = {}
    for record, change, many in ((0, without, 1), (7, exchanged, 2)):
        other = tables | {party: change(tables[party], record) for party in touched}
        folder = tmp_path / change.__name__
        there = whole_run(config, other, folder, before=here, requests=requests)
        ratios = require_kept(name, here, there, changes=many)
        furthest = {what: max(one, furthest.get(what, 0)) for what, one in ratios.items()}
        assert here.parties_moved(there) <= touched
        if config.privacy.encoder == "frozen":
            assert max(here.rows_moved(there).values()) <= many * CAP
    # With the nearest record, however far, every row stays linked.
    moving = {what: ratio for what, ratio in furthest.items() if what != "linked rows"}
    assert all(ratio > 0.02 for ratio in moving.values()), furthest


def test_records_that_are_not_counted_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: without the filter the same requests show more than was booked."""
    admit = RecordCounts.admit

    def for_ever(counts: RecordCounts, records: np.ndarray, *, most: int) -> np.ndarray:
        del most
        return admit(counts, records, most=10**9)

    monkeypatch.setattr(RecordCounts, "admit", for_ever)
    config, tables = federation(tmp_path, "principal")
    again = (tuple(range(ROWS)),) * 4
    here = whole_run(config, tables, tmp_path / "here", requests=again)
    other = tables | {"bank-1": without(tables["bank-1"], 0)}
    there = whole_run(config, other, tmp_path / "there", before=here, requests=again)
    assert here.ratios(there)["rows"] > 1.2
