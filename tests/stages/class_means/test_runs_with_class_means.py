"""A finished run whose encoders are class means, in the hands of every command that reads one."""

import dataclasses
import json
import shutil
import tomllib
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from helpers.class_means import write_class_means
from helpers.command_line import securevfl
from helpers.federations import FROZEN
from helpers.fixed_entropy import fixed_entropy

import securevfl as sv
from securevfl.config.reading import read_federation
from securevfl.data.scaling import ColumnSettings
from securevfl.dp.symbols import normal_scores
from securevfl.federation.build import build_bottom
from securevfl.runtime.run_options import RunOptions
from securevfl.runtime.run_tables import read_tables
from securevfl.runtime.simulation import simulate_federation
from securevfl.testing import save_federation

Capture = pytest.CaptureFixture[str]
SHARED = ("class_means_0", "class_means_1", "class_means_2")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run under a promise, whose labels have one too; its noise is fixed."""
    folder = tmp_path_factory.mktemp("class_means")
    path = write_class_means(folder, labels="randomised", dealer=False, privacy=FROZEN)
    source = tomllib.loads(path.read_text())
    for party in source["party"][1:]:
        party |= {"scaling": "bounds", "bounds": [-4.0, 4.0]}
    config = read_federation(save_federation(folder, source))
    tables, device = read_tables(config, folder), torch.device("cpu")
    with fixed_entropy():
        simulate_federation(
            config, tables, RunOptions(run_folder=folder / "run", device=device), with_alone=False
        )
    return folder


def test_a_table_of_class_means_says_which_class_each_number_is_for(
    finished: Path, capfd: Capture
) -> None:
    """Records of the highest class speak for it more than others do, at the class's own number."""
    out = finished / "embeddings.csv"
    asked = [
        "model",
        "embeddings",
        finished / "run",
        "--own",
        "--data-root",
        finished,
        "--out",
        out,
    ]
    done = securevfl(capfd, *asked)
    frame = pd.read_csv(out)

    assert done.code == 0
    assert frame.columns[2:5].tolist() == list(SHARED)
    assert sorted(frame["label"].unique()) == [0, 1, 2]
    means = frame.groupby("label")[list(SHARED)].mean().to_numpy()
    for label in (0, 2):
        assert means[:, label].argmax() == label


def test_what_partners_are_worth_is_refused_with_what_helps(finished: Path, capfd: Capture) -> None:
    """Class means share their numbers, so that ``layout = "blocks"`` alone would be refused too."""
    refused = securevfl(capfd, "lab", "contribution", finished / "run", "--data-root", finished)

    assert refused.code == 4
    assert "2 more releases of the 24 test rows, epsilon" in refused.complaint
    assert '(method = "principal"; class means share their numbers)' in refused.complaint


def test_ledgers_of_a_run_with_class_means_are_verified(
    finished: Path, tmp_path: Path, capfd: Capture
) -> None:
    """As they lie there; and found out where a line of the fitting is gone, or labels cost less."""
    run = tmp_path / "run"
    shutil.copytree(finished / "run", run)
    good = securevfl(capfd, "ledger", "verify", run)
    assert good.code == 0, good.err
    metrics = json.loads((run / "metrics.json").read_text())
    metrics["privacy"]["labels"]["epsilon"] = 1.0
    (run / "metrics.json").write_text(json.dumps(metrics))
    assert "labels" in securevfl(capfd, "ledger", "verify", run).out
    assert securevfl(capfd, "ledger", "verify", run).code == 4
    ledger = run / "parties" / "bank-1" / "ledger.jsonl"
    lines = ledger.read_text().splitlines()
    (fit,) = [line for line in lines if json.loads(line)["kind"] == "fit"]
    ledger.write_text("".join(f"{line}\n" for line in lines if line != fit))
    assert securevfl(capfd, "ledger", "verify", run).code == 4


def test_a_table_shows_what_a_run_with_class_means_spent_of_it(
    finished: Path, tmp_path: Path, capfd: Capture
) -> None:
    """The primary's rows at the run's epsilon, and its labels at theirs."""
    table = tmp_path / "agency.csv"
    shutil.copy(finished / "agency.csv", table)
    shutil.copy(finished / "run" / "parties" / "agency" / "ledger.jsonl", f"{table}.ledger.jsonl")
    shown = securevfl(capfd, "ledger", "show", table)
    told = json.loads(securevfl(capfd, "ledger", "show", table, "--json").out)

    lines = " ".join(shown.out.split())
    assert shown.code == 0
    assert "epsilon 50, delta 0.0001; no limit" in lines
    assert "labels towards secondaries, 1 run: epsilon = 2 against one alone, 2 against" in lines
    assert told["labels"]["epsilon"] == 2.0
    assert told["runs"][0]["epsilon"] == pytest.approx(50.0, rel=1e-6)


