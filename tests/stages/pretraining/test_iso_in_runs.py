"""ISO noise in simulated runs: each of its two places, that place alone, and what is said of it.

Noise is what a secondary receives beyond what the primary had. Comparisons of its size alarm
falsely with probability at most 1e-11 each, all together with 1e-10.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.alarms import require_noise
from torch import Tensor

from securevfl.config.reading import read_federation
from securevfl.core.errors import ConfigError
from securevfl.models.family import PretrainingSettings
from securevfl.runtime.run_options import RunOptions
from securevfl.runtime.run_tables import read_tables
from securevfl.runtime.simulation import RunResult, simulate_federation
from securevfl.stages.pretraining import parties
from securevfl.stages.pretraining.learner import unit
from securevfl.stages.pretraining.parties import PretrainingRun
from securevfl.stages.pretraining.stage import load_encoders
from securevfl.testing import write_federation

SCALE = 0.5
PLACES = ("projections", "weights")


def run(folder: Path, *places: str) -> RunResult:
    """Simulate FedHSSL with ISO noise at some places, from one seed."""
    folder.mkdir(exist_ok=True)
    path = write_federation(
        folder,
        model={"family": "fedhssl", "hidden": 32, "encoder_hidden": 16},
        pretraining={
            "iterations": 2,
            "batch_size": 128,
            "projector": [16, 16, 16],
            "predictor": 8,
            **{f"iso_{place}": SCALE for place in places},
        },
        training={"epochs": 2, "batch_size": 64},
    )
    config = read_federation(path)
    tables = read_tables(config, folder)
    return simulate_federation(
        config, tables, RunOptions(run_folder=folder / "run"), with_alone=False
    )


class Seen:
    """What the first exchange of each kind had before it, and what was handed over in it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.had: dict[str, Any] = {}
        self.sent: dict[str, Any] = {}
        learners: list[Any] = []
        start = PretrainingRun.__init__

        def built(itself: Any, learning: Any, *args: Any, **kwargs: Any) -> None:
            start(itself, learning, *args, **kwargs)
            learners.append(learning)
            learning.project = kept(learning.project)

        def kept(project: Callable[..., Tensor]) -> Callable[..., Tensor]:
            def projected(*args: Any, **kwargs: Any) -> Tensor:
                own = project(*args, **kwargs)
                self.had.setdefault("projections", own)
                return own

            return projected

        cross, average = PretrainingRun.exchange_projections, parties.average_weights

        def crossed(itself: Any, rows: Any, sent: Tensor, **kwargs: Any) -> Any:
            self.sent.setdefault("projections", sent.clone())
            return cross(itself, rows, sent, **kwargs)

        def averaged(peers: Any, request: Any, own: Mapping[str, Tensor], **kwargs: Any) -> Any:
            now = learners[-1].learner.shared_weights()
            self.had.setdefault("weights", {name: one.clone() for name, one in now.items()})
            self.sent.setdefault("weights", {name: one.clone() for name, one in own.items()})
            return average(peers, request, own, **kwargs)

        patch.setattr(PretrainingRun, "__init__", built)
        patch.setattr(PretrainingRun, "exchange_projections", crossed)
        patch.setattr(parties, "average_weights", averaged)


def watched(folder: Path, *places: str) -> tuple[Seen, RunResult]:
    with pytest.MonkeyPatch.context() as patch:
        seen = Seen(patch)
        return seen, run(folder, *places)


def deviation(values: Tensor) -> float:
    """Return Equation 7's deviation, a row of the first axis at a time."""
    rows = values.reshape(len(values), -1)
    return SCALE * float(rows.norm(dim=1).max()) / math.sqrt(rows.shape[1])


def test_projections_are_noised_and_no_more(tmp_path: Path) -> None:
    """Before they are unit vectors: the longest of the batch sets the size."""
    seen, _ = watched(tmp_path / "on", "projections")
    had, sent = seen.had["projections"], seen.sent["projections"]
    require_noise(sent - had, deviation(had))
    assert float(had.norm(dim=1).max()) > 1.05 * float(had.norm(dim=1).min())
    _require_equal(seen.had["weights"], seen.sent["weights"])


