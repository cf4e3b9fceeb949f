"""Labels that gradients carry, drawn once by randomised response."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.federations import FROZEN

from securevfl import read_federation
from securevfl.core.errors import ConfigError
from securevfl.desk.report.page import write_report
from securevfl.dp.labels import keep_probability
from securevfl.federation.checkpoint import read_state
from securevfl.federation.released_labels import DrawnLabels
from securevfl.lab.attacks.run_audit import audit_run
from securevfl.testing import run_in_process, write_federation

NO_BASE = {"base": {"estimator": "none"}}


def test_the_loss_of_drawn_labels_is_least_at_the_probabilities_of_true_ones() -> None:
    """Of drawn labels in their exact shares: forward correction undoes the draw."""
    for classes in (2, 4):
        keep = keep_probability(1.0, classes)
        true = torch.linspace(1, 2, classes).softmax(0)
        shares = (1 - keep) / (classes - 1) + (keep - (1 - keep) / (classes - 1)) * true
        drawn = DrawnLabels(torch.empty(0), keep)
        logits = torch.zeros(1, 1 if classes == 2 else classes, requires_grad=True)
        descent = torch.optim.LBFGS([logits], max_iter=200, tolerance_change=1e-12)

        def expected(shares: Any, drawn: Any, logits: Any, descent: Any) -> Any:
            descent.zero_grad()
            kinds = torch.arange(len(shares))
            each = [drawn.loss(logits, kinds[n : n + 1]) for n in range(len(shares))]
            loss = (shares * torch.stack(each)).sum()
            loss.backward()
            return loss.detach()

        descent.step(partial(expected, shares, drawn, logits, descent))
        found = (
            logits.detach().sigmoid()[0, 0] if classes == 2 else logits.detach().softmax(1)[0, -1]
        )
        assert float(found) == pytest.approx(float(true[-1]), abs=1e-3)


@pytest.mark.parametrize("classes", [2, 4])
def test_networks_train_on_labels_as_they_were_drawn(classes: int) -> None:
    """Of no training row on its own label, though that may be the same; other rows keep theirs."""
    targets = torch.arange(12) % classes
    rows = np.array([0, 3, 4, 7, 10])
    drawn = (targets[rows].numpy() + 1) % classes
    asked = targets.float() if classes == 2 else targets
    found = DrawnLabels.of(drawn, rows, asked, keep=0.6)
    assert torch.equal(found.targets_of(rows).long(), torch.from_numpy(drawn))
    others = np.setdiff1d(np.arange(12), rows)
    assert torch.equal(found.targets_of(others), asked[others])
    assert found.targets_of(rows).dtype == asked.dtype
    assert torch.equal(asked.long(), torch.arange(12) % classes), "labels themselves stay"


def test_labels_under_an_epsilon_are_drawn_charged_and_trained_on(tmp_path: Path) -> None:
    sections = {**NO_BASE, "training": {"label_epsilon": 1.0, "epochs": 2}}
    run = run_in_process(write_federation(tmp_path, **sections), tmp_path / "run", record_mib=16)
    labels = run.metrics["privacy"]["labels"]
    assert (labels["epsilon"], labels["mechanism"], labels["delta"]) == (1.0, "randomised", 0.0)
    assert "how any one of the primary's training rows is labelled" in labels["statement"]
    page = write_report(tmp_path / "run").read_text(encoding="utf-8")
    assert "covered by label_epsilon = 1, any one training row&#39;s label" in page
    kept = read_state(tmp_path / "run" / "parties" / "agency" / "labels.pt")["state"]
    true = read_state(tmp_path / "run" / "parties" / "agency" / "view.pt")["held"]["targets"]
    share = (kept["labels"] == true[kept["rows"]]).double().mean()
    assert float(share) == pytest.approx(keep_probability(1.0, 3), abs=0.2)
    # A resumed run trains on the same draw, and pays once.
    again = run_in_process(tmp_path / "fed.toml", tmp_path / "run", resume=True, record_mib=16)
    assert again.metrics["privacy"]["labels"]["epsilon"] == 1.0
    drawn = read_state(tmp_path / "run" / "parties" / "agency" / "labels.pt")["state"]["labels"]
    assert torch.equal(drawn, kept["labels"])
    # What gradients give away is what was drawn: of labels no more than the draw has left.
    found = audit_run(tmp_path / "run", ["gradient-direction"]).findings[0]
    assert found["value"] < share + 0.15


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        (
            {"training": {"label_epsilon": 1.0}, "base": {"estimator": "linear"}},
            "a base is fitted to labels as they are",
        ),
        ({"training": {"label_epsilon": 1e-9}, **NO_BASE}, "must be at least 1e-06"),
        ({"training": {"label_epsilon": 1.0}, "privacy": FROZEN}, "are sent no gradients"),
        ({"training": {"label_epsilon": 1.0, "split": "stratified"}, **NO_BASE}, "stratified"),
        (
            {
                "training": {"label_epsilon": 1.0},
                "federation": {"task": "regression"},
                **NO_BASE,
            },
            "is of classes",
        ),
    ],
)
def test_what_is_no_defence_is_refused(tmp_path: Path, sections: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_federation(write_federation(tmp_path, **sections))
