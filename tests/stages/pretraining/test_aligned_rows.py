"""Which rows are aligned: linked at every secondary, and nobody else's pairs are learned from."""

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pandas as pd
import pytest
import torch
from helpers.federations import COMMON_IDS, ROWS, write_overlapping

from securevfl.config.disclosure import channels, require_covered_channels
from securevfl.config.federation import link_spec
from securevfl.config.reading import read_federation
from securevfl.core.errors import ConfigError, DataError, PrivacyError, ProtocolError
from securevfl.core.progress import RowsAligned, Warned
from securevfl.data.tables import split_rows
from securevfl.desk.command_results import print_results
from securevfl.desk.report.page import write_report
from securevfl.desk.setup.check import check_federation
from securevfl.federation.over_star import serve
from securevfl.federation.rounds.network_primary import NetworkPrimary
from securevfl.federation.rounds.secondary import SecondaryData
from securevfl.federation.run_plan import plan_run, run_facts
from securevfl.federation.session.request_validator import RequestValidator, SessionLimits
from securevfl.linkage.stage.linking import Linker
from securevfl.linkage.stage.party_keys import keys_of
from securevfl.runtime.run_options import RunOptions
from securevfl.runtime.run_tables import read_tables
from securevfl.runtime.simulation import RunResult, simulate_federation
from securevfl.stages.pretraining.learning import LearnerWithRecords, pretraining_rows
from securevfl.stages.pretraining.messages import CrossBatch, IterationBegin, PretrainingValidator
from securevfl.stages.pretraining.parties import PretrainingSecondary
from securevfl.testing import write_federation
from securevfl.transport.message import Message
from securevfl.transport.star import SecondaryTransport

Rows = npt.NDArray[np.int64]


def simulate(path: Path, out: Path, events: list[Any] | None = None, **kinds: Any) -> RunResult:
    config = read_federation(path)
    return simulate_federation(
        config,
        read_tables(config, path.parent),
        RunOptions(run_folder=out, observe=(events if events is not None else []).append),
        **{"with_alone": False, **kinds},
    )


def crossed(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[tuple[Rows, Rows]]]:
    """Write down which rows and records meet in cross-party steps, by secondary."""
    met: dict[str, list[tuple[Rows, Rows]]] = {}
    project = PretrainingSecondary.project

    def noted(self: PretrainingSecondary, rows: Rows, *, round_number: int) -> torch.Tensor:
        records = self.data.links.link(rows).indices[:, 0]
        met.setdefault(self.data.name, []).append((rows, records))
        return project(self, rows, round_number=round_number)

    monkeypatch.setattr(PretrainingSecondary, "project", noted)
    return met


def test_only_true_pairs_learn_from_one_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """240 rows, 100 ids that all parties know: these are aligned, and every pair is one person."""
    path, events = write_overlapping(tmp_path), list[Any]()
    met = crossed(monkeypatch)
    metrics = simulate(path, tmp_path / "run", events).metrics

    assert metrics["alignment"] == {
        "rows": ROWS,
        "aligned": COMMON_IDS,
        "by_secondary": {"bank-1": 120, "bank-2": 120},
        "max_distance": 0.0,
        "distance_unit": "the keys' unit",
        "warning": None,
        "training_rows": 60,
    }
    told = [event for event in events if isinstance(event, RowsAligned)]
    assert [(one.aligned, one.rows) for one in told] == [(COMMON_IDS, ROWS)]
    assert not [event for event in events if isinstance(event, Warned)]
    ids = {name: pd.read_csv(tmp_path / f"{name}.csv")["id"].to_numpy() for name in met}
    held_out = split_rows(ROWS, validation_fraction=0.1, test_fraction=0.2, seed=3)
    learned = np.setdiff1d(np.arange(COMMON_IDS), [*held_out.validation, *held_out.test])
    for name, pairs in met.items():
        rows, records = (np.concatenate(side) for side in zip(*pairs, strict=True))
        # The primary's row numbers are its ids.
        assert (ids[name][records] == rows).all()
        assert np.array_equal(np.unique(rows), learned)
    assert metrics["pretraining"]["aligned_rows"] == len(learned)
    assert metrics["pretraining"]["own_rows"] == 168