def test_weights_are_noised_and_no_more(tmp_path: Path) -> None:
    """Each parameter by its own longest row; running statistics are no parameters."""
    seen, _ = watched(tmp_path / "on", "weights")
    had, sent = seen.had["weights"], seen.sent["weights"]
    counted = [name for name in had if name.endswith(("running_mean", "running_var"))]
    assert len(counted) == 2
    _require_equal({name: had[name] for name in counted}, sent)
    noises = []
    for name in had.keys() - set(counted):
        size = deviation(had[name])
        if size:
            noises.append((sent[name] - had[name]).flatten() / size)
        else:
            assert torch.equal(sent[name], had[name])  # biases that are still zero
    require_noise(torch.cat(noises), 1.0)
    assert sum(map(len, noises)) > 1000
    assert torch.equal(seen.sent["projections"], unit(seen.had["projections"]))


def test_all_places_at_once_and_none_by_default(tmp_path: Path) -> None:
    """A run without the settings is the run with them at 0; with both it is another."""
    plain, again = run(tmp_path / "a"), run(tmp_path / "b")
    assert plain.losses == again.losses
    for name in ("iso_projections", "iso_weights"):
        assert getattr(PretrainingSettings(), name) == 0
    noised = run(tmp_path / "c", *PLACES)
    assert noised.losses != plain.losses
    assert all(math.isfinite(loss) for loss in noised.losses)


@pytest.mark.parametrize("secondaries", [1, 9])
def test_weights_go_through_ten_iterations_at_the_papers_five(
    tmp_path: Path, secondaries: int
) -> None:
    """Of two parties weights pass what fixed steps of 2^-32 leave in the ring."""
    path = write_federation(
        tmp_path,
        secondaries=secondaries,
        model={"family": "fedhssl", "hidden": 32, "encoder_hidden": 16},
        pretraining={
            "iterations": 10,
            "batch_size": 128,
            "projector": [64, 64, 64],
            "predictor": 64,
            "iso_weights": 5.0,
        },
        training={"epochs": 1},
    )
    config = read_federation(path)
    out = tmp_path / "run"
    simulate_federation(
        config, read_tables(config, tmp_path), RunOptions(run_folder=out), with_alone=False
    )
    tops = [
        {
            name: value
            for name, value in load_encoders(out, party.name)["local"].items()
            if name.startswith("top") and value.is_floating_point()
        }
        for party in config.parties
    ]
    assert all(torch.isfinite(value).all() for value in tops[0].values())
    for other in tops[1:]:
        _require_equal(tops[0], other)


def test_reports_call_it_a_heuristic_that_shows_something(tmp_path: Path) -> None:
    """Each place has a line of its own, and no other line changes."""
    plain, noised = (
        {row["channel"]: row for row in result.metrics["privacy"]["channels"]}
        for result in (run(tmp_path / "off"), run(tmp_path / "on", *PLACES))
    )
    lines = {
        "pretraining, from the primary": "that length",
        "pretraining, aggregation of models": "each layer's longest row",
    }
    for channel, shown in lines.items():
        said = noised[channel]
        assert "ISO noise" in said["reveals"]
        assert "ISO noise promises nothing" in said["guarantee"]
        assert said["guarantee"].endswith(shown)
        assert "ISO" not in plain[channel]["reveals"] + plain[channel]["guarantee"]
    rest = plain.keys() - lines.keys()
    assert {name: plain[name] for name in rest} == {name: noised[name] for name in rest}


@pytest.mark.parametrize(
    ("sections", "complaint"),
    [
        ({"pretraining": {"iso_weights": -1.0}}, r"pretraining\.iso_weights.*>= 0"),
        (
            {"pretraining": {"iso_projections": 1.0, "primary_sends": "gaussian", "epsilon": 8.0}},
            r"pretraining\.iso_projections: primary_sends = \"gaussian\" has noise",
        ),
    ],
)
def test_what_it_does_not_go_with_is_refused(
    tmp_path: Path, sections: dict[str, Any], complaint: str
) -> None:
    path = write_federation(tmp_path, **sections)
    with pytest.raises(ConfigError, match=complaint):
        read_federation(path)


def _require_equal(had: Mapping[str, Tensor], sent: Mapping[str, Tensor]) -> None:
    for name, value in had.items():
        assert torch.equal(value, sent[name]), name
