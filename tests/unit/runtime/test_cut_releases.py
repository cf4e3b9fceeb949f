"""A frozen run that is cut within its releases goes on by row: no row leaves anybody twice."""

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.damage import damage
from helpers.federations import FROZEN

from securevfl import RunResult
from securevfl.core.errors import ConfigError, PrivacyError
from securevfl.core.progress import ProgressEvent, RowsReleased, unheard
from securevfl.federation.checkpoint import read_state
from securevfl.federation.rounds.cached_release import CachedRelease
from securevfl.federation.rounds.kept_rounds import CachedRows
from securevfl.federation.run_plan import ROUNDS_AHEAD
from securevfl.testing import run_in_process, save_federation, write_federation

ROWS, BATCH, ROUNDS = 60, 16, 4
PARTIES = ("agency", "bank-1", "bank-2")
NOISY = {**FROZEN, "links_per_record": 1}
PLAIN = {"mechanism": "none", "encoder": "frozen", "links_per_record": 1}


class PowerCutError(Exception):
    """The simulated crash."""


def federation(folder: Path, *, noise: bool, **sections: Any) -> Path:
    path = write_federation(
        folder,
        rows=ROWS,
        **{
            "model": {"release": "pooled", "top": "additive", "hidden": 4},
            "encoder": {"method": "principal"},
            "training": {"epochs": 1, "batch_size": BATCH},
            "privacy": NOISY if noise else PLAIN,
            **sections,
        },
    )
    source = tomllib.loads(path.read_text())
    for party in source["party"][1:]:
        party |= {"scaling": "bounds", "bounds": [-4.0, 4.0]}
    return save_federation(folder, source)


def run(path: Path, out: Path, *, resume: bool = False, observe=unheard) -> RunResult:
    return run_in_process(path, out, resume=resume, observe=observe)


def released(out: Path) -> torch.Tensor:
    folder = out / "parties" / "agency" / "released"
    parts = [read_state(folder / f"{number}.pt")["state"] for number in range(1, ROUNDS + 1)]
    assert torch.equal(torch.cat([part["rows"] for part in parts]), torch.arange(ROWS))
    return torch.cat([part["aggregate"] for part in parts])