@pytest.mark.parametrize("whole", [True, False])
def test_ids_link_where_they_are_equal_with_nothing_written(
    whole: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One number is the key: a stranger is no partner. ``check`` and the last screen say so."""
    path, events = write_overlapping(tmp_path, linkage={"protection": "none"}), list[Any]()
    if whole:
        for name in ("bank-1", "bank-2"):
            frame = pd.read_csv(tmp_path / f"{name}.csv")
            stranger = frame["id"] % 1 != 0
            frame.loc[stranger, "id"] = 5000 + np.arange(stranger.sum())
            frame.astype({"id": int}).to_csv(tmp_path / f"{name}.csv", index=False)
    metrics = simulate(path, tmp_path / "run", events).metrics
    assert metrics["alignment"]["aligned"] == COMMON_IDS
    assert metrics["alignment"]["by_secondary"] == {"bank-1": 120, "bank-2": 120}
    assert metrics["alignment"]["max_distance"] == 0
    print_results(metrics, tmp_path / "run", as_json=False)
    assert "100 of 240 rows are aligned" in capsys.readouterr().out
    (said,) = [one for one in check_federation(path).warnings if "aligned" in one]
    assert "linkage.max_distance = 0.0 if it is an id" in said
    settled = write_overlapping(tmp_path, linkage={"protection": "none", "max_distance": 0.0})
    assert not [one for one in check_federation(settled).warnings if "aligned" in one]


def test_texts_without_a_largest_distance_count_every_row_and_a_warning_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the console, in ``metrics.json`` and in the report; one line each."""
    linkage = {"protection": "none", "metric": "levenshtein"}
    path, events = write_overlapping(tmp_path, linkage=linkage), list[Any]()
    metrics = simulate(path, tmp_path / "run", events).metrics
    (warning,) = [event.text for event in events if isinstance(event, Warned)]
    assert "linkage.max_distance is not set" in warning
    assert "bank-1, bank-2" in warning
    assert "\n" not in warning
    assert metrics["alignment"]["aligned"] == ROWS
    assert metrics["alignment"]["warning"] == warning
    print_results(metrics, tmp_path / "run", as_json=False)
    assert warning in capsys.readouterr().out
    page = write_report(tmp_path / "run").read_text()
    assert "240 of 240 rows are linked at every secondary" in page
    assert warning.split(", so")[0] in page


def test_equal_keys_need_no_largest_distance(tmp_path: Path) -> None:
    """Where all nearest keys are equal there is nothing to decide, and nothing to warn of."""
    linkage = {"protection": "none", "metric": "levenshtein"}
    path, events = write_overlapping(tmp_path, linkage=linkage), list[Any]()
    for name in ("bank-1", "bank-2"):
        frame = pd.read_csv(tmp_path / f"{name}.csv")
        frame["id"] = np.random.default_rng(1).permutation(ROWS).astype(np.float64)
        frame.to_csv(tmp_path / f"{name}.csv", index=False)
    metrics = simulate(path, tmp_path / "run", events).metrics
    assert metrics["alignment"]["aligned"] == ROWS
    assert not [event for event in events if isinstance(event, Warned)]


@pytest.mark.parametrize("protection", ["bloom", "shares", "paillier"])
def test_rows_are_aligned_under_a_protection_too(protection: str, tmp_path: Path) -> None:
    """Whoever knows the distances leaves out the far ones, and says whether keys differ.

    Numbers are ids with nothing written; codes of texts may be near.
    """
    ranges = [[-0.5, 1000.0]]
    events: list[Any] = []
    unlimited = ROWS if protection == "bloom" else COMMON_IDS
    for limit, aligned in (({"max_distance": 0}, COMMON_IDS), ({}, unlimited)):
        linkage = {"protection": protection, "ranges": ranges, **limit}
        if protection == "bloom":
            # Codes of numbers this near are equal; those of their digits are not.
            linkage = {"protection": protection, "metric": "levenshtein", **limit}
        path = write_overlapping(tmp_path, linkage=linkage)
        spec = link_spec(read_federation(path))
        tables = read_tables(read_federation(path), tmp_path)
        link = Linker(spec, keys_of(spec.keys, tables["agency"]))
        for name in ("bank-1", "bank-2"):
            link(keys_of(spec.keys, tables[name]))
        alignment = link.primary.alignment
        assert alignment is not None
        assert alignment.everywhere.sum() == aligned
        events.append(alignment.warning(unit="bits"))
    assert events[0] is None
    assert "bank-1, bank-2" in events[1] if protection == "bloom" else events[1] is None


@pytest.mark.parametrize("share", [1.0, 0.5, 0.2])
@pytest.mark.parametrize("labelled", [None, 20])
def test_the_share_is_taken_among_aligned_rows(share: float, labelled: int | None) -> None:
    """And labelled rows that are aligned come first; rows that are not are never drawn."""
    split = split_rows(
        200, validation_fraction=0.1, test_fraction=0.2, seed=5, labelled_rows=labelled
    )
    linked = np.arange(200) % 2 == 0
    rows = pretraining_rows(split, linked=linked, aligned=share, seed=1)
    possible = rows.own[linked[rows.own]]
    first = split.train[linked[split.train]] if labelled else possible[:0]
    assert len(rows.aligned) == max(len(first), round(share * len(possible)))
    assert set(first) <= set(rows.aligned) <= set(possible)
    # Local learning keeps all of them.
    assert len(rows.own) == 140


def test_too_few_aligned_rows_are_refused() -> None:
    split = split_rows(100, validation_fraction=0.1, test_fraction=0.2, seed=5)
    with pytest.raises(DataError, match="0 aligned rows are too few, of 0 of the 70 training"):
        pretraining_rows(split, linked=np.zeros(100, dtype=np.bool_), aligned=1.0, seed=1)


class Wire(SecondaryTransport):
    """A lying primary's messages, one after another."""

    def __init__(self, *messages: Message) -> None:
        self.messages = deque(messages)

    def receive(self, *_kinds: Any, **_how: Any) -> Message:
        return self.messages.popleft()


class Silent:
    """A learner that begins iterations, and would fail at any other work."""

    def begin_iteration(self, iteration: int, steps: Sequence[str]) -> None:
        pass


class Unsaid:
    """A secure sum to which nothing must come."""

    def bind(self, message_digest: bytes, ranks: tuple[int, ...]) -> None:
        """Take any message: what is told binds nobody to answer."""

    def prepare(self, count: int, *, round_number: int, active: tuple[int, ...]) -> None:
        raise AssertionError(f"{count} words were prepared in round {round_number}")

    def __call__(
        self, words: torch.Tensor, *, round_number: int, active: tuple[int, ...]
    ) -> torch.Tensor | None:
        raise AssertionError(f"something was sent in round {round_number}")


def test_a_secondary_refuses_rows_that_it_did_not_call_aligned(tmp_path: Path) -> None:
    """Its server stops before it projects anything: row 239 has no record at ``bank-1``."""
    path = write_overlapping(tmp_path)
    config = read_federation(path)
    tables = read_tables(config, tmp_path)
    spec = link_spec(config)
    linked = Linker(spec, keys_of(spec.keys, tables["agency"]))(
        keys_of(spec.keys, tables["bank-1"])
    )
    split, facts = run_facts(config, tables["agency"])
    plan = plan_run(config, facts)
    held_out = np.concatenate([split.validation, split.test])
    row = int(np.setdiff1d(np.arange(120, ROWS), held_out)[0])
    known = int(np.setdiff1d(np.arange(COMMON_IDS), held_out)[0])
    assert linked.linked_rows()[[known, row]].tolist() == [True, False]
    batch = CrossBatch(
        round_number=1,
        rows=np.array([known, row]),
        sent=np.zeros((2, 8), dtype=np.float32),
    )

    begin = IterationBegin(iteration=0, held_out=np.sort(held_out))
    validator = PretrainingValidator(
        config.pretraining,
        steps=config.family.pretraining,
        learning_rows=facts.train_rows + facts.unlabelled_rows,
        linked=linked.linked_rows(),
        done=0,
        take_round=RequestValidator(SessionLimits.of(plan, party="bank-1")).take_round,
    )
    nothing = torch.zeros(tables["bank-1"].num_rows, 0)
    secondary = PretrainingSecondary(
        SecondaryData(
            name="bank-1",
            features=nothing,
            keys=nothing,
            links=linked.source,
            primary_rows=ROWS,
        ),
        validator,
        config.pretraining,
        parties=2,
        build=lambda _own: cast(LearnerWithRecords, Silent()),
        save=lambda *_state: None,
        finish=lambda _learning: None,
        observe=lambda _event: None,
        log=lambda *_words, **_figures: None,
        restore=None,
    )
    with pytest.raises(ProtocolError, match="round 1: the primary names 1 rows that have no link"):
        serve(
            secondary.opening,
            Wire(begin.to_message(), batch.to_message()),
            Unsaid(),
            ranks=(1, 2),
            deadline_s=1.0,
        )


@pytest.mark.parametrize("family", ["fedhssl", "exact"])
def test_training_keeps_to_aligned_rows_where_it_is_told_to(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of any family; validation and test rows stay all of them, and so do alone's."""
    model = {"family": family} if family == "exact" else {}
    seen: list[Rows] = []
    plan_round = NetworkPrimary._plan

    def noted(self: NetworkPrimary, rows: Rows, purpose: Any, active: tuple[int, ...]) -> Any:
        if purpose == "train":
            seen.append(rows)
        return plan_round(self, rows, purpose, active)

    monkeypatch.setattr(NetworkPrimary, "_plan", noted)
    sections = {"model": model} if model else {}
    found = {}
    for choice in ("all", "aligned"):
        seen.clear()
        folder = tmp_path / choice
        folder.mkdir()
        path = write_overlapping(folder, training={"rows": choice}, **sections)
        metrics = simulate(path, folder / "run", with_alone=True).metrics
        found[choice] = np.unique(np.concatenate(seen)), metrics
    labelled = split_rows(
        ROWS, validation_fraction=0.1, test_fraction=0.2, seed=3, labelled_rows=60
    ).train
    assert np.array_equal(found["all"][0], labelled)
    assert np.array_equal(found["aligned"][0], labelled[labelled < COMMON_IDS])
    assert found["aligned"][1]["alignment"]["training_rows"] == (labelled < COMMON_IDS).sum()
    assert found["aligned"][1]["alone"] == found["all"][1]["alone"]


def test_a_batch_may_have_one_row_or_one_linked_record(tmp_path: Path) -> None:
    """33 labelled rows in batches of 32, of which few are linked: the last batch has one row."""
    path = write_overlapping(tmp_path, training={"labelled_rows": 33})
    assert np.isfinite(simulate(path, tmp_path / "run").losses).all()


def test_no_aligned_training_row_is_one_line(tmp_path: Path) -> None:
    path = write_overlapping(
        tmp_path,
        model={"family": "top1sim"},
        training={"rows": "aligned"},
        linkage={"protection": "none", "max_distance": 0.0, "least_linked": 0.0},
    )
    frame = pd.read_csv(tmp_path / "bank-2.csv")
    frame["id"] += 5000
    frame.to_csv(tmp_path / "bank-2.csv", index=False)
    with pytest.raises(DataError, match=r"training\.rows: none of the 60 labelled training rows"):
        simulate(path, tmp_path / "run")


def test_a_promise_does_not_go_with_aligned_rows(tmp_path: Path) -> None:
    """Which rows have a record is an answer without noise."""
    path = write_federation(
        tmp_path,
        privacy={"epsilon": 300.0, "delta": 1e-4, "encoder": "trained"},
        training={"rows": "aligned"},
        linkage={"max_distance": 0.1},
    )
    with pytest.raises(PrivacyError, match=r'training\.rows: "aligned" shows the primary which'):
        require_covered_channels(read_federation(path))


def test_fresh_samples_have_no_aligned_rows(tmp_path: Path) -> None:
    """A row that is linked in one round may not be in the next."""
    with pytest.raises(ConfigError, match=r"privacy\.sampling_rate: rows are aligned for good"):
        read_federation(
            write_overlapping(
                tmp_path,
                privacy={
                    "mechanism": "gaussian",
                    "epsilon": 5.0,
                    "accounting": "as-published",
                    "sampling_rate": 0.5,
                },
            )
        )


def test_the_channel_is_listed_where_there_is_one(tmp_path: Path) -> None:
    path = write_overlapping(tmp_path)
    (channel,) = [
        one for one in channels(read_federation(path)) if one["channel"] == "aligned rows"
    ]
    assert "whether the row has a link there" in channel["reveals"]
    assert channel["guarantee"] == "not covered"
    other = read_federation(write_overlapping(tmp_path, model={"family": "exact"}))
    assert "aligned rows" not in [one["channel"] for one in channels(other)]
