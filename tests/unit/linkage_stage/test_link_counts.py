"""Counts of links: a secondary's own, and the noised one by which the primary ends a run."""

import json
import math
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from helpers.federations import FROZEN
from helpers.fixed_entropy import fixed_entropy
from helpers.lines import link_as_threads
from helpers.linking import hidden_spec, key_table, link_spec
from scipy.stats import chi2

from securevfl.config.federation import link_spec as link_spec_of
from securevfl.config.linkage import parse_linkage
from securevfl.config.reading import read_federation
from securevfl.core.errors import BudgetExceededError, ConfigError, DataError, PrivacyError
from securevfl.core.progress import (
    LinkedRowsCounted,
    LinksCounted,
    ProgressEvent,
    Warned,
    links_in_words,
)
from securevfl.data.tables import KeyTable
from securevfl.desk.report.wording import links_of_run
from securevfl.dp.gaussian import gaussian_epsilon
from securevfl.federation.link_counts import link_count
from securevfl.federation.run_plan import (
    RunPlan,
    plan_prediction,
    plan_run,
    prediction_facts,
    run_facts,
)
from securevfl.ledger.book import Limit
from securevfl.ledger.ledger import Ledger, Linked
from securevfl.ledger.ledger_file import set_limit
from securevfl.linkage.metrics.metric import KeySpec
from securevfl.linkage.sampling import has_candidate
from securevfl.linkage.spec import LinkSpec
from securevfl.linkage.stage.linkage_parts import METRICS, protection_of
from securevfl.linkage.stage.linking import Linker
from securevfl.runtime.run_options import RunOptions
from securevfl.runtime.run_tables import read_tables
from securevfl.runtime.simulation import simulate_federation
from securevfl.testing import save_federation

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
        choice=replace(spec.choice, neighbours=k, counted=True, **choice),
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
@pytest.mark.parametrize("once", [True, False])
@pytest.mark.parametrize("protection", ["none", "hashes"])
def test_a_secret_sample_does_not_change_what_is_said(protection: str, by: Any, once: bool) -> None:
    """Rows with a record are counted, whatever the sample holds: its count is no sampled release.

    All of 600 records are in a sample of rate 0.5 once in 10^180 runs.
    """
    names = [f"k{number}" for number in range(600)]
    spec = exact(sampling_rate=0.5, once=once or by == "records", by=by, links_per_record=1)
    mine, theirs = ids("agency", *names, "x", "y"), ids("bank", *names)
    linked = Linker(replace(spec, hiding=replace(spec.hiding, protection=protection)), mine)(theirs)
    assert int(has_candidate(linked.source, np.arange(602)).sum()) == 600
    assert linked.linked_rows().sum() < 600


@pytest.mark.parametrize("protection", ["none", "hashes", "psi"])
def test_a_secondary_goes_on_without_a_link(protection: str) -> None:
    """Nothing that it sends or ends depends on it: the primary gets LINKED, as of full links."""
    spec = exact(protection=protection)
    helpers = {"hashes": {"coordinator": "coordinator"}}.get(protection, {})
    spec = replace(spec, roles=replace(spec.roles, helpers=helpers))
    sent = []
    for known in (DISTINCT, [f"other{number}" for number in range(60)]):
        keys = {"agency": ids("agency", *DISTINCT), "bank": ids("bank", *known)}
        results, wires = link_as_threads(spec, keys)
        assert not [one for one in results.values() if isinstance(one, Exception)]
        sent.append([(*way, one.kind, len(one.tensors)) for *way, one in wires.travelled])
    assert sorted(map(str, sent[0])) == sorted(map(str, sent[1]))


def test_key_ranges_that_do_not_meet_are_a_warning() -> None:
    """The nearest record is a link however far; only the ranges tell."""
    mine, theirs = key_table("agency", 60, seed=1), key_table("bank", 40, seed=2)
    away = KeyTable(name="bank", columns={k: v + 50 for k, v in theirs.columns.items()})
    spec = link_spec()
    spec = replace(spec, choice=replace(spec.choice, counted=True))
    assert counted(spec, mine, theirs)[1] == []
    assert "below or above" in counted(spec, mine, away)[1][0]


