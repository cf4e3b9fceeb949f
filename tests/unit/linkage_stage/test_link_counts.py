"""Counts of links: what every run says of them before anything is charged, and when it refuses."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from helpers.federations import FROZEN, save
from helpers.lines import link_as_threads
from helpers.linking import hidden_spec, key_table, link_spec

from securevfl.config.linkage import parse_linkage
from securevfl.config.reading import read_federation
from securevfl.core.errors import ConfigError, DataError
from securevfl.core.progress import LinksCounted, ProgressEvent, Warned, links_in_words
from securevfl.data.tables import KeyTable
from securevfl.linkage.metrics.metric import KeySpec
from securevfl.linkage.spec import LinkSpec
from securevfl.linkage.stage.linking import METRICS, Linker, protection_of
from securevfl.runtime.run_folder import links_of_run
from securevfl.runtime.run_options import RunOptions
from securevfl.runtime.run_tables import read_tables
from securevfl.runtime.simulation import simulate_federation

DISTINCT = [f"k{number}" for number in range(60)]


def ids(name: str, *values: str | None) -> KeyTable:
    """Return a party's keys."""
    return KeyTable(name=name, columns={"id": np.array(values, dtype=object)})


def exact(k: int = 1, *, protection: str = "none", **choice: Any) -> LinkSpec:
    """Return how ids are linked: K of all records."""
    spec = link_spec(protection)
    return replace(
        spec,
        keys=KeySpec(columns=("id",), metric=METRICS["exact"]),
        choice=replace(spec.choice, neighbours=k, least_linked=0.05, **choice),
    )


def counted(spec: LinkSpec, mine: KeyTable, theirs: KeyTable) -> tuple[LinksCounted, list[str]]:
    """Return the counts of a simulation, and its warnings."""
    events: list[ProgressEvent] = []
    linked = Linker(spec, mine)(theirs)
    found = protection_of(spec).report_links(spec, theirs, linked, events.append)
    assert found.counts == events[0]
    return found.counts, [event.text for event in events if isinstance(event, Warned)]


def test_rows_and_records_with_links_are_counted() -> None:
    """Five rows of sixty, and five records of thirty-five."""
    theirs = ids("bank", *DISTINCT[:5], *(f"other{number}" for number in range(30)))
    counts, warnings = counted(exact(), ids("agency", *DISTINCT), theirs)
    assert (counts.rows_linked, counts.rows) == (5, 60)
    assert (counts.records_linked, counts.records) == (5, 35)
    assert (counts.tied_rows, counts.repeated_records, counts.median_distance) == (0, 0, 0)
    assert not warnings
    assert links_in_words(counts) == (
        "links of bank: 5 of 60 rows (8%), 5 of 35 records; linked to equal keys"
    )


def test_nobody_but_a_link_party_knows_distances() -> None:
    """Under a protection counts are the same, and no data party has a distance."""
    spec = exact(protection="hashes")
    roles = replace(spec.roles, helpers={"coordinator": "coordinator"})
    counts, _ = counted(replace(spec, roles=roles), ids("agency", *DISTINCT), ids("bank", "k3"))
    assert (counts.rows_linked, counts.records_linked) == (1, 1)
    assert counts.median_distance is None


@pytest.mark.parametrize("k", [1, 2, 3])
def test_records_of_one_key_beyond_k_are_counted(k: int) -> None:
    """Every id three times: with one link a row, and with two, record numbers decide."""
    theirs = ids("bank", *DISTINCT * 3)
    counts, warnings = counted(exact(k), ids("agency", *DISTINCT), theirs)
    assert counts.tied_rows == (60 if k < 3 else 0)
    assert counts.repeated_records == 180
    assert 'privacy.unit = "entity"' in warnings[0]


def test_missing_keys_are_not_the_same_key() -> None:
    """Records without a key are no repetitions of one another."""
    theirs = ids("bank", *DISTINCT, None, None, " ", "")
    counts, warnings = counted(exact(), ids("agency", *DISTINCT), theirs)
    assert counts.repeated_records == 0
    assert not warnings