def ledger_of(out: Path, name: str) -> list[dict[str, Any]]:
    lines = (out / "parties" / name / "ledger.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def rows_charged(out: Path, name: str) -> int:
    return sum(line["rows"] for line in ledger_of(out, name) if line["kind"] == "charge")


class CutLayer:
    """Lets a method raise at its n-th call, before or after its work, and then never again."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.done = False
        self.result: Any = None

    def at(self, kind: type, method: str, *, call: int, after: bool) -> None:
        whole: Callable[..., Any] = getattr(kind, method)
        calls = 0

        def cut(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            here = calls == call and not self.done
            if here and not after:
                self.done, self.result = True, args
                raise PowerCutError
            result = whole(*args, **kwargs)
            if here:
                self.done, self.result = True, result
                raise PowerCutError
            return result

        self._monkeypatch.setattr(kind, method, cut)


# In a round the primary's ledger is charged, then bank-1 answers whole, then bank-2.
POINTS = {
    "bank-1 has fitted and kept nothing": (CachedRelease, "_write", 1, False),
    "bank-1 has kept its encoder and no row": (CachedRelease, "settle", 1, True),
    "bank-1 has noted what is asked for": (CachedRelease, "_write", 2, True),
    "the first round is booked by nobody but the primary": (CachedRelease, "charge", 1, False),
    "bank-1 has booked and not answered": (CachedRelease, "keep_answer", 3, False),
    "bank-1 has answered, bank-2 was not asked": (CachedRelease, "keep_answer", 3, True),
    "bank-2 has booked and not answered": (CachedRelease, "keep_answer", 4, False),
    "all have answered, the primary has kept nothing": (CachedRows, "keep", 2, False),
    "the primary has kept a round": (CachedRows, "keep", 2, True),
    "the primary has kept the last round": (CachedRows, "keep", ROUNDS, True),
    "the first round was answered and lost": (CachedRows, "keep", 1, False),
}


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "noised"])
def uncut(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[bool, Path, RunResult]:
    """A run that nothing cuts: whether it has noise, its folder, and what it returned."""
    folder = tmp_path_factory.mktemp("uncut")
    return (
        request.param,
        folder / "run",
        run(federation(folder, noise=request.param), folder / "run"),
    )


@pytest.mark.parametrize("point", sorted(POINTS))
def test_a_cut_run_releases_each_row_once(
    point: str,
    uncut: tuple[bool, Path, RunResult],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Wherever the crash comes: every row is booked once, and epsilon is the uncut run's.

    Without noise the result is the uncut run's, bit for bit. What the primary had got and lost
    comes back the same, with noise too: it is that release and no other.
    """
    noise, uncut_run, once = uncut
    path = federation(tmp_path, noise=noise)
    out = tmp_path / "cut"
    cut = CutLayer(monkeypatch)
    kind, method, call, after = POINTS[point]
    cut.at(kind, method, call=call, after=after)
    with pytest.raises(PowerCutError):
        run(path, out)
    assert cut.done

    again = run(path, out, resume=True)

    for name in PARTIES:
        assert rows_charged(out, name) == ROWS
        assert sum(line["kind"] == "fit" for line in ledger_of(out, name)) == 1
    assert again.metrics["privacy"]["epsilon"] == once.metrics["privacy"]["epsilon"]
    assert again.metrics["privacy"]["row_releases"] == ROWS
    if kind is CachedRows and not after:
        _, number, lost = cut.result
        part = slice(number * BATCH, (number + 1) * BATCH)
        assert torch.equal(released(out)[part], lost)
    if not noise:
        assert torch.equal(released(out), released(uncut_run))
        assert again.losses == once.losses
        assert again.metrics["test"] == once.metrics["test"]


@pytest.mark.parametrize("choose", ["rows", "records"])
def test_the_secret_sample_is_the_run_s(
    choose: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At q < 1 the rows behind a cut are released from the sample of those before it.

    Without noise, what a row's release is made of shows: an uncut pass over the same kept links
    gives the same rows. A second sample would be a second release of the records in both.
    """
    path = federation(
        tmp_path,
        noise=True,
        linkage={"choose": choose},
        privacy={
            **NOISY,
            "sampling_rate": 0.5,
        },
    )
    out = tmp_path / "cut"
    cut = CutLayer(monkeypatch)
    cut.at(CachedRows, "keep", call=2, after=True)
    with pytest.raises(PowerCutError):
        run(path, out)
    folder = out / "parties" / "bank-1"
    before = (folder / "release.pt").read_bytes()
    used: list[np.ndarray] = []
    link = CachedRelease.link

    def linked(self: CachedRelease, rows: np.ndarray):
        table = link(self, rows)
        used.append(table.indices)
        return table

    monkeypatch.setattr(CachedRelease, "link", linked)
    run(path, out, resume=True)
    assert (folder / "release.pt").read_bytes() == before
    kept = read_state(folder / "release.pt")["state"]["links"]
    if choose == "rows":
        rest = kept["indices"][2 * BATCH :]
        assert np.array_equal(np.concatenate(used[::2]), rest.numpy())
    else:
        sampled = set(np.flatnonzero(kept["sample"].numpy()))
        assert {record for table in used[::2] for record in table[table >= 0]} <= sampled


def cut_within(path: Path, out: Path, *, rounds: int) -> None:
    def observe(event: ProgressEvent) -> None:
        if isinstance(event, RowsReleased) and event.done == rounds:
            raise PowerCutError

    with pytest.raises(PowerCutError):
        run(path, out, observe=observe)


@pytest.mark.parametrize("harm", ["deleted", "flipped"])
@pytest.mark.parametrize("name", ["release.pt", "answers/2.pt"])
def test_lost_state_of_a_secondary_is_refused(
    harm: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that were released are not released again, whatever was deleted or damaged."""
    path = federation(tmp_path, noise=True)
    out = tmp_path / "run"
    cut = CutLayer(monkeypatch)
    cut.at(CachedRows, "keep", call=2, after=False)
    with pytest.raises(PowerCutError):
        run(path, out)
    before = {party: rows_charged(out, party) for party in PARTIES}
    damage(out / "parties" / "bank-2" / name, harm)
    if name == "release.pt":
        # The last answer does not need it; what comes behind it does.
        damage(out / "parties" / "bank-2" / "answers/2.pt", harm)
    with pytest.raises(PrivacyError, match=r"released.*another --out, which is charged"):
        run(path, out, resume=True)
    assert {party: rows_charged(out, party) for party in PARTIES} == before


def test_a_primary_that_lost_more_than_was_under_way_asks_for_none(tmp_path: Path) -> None:
    """Deleted releases are not released once more, not even by a plan without an epsilon."""
    privacy = {**NOISY, "noise_multiplier": 1.0}
    del privacy["epsilon"]
    training = {"epochs": 1, "batch_size": ROWS // (ROUNDS_AHEAD + 1)}
    path = federation(tmp_path, noise=True, privacy=privacy, training=training)
    out = tmp_path / "run"
    run(path, out)
    (out / "metrics.json").unlink()
    before = {party: rows_charged(out, party) for party in PARTIES}
    for part in (out / "parties" / "agency" / "released").iterdir():
        part.unlink()
    with pytest.raises(PrivacyError, match=r"released/1\.pt: is missing or damaged"):
        run(path, out, resume=True)
    assert {party: rows_charged(out, party) for party in PARTIES} == before


def test_a_table_that_changed_is_refused(tmp_path: Path) -> None:
    """The rest of a release is made of what its beginning was made of, or of nothing."""
    path = federation(tmp_path, noise=True)
    out = tmp_path / "run"
    cut_within(path, out, rounds=2)
    table = tmp_path / "bank-1.csv"
    lines = table.read_text().splitlines()
    cells = lines[5].split(",")
    lines[5] = ",".join([*cells[:-1], "0.125"])
    table.write_text("\n".join(lines) + "\n")
    with pytest.raises(
        PrivacyError, match=r"table, its keys or release\.pt are others.*restore them"
    ):
        run(path, out, resume=True)


def test_folders_of_two_runs_do_not_go_on_together(tmp_path: Path) -> None:
    """A secondary's folder of another run is named before anything is released."""
    path = federation(tmp_path, noise=False)
    for name in ("one", "two"):
        cut_within(path, tmp_path / name, rounds=2)
    folder = tmp_path / "one" / "parties" / "bank-1"
    folder.rename(tmp_path / "aside")
    (tmp_path / "two" / "parties" / "bank-1").rename(folder)
    with pytest.raises(ConfigError, match=r"bank-1: belongs to another run"):
        run(path, tmp_path / "one", resume=True)


def test_a_finished_run_s_rows_are_never_asked_for_again(tmp_path: Path) -> None:
    """Its training can be done again and again: from what was released, for nothing."""
    path = federation(tmp_path, noise=True)
    out = tmp_path / "run"
    once = run(path, out)
    before = {party: ledger_of(out, party)[-1]["epsilon"] for party in PARTIES}
    (out / "parties" / "agency" / "epoch-1.pt").unlink()
    again = run(path, out, resume=True)
    assert again.losses == once.losses
    assert again.metrics["test"] == once.metrics["test"]
    for party in PARTIES:
        charges = [line for line in ledger_of(out, party) if line["kind"] == "charge"]
        assert len(charges) == ROUNDS
        assert charges[-1]["epsilon"] == before[party]