def test_texts_that_are_far_from_one_another_are_a_warning() -> None:
    """Dates in another order cost eight edits of ten letters."""
    spec = link_spec(metric="levenshtein")
    spec = replace(spec, choice=replace(spec.choice, neighbours=1, counted=True))

    def born(name: str, form: str) -> KeyTable:
        days = [(d, m, y) for d, m, y in zip(range(1, 25), range(1, 25), range(40), strict=False)]
        texts = [form.format(d=d, m=m % 12 + 1, y=1950 + y) for d, m, y in days]
        empty = np.array([""] * len(texts), dtype=object)
        return KeyTable(name=name, columns={"lon": np.array(texts, dtype=object), "lat": empty})

    iso = born("agency", "{y}-{m:02}-{d:02}")
    assert counted(spec, iso, born("bank", "{y}-{m:02}-{d:02}"))[1] == []
    assert "order of words, dates" in counted(spec, iso, born("bank", "{d:02}.{m:02}.{y}"))[1][0]


def federation(
    folder: Path, theirs: list[int], *, noise: float | None = 0.05, **linkage: Any
) -> Path:
    """Write a federation of two parties by whole ids, behind a promise or without one."""
    random = np.random.default_rng(5)
    rows = ["id,a,y", *(f"{i},{a:.3f},{int(a > 0)}" for i, a in enumerate(random.normal(size=60)))]
    (folder / "agency.csv").write_text("\n".join(rows))
    own = ["id,b", *(f"{i},{b:.3f}" for i, b in zip(theirs, random.normal(size=60), strict=True))]
    (folder / "bank.csv").write_text("\n".join(own))
    privacy: dict[str, Any] = {**FROZEN, "links_per_record": 1, "noise_multiplier": noise}
    del privacy["epsilon"]
    if noise is None:
        privacy = {"mechanism": "none", "encoder": "frozen", "links_per_record": 1}
    source: dict[str, Any] = {
        "federation": {"name": "ids", "task": "binary", "seed": 1},
        "model": {"family": "avgsim", "neighbours": 1},
        "base": {"estimator": "none"},
        "training": {"epochs": 1, "batch_size": 16},
        "privacy": privacy,
        "linkage": {"metric": "exact", "protection": "none", **linkage},
        "party": [
            {"name": "agency", "role": "primary", "label": "y", "address": "127.0.0.1:0"},
            {"name": "bank", "role": "secondary", "scaling": "bounds", "bounds": {"b": [-4, 4]}},
        ],
    }
    for party in source["party"]:
        party |= {"data": f"{party['name']}.csv", "key": ["id"]}
    return save_federation(folder, source)


def simulated(
    folder: Path, path: Path, events: list[ProgressEvent], *, resume: bool = False
) -> dict[str, Any]:
    config = read_federation(path)
    tables = read_tables(config, folder)
    cpu = torch.device("cpu")
    options = RunOptions(
        run_folder=folder / "run", device=cpu, observe=events.append, resume=resume
    )
    return simulate_federation(config, tables, options, with_alone=False).metrics


