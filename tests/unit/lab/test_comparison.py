"""Methods side by side: equal to single runs, resumed, interrupted, and their figures."""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from securevfl import SecureVflError, read_federation
from securevfl.config.sections import TrainingSettings
from securevfl.core import settings
from securevfl.core.errors import ConfigError
from securevfl.core.progress import EpochDone
from securevfl.federation.base import Base, fit_base
from securevfl.lab.comparison import (
    Comparison,
    compare_methods,
    published,
    summary,
    table_rows,
    write_comparison,
)
from securevfl.lab.methods import method_source_of
from securevfl.lab.one_run import LeftOut, Recipe, Run, StudyOptions, markdown, run_config
from securevfl.runtime import primary_run
from securevfl.testing import read_tables, run_in_process, write_federation

SMALL: dict[str, Any] = {
    "rows": 60,
    "secondaries": 1,
    "training": {"epochs": 2, "batch_size": 32},
    "methods": {"solo": {"epochs": 2}, "wide": {"family": "fet", "hidden": 32}},
}

METRICS = ("validation_metrics", "test_metrics")


def comparison(folder: Path, *methods: str, seeds: int = 2, **sections: Any) -> Comparison:
    path = write_federation(folder, **{**SMALL, **sections})
    return Comparison(
        config=read_federation(path),
        methods=methods,
        seeds=seeds,
        data_root=folder,
        folder=folder / "out",
    )


def without_times(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in one.items() if not name.endswith("seconds")}
        for one in results
    ]


def test_runs_equal_those_made_alone(tmp_path: Path) -> None:
    """A comparison adds nothing: the seed's simulation, and the primary alone beside it."""
    plan = comparison(tmp_path, "alone", "fet")
    results = {(one["name"], one["seed"]): one for one in compare_methods(plan)}
    assert list(results) == [("alone", 3), ("fet", 3), ("alone", 4), ("fet", 4)]
    config = run_config(Recipe(source=plan.config.source, method="fet"), Run(name="fet", seed=4))
    alone = run_in_process(config, tmp_path / "alone", data_root=tmp_path, with_alone=True).metrics
    for figure in ("test", "validation", "train", "best_epoch", *METRICS):
        assert results["fet", 4][figure] == alone[figure]
    assert results["alone", 4]["test"] == alone["alone_test"]
    assert results["alone", 4]["test_metrics"] == alone["alone"]["metrics"]
    assert results["alone", 4]["chosen"] == alone["alone"]["chosen"]
    models = results["alone", 4]["candidates"]
    assert models[alone["alone"]["chosen"]] == results["alone", 4]["test_metrics"]
    assert set(models) >= {"linear", "boosting", "network"}


def test_what_is_done_is_not_done_again(tmp_path: Path) -> None:
    """More seeds and more methods train only what is missing, with the same results."""
    first = compare_methods(comparison(tmp_path, "fet", seeds=1))
    trained: set[Run] = set()

    def tell(run: Run, event: Mapping[str, Any]) -> None:
        trained.add(run)

    plan = comparison(tmp_path, "fet", "wide", seeds=2)
    results = compare_methods(plan, StudyOptions(tell=tell))
    assert results[0] == first[0]
    assert trained == set(plan.runs) - {Run(name="fet", seed=3)}
    assert not list((tmp_path / "out").rglob("parties"))
    assert compare_methods(plan, StudyOptions(tell=pytest.fail)) == results


def test_an_interrupted_run_is_begun_again(tmp_path: Path) -> None:
    """Cut off within a run: what was finished is kept, and the end is the same."""
    once = tmp_path / "once"
    once.mkdir()
    undisturbed = compare_methods(comparison(once, "solo", "fet", seeds=1))
    kept: list[Mapping[str, Any]] = []

    def tell(run: Run, event: Mapping[str, Any]) -> None:
        if isinstance(event, EpochDone):
            raise KeyboardInterrupt

    plan = comparison(tmp_path, "solo", "fet", seeds=1)
    with pytest.raises(KeyboardInterrupt):
        compare_methods(plan, StudyOptions(tell=tell, done=lambda _, result: kept.append(result)))
    assert [one["name"] for one in kept] == ["solo"]
    results = compare_methods(plan)
    # The federation's name and data are the same; where it lies does not matter.
    assert without_times(results) == without_times(undisturbed)


