"""One label exchanged, through a whole run: what each secondary receives, and what was promised.

Two runs on tables that differ in one label of the primary, from the table to predictions of new
rows: split, scaling, links, class sums, rounds, requests. Randomised response is left out and noise
on sums is not looked at, so what is compared is what both are made for: the class that each row is
said to have. All else that a secondary receives must be the same.
"""

import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from helpers.federations import FROZEN
from helpers.removal import whole_run

from securevfl import read_federation
from securevfl.config.federation import FederationConfig
from securevfl.core.errors import ConfigError
from securevfl.data.tables import PartyTable
from securevfl.federation.rounds.secondary import Secondary
from securevfl.federation.run_plan import run_facts
from securevfl.federation.saved_model import load_model
from securevfl.linkage.stage.party_keys import keys_of
from securevfl.runtime import prediction_session
from securevfl.stages.class_means import class_labels, stage
from securevfl.testing import read_tables, run_in_process, save_federation, write_federation

ROWS = 60
EXTREMES = {"regression": (1e12, -1e12), "multiclass": (0.0, 2.0)}


@dataclass
class Received:
    """What secondaries have received of one run and of one request."""

    classes: list[np.ndarray] = field(default_factory=list)
    """Of every row, as sums are made by them; the last class is of rows that are not for learning.
    """
    rounds: list[tuple[int, tuple[int, ...], str]] = field(default_factory=list)
    """Number, rows and purpose of every round of training, by secondary in turns."""
    keys: list[Mapping[str, Any]] = field(default_factory=list)
    """Keys of each request for predictions."""


def federation(folder: Path, task: str, labels: str) -> Path:
    """Write a federation whose encoders learn from labels that have an epsilon."""
    path = write_federation(
        folder,
        rows=ROWS,
        federation={"task": task},
        model={"release": "pooled", "hidden": 3 if task == "multiclass" else 1, "heads": 1}
        | {"top": "tied"},
        encoder={"method": "class-means", "labels": labels, "share": 0.1},
        privacy=FROZEN,
        linkage={"protection": "none", "choose": "records"},
        base={"estimator": "linear"},
        training={"batch_size": 16},
    )
    source = tomllib.loads(path.read_text())
    # As a file that says nothing of it, so that the default has to be right.
    source["training"].pop("split", None)
    for party in source["party"][1:]:
        party |= {"scaling": "bounds", "bounds": [-4.0, 4.0]}
    if labels == "shares":
        source["party"].append({"name": "dealer", "role": "dealer"})
    return save_federation(folder, source)


def played(
    config: FederationConfig,
    tables: Mapping[str, PartyTable],
    folder: Path,
    patch: pytest.MonkeyPatch,
) -> Received:
    """Run everything, ask for predictions, and return what secondaries received."""
    received = Received()
    make, answer, request = (
        stage.class_labels_of,
        Secondary.hear_round,
        prediction_session.Request,
    )

    def made(*parts: Any) -> Any:
        labels = make(*parts)
        received.classes.append(labels.bins_of_rows.copy())
        return labels

    def answered(secondary: Secondary, plan: Any, reply: Any) -> Any:
        if plan.purpose != "predict":
            received.rounds.append((plan.round_number, tuple(plan.rows.tolist()), plan.purpose))
        return answer(secondary, plan, reply)

    def requested(**parts: Any) -> Any:
        columns = parts["keys"].columns
        received.keys.append({name: np.asarray(one).tolist() for name, one in columns.items()})
        return request(**parts)

    with patch.context() as watched:
        watched.setattr(stage, "class_labels_of", made)
        watched.setattr(Secondary, "hear_round", answered)
        watched.setattr(prediction_session, "Request", requested)
        watched.setattr(class_labels, "randomised_labels", lambda own, _classes, _epsilon: own)
        result = run_in_process(config, folder, tables=tables)
        assert result.trained is not None
        # Whoever answers: a request is what secondaries would get.
        model = load_model(folder / "parties" / "agency" / "model", config, party="agency")
        spec = prediction_session.prediction_spec(config, model).keys
        new = keys_of(spec, tables["agency"].take(np.arange(3)))
        prediction_session.request_of(config, model, new, active=None)
    return received


