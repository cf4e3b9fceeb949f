"""``sv.simulate`` on frames of pandas and polars, and one line for what is no frame."""

from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest

import securevfl as sv
from securevfl.core.errors import ConfigError, DataError

FREE: dict[str, Any] = {
    "privacy": sv.dp.Privacy(mechanism="none"),
    "training": sv.TrainingSettings(epochs=1, batch_size=32),
    "base": "none",
    "with_alone": False,
}
MODEL = sv.models.FeT(neighbours=2, hidden=4, heads=2)


def frames() -> tuple[pd.DataFrame, pd.DataFrame]:
    random = np.random.default_rng(0)
    ids = np.arange(60.0)
    theirs = random.normal(size=60)
    bank = pd.DataFrame({"id": ids, "a": random.normal(size=60), "y": (theirs > 0).astype(int)})
    return bank, pd.DataFrame({"id": ids, "b": theirs})


def test_frames_go_in_by_name() -> None:
    """A 0/1 label is two classes, and all spellings of one federation are one federation."""
    bank, bureau = frames()
    asked = {"label": "y", "primary": bank, **FREE}
    run = sv.simulate(model=MODEL, secondaries=[bureau], key="id", **asked)
    assert run.metrics["task"] == "binary"
    renamed = bureau.rename(columns={"id": "customer"})
    for secondaries, key in (
        ({"secondary-1": bureau}, ["id"]),
        ([pl.from_pandas(bureau)], "id"),
        ([renamed], {"primary": "id", "secondary-1": "customer"}),
    ):
        again = sv.simulate(model=MODEL, secondaries=secondaries, key=key, **asked)
        assert again.losses == run.losses


def test_a_promise_takes_bounds_by_party_and_column_and_keys_that_are_words() -> None:
    bank, bureau = frames()
    names = [f"person {number}" for number in range(len(bank))]
    theirs = bureau.drop(columns="id").assign(name=names)
    theirs.loc[::9, "b"] = np.nan
    run = sv.simulate(
        primary=bank.drop(columns="id").assign(name=names),
        secondaries={"bureau": theirs},
        label="y",
        key="name",
        encoder="auto",
        linkage=sv.LinkageSettings(metric="exact", protection="none"),
        bounds={"bureau": {"b": [-4, 4]}},
        missing_columns={"bureau": ["b"]},
        **{**FREE, "privacy": sv.dp.Privacy(epsilon=8.0, delta=1e-5), "base": "linear"},
    )
    assert run.metrics["privacy"]["epsilon"] == pytest.approx(8, rel=1e-3)


def test_a_wrong_type_gets_one_line_that_names_the_argument() -> None:
    bank, bureau = frames()
    by_name: dict[str, Any] = {"primary": bank, "secondaries": [bureau], "label": "y", "key": "id"}
    for arguments, more, message in (
        ((bank, bureau), {}, "model: must be a family's settings, got a DataFrame"),
        (([bank, bureau], MODEL), FREE, "parties: number 1 is a DataFrame"),
        ((bank, MODEL), FREE, "parties: number 1 is a DataFrame"),
        ((None, MODEL), {**FREE, **by_name, "secondaries": bureau}, "secondaries: must be a list"),
        ((None, MODEL), {**FREE, **by_name, "secondaries": []}, "secondaries: must have at least"),
        ((None, MODEL), {**FREE, **by_name, "secondaries": [7]}, "got int"),
        ((None, MODEL), {**FREE, **by_name, "label": None}, "label: must be the name"),
        ((None, MODEL), {**FREE, **by_name, "label": "z"}, "z"),
        ((None, MODEL), {**FREE, **by_name, "key": None}, "key: must name the columns"),
        ((None, MODEL), {**FREE, **by_name, "key": {"primary": "id"}}, "key: has none for 'sec"),
        (
            (None, MODEL),
            {**FREE, **by_name, "privacy": 8.0},
            "privacy: must be sv.dp.Privacy(...), got 8.0",
        ),
        (
            (None, MODEL),
            {**FREE, **by_name, "missing_columns": ["b"]},
            "missing_columns: must be lists of columns by party name",
        ),
        (
            (None, MODEL),
            {**FREE, **by_name, "missing_columns": {"b": ["b"]}},
            "missing_columns: 'b' is no party",
        ),
        (
            (None, MODEL),
            {**FREE, **by_name, "bounds": {"secondary1": [0, 1]}},
            "bounds: 'secondary1' is no party; they are 'primary', 'secondary-1'; did you mean",
        ),
        ((None, MODEL), FREE, "primary: must be given"),
    ):
        with pytest.raises(sv.SecureVflError) as caught:
            sv.simulate(*arguments, **more)
        assert isinstance(caught.value, ConfigError | DataError)
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)


def test_the_estimators_name_a_promise_that_is_none() -> None:
    bank, bureau = frames()
    model = sv.FederatedClassifier(privacy=8.0, key="id", secondaries=[bureau])
    with pytest.raises(ConfigError, match="privacy: must be Privacy"):
        model.fit(bank.drop(columns="y"), bank["y"])


def test_progress_is_shown_unless_it_is_not_wanted(capfd: pytest.CaptureFixture[str]) -> None:
    bank, bureau = frames()
    asked = {"primary": bank, "secondaries": [bureau], "label": "y", "key": "id", **FREE}
    sv.simulate(model=MODEL, progress=False, **asked)
    assert capfd.readouterr() == ("", "")
    run = sv.simulate(model=MODEL, **asked)
    out, err = capfd.readouterr()
    assert out == ""
    assert "links of secondary-1: 60 of 60 rows" in err
    for text in (repr(run), run._repr_html_()):
        assert "binary" in text
        assert len(text) < 2000
    assert len(repr(run).splitlines()) <= 5


def test_one_neighbour_by_exact_ids_trains_fedsim() -> None:
    """All training links are equally long then: the lowest place of any grid over neighbours."""
    bank, bureau = frames()
    model = sv.FederatedClassifier("fedsim", key="id", secondaries=[bureau], neighbours=1, epochs=1)
    fitted = model.fit(bank.drop(columns="y"), bank["y"])
    assert np.isfinite(fitted.predict_proba(bank.drop(columns="y"))).all()


def test_texts_that_a_metric_of_numbers_cannot_compare_are_refused_in_a_line() -> None:
    bank, bureau = frames()
    names = [f"person {number}" for number in range(len(bank))]
    with pytest.raises(DataError, match=r"key column 'id' holds texts, .* compares numbers"):
        sv.simulate(
            primary=bank.assign(id=names),
            secondaries=[bureau.assign(id=names)],
            label="y",
            key="id",
            encoder="auto",
            **{**FREE, "base": "linear"},
        )