def test_other_settings_or_tables_are_not_mixed(tmp_path: Path) -> None:
    """A folder's results are those of one federation file and of the tables that a method reads."""
    compare_methods(comparison(tmp_path, "solo", seeds=1))
    changed = comparison(tmp_path, "solo", seeds=1, methods={"solo": {"epochs": 3}})
    with pytest.raises(ConfigError, match=r"other settings, on other tables.*--out"):
        compare_methods(changed)
    plan = comparison(tmp_path, "solo", seeds=1)
    (tmp_path / "bank-1.csv").unlink()
    compare_methods(plan)
    table = pd.read_csv(tmp_path / "agency.csv")
    table.assign(x0=0.5).to_csv(tmp_path / "agency.csv", index=False)
    with pytest.raises(ConfigError, match="other tables"):
        compare_methods(plan)
    (tmp_path / "out/runs/solo/seed-3/result.json").write_text("{")
    with pytest.raises(ConfigError, match="is not a run's result"):
        compare_methods(plan)


def test_runs_by_other_defaults_are_not_mixed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One file under two versions of securevfl may mean two runs."""
    plan = comparison(tmp_path, "solo", seeds=1)
    compare_methods(plan)
    with monkeypatch.context() as newer:
        newer.setattr("securevfl.lab.one_run.__version__", "99.0")
        with pytest.raises(ConfigError, match="by another version"):
            compare_methods(plan)
    compare_methods(comparison(tmp_path, "solo", seeds=1))
    changed = dataclasses.fields(TrainingSettings)
    (decay,) = [field for field in changed if field.name == "weight_decay"]
    with monkeypatch.context() as newer:
        newer.setattr(decay, "default", 0.5)
        # A reader is made once of a class and its defaults.
        newer.setattr(settings, "_reader", settings._reader.__wrapped__)
        with pytest.raises(ConfigError, match="by another version"):
            compare_methods(comparison(tmp_path, "solo", seeds=1))


def test_combine_joins_by_the_truth(tmp_path: Path) -> None:
    """It needs the truth, and a match for every row, before anything trains."""
    with pytest.raises(ConfigError, match=r"combine skipped: needs linkage\.truth"):
        compare_methods(comparison(tmp_path, "combine"))
    for name in ("agency", "bank-1"):
        path = tmp_path / f"{name}.csv"
        table = pd.read_csv(path)
        table.assign(who=range(len(table))).to_csv(path, index=False)
    plan = comparison(tmp_path, "combine", seeds=1, linkage={"truth": "who"})
    for name in ("agency", "bank-1"):
        path = tmp_path / f"{name}.csv"
        table = pd.read_csv(path)
        table.assign(who=range(len(table))).to_csv(path, index=False)
    (result,) = compare_methods(plan)
    assert 0 <= result["test"] <= 1
    table.assign(who=range(1, len(table) + 1)).to_csv(path, index=False)
    with pytest.raises(ConfigError, match="1 rows of 'agency' have no match"):
        compare_methods(plan)


def test_joined_methods_train_on_the_same_rows_and_truth(tmp_path: Path) -> None:
    """Boosted trees stand beside the others, with settings of their own."""
    write_federation(tmp_path, **{**SMALL, "rows": 200})
    for name in ("agency", "bank-1"):
        path = tmp_path / f"{name}.csv"
        table = pd.read_csv(path).sort_values("lon", ignore_index=True)
        table.assign(who=range(len(table))).to_csv(path, index=False)
    tables = {"boosting-combine": {"iterations": 20}}
    config = {"rows": 200, "linkage": {"truth": "who"}, "methods": tables}
    plan = comparison(tmp_path, "combine", "boosting-combine", seeds=1, **config)
    for name in ("agency", "bank-1"):
        path = tmp_path / f"{name}.csv"
        table = pd.read_csv(path).sort_values("lon", ignore_index=True)
        table.assign(who=range(len(table))).to_csv(path, index=False)
    combined, boosted = compare_methods(plan)

    assert boosted["epochs"] == 20
    assert 1 <= boosted["best_epoch"] <= 20
    assert {one["train_rows"] for one in (combined, boosted)} == {140}
    for one in (combined, boosted):
        for part in ("validation", "test"):
            assert set(one[f"{part}_metrics"]) > {"accuracy", "macro_f1", "macro_auc", "brier"}
            assert one[part] == one[f"{part}_metrics"]["accuracy"]
    assert boosted["train"] > 0.6
    assert 0.3 < boosted["test"] <= 1


def test_boosted_trees_on_links(tmp_path: Path) -> None:
    """They find what linked records say, without any truth; rows without a link are no error."""
    plan = comparison(
        tmp_path,
        "boosting",
        "boosting-links",
        seeds=1,
        rows=400,
        linkage={"max_distance": 0.02},
    )
    own, linked = compare_methods(plan)
    assert linked["train_rows"] == own["train_rows"]
    assert linked["test"] > own["test"] + 0.05


def test_boosting_reads_the_primarys_own_columns_and_keys(tmp_path: Path) -> None:
    """No truth and no other table; keys too, where joint models do not have them."""
    model = {"family": "fedsim", "neighbours": 4}
    plan = comparison(tmp_path, "boosting", seeds=1, model=model, rows=200)
    table = pd.read_csv(tmp_path / "agency.csv")
    table.assign(y=(table["lon"] > 5).astype(int)).to_csv(tmp_path / "agency.csv", index=False)
    (tmp_path / "bank-1.csv").unlink()
    (result,) = compare_methods(plan)
    assert result["test"] > 0.9


def test_a_defect_in_one_method_leaves_the_others_their_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its row says so, its trace is kept; misfits beside it are rows too, and adaptations lines."""

    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("in | some\nlibrary")

    monkeypatch.setattr("securevfl.lab.one_run.simulate_federation", fail)
    regression = {"task": "regression"}
    plan = comparison(tmp_path, "fet", "solo", "combine", seeds=2, federation=regression)
    out: list[LeftOut] = []
    results = compare_methods(plan, StudyOptions(leave_out=out.append))
    assert [(one["name"], one["seed"]) for one in results] == [("solo", 3), ("solo", 4)]
    assert [(one.name, one.status) for one in out] == [("combine", "skipped"), ("fet", "failed")]
    assert out[0].reason == "needs linkage.truth, the column with the true matches"
    assert out[1].reason.startswith("seed 3: ZeroDivisionError: in | some library (trace: ")
    trace = tmp_path / "out/runs/fet/seed-3/failure.txt"
    assert "Traceback" in trace.read_text()
    figures = summary(results, federation="x", task="regression", left_out=out)
    assert [row[:2] for row in table_rows(figures, narrow=True)[2:]] == [
        ["combine", "skipped"],
        ["fet", "failed"],
    ]
    *_, last = markdown(table_rows(figures)).splitlines()
    assert last.startswith(r"| fet | failed: seed 3: ZeroDivisionError: in \| some library")
    with pytest.raises(SecureVflError, match="no method could be trained: fet failed: seed 3"):
        compare_methods(dataclasses.replace(plan, methods=("fet",)))


