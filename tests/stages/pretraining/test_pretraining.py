"""Pretraining as a stage of a simulated run: rows, resumption, protection, refusals."""

import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from helpers.learners import encoders_of

from securevfl.config.reading import read_federation
from securevfl.core.errors import DataError, PrivacyError
from securevfl.core.progress import PretrainingIteration, RoundDone, Warned
from securevfl.data.tables import split_rows
from securevfl.runtime.run_options import RunOptions
from securevfl.runtime.run_tables import read_tables
from securevfl.runtime.simulation import RunResult, simulate_federation
from securevfl.stages.pretraining.learning import (
    CollapseWatch,
    IterationFigures,
    even_batches,
    pretraining_rows,
)
from securevfl.stages.pretraining.stage import build_learner
from securevfl.testing import save_federation, write_federation

MODEL = {"family": "fedhssl", "hidden": 8, "encoder_hidden": 8, "neighbours": 1}
PRETRAINING = {"iterations": 2, "batch_size": 64, "projector": [8, 8, 8], "predictor": 8}


def federation(folder: Path, **sections: Any) -> Path:
    folder.mkdir(exist_ok=True)
    model = {**MODEL, **sections.pop("model", {})}
    return write_federation(
        folder,
        model=model,
        pretraining={**PRETRAINING, **sections.pop("pretraining", {})},
        training={"epochs": 2, "batch_size": 32, "labelled_rows": 40},
        **sections,
    )


def simulate(
    path: Path,
    out: Path,
    *,
    resume: bool = False,
    events: list[Any] | None = None,
) -> RunResult:
    config = read_federation(path)
    return simulate_federation(
        config,
        read_tables(config, path.parent),
        RunOptions(
            run_folder=out,
            data_root=path.parent,
            resume=resume,
            observe=(events if events is not None else []).append,
        ),
        with_alone=False,
    )


def test_labelled_rows_are_a_part_of_the_same_training_rows() -> None:
    kinds = {"validation_fraction": 0.1, "test_fraction": 0.2, "seed": 5}
    all_of_them = split_rows(100, **kinds)  # type: ignore[arg-type]
    few = split_rows(100, **kinds, labelled_rows=20)  # type: ignore[arg-type]
    assert np.array_equal(few.test, all_of_them.test)
    assert np.array_equal(few.validation, all_of_them.validation)
    assert len(few.train) == 20
    assert sorted([*few.train, *few.unlabelled]) == all_of_them.train.tolist()
    with pytest.raises(DataError, match="between 1 and the 70 training rows"):
        split_rows(100, **kinds, labelled_rows=71)  # type: ignore[arg-type]


@pytest.mark.parametrize(("aligned", "count"), [(0.2, 20), (0.4, 28), (1.0, 70)])
def test_labelled_rows_are_aligned_and_held_out_rows_are_in_nothing(
    aligned: float, count: int
) -> None:
    split = split_rows(100, validation_fraction=0.1, test_fraction=0.2, seed=5, labelled_rows=20)
    rows = pretraining_rows(split, linked=None, aligned=aligned, seed=1)
    assert len(rows.aligned) == count
    assert set(split.train) <= set(rows.aligned) <= set(rows.own)
    held_out = set(split.validation) | set(split.test)
    assert set(rows.held_out) == held_out
    assert not held_out & set(rows.own)


def test_batches_differ_by_one_row_at_most() -> None:
    sizes = [len(part) for part in even_batches(np.arange(130), batch_size=64)]
    assert sizes == [44, 43, 43]


def test_every_method_runs_and_says_what_it_did(tmp_path: Path) -> None:
    steps = {
        "fedhssl": ["cross", "local", "aggregate"],
        "fedgssl": ["cross", "local"],
        "fedcssl": ["cross"],
        "fedlocalssl": ["local"],
        "fedsplitnn": None,
    }
    for name, wanted in steps.items():
        path = federation(tmp_path / name, model={"family": name})
        metrics = simulate(path, tmp_path / name / "run").metrics
        assert metrics["family"] == name
        if wanted is None:
            assert "pretraining" not in metrics
            continue
        figures = metrics["pretraining"]
        assert figures["steps"] == wanted
        assert ("cross_loss" in figures) == ("cross" in wanted)
        assert ("local_loss" in figures) == ("local" in wanted)
        history = json.loads((tmp_path / name / "run" / "pretraining.json").read_text())["history"]
        assert [line["iteration"] for line in history] == [1, 2]