def test_scores_have_names(tmp_path: Path) -> None:
    """What is released are M values, the mean scores of as many cells."""
    path = write_class_means(
        tmp_path,
        labels="randomised",
        dealer=False,
        privacy=FROZEN,
        federation={"task": "regression"},
    )
    source = tomllib.loads(path.read_text())
    source["model"]["hidden"] = 1
    for party in source["party"][1:]:
        party |= {"scaling": "bounds", "bounds": [-4.0, 4.0]}
    config = read_federation(save_federation(tmp_path, source))
    tables, run = read_tables(config, tmp_path), tmp_path / "run"
    simulate_federation(config, tables, RunOptions(run_folder=run), with_alone=False)
    released = sv.features(run, data_root=tmp_path)["score"]
    about = released.attrs["securevfl"]
    assert about["noise_deviation"] is None
    values = normal_scores(about["cells"]) / normal_scores(about["cells"])[-1]
    averages = (values[:, None] + values).ravel() / 2 * config.privacy.clip_norm
    assert np.abs(released.to_numpy()[:, None] - averages).min(axis=1).max() < 1e-4
    assert len(np.unique(released)) > 2


def test_tables_in_memory_vote_by_one_word() -> None:
    """``encoder="auto"`` needs no model; defaults of other arguments are not taken for wishes."""
    draw = np.random.default_rng(0)
    columns = draw.normal(size=(90, 6))
    housing = sv.datasets.split_table(
        columns, columns.sum(axis=1), parties=3, key_dim=2, seed=0, task="regression"
    )
    privacy = sv.dp.Privacy(epsilon=8.0, delta=1e-5)
    run = sv.simulate(
        housing,
        privacy=privacy,
        encoder="auto",
        bounds=[-4.0, 4.0],
        base="linear",
        with_alone=False,
    )
    assert run.metrics["privacy"]["epsilon"] == pytest.approx(8.0)
    assert run.metrics["privacy"]["labels"]["epsilon"] == 2.0
    encoder = sv.EncoderSettings(method="class-means", labels="shares", label_epsilon=1.0)
    dealt = sv.simulate(
        housing,
        sv.models.FeT(neighbours=4, hidden=1, release="pooled"),
        privacy=dataclasses.replace(privacy, encoder="frozen", links_per_record=1),
        encoder=encoder,
        linkage=sv.LinkageSettings(protection="none", choose="records"),
        top="tied",
        base="linear",
        bounds=[-4.0, 4.0],
        with_alone=False,
    )
    assert dealt.metrics["privacy"]["labels"]["mechanism"] == "shares"


def test_a_saved_encoder_reads_words(tmp_path: Path) -> None:
    """It sends another number for a record with another word, and as many numbers as words."""
    draw = np.random.default_rng(0)
    word, ids = draw.integers(0, 3, 200), [f"id {number}" for number in range(200)]
    partner = pd.DataFrame({"id": ids, "x": draw.normal(size=200), "word": [f"w{w}" for w in word]})
    own = pd.DataFrame({"id": ids, "a": draw.normal(size=200), "y": word + draw.normal(size=200)})
    words = ColumnSettings(categories={"word": ["w0", "w1", "w2"]})
    result = sv.simulate(
        [
            sv.data.from_frame(own, name="bank", key="id", label="y"),
            sv.data.from_frame(partner, name="bureau", key="id", columns=words),
        ],
        privacy=sv.dp.Privacy(epsilon=8.0, delta=1e-5),
        encoder="auto",
        top="tied",
        base="linear",
        bounds={"bureau": {"x": [-4.0, 4.0]}},
        linkage=sv.LinkageSettings(metric="exact", protection="none"),
        with_alone=False,
        out=tmp_path / "run",
    )
    assert result.trained is not None
    run = result.trained
    party = run.config.party("bureau")
    bottom = build_bottom(run.config, party, run.table(party))
    run.model("bureau").into(bottom)
    rows = torch.tensor([[[0.0, *row]] for row in np.eye(3).tolist()])
    with torch.no_grad():
        sent = bottom.eval()(rows, rows[..., :0], torch.ones((3, 1), dtype=torch.bool))
    assert len(sent.unique()) == 3