def test_runs_with_noise_are_started_afresh(tmp_path: Path) -> None:
    """What an interrupted one released would count twice; the next has its whole budget."""
    privacy = {"noise_multiplier": 1.0, "delta": 1e-4, "encoder": "trained"}

    def tell(run: Run, event: Mapping[str, Any]) -> None:
        if isinstance(event, EpochDone):
            raise KeyboardInterrupt

    plan = comparison(tmp_path, "fet", seeds=1, privacy=privacy)
    with pytest.raises(KeyboardInterrupt):
        compare_methods(plan, StudyOptions(tell=tell))
    (result,) = compare_methods(plan)
    assert result["epochs"] == 2
    assert result["cpu_seconds"] is not None
    assert result["epsilon"] > 0


@pytest.mark.parametrize(
    ("methods", "more", "complaint"),
    [
        ((), {}, "methods: name at least one"),
        (("fet", "fet"), {}, "'fet' is named twice"),
        (("fet", "fedsym"), {}, "method 'fedsym': is neither"),
        (("fet",), {"seeds": 0}, "seeds must be at least 1"),
        (("alone", "auto"), {}, 'methods: "auto" chooses among families'),
        (("fet", "auto"), {"methods": {"auto": {"family": "fet"}}}, "methods.auto: .* rename it"),
    ],
)
def test_impossible_comparisons(
    methods: tuple[str, ...], more: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    """Refused before anything is read."""
    with pytest.raises(ConfigError, match=complaint):
        comparison(tmp_path, *methods, **more)


def test_auto_is_the_family_that_validates_best(tmp_path: Path) -> None:
    """With each seed anew, never the primary alone; and it costs what all of them cost."""
    plan = comparison(tmp_path, "auto", "alone", "fet", "wide", seeds=4)
    results = compare_methods(plan)
    by_run = {(one["name"], one["seed"]): one for one in results}
    assert len(by_run) == len(results) == 16
    for seed in (3, 4, 5, 6):
        auto = by_run["auto", seed]
        asked = [by_run[name, seed] for name in ("fet", "wide")]
        best = max(asked, key=lambda one: one["validation"])
        assert auto["chosen"] == best["name"]
        for figure in ("test", "validation", "family", "best_epoch", *METRICS):
            assert auto[figure] == best[figure]
        assert auto["cpu_seconds"] == sum(one["cpu_seconds"] for one in asked)
    assert {by_run["auto", seed]["chosen"] for seed in (3, 4, 5, 6)} == {"fet", "wide"}
    figures = summary(results, federation="x", task="multiclass")
    assert figures["methods"]["auto"]["chosen"] == [
        by_run["auto", seed]["chosen"] for seed in (3, 4, 5, 6)
    ]
    assert "auto" in figures["differences"]["alone"]


def made_up(method: str, seed: int, test: float, r2: float | None = 0.5) -> dict[str, Any]:
    metrics = {"rmse": test, "mae": test / 2, "r2": r2}
    return {
        "name": method,
        "family": method,
        "seed": seed,
        "metric": "rmse",
        "higher_is_better": False,
        "test": test,
        "validation": test,
        "train": test,
        "validation_metrics": metrics,
        "test_metrics": metrics,
        "epochs": 2,
        "best_epoch": 1,
        "placebos": {},
        "used": None,
        "epsilon": None,
        "train_rows": 100,
        "seconds": 3.0,
        "cpu_seconds": 2.0,
    }


def test_figures(tmp_path: Path) -> None:
    """Means and deviations of a sample; differences seed by seed, not of means."""
    tests = {"solo": [3.0, 5.0], "fedsim": [2.0, 5.0], "fet": [1.0, 1.0]}
    results = [
        made_up(name, seed, values[seed]) for seed in (0, 1) for name, values in tests.items()
    ]
    figures = summary(results, federation="made-up", task="regression")
    assert figures["metric"] == "rmse"
    assert figures["seed_numbers"] == [0, 1]
    solo = figures["methods"]["solo"]
    assert (solo["mean"], solo["seeds"]) == (4.0, [3.0, 5.0])
    assert solo["std"] == pytest.approx(math.sqrt(2))
    paired = figures["differences"]["fedsim"]["solo"]
    assert (paired["mean"], paired["seeds"]) == (0.5, [1.0, 0.0])
    assert paired["std"] == pytest.approx(math.sqrt(0.5))
    assert set(figures["differences"]["fet"]) == {"solo", "fedsim"}
    write_comparison(tmp_path, figures, results)
    assert markdown(table_rows(figures)).splitlines()[2].startswith("| solo | 4.00 ± 1.41 | +0.50")
    runs = pd.read_csv(tmp_path / "comparison.csv")
    assert runs.groupby("method")["test"].mean().to_dict() == {"solo": 4, "fedsim": 3.5, "fet": 1}


def test_every_method_is_held_against_its_placebo() -> None:
    """The better of a method's placebos, seed by seed; methods without one have no figure."""
    results = [made_up("alone", seed, 3.0) for seed in (0, 1, 2)]
    for seed, test, own, permuted in ((0, 2.0, 2.5, 2.25), (1, 2.0, 1.5, 1.75), (2, 3.0, 2, 2)):
        placebos = {"own": {"rmse": own}, "permuted": {"rmse": permuted}}
        # With the last seed the local baseline answers, and nobody is asked.
        used = "alone" if seed == 2 else "joint"
        results.append({**made_up("fet", seed, test), "placebos": placebos, "used": used})
    figures = summary(results, federation="made-up", task="regression")
    assert figures["differences"]["placebo"]["fet"]["seeds"] == [-0.25, 0.5, 0.0]
    assert set(figures["differences"]["placebo"]) == {"fet"}
    heading, _, alone, fet = markdown(table_rows(figures)).splitlines()
    assert [cell.strip() for cell in heading.split("|")][3:5] == ["minus placebo", "minus alone"]
    assert alone.split("|")[3].strip() == ""
    assert fet.split("|")[3].strip().startswith("+0.0833")


def test_every_method_is_held_against_alone() -> None:
    """A column of paired differences with their deviation, and which model alone was each time."""
    tests = {"alone": [3.0, 5.0], "fet": [2.5, 5.5]}
    chosen = {0: "boosting", 1: "network"}
    # A model that could not be fitted with every seed has no mean.
    models = {
        0: {"linear": made_up("", 0, 7.0)["test_metrics"], "network": {}},
        1: {"linear": made_up("", 1, 8.0)["test_metrics"]},
    }
    results = [
        {
            **made_up(name, seed, values[seed]),
            **({"chosen": chosen[seed], "candidates": models[seed]} if name == "alone" else {}),
        }
        for seed in (0, 1)
        for name, values in tests.items()
    ]
    figures = summary(results, federation="made-up", task="regression")
    assert figures["differences"]["alone"]["fet"]["seeds"] == [-0.5, 0.5]
    assert figures["methods"]["alone"]["chosen"] == ["boosting", "network"]
    assert figures["methods"]["alone"]["candidates"]["linear"]["seeds"] == [7.0, 8.0]
    assert set(figures["methods"]["alone"]["candidates"]) == {"linear"}
    assert not {"chosen", "candidates"} & set(figures["methods"]["fet"])
    head, _, fet = table_rows(figures)
    assert dict(zip(head, fet, strict=True))["minus alone"] == "+0.0000 ± 0.7071"


def test_every_metric_is_in_the_figures(tmp_path: Path) -> None:
    """Another one is compared by without new runs; what some split does not define has no mean."""
    results = [
        made_up(name, seed, test, r2)
        for seed, r2 in ((0, 0.5), (1, None))
        for name, test in (("solo", 3.0), ("fet", 1.0))
    ]
    figures = summary(results, federation="made-up", task="regression")
    by_mae = summary(results, federation="made-up", task="regression", metric="mae")

    assert (figures["metric"], by_mae["metric"]) == ("rmse", "mae")
    assert figures["chosen_by"] == by_mae["chosen_by"] == "rmse"
    for shown in (figures, by_mae):
        spreads = shown["methods"]["solo"]["metrics"]
        assert spreads["mae"]["seeds"] == [1.5, 1.5]
        assert spreads["r2"] == {"mean": None, "std": None, "seeds": [0.5, None]}
        assert shown["methods"]["solo"]["mean"] == spreads[shown["metric"]]["mean"]
    assert by_mae["differences"]["fet"]["solo"]["seeds"] == [1.0, 1.0]
    head, _, solo, _ = (line.split(" | ") for line in markdown(table_rows(by_mae)).splitlines())
    cells = dict(zip(head, solo, strict=True))
    assert cells["mae"] == "1.5000 ± 0.0000"
    assert cells["rmse"] == "3.00 ± 0.00"
    assert cells["r2"] == "undefined"
    narrow = dict(zip(*table_rows(by_mae, narrow=True)[:2], strict=True))
    assert (narrow["mae"], narrow["rmse"]) == ("1.5000 ± 0.0000", "3.00")
    by_r2 = summary(results, federation="made-up", task="regression", metric="r2")
    assert by_r2["higher_is_better"]
    assert by_r2["differences"]["fet"]["solo"]["seeds"] == [0.0, None]
    write_comparison(tmp_path, figures, results)
    runs = pd.read_csv(tmp_path / "comparison.csv")
    assert runs["test_mae"].tolist() == [1.5, 0.5, 1.5, 0.5]
    assert runs["validation_r2"].isna().tolist() == [False, False, True, True]
    with pytest.raises(ConfigError, match="a regression task has rmse, mae, r2; got 'auc'"):
        summary(results, federation="made-up", task="regression", metric="auc")


def test_one_seed_has_no_deviation() -> None:
    """None, rather than a zero that looks like certainty."""
    figures = summary([made_up("fet", 0, 3.0)], federation="made-up", task="regression")
    assert figures["methods"]["fet"]["std"] is None
    assert "±" not in markdown(table_rows(figures))


def test_methods_of_a_seed_begin_at_one_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is fitted once a seed, and figures are those of runs that fit their own."""
    fitted = []

    def counted(*arguments: Any) -> Base:
        fitted.append(fit_base(*arguments))
        return fitted[-1]

    monkeypatch.setattr(primary_run, "fit_base", counted)
    plan = comparison(tmp_path, "fet", "top1sim", base={"estimator": "best"})
    results = compare_methods(plan)
    assert len(fitted) == 2
    assert all(one["cpu_seconds"] > fitted[0].cpu_seconds / 2 > 0 for one in results)
    tables = read_tables(plan.config, tmp_path)
    for one in results[1:]:
        recipe = Recipe(source=plan.config.source, method=one["name"])
        config = run_config(recipe, Run(name=one["name"], seed=one["seed"]))
        own = tmp_path / f"own-{one['name']}-{one['seed']}"
        again = run_in_process(config, own, tables=tables, with_alone=True)
        for metrics in METRICS:
            assert one[metrics] == again.metrics[metrics]


@pytest.mark.parametrize("length_from", ["file", "table", "paper"])
def test_a_preset_trains_as_long_as_the_file_unless_its_own_length_is_asked_for(
    tmp_path: Path, length_from: str
) -> None:
    """Like is compared with like: a paper's hundred epochs are no method."""
    length = {"epochs": 100, "batch_size": 128, "patience": 100}
    methods = {"fet-paper": length} if length_from == "table" else {}
    config = read_federation(write_federation(tmp_path, **{**SMALL, "methods": methods}))
    if length_from == "paper":
        config = published(config, ["fet-paper"])
    source, notes = method_source_of(config, "fet-paper")
    trained = source["training"]["epochs"], source["training"]["batch_size"]
    as_file = length_from == "file"
    assert trained == ((2, 32) if as_file else (100, 128))
    assert any("not the published epochs = 100" in note for note in notes) is as_file
