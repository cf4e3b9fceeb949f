"""Defences of labels that secondaries' gradients carry, and of records that averages carry."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.federations import FROZEN

from securevfl import read_federation
from securevfl.config.sections import TrainingSettings
from securevfl.core.errors import ConfigError
from securevfl.desk.report.page import write_report
from securevfl.dp.labels import keep_probability
from securevfl.federation.checkpoint import read_state
from securevfl.federation.rounds.label_defences import (
    DrawnLabels,
    distance_correlation,
    marvell_spectrum,
    protect_gradient,
    with_marvell_noise,
)
from securevfl.lab.attacks.run_audit import audit_run
from securevfl.testing import run_in_process, write_federation

NO_BASE = {"base": {"estimator": "none"}}


def test_marvell_solves_what_its_paper_states() -> None:
    """No noise of 100,000 others of the same mean square length tells classes apart less."""
    random = np.random.default_rng(0)
    for u, v, width, share, power in ((0.15, 0.002, 2, 0.04, 7.0), (0.003, 0.4, 8, 0.5, 1.0)):
        weights = np.array([1 - share, (1 - share) * (width - 1), share, share * (width - 1)])

        def divergence(x: Any, u: float = u, v: float = v, width: int = width) -> Any:
            (a, b, c, d) = np.atleast_2d(x).T
            apart = (width - 1) * ((b + u) / (d + v) + (d + v) / (b + u))
            return apart + (a + u + 1) / (c + v) + (c + v + 1) / (a + u)

        found = marvell_spectrum(u, v, width=width, share=share, power=power).ravel()
        assert weights @ found <= power * 1.001
        assert found[0] >= found[1] - 1e-9
        assert found[2] >= found[3] - 1e-9
        others = random.dirichlet(np.full(4, 0.3), 100_000) * power / weights
        others = others[(others[:, 0] >= others[:, 1]) & (others[:, 2] >= others[:, 3])]
        assert divergence(found)[0] < divergence(others).min() * 1.001


def test_marvell_noise_has_its_power_and_hides_the_line_between_classes() -> None:
    torch.manual_seed(0)
    positive = torch.arange(4000) % 4 == 0
    gradient = 0.1 * torch.randn(4000, 1, 3)
    gradient[positive, 0, 0] += 1.0
    noised = with_marvell_noise(gradient, positive, power=4.0)
    assert (noised - gradient).square().sum(dim=(1, 2)).mean() == pytest.approx(4.0, rel=0.1)
    variances = (noised - gradient)[:, 0].var(dim=0)
    assert variances[0] > 50 * variances[1:].max()
    sent = protect_gradient(gradient, positive.float(), TrainingSettings(marvell=4.0))
    assert (sent - gradient).square().sum(dim=(1, 2)).mean() == pytest.approx(4.0, rel=0.1)
    one_class = with_marvell_noise(gradient[positive], positive[positive], power=1.0)
    assert (one_class - gradient[positive]).square().sum() > 0


def test_a_clip_bounds_a_row_s_own_gradient() -> None:
    gradient = torch.randn(8, 1, 5) / 8  # of the mean loss of a batch of 8
    clipped = protect_gradient(gradient, torch.zeros(8), TrainingSettings(clip_gradients=0.5))
    assert (8 * clipped).flatten(1).norm(dim=1).max() <= 0.5
    same = protect_gradient(gradient, torch.zeros(8), TrainingSettings(clip_gradients=1e3))
    torch.testing.assert_close(same, gradient)


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


def test_distance_correlation_is_1_of_a_line_and_small_of_noise() -> None:
    torch.manual_seed(0)
    columns = torch.randn(300, 4)
    assert distance_correlation(columns, 3 * columns + 1) == pytest.approx(1.0, abs=1e-4)
    assert distance_correlation(columns, torch.randn(300, 4)) < 0.25


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


def test_a_heuristic_promises_nothing_and_changes_what_is_learned(tmp_path: Path) -> None:
    def run_of(name: str, **defence: float) -> tuple[list[float], str]:
        (tmp_path / name).mkdir()
        path = write_federation(tmp_path / name, rows=96, training={"epochs": 2, **defence})
        run = run_in_process(path, tmp_path / name / "run")
        about = "aggregates" if name == "distance_correlation" else "gradients"
        channels = run.metrics["privacy"]["channels"]
        (guarantee,) = [one["guarantee"] for one in channels if one["channel"] == about]
        return run.losses, guarantee

    without, _ = run_of("without")
    strengths = {"clip_gradients": 0.1, "iso_gradients": 1.0, "distance_correlation": 2.0}
    for name, strength in strengths.items():
        losses, guarantee = run_of(name, **{name: strength})
        assert not guarantee.startswith("covered")
        assert "promis" in guarantee
        assert losses[0] == without[0], "the first round is before anything is learned"
        assert losses != without


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"training": {"marvell": 1.0}}, "is noise for two classes"),
        (
            {"training": {"label_epsilon": 1.0}, "base": {"estimator": "linear"}},
            "a base is fitted to labels as they are",
        ),
        ({"training": {"label_epsilon": 1e-9}, **NO_BASE}, "must be at least 1e-06"),
        ({"training": {"clip_gradients": 1.0}, "privacy": FROZEN}, "are sent no gradients"),
        ({"training": {"label_epsilon": 1.0, "split": "stratified"}, **NO_BASE}, "stratified"),
        (
            {
                "training": {"distance_correlation": 1.0},
                "privacy": {"encoder": "dp-trained", "epsilon": 8.0, "links_per_record": 1},
            },
            "dp-trained encoders",
        ),
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