@pytest.mark.parametrize("by", ["rows", "records"])
def test_too_few_links_are_refused(by: Any) -> None:
    """The counts are reported first; a small table that is linked throughout is enough."""
    choice: dict[str, Any] = {} if by == "rows" else {"by": by, "links_per_record": 1, "once": True}
    spec, mine = exact(**choice), ids("agency", *DISTINCT)
    strangers = ids("bank", *(f"other{number}" for number in range(60)))
    with pytest.raises(DataError, match=r"least_linked: .* 0 of 60 rows \(0%\), 0 of 60"):
        counted(spec, mine, strangers)
    assert counted(spec, mine, ids("bank", "k7"))[0].rows_linked == 1
    allowed = replace(spec, choice=replace(spec.choice, least_linked=0.0))
    assert counted(allowed, mine, strangers)[0].rows_linked == 0


def test_a_secret_sample_does_not_count_as_few_links() -> None:
    """Of perfect links, a sample of one record in fifty leaves about one row in fifty a link.

    None of 1,200 records is in a sample once in 10^10 runs (0.98^1200).
    """
    names = [f"k{number}" for number in range(1200)]
    spec = exact(sampling_rate=0.02, once=True)
    counts, _ = counted(spec, ids("agency", *names), ids("bank", *names))
    assert 0 < counts.rows_linked < 80


@pytest.mark.parametrize("protection", ["none", "hashes"])
def test_a_secondary_refuses_before_it_says_that_linkage_is_done(protection: str) -> None:
    """So the primary gets no LINKED, and neither party goes on to what is charged."""
    keys = {
        "agency": ids("agency", *DISTINCT),
        "bank": ids("bank", *(f"other{number}" for number in range(60))),
    }
    spec = exact(protection=protection)
    helpers = {} if protection == "none" else {"coordinator": "coordinator"}
    spec = replace(spec, roles=replace(spec.roles, helpers=helpers))
    results, wires = link_as_threads(spec, keys)
    assert isinstance(results["bank"], DataError)
    assert "least_linked" in str(results["bank"])
    # Others are told what kind of error it is, and no count.
    assert results["bank"].for_others() == "DataError (its own log says more)"
    assert not [one for _, _, one in wires.travelled if one.kind.name == "LINKED"]


def test_key_ranges_that_do_not_meet_are_a_warning() -> None:
    """The nearest record is a link however far; only the ranges tell."""
    mine, theirs = key_table("agency", 60, seed=1), key_table("bank", 40, seed=2)
    away = KeyTable(name="bank", columns={k: v + 50 for k, v in theirs.columns.items()})
    spec = link_spec()
    spec = replace(spec, choice=replace(spec.choice, least_linked=0.05))
    assert counted(spec, mine, theirs)[1] == []
    assert "below or above" in counted(spec, mine, away)[1][0]


def test_records_that_all_choose_one_row_are_few_links() -> None:
    """Keys on another continent: every record has a row, and nearly all of them the same one."""
    mine, theirs = key_table("agency", 60, seed=1), key_table("bank", 40, seed=2)
    away = KeyTable(name="bank", columns={k: v + 50 for k, v in theirs.columns.items()})
    spec = link_spec()
    choice = replace(spec.choice, by="records", links_per_record=1, once=True, least_linked=0.05)
    spec = replace(spec, choice=choice)
    assert counted(spec, mine, theirs)[0].share > 0.5
    with pytest.raises(DataError, match=r"1 of 60 rows .* 40 of 40 records; .* 2.50% is less"):
        counted(spec, mine, away)


def test_texts_that_are_far_from_one_another_are_a_warning() -> None:
    """Dates in another order cost eight edits of ten letters."""
    spec = link_spec(metric="levenshtein")
    spec = replace(spec, choice=replace(spec.choice, neighbours=1, least_linked=0.05))

    def born(name: str, form: str) -> KeyTable:
        days = [(d, m, y) for d, m, y in zip(range(1, 25), range(1, 25), range(40), strict=False)]
        texts = [form.format(d=d, m=m % 12 + 1, y=1950 + y) for d, m, y in days]
        empty = np.array([""] * len(texts), dtype=object)
        return KeyTable(name=name, columns={"lon": np.array(texts, dtype=object), "lat": empty})

    iso = born("agency", "{y}-{m:02}-{d:02}")
    assert counted(spec, iso, born("bank", "{y}-{m:02}-{d:02}"))[1] == []
    assert "order of words, dates" in counted(spec, iso, born("bank", "{d:02}.{m:02}.{y}"))[1][0]


