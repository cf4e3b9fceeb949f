"""One file under many settings: equal to single runs, resumed, and refused before anything."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import securevfl as sv
from securevfl import SecureVflError, read_federation
from securevfl.core.errors import ConfigError, PrivacyError
from securevfl.lab.comparison import Comparison, compare_and_write
from securevfl.lab.one_run import LeftOut, Run, StudyOptions
from securevfl.lab.settings_grid import parse_setting
from securevfl.testing import read_tables, run_in_process, write_federation

SMALL: dict[str, Any] = {
    "rows": 60,
    "secondaries": 1,
    "training": {"epochs": 1, "batch_size": 32},
}


def asked(folder: Path, *settings: str, seeds: int = 1, **sections: Any) -> Comparison:
    path = write_federation(folder, **{**SMALL, **sections})
    return Comparison(
        config=read_federation(path),
        settings=tuple(map(parse_setting, settings)),
        seeds=seeds,
        data_root=folder,
        folder=folder / "out",
    )


def train(
    comparison: Comparison, out: list[LeftOut] | None = None
) -> tuple[dict[str, Any], list[Run]]:
    trained: list[Run] = []

    def tell(run: Run, event: object) -> None:
        if run not in trained:
            trained.append(run)

    options = StudyOptions(tell=tell, leave_out=pytest.fail if out is None else out.append)
    return compare_and_write(comparison, options), trained


def test_a_grid_equals_runs_of_files_and_is_resumed(tmp_path: Path) -> None:
    """A point is the file with its settings; more seeds and values train what is missing."""
    figures, trained = train(asked(tmp_path, "model.neighbours=2,4", seeds=2))
    names = [f"model.neighbours={number}" for number in (2, 4)]
    assert trained == [Run(name=name, seed=seed) for seed in (3, 4) for name in names]
    assert list(figures["methods"]) == ["alone", *names]
    assert figures["seed_numbers"] == [3, 4]
    alone = run_in_process(
        write_federation(tmp_path, **SMALL, model={"neighbours": 2}, federation={"seed": 4}),
        tmp_path / "once",
        with_alone=True,
    ).metrics
    for name, one in figures["methods"][names[0]]["metrics"].items():
        assert one["seeds"][1] == alone["test_metrics"][name]
    assert figures["methods"]["alone"]["seeds"][1] == alone["alone_test"]
    assert figures["best"] in names
    differences = figures["differences"]["alone"][names[0]]["seeds"]
    assert differences[1] == pytest.approx(alone["test"] - alone["alone_test"])

    more, trained = train(asked(tmp_path, "model.neighbours=2,4,3", seeds=2))
    assert {run.name for run in trained} == {"model.neighbours=3"}
    assert {name: more["methods"][name] for name in names} == {
        name: figures["methods"][name] for name in names
    }
    assert json.loads((tmp_path / "out/comparison.json").read_text()) == more
    runs = pd.read_csv(tmp_path / "out/comparison.csv")
    means = runs.groupby("model.neighbours")["test"].mean()
    assert means[3] == pytest.approx(more["methods"]["model.neighbours=3"]["mean"])
    assert runs["model.neighbours"].isna().sum() == 2
    with pytest.raises(ConfigError, match=r"other settings, on other tables.*--out"):
        train(asked(tmp_path, "model.neighbours=2", training={"epochs": 2}))


def test_settings_of_parties_and_tables_that_follow(tmp_path: Path) -> None:
    """A party's own settings change its table; alone has no place where its own may change."""
    comparison = asked(tmp_path, "party.bank-1.scaling=standard,bounds,none")
    with pytest.raises(ConfigError, match=r"with party.bank-1.scaling=bounds: "):
        train(comparison)
    assert not (tmp_path / "out").exists()
    figures, _ = train(asked(tmp_path, "party.bank-1.scaling=standard,none"))
    one, other = figures["methods"].values()
    assert one["settings"] == {"party.bank-1.scaling": "standard"}
    assert one["metrics"] != other["metrics"]
    with pytest.raises(ConfigError, match=r"scaling: may change the primary's rows.*equal ones"):
        dataclasses.replace(comparison, methods=("alone",))


