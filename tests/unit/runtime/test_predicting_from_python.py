"""``RunResult.predict`` and ``sv.predict``: new rows in, predictions out, charged like any."""

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from helpers.federations import FROZEN

import securevfl as sv
from securevfl.core.errors import BudgetExceededError, ConfigError, DataError
from securevfl.core.progress import Warned
from securevfl.desk.command_results import summary_of
from securevfl.testing import run_in_process, save_federation, write_federation

NO_NOISE = sv.dp.Privacy(mechanism="none")
SMALL = sv.models.FeT(
    neighbours=2,
    hidden=4,
    heads=1,
    fourier_features=4,
    fourier_width=4,
)
SHORT = sv.TrainingSettings(epochs=1, batch_size=32)


def people(rows: int = 60) -> tuple[pd.DataFrame, pd.DataFrame]:
    """A primary's and a secondary's frame: words, dates, gaps, a numeric and a text key."""
    random = np.random.default_rng(5)
    place, wealth = random.uniform(0, 10, rows), random.normal(size=rows)
    ids = [f"P{number:04d}" for number in range(rows)]
    own = pd.DataFrame(
        {
            "id": ids,
            "place": place,
            "job": random.choice(["cook", "nurse", "smith"], rows),
            "since": pd.Timestamp("2020-01-01")
            + pd.to_timedelta(random.integers(0, 900, rows), "D"),
            "age": np.where(random.random(rows) < 0.2, np.nan, random.integers(20, 70, rows)),
            "pays": np.where(wealth > 0, "yes", "no"),
        }
    )
    theirs = pd.DataFrame({"id": ids, "place": place, "wealth": wealth})
    return own, theirs.sample(frac=1, random_state=1)


def trained(frame: pd.DataFrame, theirs: pd.DataFrame, **more: Any) -> sv.RunResult:
    parties = [
        sv.data.from_frame(frame, name="bank", key=["place"], label="pays", exclude=["id"]),
        sv.data.from_frame(theirs, name="bureau", key=["place"], exclude=["id"]),
    ]
    return sv.simulate(
        parties, SMALL, privacy=NO_NOISE, training=SHORT, base="none", with_alone=False, **more
    )


def test_any_frame_or_file_of_new_rows_gets_the_predictions_of_the_test_rows(
    tmp_path: Path,
) -> None:
    """The run's own test rows, as new ones: the same words and numbers to the last bit.

    However they come: of three libraries or a file, shuffled columns, one more, without labels.
    """
    own, theirs = people()
    run = trained(own, theirs, out=tmp_path / "run")
    written = pd.read_csv(tmp_path / "run" / "predictions.csv")
    new = own.iloc[written["row"] - 1].reset_index(drop=True)
    bare = new[["since", "job", "age", "id", "place"]]
    bare.to_parquet(tmp_path / "new.parquet")
    sources: list[Any] = [
        new,
        bare,
        pl.from_pandas(bare),
        pa.Table.from_pandas(bare),
        str(tmp_path / "new.parquet"),
    ]
    for source in sources:
        found = run.predict(source)
        assert found.values.tolist() == written["prediction"].tolist()
        assert type(found.frame()) is (pd.DataFrame if isinstance(source, str) else type(source))
        assert found.probabilities is not None
        assert found.probabilities[:, 1].tolist() == written["probability_yes"].tolist()
        assert (found.metrics is None) == (source is not new)
    assert run.predict(new).metrics == run.metrics["test_metrics"]
    named = run.predict(bare, id_column="id", out=tmp_path / "out.csv")
    assert list(named.rows) == bare["id"].tolist()
    assert pd.read_csv(tmp_path / "out.csv")["id"].tolist() == bare["id"].tolist()
    bureau = sv.data.from_frame(theirs, name="bureau", key=["place"], exclude=["id"])
    later = sv.predict(tmp_path / "run", bare, parties=[bureau])
    assert later.values.tolist() == named.values.tolist()


def test_rows_that_were_encoded_by_themselves_are_refused() -> None:
    """A table's own words and classes are not those of training: its numbers mean others."""
    own, theirs = people()
    run = trained(own, theirs)
    some = own[own["job"] != "cook"]
    alone = sv.data.from_frame(some, name="bank", key=["place"], label="pays", exclude=["id"])
    with pytest.raises(DataError, match="was encoded by itself"):
        run.predict(alone)
    with pytest.raises(DataError, match="has no column 'job'"):
        run.predict(own.drop(columns="job"))
    with pytest.raises(ConfigError, match="id_column"):
        run.predict(alone, id_column="id")


def test_texts_are_keys_of_new_rows_too() -> None:
    """New rows link by the columns that those of training linked by."""
    own, theirs = people()
    parties = [
        sv.data.from_frame(own, name="bank", key=["id"], label="pays", exclude=["place"]),
        sv.data.from_frame(theirs, name="bureau", key=["id"], exclude=["place"]),
    ]
    run = sv.simulate(
        parties,
        sv.models.Top1Sim(hidden=4, keys_as_features=False),
        privacy=NO_NOISE,
        training=SHORT,
        base="none",
        linkage=sv.LinkageSettings(metric="exact", protection="none"),
        with_alone=False,
    )
    known, strange = run.predict(own), run.predict(own.assign(id="nobody"))
    assert known.probabilities is not None
    assert strange.probabilities is not None
    assert np.abs(known.probabilities - strange.probabilities).max() > 1e-4