@pytest.mark.parametrize("algorithm", ["simsiam", "moco"])
def test_resumed_pretraining_ends_where_an_unbroken_one_does(
    tmp_path: Path, algorithm: str
) -> None:
    path = federation(
        tmp_path, pretraining={"iterations": 3, "algorithm": algorithm, "corruption": 0.4}
    )
    whole = simulate(path, tmp_path / "whole")

    class Events(list[Any]):
        def append(self, event: Any) -> None:
            if isinstance(event, PretrainingIteration) and event.iteration == 2:
                raise DataError("the power went")

    with pytest.raises(DataError, match="power"):
        simulate(path, tmp_path / "broken", events=Events())
    resumed = simulate(path, tmp_path / "broken", resume=True)
    assert resumed.losses == whole.losses
    assert resumed.metrics["test"] == whole.metrics["test"]
    # Nor does the record of pretraining lack what came before the break.
    one, other = (_history(tmp_path / name) for name in ("whole", "broken"))
    assert [line["iteration"] for line in other] == [1, 2, 3]
    assert [line["local_loss"] for line in other] == [line["local_loss"] for line in one]


def test_resuming_what_has_ended_changes_nothing(tmp_path: Path) -> None:
    """Neither pretraining, once it is through, nor what a resumed run says of it."""

    class Events(list[Any]):
        def append(self, event: Any) -> None:
            if isinstance(event, RoundDone):
                raise DataError("the power went")

    path, file = federation(tmp_path), tmp_path / "run" / "pretraining.json"
    with pytest.raises(DataError, match="power"):
        simulate(path, tmp_path / "run", events=Events())
    written, encoders = file.read_bytes(), encoders_of(tmp_path / "run", "bank-1")
    trained = simulate(path, tmp_path / "run", resume=True).metrics
    assert file.read_bytes() == written
    for name, weights in encoders_of(tmp_path / "run", "bank-1").items():
        assert all(torch.equal(value, encoders[name][key]) for key, value in weights.items())
    assert trained["pretraining"]["local_loss"] == json.loads(written)["local_loss"]
    assert (
        simulate(path, tmp_path / "run", resume=True).metrics["pretraining"]
        == (trained["pretraining"])
    )
    assert file.read_bytes() == written


def _history(run_folder: Path) -> list[dict[str, Any]]:
    history: list[dict[str, Any]] = json.loads((run_folder / "pretraining.json").read_text())[
        "history"
    ]
    return history


def test_plain_exchange_learns_the_same(tmp_path: Path) -> None:
    averaged = simulate(federation(tmp_path / "a"), tmp_path / "a" / "run")
    plain = simulate(
        federation(tmp_path / "b", pretraining={"exchange": "plain"}), tmp_path / "b" / "run"
    )
    for name in ("cross_loss", "local_loss"):
        one, other = (run.metrics["pretraining"][name] for run in (averaged, plain))
        assert one == pytest.approx(other, abs=1e-3)


def test_collapse_is_told_once() -> None:
    events: list[Any] = []
    watch = CollapseWatch("bank", events.append)

    def figures(local: float) -> IterationFigures:
        return IterationFigures(
            cross_loss=None, cross_spread=None, local_loss=-1.0, local_spread=local
        )

    watch(figures(0.9), last=False)
    watch(figures(0.01), last=False)
    assert not events
    watch(figures(0.01), last=False)
    watch(figures(0.01), last=True)
    assert len(events) == 1
    assert "bank: the local encoder has collapsed" in events[0].text


def test_promises_that_pretraining_would_break_are_refused(tmp_path: Path) -> None:
    sound = {"epsilon": 8.0, "delta": 1e-5, "encoder": "trained", "unit": "secondary-record"}
    for number, (model, reason) in enumerate(
        [
            ({}, "batch"),
            ({"norm": "layer"}, "exchanges averages of projections"),
            ({"norm": "layer", "family": "fedcssl"}, "exchanges averages of projections"),
        ]
    ):
        path = federation(tmp_path / str(number), model=model, privacy=sound)
        with pytest.raises(PrivacyError, match=reason):
            simulate(path, tmp_path / str(number) / "run")
    local = federation(
        tmp_path / "local", model={"norm": "layer", "family": "fedlocalssl"}, privacy=sound
    )
    assert simulate(local, tmp_path / "local" / "run").metrics["privacy"]["epsilon"] <= 8.0
    frozen = {**sound, "encoder": "frozen", "links_per_record": 1}
    path = federation(
        tmp_path / "f", model={"norm": "layer", "family": "fedlocalssl"}, privacy=frozen
    )
    with pytest.raises(PrivacyError, match="not frozen in the sense"):
        simulate(path, tmp_path / "f" / "run")


