"""Class means with every party in a process of its own."""

import json
from pathlib import Path

import numpy as np
import pytest
from helpers.class_means import write_class_means

import securevfl as sv
from securevfl.desk.report.verify import verify_run
from securevfl.ledger.ledger_file import ledger_of_table, summary_of

pytestmark = pytest.mark.multiprocess


def released(run: Path, root: Path) -> np.ndarray:
    return sv.features(run, data_root=root).filter(like="class_means_").to_numpy(dtype=float)


def events(run: Path, name: str) -> list[dict]:
    text = (run / "parties" / name / "log.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def test_class_means_under_masks_release_what_those_by_labels_do(tmp_path: Path) -> None:
    """A dealer, two secondaries: the rows of a simulation that shows labels, but for label noise.

    The noise of such a label epsilon is about 64 units a number, and class sums are ten thousands:
    no number of it is beyond eight deviations but once in 10^13, and within those a released number
    moves by hundredths. Directions that are fitted to other sums differ by tenths.
    """
    shown = write_class_means(tmp_path, labels="plaintext", dealer=False)
    sv.simulate(shown, out=tmp_path / "simulated")
    path = write_class_means(tmp_path, encoder={"label_epsilon": 1e4})
    run = tmp_path / "federated"
    sv.train(path, out=run, data_root=tmp_path)

    expected, found = released(tmp_path / "simulated", tmp_path), released(run, tmp_path)
    assert found.shape == expected.shape == (120, 3)
    # Each is the sum of two secondaries' vectors of length 1.
    assert np.abs(expected).mean() > 0.2
    assert np.median(np.abs(found - expected)) < 0.1
    dealt = [line for line in events(run, "dealer") if line["event"] == "dealt for class means"]
    assert [line["secondaries"] for line in dealt] == [2]
    # What everybody has booked and signed hangs together, and says what labels cost.
    assert all(one.good is not False for one in verify_run(run))
    told = summary_of(ledger_of_table(tmp_path / "agency.csv")).labels
    assert told is not None
    assert told.epsilon == pytest.approx(1e4)
    assert told.together is not None
    assert told.together > 1e4