def test_tables_are_read_once_where_settings_leave_them_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A grid over models does not read every table for every point."""
    reads = []

    def read(config: Any, root: Path) -> Any:
        reads.append(config)
        return read_tables(config, root)

    monkeypatch.setattr("securevfl.lab.study_outputs.read_tables", read)
    figures, _ = train(asked(tmp_path, "model.neighbours=1,2,3,4"))
    assert (len(reads), len(figures["methods"])) == (1, 5)


def test_a_finished_simulation_is_compared_on_its_own_tables(tmp_path: Path) -> None:
    """With methods beside settings; auto is the best of families and settings with each seed."""
    run = sv.simulate(write_federation(tmp_path, **SMALL), progress=False, with_alone=False)
    for name in ("agency", "bank-1"):
        (tmp_path / f"{name}.csv").unlink()
    settings = {"model.hidden": [4, 8]}
    figures = sv.compare(run, ["top1sim", "auto"], settings=settings, seeds=1)
    tried = ["top1sim", "model.hidden=4", "model.hidden=8"]
    assert list(figures["methods"]) == [*tried, "auto"]
    best = max(tried, key=lambda name: figures["methods"][name]["validation"])
    assert figures["methods"]["auto"]["chosen"] == [best]
    with pytest.raises(ConfigError, match=r"may change a table, and these are in memory"):
        sv.compare(run, settings={"party.bank-1.scaling": "none"})


@pytest.mark.parametrize(
    ("settings", "kind", "complaint"),
    [
        (
            ("model.neighbours=2,0",),
            ConfigError,
            "with model.neighbours=0: model.neighbours must be at least 1, got 0",
        ),
        (("model.neighbors=2",), ConfigError, "model.neighbors.*did you mean 'neighbours'"),
        (("modell.hidden=2",), ConfigError, r"\[modell\]: no such section"),
        (("federation.name.x=2",), ConfigError, "'test' is a value and no table"),
        (("party.bonk.scaling=none",), ConfigError, "parties are agency, bank-1"),
        (("model.hidden=8", "model.hidden=9"), ConfigError, "model.hidden is set twice"),
        (
            ("privacy.mechanism=none,gaussian",),
            (ConfigError, PrivacyError),
            "with privacy.mechanism=gaussian: ",
        ),
    ],
)
def test_bad_settings_are_refused_before_anything_starts(
    settings: tuple[str, ...], kind: Any, complaint: str, tmp_path: Path
) -> None:
    """Also where only the last point is wrong."""
    with pytest.raises(kind, match=complaint):
        train(asked(tmp_path, *settings))
    assert not (tmp_path / "out").exists()


def test_a_point_that_fails_leaves_the_others_their_figures(tmp_path: Path) -> None:
    """More links than there are records is found when rows are linked."""
    out: list[LeftOut] = []
    comparison = asked(tmp_path, "model.neighbours=2,61", seeds=2)
    figures, _ = train(comparison, out)
    assert list(figures["methods"]) == ["alone", "model.neighbours=2"]
    assert [one.name for one in out] == ["model.neighbours=61"]
    assert "seed 3" in figures["left_out"]["model.neighbours=61"]["reason"]
    failing = asked(tmp_path, "model.neighbours=61", "training.split=random")
    with pytest.raises(
        SecureVflError,
        match=r"no method could be trained: model.neighbours=61,training.split=random failed",
    ):
        train(failing, [])


def test_what_auto_chooses_follows_from_each_point(tmp_path: Path) -> None:
    """Settings that the file leaves to the rule are chosen under each point's own."""
    sections: dict[str, Any] = {
        "federation": {"classes": 3},
        "model": {"family": "class-means"},
        "encoder": {"method": "auto"},
        "base": {"estimator": "best"},
        "privacy": {
            "mechanism": "gaussian",
            "encoder": "frozen",
            "unit": "secondary-record",
            "epsilon": 8.0,
            "delta": 1e-5,
        },
    }
    comparison = asked(tmp_path, "federation.classes=3,4", "party.bank-1.scaling=none", **sections)
    assert "encoder.method" in comparison.config.chosen
    numbers = []
    for point in comparison.points:
        recipe, config = point.recipe(comparison.config)
        assert recipe.source["encoder"]["method"] == "auto"
        numbers.append(config.model.numbers)
    assert numbers == [3, 4]