def charged(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the lines of a run's ledgers that charge something, by party."""
    found = {}
    for path in (folder / "run").rglob("ledger.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        found[path.parent.name] = [line for line in lines if "epsilon" in line]
    return found


@pytest.mark.parametrize("noise", [0.05, None])
def test_a_run_of_too_few_links_ends_by_the_number_alone(
    tmp_path: Path, noise: float | None
) -> None:
    """Other ids on both sides: the primary ends it; the number is charged, and nothing else.

    The noise's deviation is half a row, so that 3 of 60 are said of none once in 10^9 runs.
    """
    path = federation(tmp_path, list(range(1000, 1060)), noise=noise)
    events: list[ProgressEvent] = []
    with pytest.raises(DataError, match=r"0 % of the 60 rows are linked at bank.*least_linked = 0"):
        simulated(tmp_path, path, events)
    said = [event for event in events if isinstance(event, LinkedRowsCounted)]
    assert [(one.name, one.rows, one.linked) for one in said] == [("bank", 60, 0)]
    lines = charged(tmp_path)
    assert {name: [one["kind"] for one in own] for name, own in lines.items()} == {
        "agency": ["link-count"],
        "bank": ["link-count"],
    }
    assert [lines[name][0]["linked"] for name in ("agency", "bank")] == [None, 0]
    assert (lines["bank"][0]["epsilon"] is None) == (noise is None)


def answer(
    plan: RunPlan,
    path: Path,
    theirs: list[int],
    *,
    run: str,
    limit: float | None = None,
    kind: type[Ledger] = Ledger,
) -> tuple[int, Ledger]:
    """Return what a secondary says in one session of a run, with its closed ledger.

    Its table is the primary's rows 0 to 59 and what ``theirs`` has of them.
    """
    if limit is not None and not path.exists():
        set_limit(path, Limit(unit=plan.config.privacy.unit, epsilon=limit, delta=1e-4))
    ledger = kind(
        path,
        party="bank",
        plan=plan.releases,
        noise_share_std=plan.noise_share_std,
        run=run,
        durable=False,
    )
    try:
        mine = ids("agency", *(f"{number}" for number in range(60)))
        spec = link_spec_of(plan.config)
        linked = Linker(spec, mine)(ids("bank", *(f"{number}" for number in theirs)))
        return link_count(plan, linked, ledger).linked, ledger
    finally:
        ledger.close()


def plan_of(folder: Path, *, noise: float) -> RunPlan:
    config = read_federation(federation(folder, list(range(60)), noise=noise))
    return plan_run(config, run_facts(config, read_tables(config, folder)["agency"])[1])


def test_no_number_of_sessions_draws_twice(tmp_path: Path) -> None:
    """Resumed as often as one likes, and over other records, a run says what it has said.

    The noise's deviation is 5 rows: a second draw would be the first one once in 13.
    """
    plan, path = plan_of(tmp_path, noise=0.5), tmp_path / "bank.jsonl"
    first, ledger = answer(plan, path, list(range(30)), run="0" * 32)
    spent = ledger.epsilon_spent
    for theirs in ([999], list(range(60)), list(range(30)), [*range(29)]):
        said, ledger = answer(plan, path, theirs, run="0" * 32)
        assert (said, ledger.epsilon_spent) == (first, spent)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["linked"] for line in lines if line["kind"] == "link-count"] == [first]
    # Another run is another draw, and charged.
    assert answer(plan, path, [999], run="1" * 32)[1].total > spent


def test_a_number_is_on_the_disk_before_it_is_said(tmp_path: Path) -> None:
    """A budget that does not cover it, or a disk that takes nothing: no number."""
    plan, path = plan_of(tmp_path, noise=0.5), tmp_path / "bank.jsonl"
    with pytest.raises(BudgetExceededError, match="saying how many rows are linked"):
        answer(plan, path, [7], run="0" * 32, limit=1e-3)
    assert "link-count" not in path.read_text()

    class FullDisk(Ledger):
        """Takes its first line alone."""

        def charge_link_count(self, draw: Callable[[], Linked]) -> Linked:
            self._file.close()
            return super().charge_link_count(draw)

    with pytest.raises(PrivacyError, match="closed"):
        answer(plan, tmp_path / "other.jsonl", [7], run="0" * 32, kind=FullDisk)
    assert "link-count" not in (tmp_path / "other.jsonl").read_text()


def test_a_primary_that_asks_for_ever_is_charged_for_ever(tmp_path: Path) -> None:
    """A run each time: the owner's limit ends it, the total is booked, and every number is noised.

    At a run's multiplier of 0.5, runs of which nothing but the number is asked come to the root of
    their number over five. Noise of a quarter of the deviation fails, and so does a fixed one.
    """
    plan, path = plan_of(tmp_path, noise=0.5), tmp_path / "bank.jsonl"
    limit, said = gaussian_epsilon(noise_multiplier=5 / math.sqrt(20), delta=1e-4), []

    def ask_for_ever() -> None:
        for asked in range(40):
            run = f"{asked:032x}"
            said.append(answer(plan, path, [*range(30)], run=run, limit=limit * (1 + 1e-9)))

    with pytest.raises(BudgetExceededError, match="over the limit of its owner"):
        ask_for_ever()
    assert len(said) == 20
    assert said[-1][1].total == pytest.approx(limit)
    squares = sum((linked - 30) ** 2 for linked, _ in said) / 5**2
    assert chi2.ppf(1e-9, 20) < squares < chi2.isf(1e-9, 20)


def test_a_run_reports_its_links(tmp_path: Path) -> None:
    """Before the first release, in metrics.json, in lines for people, and within epsilon."""
    path = federation(tmp_path, list(range(30, 90)))
    events: list[ProgressEvent] = []
    metrics = simulated(tmp_path, path, events)
    names = [event.EVENT for event in events]
    assert names.index("links-counted") < names.index("linked-rows") < names.index("release")
    assert metrics["links"]["bank"]["rows_linked"] == 30
    assert metrics["linked_rows"]["bank"]["linked"] == pytest.approx(30, abs=4)
    exact, said = links_of_run(metrics)[1], links_of_run(metrics)[0]
    assert exact.startswith("links of bank: 30 of 60 rows (50%)")
    assert re.match(
        r"warning: only about \d\d % of the 60 rows are linked at bank \(± 1.7 %\)", said
    )
    assert "strip_zeros" in metrics["linked_rows"]["bank"]["doubt"]
    privacy = metrics["privacy"]
    assert privacy["epsilon"] == pytest.approx(privacy["epsilon_planned"])
    kinds = [line["kind"] for line in charged(tmp_path)["bank"]]
    assert kinds == ["link-count", *["charge"] * 4]


def test_too_few_rows_to_count_are_not_counted(tmp_path: Path) -> None:
    """Noise of a sixth of the rows would end good runs: nothing is said, and nothing charged."""
    events: list[ProgressEvent] = []
    metrics = simulated(tmp_path, federation(tmp_path, list(range(60)), noise=1.0), events)
    assert "linked_rows" not in metrics
    assert not [line for line in charged(tmp_path)["bank"] if line["kind"] == "link-count"]
    assert any("60 rows are too few" in str(event) for event in events)


def test_new_rows_that_nobody_knows_are_a_warning(tmp_path: Path) -> None:
    """Ids that a program has changed: the answer comes, and whoever may know is told."""
    path = federation(tmp_path, list(range(60)))
    path.write_text(f"{path.read_text()}\n[prediction]\nepsilon = 5000.0\n")
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


def test_predictions_do_not_count_links(tmp_path: Path) -> None:
    """Of one row, the count would tell whether it has a link."""
    run = plan_of(tmp_path, noise=0.05)
    facts = prediction_facts(rows=60, predicted_rows=30, active=(1,))
    asked = plan_prediction(run.config, facts, noise_share_std=run.noise_share_std)
    assert (run.releases.linked_rows, asked.releases.linked_rows) == (60, None)
    spec = hidden_spec("none")
    assert not spec.choice.counted
    linked = Linker(spec, key_table("agency", 60, seed=1))(key_table("bank", 40, seed=2))
    events: list[ProgressEvent] = []
    keys = key_table("bank", 40, seed=2)
    assert protection_of(spec).report_links(spec, keys, linked, events.append).counts is None
    assert not events


def test_a_suspect_is_told_by_the_noised_number_alone(tmp_path: Path) -> None:
    """19 invented ids and one suspect's, with the same noise: the number differs by m at most.

    All else that happens follows from the number, so that two equal ones end alike.
    """
    ends = []
    for name, suspect in (("member", 30), ("stranger", 999)):
        (tmp_path / name).mkdir()
        path = federation(tmp_path / name, list(range(60)), noise=0.15)
        agency = pd.read_csv(path.parent / "agency.csv").head(20)
        agency["id"] = [*range(500, 519), suspect]
        agency.to_csv(path.parent / "agency.csv", index=False)
        events: list[ProgressEvent] = []
        with fixed_entropy(), suppress(DataError):
            simulated(path.parent, path, events)
            events.append(Warned(text="went on"))
        (said,) = [one.linked for one in events if isinstance(one, LinkedRowsCounted)]
        ends.append(said)
        assert (Warned(text="went on") in events) == (said >= 1)
    member, stranger = ends
    assert 0 <= member - stranger <= 1