def test_words_are_embedded_in_pretraining_and_after(tmp_path: Path) -> None:
    """Words that no file declares are recognised; a table without any is told of."""
    path = federation(tmp_path, model={"encoder": "embedding", "embedding": 4})
    _colour(tmp_path, "agency", "bank-1")
    events: list[Any] = []
    simulate(path, tmp_path / "run", events=events)
    weights = encoders_of(tmp_path / "run", "bank-1")["local"]
    assert weights["bottom.0.embeddings.0.weight"].shape == (4, 4)  # three words and "replaced"
    assert "bottom.0.embeddings.0.weight" not in encoders_of(tmp_path / "run", "bank-2")["local"]
    warnings = [event.text for event in events if isinstance(event, Warned)]
    assert [text for text in warnings if "party.categories" in text] == [
        'bank-2: no feature column holds words, so that encoder = "embedding" embeds nothing '
        "there; list the values of a column of codes as party.categories"
    ]


def test_codes_that_the_file_declares_are_words(tmp_path: Path) -> None:
    path = federation(tmp_path, model={"encoder": "embedding", "embedding": 4})
    table = pd.read_csv(tmp_path / "bank-1.csv")
    table["branch"] = np.arange(len(table)) % 3 + 10
    table.to_csv(tmp_path / "bank-1.csv", index=False)
    source = tomllib.loads(path.read_text(encoding="utf-8"))
    source["party"][1]["categories"] = {"branch": ["10", "11", "12", "13"]}
    simulate(save_federation(tmp_path, source), tmp_path / "run")
    weights = encoders_of(tmp_path / "run", "bank-1")["local"]
    assert weights["bottom.0.embeddings.0.weight"].shape == (5, 4)


def test_a_perceptron_sees_a_word_replaced_as_a_whole(tmp_path: Path) -> None:
    path = federation(tmp_path)
    _colour(tmp_path, "bank-1")
    config = read_federation(path)
    table = read_tables(config, tmp_path)["bank-1"]
    words = [place for place, name in enumerate(table.feature_names) if name.startswith("colour=")]
    features = torch.from_numpy(table.features)
    learning = build_learner(config, features, np.arange(len(features)), table=table)
    view = learning.learner.augment(features, learning.learner.generator)
    ones = view[:, words].sum(dim=1)
    assert set(ones.tolist()) == {0.0, 1.0}  # never two words, nor a part of one


def _colour(folder: Path, *names: str) -> None:
    """Add a column of three words to tables."""
    for name in names:
        table = pd.read_csv(folder / f"{name}.csv")
        table["colour"] = np.where(table["x0"] > 0, "red", np.where(table["x1"] > 0, "blue", "tan"))
        table.to_csv(folder / f"{name}.csv", index=False)


def test_every_channel_of_pretraining_is_reported(tmp_path: Path) -> None:
    metrics = simulate(federation(tmp_path, secondaries=1), tmp_path / "run").metrics
    said = {row["channel"]: row for row in metrics["privacy"]["channels"]}
    assert "each secondary's" in said["pretraining, to the primary"]["reveals"]
    assert said["pretraining, from the primary"]["guarantee"] == "not covered"
    assert "gives its weights away" in said["pretraining, aggregation of models"]["guarantee"]


def test_empty_label_cells_are_rows_for_pretraining(tmp_path: Path) -> None:
    path = federation(tmp_path)
    table = pd.read_csv(tmp_path / "agency.csv")
    table["y"] = table["y"].astype("Int64")
    table.loc[table.index % 3 != 0, "y"] = pd.NA
    table.to_csv(tmp_path / "agency.csv", index=False)
    with pytest.raises(DataError, match="row 2: is missing"):
        simulate(path, tmp_path / "refused")
    text = path.read_text(encoding="utf-8")
    path.write_text(
        text.replace("labelled_rows = 40", 'empty_labels = "unlabelled"'), encoding="utf-8"
    )
    figures = simulate(path, tmp_path / "run").metrics["pretraining"]
    # Of 240 rows 80 have a label: 8 for validation, 16 for testing, 56 to learn from.
    assert (figures["labelled_rows"], figures["own_rows"]) == (56, 56 + 160)