def test_a_temporary_folder_lives_as_long_as_its_result() -> None:
    """It held the models, and was removed before anybody could use them."""
    run = trained(*people())
    assert run.trained is not None
    folder = run.trained.folder
    assert (folder / "parties" / "bank" / "model" / "model.json").exists()
    assert run.predict(people()[0]).metrics is not None
    del run
    gc.collect()
    assert not folder.exists()


@pytest.mark.parametrize("from_file", [True, False])
def test_every_call_is_charged_until_nothing_is_left(tmp_path: Path, from_file: bool) -> None:
    """The ledgers of a run in Python are those that ``securevfl predict`` charges, and as full."""
    path = write_federation(
        tmp_path,
        rows=60,
        secondaries=1,
        privacy=FROZEN,
        training={"epochs": 1},
        model={"family": "fet", "neighbours": 2, "hidden": 4, "heads": 1, "release": "pooled"},
    )
    source = sv.read_federation(path).source
    for party in source["party"]:
        party |= {"scaling": "bounds", "bounds": [-5.0, 15.0]}
    run = run_in_process(save_federation(tmp_path, dict(source)), tmp_path / "run")
    rows: Any = tmp_path / "agency.csv" if from_file else pd.read_csv(tmp_path / "agency.csv")
    ledger = tmp_path / "run" / "parties" / "bank-1" / "ledger.jsonl"
    before = len(ledger.read_text().splitlines())
    first = run.predict(rows)
    assert first.epsilon is not None
    assert 0 < first.epsilon <= FROZEN["epsilon"]
    assert len(ledger.read_text().splitlines()) > before
    answers = [first]
    with pytest.raises(BudgetExceededError):
        answers.extend(run.predict(rows) for _ in range(20))
    assert answers[-1].epsilon <= FROZEN["epsilon"]


def test_words_that_the_model_does_not_know_are_counted(tmp_path: Path) -> None:
    """Of frames, files and the command alike; a gap and a word in other letters are two things."""
    own, theirs = people()
    result = trained(own, theirs, out=tmp_path / "run")
    new = own.iloc[:4].assign(job=["Cook", "pilot", "nurse", None])
    new.to_csv(tmp_path / "new.csv", index=False)

    heard: list[Any] = []
    told = result.predict(new)
    read = result.predict(tmp_path / "new.csv", observe=heard.append)

    assert told.unknown_words == read.unknown_words == {"job": 2}
    assert [one.text for one in heard if isinstance(one, Warned)] == [
        "bank: 2 of 4 cells of column 'job' hold words that the model does not know; they count "
        "as none of its words",
        "bank: column 'job' is empty in 1 of 4 new rows, and in none of training; a value that "
        "stands for it is filled in, so the model has learned nothing about such rows",
    ]
    assert summary_of(read, tmp_path / "new.csv")["unknown_words"] == {"job": 2}
    assert result.predict(own.iloc[:4]).unknown_words == {}


def test_the_positive_class_is_the_one_that_the_primary_names(tmp_path: Path) -> None:
    """Class 1, by name in files and figures."""
    own, theirs = people()
    for positive in ("no", "yes"):
        parties = [
            sv.data.from_frame(
                own, name="bank", key=["place"], label="pays", positive=positive, exclude=["id"]
            ),
            sv.data.from_frame(theirs, name="bureau", key=["place"], exclude=["id"]),
        ]
        run = sv.simulate(
            parties,
            SMALL,
            privacy=NO_NOISE,
            training=SHORT,
            base="none",
            out=tmp_path / positive,
            with_alone=False,
        )
        written = pd.read_csv(tmp_path / positive / "predictions.csv")
        assert f"probability_{positive}" in written
        above = written[f"probability_{positive}"] > 0.5
        assert ((written["prediction"] == positive) == above).all()
        assert run.metrics["evaluation"]["confusion"]["classes"][1] == positive
        again = run.predict(own[:3]).frame()
        assert f"probability_{positive}" in again
    with pytest.raises(DataError, match=r"positive: is 'Ja', and the label's values are 'no'"):
        sv.data.from_frame(
            own, name="bank", key=["place"], label="pays", positive="Ja", exclude=["id"]
        )


def test_no_new_rows_are_answered_with_an_empty_table(tmp_path: Path) -> None:
    """A batch of no rows, as of a quiet night: the header alone; a column that lacks is refused."""
    frame, theirs = people()
    result = trained(frame, theirs)
    (tmp_path / "new.csv").write_text(frame[:0].to_csv(index=False))
    out = tmp_path / "out.csv"
    for rows in (frame[:0], tmp_path / "new.csv"):
        found = result.predict(rows, id_column="id", out=out)
        assert len(found) == 0
        assert found.epsilon is None
        assert out.read_text() == "id,prediction,probability_yes\n"
    with pytest.raises(DataError, match="job"):
        result.predict(frame[:0].drop(columns="job"))
