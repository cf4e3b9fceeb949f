"""Scores: what secondaries fit between parties is what they fit in one process."""

import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.built import built
from helpers.class_means import fit_as_threads, fit_here, write_class_means

from securevfl.config.reading import read_federation
from securevfl.dp.class_sums import RADIUS
from securevfl.federation.build import primary_data
from securevfl.federation.run_plan import run_facts
from securevfl.linkage.spec import LinkedPrimary
from securevfl.models.frozen import RecordShape, ScoreBottom
from securevfl.stages.class_means.class_labels import ClassLabels
from securevfl.stages.class_means.fitting import scale_of
from securevfl.testing import read_tables, save_federation

ROWS = 120


def encoders(folder: Path, fit, *, labels: str, told: ClassLabels) -> list[dict[str, torch.Tensor]]:
    """Return the fitted encoders' states, of a run without noise."""
    path = write_class_means(
        folder, labels=labels, dealer=labels == "shares", federation={"task": "regression"}
    )
    source = tomllib.loads(path.read_text())
    source["model"]["hidden"] = 1
    with built(save_federation(folder, source), folder / "run") as made:
        fit(made, told)
        bottoms = [one.bottom for one in made.secondaries.values()]
        assert all(isinstance(bottom, ScoreBottom) for bottom in bottoms)
        return [{k: v.clone() for k, v in bottom.state_dict().items()} for bottom in bottoms]


@pytest.mark.parametrize("labels", ["shares", "plaintext"])
def test_encoders_are_those_of_one_process(labels: str, tmp_path: Path) -> None:
    """To the bit: columns are mapped before class sums are made."""
    bins = np.random.default_rng(1).integers(0, 3, ROWS)
    noise = (lambda sums: sums.noise(0.0)) if labels == "shares" else None
    told = ClassLabels(bins_of_rows=bins, bins=3, label_noise=noise)
    found = []
    for name, fit in (("between", fit_as_threads), ("here", fit_here)):
        (tmp_path / name).mkdir()
        found.append(encoders(tmp_path / name, fit, labels=labels, told=told))
    for between, here in zip(*found, strict=True):
        assert here["weights"].abs().max() > 0
        for name, value in here.items():
            assert torch.equal(between[name], value), name


def test_words_take_the_noise_of_six_numbers_a_column_at_most() -> None:
    """Of six at most, however many words a column has; a record fills the ball of its numbers."""
    shape = RecordShape(features=103, words=(range(1, 101), (101, 102)))
    longest = RADIUS * np.sqrt(1 + 6 + 2)
    assert scale_of(shape) * longest == pytest.approx(RADIUS * np.sqrt(103))
    assert scale_of(RecordShape(features=5)) == 1


@pytest.mark.parametrize("task", ["regression", "multiclass"])
def test_rows_of_one_key_are_known_as_such_where_symbols_are_shared(
    tmp_path: Path, task: str
) -> None:
    """Of scores and of votes: folds, errors and optimism go by keys."""
    path = write_class_means(tmp_path, federation={"task": task})
    source = tomllib.loads(path.read_text())
    source["model"]["hidden"] = 1 if task == "regression" else 3
    config = read_federation(save_federation(tmp_path, source))
    table = read_tables(config, tmp_path)[config.primary.name]
    split, _ = run_facts(config, table)
    firsts = np.arange(ROWS) // 2 * 2
    linked = LinkedPrimary(keys=np.zeros((ROWS, 2), np.float32), firsts=firsts)
    data = primary_data(config, table, split, linked, device=torch.device("cpu"))
    assert data.firsts is not None
    assert data.firsts.tolist() == firsts.tolist()
