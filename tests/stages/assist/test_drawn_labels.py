"""Labels with an epsilon: what is sent is made of drawn ones alone, charged once, and said so."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from helpers.assisted import LINEAR, TREES, write_assisted

from securevfl.config.disclosure import channels
from securevfl.config.reading import read_federation
from securevfl.core.errors import ConfigError
from securevfl.core.progress import ProgressEvent, RoundDone
from securevfl.data.tables import PartyTable
from securevfl.desk.report.page import write_report
from securevfl.desk.report.verify import verify_run
from securevfl.dp import labels as mechanisms
from securevfl.federation.session.peers import PeersHere
from securevfl.models.alone import choice
from securevfl.runtime.run_options import RunOptions
from securevfl.runtime.run_tables import read_tables
from securevfl.runtime.simulation import RunResult, simulate_federation
from securevfl.stages.assist import parties
from securevfl.stages.assist.family import best_step
from securevfl.stages.assist.messages import AssistKind

Tables = dict[str, PartyTable]


def prepared(folder: Path, task: str, base: str = "none") -> tuple[Any, Tables]:
    """Return the settings and tables of a small federation whose labels have an epsilon."""
    model: dict[str, Any] = {**LINEAR, "rounds": 4, "label_epsilon": 3.0}
    if task == "regression":
        model |= {"label_lower": -4.0, "label_upper": 4.0}
    if task != "multiclass":
        model["outputs"] = 1
    path = write_assisted(
        folder,
        model=model,
        base={"estimator": base},
        federation={"name": "test", "task": task, "seed": 3},
        # One epoch without a gain would end training, if labels as they are had a say.
        training={"batch_size": 128, "patience": 1},
    )
    if task == "binary":
        frame = pd.read_csv(folder / "agency.csv")
        frame["y"] = frame["y"].clip(upper=1)
        frame.to_csv(folder / "agency.csv", index=False)
    config = read_federation(path)
    return config, read_tables(config, path.parent)


def run(config: Any, tables: Tables, out: Path, **settings: Any) -> RunResult:
    return simulate_federation(
        config, tables, RunOptions(run_folder=out, **settings), with_alone=False
    )


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Everything that secondaries are told or asked, in order, as bytes."""
    heard: list[tuple[Any, ...]] = []

    def overheard(method: Any) -> Any:
        def telling(self: Any, message: Any, *more: Any) -> Any:
            made = message.to_message()
            tensors = {name: value.tobytes() for name, value in made.tensors.items()}
            heard.append((made.kind, dict(made.meta), tensors))
            return method(self, message, *more)

        return telling

    for name in ("tell", "ask"):
        monkeypatch.setattr(PeersHere, name, overheard(getattr(PeersHere, name)))
    return heard


