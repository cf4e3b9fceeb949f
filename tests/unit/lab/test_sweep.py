"""One file under many settings: equal to single runs, resumed, and refused before anything."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from securevfl import SecureVflError, read_federation
from securevfl.core.errors import ConfigError, PrivacyError
from securevfl.lab.one_run import LeftOut, Run, StudyOptions
from securevfl.lab.sweep import Sweep, parse_setting, sweep_and_write
from securevfl.testing import read_tables, run_in_process, write_federation

SMALL: dict[str, Any] = {
    "rows": 60,
    "secondaries": 1,
    "training": {"epochs": 1, "batch_size": 32},
}


def asked(folder: Path, *settings: str, **sections: Any) -> Sweep:
    path = write_federation(folder, **{**SMALL, **sections})
    return Sweep(
        config=read_federation(path),
        tried=tuple(map(parse_setting, settings)),
        data_root=folder,
        folder=folder / "out",
    )


def train(
    sweep: Sweep, out: list[LeftOut] | None = None, **heard: Any
) -> tuple[dict[str, Any], list[Run]]:
    trained: list[Run] = []

    def tell(run: Run, event: object) -> None:
        if run not in trained:
            trained.append(run)

    heard = {
        "tell": tell,
        "done": lambda _run, _result: None,
        "leave_out": pytest.fail if out is None else out.append,
        **heard,
    }
    return sweep_and_write(sweep, StudyOptions(**heard)), trained


def test_a_grid_equals_runs_of_files_and_is_resumed(tmp_path: Path) -> None:
    """A point is the file with its settings; more seeds and values train what is missing."""
    figures, trained = train(asked(tmp_path, "model.neighbours=2,4", "seed=3..4"))
    names = [f"model.neighbours={number}" for number in (2, 4)]
    assert trained == [Run(name=name, seed=seed) for seed in (3, 4) for name in names]
    assert list(figures["points"]) == names
    assert figures["seed_numbers"] == [3, 4]
    alone = run_in_process(
        write_federation(tmp_path, **SMALL, model={"neighbours": 2}, federation={"seed": 4}),
        tmp_path / "once",
        with_alone=True,
    ).metrics
    for name, one in figures["points"][names[0]]["metrics"].items():
        assert one["seeds"][1] == alone["test_metrics"][name]
    assert figures["alone"]["seeds"][1] == alone["alone_test"]
    assert figures["best"] in names

    more, trained = train(asked(tmp_path, "model.neighbours=2,4,3", "seed=3..4"))
    assert {run.name for run in trained} == {"model.neighbours=3"}
    assert {name: more["points"][name] for name in names} == figures["points"]
    assert json.loads((tmp_path / "out/sweep.json").read_text()) == more
    runs = pd.read_csv(tmp_path / "out/sweep.csv")
    means = runs.groupby("model.neighbours")["test"].mean()
    assert means[3] == pytest.approx(more["points"]["model.neighbours=3"]["mean"])
    assert runs["model.neighbours"].isna().sum() == 2
    with pytest.raises(ConfigError, match=r"other settings, on other tables.*--out"):
        train(asked(tmp_path, "model.neighbours=2", "seed=3", training={"epochs": 2}))


def test_settings_of_parties_and_tables_that_follow(tmp_path: Path) -> None:
    """A party's own settings change its table; alone has no place where its own may change."""
    sweep = asked(tmp_path, "party.bank-1.scaling=standard,bounds,none", "seed=3")
    with pytest.raises(ConfigError, match=r"with party.bank-1.scaling=bounds: "):
        train(sweep)
    assert not (tmp_path / "out").exists()
    figures, _ = train(asked(tmp_path, "party.bank-1.scaling=standard,none"))
    assert figures["alone"] is None
    one, other = figures["points"].values()
    assert one["settings"] == {"party.bank-1.scaling": "standard"}
    assert one["metrics"] != other["metrics"]


def test_tables_are_read_once_where_settings_leave_them_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A grid over models does not read every table for every point."""
    reads = []

    def read(config: Any, root: Path) -> Any:
        reads.append(config)
        return read_tables(config, root)

    monkeypatch.setattr("securevfl.lab.study_outputs.read_tables", read)
    figures, _ = train(asked(tmp_path, "model.neighbours=1..4"))
    assert (len(reads), len(figures["points"])) == (1, 4)


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
        (("seed=0.5",), ConfigError, "seed: must be whole numbers"),
        (("seed=-1",), ConfigError, "from 0 on, such as 0..4; got -1"),
        (("model.hidden=1..1000", "model.heads=1..1000"), ConfigError, "1000000 combinations"),
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
    sweep = asked(tmp_path, "model.neighbours=2,61", "seed=3..4")
    figures, _ = train(sweep, out)
    assert list(figures["points"]) == ["model.neighbours=2"]
    assert [one.name for one in out] == ["model.neighbours=61"]
    assert "seed 3" in figures["left_out"]["model.neighbours=61"]["reason"]
    failing = dataclasses.replace(sweep, tried=(parse_setting("model.neighbours=61"),))
    with pytest.raises(
        SecureVflError, match=r"no run could be trained: model.neighbours=61 failed"
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
    sweep = asked(tmp_path, "federation.classes=3,4", "party.bank-1.scaling=none", **sections)
    assert "encoder.method" in sweep.config.chosen
    numbers = []
    for point in sweep.grid():
        recipe, config = point.recipe(sweep.source)
        assert recipe.source["encoder"]["method"] == "auto"
        numbers.append(config.model.numbers)
    assert numbers == [3, 4]