@pytest.mark.parametrize(
    ("task", "labels"),
    [
        ("regression", "randomised"),
        ("regression", "shares"),
        ("multiclass", "shares"),
        ("multiclass", "randomised"),
    ],
)
def test_one_label_moves_as_many_rows_as_its_promise_counts(
    task: str, labels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing else that any secondary receives: no row's part, no round, no key.

    Whether predictions ask secondaries at all is what the statement names as not covered, so a
    request is made whoever answers.
    """
    config = read_federation(federation(tmp_path, task, labels))
    tables = read_tables(config, tmp_path)
    own = tables["agency"]
    assert own.labels is not None
    before = played(config, tables, tmp_path / "before", monkeypatch)
    (classes,) = before.classes
    split, facts = run_facts(config, own)
    training = split.train
    moved = []
    for place, value in enumerate(EXTREMES[task]):
        row = int(training[7 * place + 1])
        exchanged = own.labels.copy()
        exchanged[row] = value
        other = {**tables, "agency": dataclasses.replace(own, labels=exchanged)}
        assert np.array_equal(run_facts(config, other["agency"])[0].train, training)
        after = played(config, other, tmp_path / f"after-{place}", monkeypatch)
        (there,) = after.classes
        moved.append(int((there != classes).sum()))
        assert after.rounds == before.rounds
        assert after.keys == before.keys != []
    assert max(moved) <= config.labels_moved
    assert facts.train_rows == len(training)


def with_other_label(
    config: FederationConfig, tables: Mapping[str, PartyTable], value: float
) -> dict[str, PartyTable]:
    """Return tables of which one training row has another label."""
    own = tables["agency"]
    assert own.labels is not None
    training = run_facts(config, own)[0].train
    row = int(training[own.labels[training] != value][0])
    labels = own.labels.copy()
    labels[row] = value
    return {**tables, "agency": dataclasses.replace(own, labels=labels)}


@pytest.mark.parametrize("labels", ["randomised", "shares"])
@pytest.mark.parametrize("task", ["binary", "regression"])
def test_one_label_moves_class_sums_by_what_noise_is_made_for(
    task: str, labels: str, tmp_path: Path
) -> None:
    """Given drawn labels, or the sums behind their noise, all that secondaries receive is equal."""
    path = federation(tmp_path, task, labels)
    if task == "binary":
        frame = pd.read_csv(tmp_path / "agency.csv")
        frame["y"] = frame["y"].clip(upper=1)
        frame.to_csv(tmp_path / "agency.csv", index=False)
    config = read_federation(path)
    tables = read_tables(config, tmp_path)
    here = whole_run(config, tables, tmp_path / "here")
    other = with_other_label(config, tables, 1e12 if task == "regression" else 0.0)
    there = whole_run(config, other, tmp_path / "there", before=here)
    drawn, furthest = here.labels_moved(there)
    if labels == "randomised":
        assert 0 < drawn <= config.labels_moved
        assert furthest == 0, "sums are by labels that were drawn"
        assert config.label_epsilon is not None
        (each,) = here.label_epsilons
        assert each * config.labels_moved <= config.label_epsilon
    else:
        assert drawn == 0
        assert 0 < furthest <= 1
    assert there.heard_by_secondaries() == here.heard_by_secondaries()


NETWORKS: dict[str, dict[str, Any]] = {
    "fet": {"family": "fet", "hidden": 4, "heads": 1, "neighbours": 2},
    "fedsim": {"family": "fedsim", "hidden": 4, "layer_width": 4, "neighbours": 2},
    "top1sim": {"family": "top1sim", "hidden": 4, "layer_width": 4},
    "fedsplitnn": {"family": "fedsplitnn", "hidden": 4, "encoder_hidden": 4},
}


@pytest.mark.parametrize("family", NETWORKS)
@pytest.mark.parametrize("task", ["binary", "multiclass"])
def test_gradients_are_of_labels_as_they_were_drawn(family: str, task: str, tmp_path: Path) -> None:
    """Given the draw, no gradient, no round, no best epoch and no end depends on a label."""
    path = write_federation(
        tmp_path,
        rows=ROWS,
        federation={"task": task},
        model=NETWORKS[family],
        privacy={"mechanism": "none", "encoder": "trained"},
        training={"batch_size": 16, "epochs": 3, "patience": 2, "label_epsilon": 1.0},
    )
    source = tomllib.loads(path.read_text())
    source["training"].pop("split", None)
    if task == "binary":
        frame = pd.read_csv(tmp_path / "agency.csv")
        frame["y"] = frame["y"].clip(upper=1)
        frame.to_csv(tmp_path / "agency.csv", index=False)
    config = read_federation(save_federation(tmp_path, source))
    tables = read_tables(config, tmp_path)
    here = whole_run(config, tables, tmp_path / "here")
    other = with_other_label(config, tables, 0.0)
    there = whole_run(config, other, tmp_path / "there", before=here)
    assert here.labels_moved(there)[0] == 1
    assert here.label_epsilons == [1.0]
    assert any(one[0] == "gradient" for one in here.received)
    assert there.heard_by_secondaries() == here.heard_by_secondaries()


@pytest.mark.parametrize("labels", ["randomised", "shares"])
def test_a_split_by_labels_that_have_an_epsilon_is_refused(labels: str, tmp_path: Path) -> None:
    """Every party knows the seed, so which rows train would show labels."""
    path = federation(tmp_path, "binary", labels)
    source = tomllib.loads(path.read_text())
    source["training"]["split"] = "stratified"
    with pytest.raises(ConfigError, match=r"training\.split: .*label_epsilon would not hold"):
        read_federation(save_federation(tmp_path, source))