def federation(folder: Path, theirs: list[int], **linkage: Any) -> Path:
    """Write a federation of two parties by whole ids, behind a promise."""
    random = np.random.default_rng(5)
    rows = ["id,a,y", *(f"{i},{a:.3f},{int(a > 0)}" for i, a in enumerate(random.normal(size=60)))]
    (folder / "agency.csv").write_text("\n".join(rows))
    own = ["id,b", *(f"{i},{b:.3f}" for i, b in zip(theirs, random.normal(size=60), strict=True))]
    (folder / "bank.csv").write_text("\n".join(own))
    source: dict[str, Any] = {
        "federation": {"name": "ids", "task": "binary", "seed": 1},
        "model": {"family": "avgsim", "neighbours": 1},
        "base": {"estimator": "none"},
        "training": {"epochs": 1, "batch_size": 16},
        "privacy": {**FROZEN, "links_per_record": 1},
        "linkage": {"metric": "exact", "protection": "none", **linkage},
        "party": [
            {"name": "agency", "role": "primary", "label": "y", "address": "127.0.0.1:0"},
            {"name": "bank", "role": "secondary", "scaling": "bounds", "bounds": {"b": [-4, 4]}},
        ],
    }
    for party in source["party"]:
        party |= {"data": f"{party['name']}.csv", "key": ["id"]}
    return save(folder, source)


def simulated(folder: Path, path: Path, events: list[ProgressEvent]) -> dict[str, Any]:
    config = read_federation(path)
    tables = read_tables(config, folder)
    cpu = torch.device("cpu")
    run = folder / "run"
    return simulate_federation(
        config,
        tables,
        RunOptions(run_folder=run, device=cpu, observe=events.append),
        with_alone=False,
    ).metrics


def test_a_run_without_links_charges_nothing(tmp_path: Path) -> None:
    """Other ids on both sides: the run ends in one line, and no ledger has a charge."""
    path = federation(tmp_path, list(range(1000, 1060)))
    events: list[ProgressEvent] = []
    with pytest.raises(DataError, match=r"links of bank: 0 of 60 rows"):
        simulated(tmp_path, path, events)
    assert any(isinstance(event, LinksCounted) for event in events)
    assert charged(tmp_path) == 0


def charged(folder: Path) -> int:
    """Return the lines of a run's ledgers that charge something."""
    ledgers = (folder / "run").rglob("ledger.jsonl")
    lines = [json.loads(line) for path in ledgers for line in path.read_text().splitlines()]
    return sum("epsilon" in line for line in lines)


def test_a_run_reports_its_links(tmp_path: Path) -> None:
    """As an event before the first release, in metrics.json, and in a line for people."""
    path = federation(tmp_path, list(range(30, 90)))
    events: list[ProgressEvent] = []
    metrics = simulated(tmp_path, path, events)
    names = [event.EVENT for event in events]
    assert names.index("links-counted") < names.index("release")
    assert charged(tmp_path) > 0
    assert metrics["links"]["bank"]["rows_linked"] == 30
    assert links_of_run(metrics)[0].startswith("links of bank: 30 of 60 rows (50%)")


def test_new_rows_that_nobody_knows_are_a_warning(tmp_path: Path) -> None:
    """Ids that a program has changed: the answer comes, and whoever may know is told."""
    path = federation(tmp_path, list(range(60)))
    path.write_text(f"{path.read_text()}\n[prediction]\nepsilon = 500.0\n")
    config, events = read_federation(path), list[ProgressEvent]()
    tables, cpu = read_tables(config, tmp_path), torch.device("cpu")
    run = simulate_federation(
        config, tables, RunOptions(run_folder=tmp_path / "run", device=cpu), with_alone=False
    )
    rows = pd.read_csv(tmp_path / "agency.csv").drop(columns="y")
    run.predict(rows.head(30), observe=events.append)
    assert not any("new rows" in str(event) for event in events)
    run.predict(rows.assign(id=rows["id"] + 5000).head(30), observe=events.append)
    assert [event for event in events if "0 of 30 new rows are linked" in str(event)]


def test_the_least_share_is_one() -> None:
    """A share above 1 is refused with the file."""
    with pytest.raises(ConfigError, match=r"linkage.least_linked must lie in \[0, 1\], got 5"):
        parse_linkage({"protection": "none", "least_linked": 5})


def test_predictions_do_not_count_links() -> None:
    """Of one row, a refusal would tell that it has no link."""
    spec = hidden_spec("none")
    assert spec.choice.least_linked is None
    linked = Linker(spec, key_table("agency", 60, seed=1))(key_table("bank", 40, seed=2))
    events: list[ProgressEvent] = []
    keys = key_table("bank", 40, seed=2)
    assert protection_of(spec).report_links(spec, keys, linked, events.append).counts is None
    assert not events