@pytest.mark.parametrize(
    ("task", "base"),
    [
        ("multiclass", "linear"),
        ("binary", "none"),
        ("regression", "linear"),
    ],
)
def test_what_is_sent_is_made_of_drawn_labels_alone(
    task: str,
    base: str,
    tmp_path: Path,
    sent: list[tuple[Any, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every label of the table is another, the draw is the same: secondaries see the same bits.

    Steps, the order of rows, which epoch is the best, when training ends, and what is asked for
    afterwards are among them.
    """
    config, tables = prepared(tmp_path, task, base)
    labels = tables["agency"].labels
    assert labels is not None
    drawn: list[np.ndarray] = []

    def the_same_again(values: np.ndarray, *_: Any, **__: Any) -> np.ndarray:
        # Near enough to the first run's labels that there is something to learn.
        drawn.append(np.where(np.arange(len(values)) % 9, values, values[::-1]))
        return drawn[0]

    def never_zero(*given: Any, unit: float) -> float:
        # So that it is not a round without a gain that ends training.
        return max(best_step(*given, unit=unit), unit / 20)

    # Labels as they are choose lambda too: in the second run the correction counts for nothing.
    scales = iter([1.0, 0.0])
    monkeypatch.setattr(choice, "choose_scale", lambda *_, **__: next(scales))
    monkeypatch.setattr(parties, "best_step", never_zero)
    monkeypatch.setattr(parties, "randomised_labels", the_same_again)
    monkeypatch.setattr(parties, "noised_labels", the_same_again)
    first = run(config, tables, tmp_path / "first")
    seen = list(sent)
    sent.clear()
    others = np.random.default_rng(1).permutation(labels)
    if task == "regression":
        others = others * 3 + 1
    tables["agency"] = dataclasses.replace(tables["agency"], labels=others)
    second = run(config, tables, tmp_path / "second")
    assert first.metrics["test"] != second.metrics["test"]
    # All of them, though the second run validates by labels that nobody could have learned.
    assert [one[0] for one in seen].count(AssistKind.STEP) == 4
    assert sent == seen


def test_drawn_once_and_charged_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that was cut goes on with the same labels, and its ledger has one line of them."""
    config, tables = prepared(tmp_path, "multiclass")
    draws: list[np.ndarray] = []

    def watched(bins: np.ndarray, classes: int, epsilon: float) -> np.ndarray:
        assert (classes, epsilon) == (3, 3.0)
        draws.append(mechanisms.randomised_labels(bins, classes, epsilon))
        return draws[-1]

    monkeypatch.setattr(parties, "randomised_labels", watched)

    class PowerCutError(Exception):
        """The simulated crash."""

    def cut(event: ProgressEvent) -> None:
        if isinstance(event, RoundDone) and event.epoch == 2:
            raise PowerCutError

    with pytest.raises(PowerCutError):
        run(config, tables, tmp_path / "run", observe=cut)
    again = run(config, tables, tmp_path / "run", resume=True)
    assert len(draws) == 1
    lines = [line for line in again.ledger if line["kind"] == "labels"]
    assert [(one["mechanism"], one["epsilon"], one["together"]) for one in lines] == [
        ("randomised", 3.0, 3.0)
    ]
    assert lines[0]["digest"] == mechanisms.digest_of_labels(draws[0])
    kinds = [line["kind"] for line in again.ledger]
    assert kinds.index("labels") < kinds.index("charge")


def test_figures_sentence_report_and_verification(tmp_path: Path) -> None:
    """What is promised is in the figures and the report, and follows from the ledger."""
    config, tables = prepared(tmp_path, "regression")
    found = run(config, tables, tmp_path / "run")
    labels = found.metrics["privacy"]["labels"]
    assert labels["mechanism"] == "noised"
    assert labels["epsilon"] == labels["together"] == 3.0
    assert labels["delta"] == config.privacy.delta
    assert "how any one of the primary's training rows is labelled" in labels["statement"]
    assert "a factor of 20 (epsilon = 3)" in labels["statement"]
    write_report(tmp_path / "run")
    report = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "Labels: Suppose all 2 secondaries together try" in report

    figures = {one.check: one for one in verify_run(tmp_path / "run")}["figures"]
    assert figures.good, figures.text
    metrics = tmp_path / "run" / "metrics.json"
    told = json.loads(metrics.read_text(encoding="utf-8"))
    told["privacy"]["labels"]["together"] = 2.0
    metrics.write_text(json.dumps(told), encoding="utf-8")
    figures = {one.check: one for one in verify_run(tmp_path / "run")}["figures"]
    assert figures.good is False
    assert "labels.together" in figures.text


def test_labels_that_are_shown_are_said_to_be(tmp_path: Path) -> None:
    """Without an epsilon there is a line too, and a warning in the figures."""
    config = read_federation(write_assisted(tmp_path))
    found = run(config, read_tables(config, tmp_path), tmp_path / "run")
    (line,) = [line for line in found.ledger if line["kind"] == "labels"]
    assert (line["mechanism"], line["epsilon"], line["digest"]) == ("plaintext", None, "")
    labels = found.metrics["privacy"]["labels"]
    assert labels["epsilon"] is None
    assert labels["statement"].startswith("Labels are shown")
    assert labels["warning"]


def test_the_channel_names_the_epsilon(tmp_path: Path) -> None:
    config, _ = prepared(tmp_path, "multiclass")
    told = {one["channel"]: one for one in channels(config)}["residuals"]
    assert told["guarantee"] == "covered by label_epsilon = 3, against all secondaries together"
    assert config.split_kind == "random"


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"model": {**TREES, "label_epsilon": 0.0}}, r"label_epsilon must be finite and > 0"),
        ({"model": {**TREES, "label_epsilon": 1e-9}}, r"model\.label_epsilon: must be at least"),
        ({"model": {**TREES, "label_lower": 0.0}}, r"model\.label_lower: .*leave it out"),
        (
            {"model": {**TREES, "label_epsilon": 1.0}, "training": {"split": "stratified"}},
            r"training\.split: .*would not hold",
        ),
        (
            {
                "model": {**TREES, "outputs": 1, "label_epsilon": 1.0},
                "federation": {"name": "test", "task": "regression"},
            },
            r"model\.label_lower: is missing",
        ),
        (
            {
                "model": {
                    **TREES,
                    "outputs": 1,
                    "label_epsilon": 1.0,
                    "label_lower": 1.0,
                    "label_upper": 1.0,
                },
                "federation": {"name": "test", "task": "regression"},
            },
            r"model\.label_upper: must be above",
        ),
    ],
)
def test_settings_under_which_it_would_not_hold_are_refused(
    sections: dict[str, Any], says: str, tmp_path: Path
) -> None:
    path = write_assisted(tmp_path, **sections)

    def asked_for() -> None:
        config = read_federation(path)
        run(config, read_tables(config, tmp_path), tmp_path / "run")

    with pytest.raises(ConfigError, match=says):
        asked_for()
